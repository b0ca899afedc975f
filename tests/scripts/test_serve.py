"""Servers: sessions do not see each other, end when they should, and no request breaks one."""

import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

import envs
from envs.search.retrieval import SearchServer
from envs.serving.host import Host, is_loopback
from scripts import serve
from tests.envs.adapted import Counting
from tests.envs.serving import Client, eventually, serving

COUNTING = "adapted/Counting-v0"


@pytest.fixture(autouse=True)
def nothing_left():
    """Whatever a test does, its environments are closed at the end."""
    gc.collect()
    before = Counting.open
    yield
    eventually(lambda: Counting.open == before)


# OpenEnv


def test_an_episode_over_the_wire():
    with serving(COUNTING) as url, Client(url) as client:
        data = client.reset(seed=3, episode_id="mine")["data"]
        assert data["observation"]["text"].startswith("task ") and data["observation"]["system_prompt"] == "Count."
        assert (data["reward"], data["done"]) == (None, False)
        data = client.step("a 😀 é")["data"]
        assert data["observation"]["text"].endswith("1 a 😀 é") and data["observation"]["info"]["count"] == 1
        state = client.send({"type": "state"})["data"]
        assert (state["episode_id"], state["step_count"], state["done"]) == ("mine", 1, False)
        data = client.step("win")["data"]
        assert (data["reward"], data["done"], data["observation"]["success"]) == (1.0, True, True)


def test_the_end_by_the_turn_limit_says_so():
    with serving(COUNTING) as url, Client(url) as client:
        client.reset(task=2)
        ends = [client.step("a")["data"] for _ in range(3)]
        assert [end["done"] for end in ends] == [False, False, True]
        assert ends[2]["observation"]["truncated"] and not ends[2]["observation"]["success"]


@pytest.mark.parametrize(("message", "code"), [
    ("{", "INVALID_JSON"), ("", "INVALID_JSON"), ("[" * 100_000, "INVALID_JSON"), (b"\xff\x00", "INVALID_JSON"),
    ("[]", "VALIDATION_ERROR"), ("null", "VALIDATION_ERROR"), ({}, "UNKNOWN_TYPE"), ({"type": "fly"}, "UNKNOWN_TYPE"),
    ({"type": ["step"]}, "UNKNOWN_TYPE"), ({"type": "step"}, "VALIDATION_ERROR"),
    ({"type": "step", "data": "a"}, "VALIDATION_ERROR"), ({"type": "step", "data": {"text": 3}}, "VALIDATION_ERROR"),
    ({"type": "step", "data": {"text": None}}, "VALIDATION_ERROR"),
    ({"type": "step", "data": {"text": "a", "reward": 1}}, "VALIDATION_ERROR"),
    ({"type": "reset", "data": {"seed": -1}}, "VALIDATION_ERROR"),
    ({"type": "reset", "data": {"seed": "x"}}, "VALIDATION_ERROR"),
    ({"type": "reset", "data": {"sed": 1}}, "VALIDATION_ERROR"),
    ({"type": "reset", "data": {"split": "nowhere"}}, "VALIDATION_ERROR"),
    ({"type": "reset", "data": {"task": 5}}, "VALIDATION_ERROR"),
    ({"type": "reset", "data": {"episode_id": "x" * 1_000}}, "VALIDATION_ERROR"),
])
def test_a_message_that_does_not_fit_is_refused_and_the_session_goes_on(message, code):
    with serving(COUNTING) as url, Client(url) as client:
        client.reset(task=1)
        answer = client.send(message)
        assert (answer["type"], answer["data"]["code"]) == ("error", code) and answer["data"]["message"]
        assert client.step("win")["data"]["reward"] == 1.0


def test_ids_are_never_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving(COUNTING) as url, Client(url) as client:
        for name in ("x/../../../pwn", "..%2f..", "/pwn", "\x00"):
            assert client.reset(task=0, episode_id=name)["type"] == "observation"
    assert list(tmp_path.iterdir()) == []


def test_a_step_outside_an_episode_is_refused():
    with serving(COUNTING) as url, Client(url) as client:
        assert client.step("a")["data"]["code"] == "SESSION_ERROR"
        client.reset(task=0)
        client.step("win")
        assert client.step("a")["data"]["code"] == "SESSION_ERROR"
        assert client.reset(task=0)["type"] == "observation"


def test_an_environment_that_breaks_ends_the_episode_and_gives_no_reward():
    with serving(COUNTING) as url, Client(url) as client:
        client.reset(task=0)
        answer = client.step("break")
        assert answer["data"]["code"] == "EXECUTION_ERROR" and "the engine is broken" in answer["data"]["message"]
        assert "reward" not in answer["data"]
        assert client.step("a")["data"]["code"] == "SESSION_ERROR"
        client.reset(task=0)
        assert client.step("win")["data"]["reward"] == 1.0


def test_sessions_do_not_see_each_other():
    with serving(COUNTING) as url, Client(url) as one, Client(url) as other:
        one.reset(task=0)
        other.reset(task=4)
        assert one.step("a")["data"]["observation"]["text"] == "0: 1 a"
        assert other.step("b")["data"]["observation"]["text"] == "4: 1 b"
        assert one.step("win")["data"]["done"]
        assert other.step("c")["data"]["observation"]["text"] == "4: 2 c"


def test_a_slow_environment_holds_up_no_other():
    with serving(COUNTING) as url, Client(url) as slow, Client(url) as quick:
        slow.reset(task=0)
        quick.reset(task=0)
        thread = threading.Thread(target=slow.step, args=("slow 3",))
        thread.start()
        started = time.monotonic()
        quick.step("a")
        assert time.monotonic() - started < 2.5 and thread.is_alive()
        thread.join()


def test_a_client_too_many_is_refused_with_the_reason_until_one_leaves():
    with serving(COUNTING, "max_sessions=2") as url, Client(url) as one:
        with Client(url), Client(url) as third:
            answer = json.loads(third.socket.recv(timeout=20))
            assert answer["data"]["code"] == "CAPACITY_REACHED" and "2 sessions" in answer["data"]["message"]
            with pytest.raises(ConnectionClosed):
                third.socket.recv(timeout=20)
        eventually(lambda: Counting.open == 1)
        with Client(url) as third:
            assert third.reset(task=0)["type"] == "observation"
        assert one.reset(task=0)["type"] == "observation"


def test_an_idle_session_is_closed_with_the_reason():
    with serving(COUNTING, "idle_seconds=0.3") as url, Client(url) as client:
        client.reset(task=0)
        answer = json.loads(client.socket.recv(timeout=20))
        assert answer["data"]["code"] == "SESSION_ERROR" and "0.3 s" in answer["data"]["message"]
        eventually(lambda: Counting.open == 0)


def test_clients_that_vanish_in_the_middle_leave_nothing():
    with serving(COUNTING, "max_sessions=3") as url:
        with Client(url) as client:  # by now the server's own files are open
            client.reset(task=0)
        files = len(os.listdir("/proc/self/fd"))
        for number in range(60):
            with Client(url) as client:
                client.reset(task=0)
                if number % 2:  # while the environment is at work
                    client.socket.send(json.dumps({"type": "step", "data": {"text": "slow 0.05"}}))
                client.socket.socket.shutdown(socket.SHUT_RDWR)  # no closing handshake
            eventually(lambda: Counting.open < 3)
        eventually(lambda: Counting.open == 0)
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= files + 2)


def test_a_huge_message_ends_its_session_only():
    with serving(COUNTING) as url, Client(url) as client, Client(url) as other:
        other.reset(task=0)
        with pytest.raises(ConnectionClosed, match="1009"):
            client.step("x" * 2_000_000)
        assert other.step("win")["data"]["done"]


def test_close_ends_the_session():
    with serving(COUNTING) as url, Client(url) as client:
        client.reset(task=0)
        client.socket.send('{"type": "close"}')
        with pytest.raises(ConnectionClosed):
            client.socket.recv(timeout=20)


def test_other_sites_and_other_names_are_refused():
    with serving(COUNTING) as url:
        for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}):
            with pytest.raises(InvalidStatus, match="403"):
                connect(url.replace("http", "ws") + "/ws", proxy=None, additional_headers=headers)
        assert httpx.get(f"{url}/health", headers={"Host": "evil.example"}).status_code == 400
        assert httpx.get(f"{url}/health").json() == {"status": "healthy"}
        assert httpx.get(f"{url}/schema").json()["action"]["required"] == ["text"]
        assert httpx.post(f"{url}/step", content=b"\x80\x04cos\nsystem\n.").status_code == 404


def test_ours_are_served():
    with serving("turngym/Countdown-v0") as url, Client(url) as client:
        env = envs.make("turngym/Countdown-v0")
        env.reset(options={"task": env.tasks("heldout")[3]})
        client.reset(split="heldout", task=3)
        gold = env.gold(np.random.default_rng(0))
        ends = [client.step(response)["data"] for response in gold]
        assert ends[-1]["done"] and ends[-1]["observation"]["success"] and ends[-1]["reward"] == 1.0


# Retrieval


@pytest.fixture(scope="module")
def retrieval():
    pytest.importorskip("tantivy")
    with serving("turngym/Search-v0", "retrieval=true") as url:
        yield url


def ask(url, **body):
    return httpx.post(f"{url}/retrieve", json=body)


def test_search_r1s_and_skyrls_requests_are_answered(retrieval):
    result = ask(retrieval, queries=["capital of Peru", "gold"], topk=2, return_scores=True).json()["result"]
    assert [len(found) for found in result] == [2, 2]
    assert result[0][0]["document"]["contents"].startswith('"') and result[0][0]["score"] >= result[0][1]["score"]
    alone = ask(retrieval, query="capital of Peru", return_scores=False).json()["result"]
    assert len(alone) == 1 and len(alone[0]) == 3
    assert alone[0][0] == result[0][0]["document"]


def test_the_search_environments_own_client_finds_what_the_index_finds(retrieval):
    client = SearchServer(retrieval)
    try:
        here = envs.make("turngym/Search-v0").retriever.search("river in Brazil", 5)
        assert client.search("river in Brazil", 5) == here and len(here) == 5
    finally:
        client.close()


@pytest.mark.parametrize(("body", "status"), [
    (b"{", 400), (b"", 400), (b"\xff", 400), (b"[" * 10_000, 400), (b"[]", 422), (b"{}", 422),
    (b'{"queries": "Peru"}', 422), (b'{"queries": []}', 422), (b'{"queries": [3]}', 422), (b'{"query": ["a"]}', 422),
    (b'{"query": "a", "topk": 0}', 422), (b'{"query": "a", "topk": 1000000}', 422),
    (b'{"query": "a", "topk": "3"}', 422),
    (b'{"query": "' + b"a" * 2_000_000 + b'"}', 413), (b'{"query": "\\ud800"}', 400),
])
def test_a_request_that_does_not_fit_is_refused(retrieval, body, status):
    assert httpx.post(f"{retrieval}/retrieve", content=body).status_code == status


# Pages


@pytest.fixture(scope="module")
def shop():
    pytest.importorskip("bm25s")
    with serving("turngym/WebShop-v0", "web=true", 'option=["size=200"]', "max_sessions=20") as url:
        yield url


def test_a_person_shops_in_the_same_session_state(shop):
    env = envs.make("turngym/WebShop-v0", size=200, observation_mode="html")
    page, _ = env.reset(options={"task": env.tasks("test")[2]})
    with httpx.Client(base_url=shop, follow_redirects=True) as person:
        answer = person.get("/?split=test&task=2")
        assert answer.text == page and "default-src 'none'" in answer.headers["content-security-policy"]
        path = answer.url.path
        for response in env.gold(np.random.default_rng(0)):
            action = env.parse(response).text
            page, *_ = env.step(action)
            form = {"action": action}
            if action.startswith("search["):
                form = {"action": "search", "search_query": action[7:-1]}
            answer = person.post(path, data=form)
            assert (answer.status_code, answer.text) == (200, page)
        assert "1.0" in page
        assert person.post(path, data={"action": "click[buy now]"}).status_code == 409
        assert person.get(path).text == page


def test_two_persons_do_not_see_each_other(shop):
    with httpx.Client(base_url=shop, follow_redirects=True) as one:
        first, second = one.get("/?task=0"), one.get("/?task=1")
        one.post(first.url.path, data={"action": "search", "search_query": "shirt"})
        assert one.get(second.url.path).text == second.text


def test_what_a_person_types_is_escaped_or_left_out(shop):
    with httpx.Client(base_url=shop, follow_redirects=True) as person:
        path = person.get("/").url.path
        for text in ("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "\x00", "é" * 5_000):
            answer = person.post(path, data={"action": "search", "search_query": text})
            assert answer.status_code == 200 and "<script>" not in answer.text and "<img" not in answer.text
            person.post(path, data={"action": "click[back to search]"})


def test_unknown_sessions_and_odd_requests_are_refused(shop):
    for name in ("nobody", "..%2f..%2fetc", "%00"):
        assert httpx.get(f"{shop}/session/{name}").status_code == 404
        assert httpx.post(f"{shop}/session/{name}", data={"action": "search"}).status_code == 404
    for query in ("split=nowhere", "task=-1", "task=x", "task=999999", "task=" + "9" * 5_000, "task=²"):
        assert httpx.get(f"{shop}/?{query}").status_code == 400
    path = httpx.get(f"{shop}/").headers["location"]
    assert httpx.post(shop + path).status_code == 400
    assert httpx.post(shop + path, content=b"\xff" * 10).status_code == 400
    assert httpx.post(shop + path, content=b"a" * 2_000_000).status_code == 413
    assert httpx.post(shop + path, data={"action": "search"}, headers={"Origin": "http://evil"}).status_code == 403


def test_idle_visits_are_closed_and_a_visitor_too_many_is_told():
    pytest.importorskip("bm25s")
    with serving("turngym/WebShop-v0", "web=true", 'option=["size=200"]', "max_sessions=1", "idle_seconds=2") as url:
        path = httpx.get(f"{url}/").headers["location"]
        full = httpx.get(f"{url}/")
        assert full.status_code == 503 and "sessions are taken" in full.text
        eventually(lambda: httpx.get(f"{url}/").status_code == 303)
        assert httpx.get(url + path).status_code == 404


# The command


def test_the_command_binds_loopback_only_and_ends_on_interrupt():
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen([sys.executable, "-m", "scripts.serve", "turngym/Countdown-v0", "--port", "0"], cwd=root,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("serving turngym/Countdown-v0 at http://127.0.0.1:")
        with Client(line.split()[-1]) as client:
            assert client.reset(seed=0)["type"] == "observation"
            process.send_signal(2)
            assert process.wait(30) in (0, 130)
        assert "warning" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("host", "loopback"), [
    ("127.0.0.1", True), ("127.0.0.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
    ("192.168.0.1", False), ("example.org", False)])
def test_which_addresses_only_this_machine_reaches(host, loopback):
    assert is_loopback(host) == loopback


def test_an_open_address_is_warned_of(monkeypatch, capsys):
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    assert serve.main([COUNTING, "--host", "0.0.0.0", "--port", "0"]) == 0
    assert "warning: 0.0.0.0" in capsys.readouterr().err
    assert serve.main([COUNTING, "--port", "0"]) == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "said"), [
    (["turngym/Countdwn-v0"], "Countdown"), ([COUNTING, "--option", "fails=true"], "no such data"),
    ([COUNTING, "--web"], "--web needs"), ([COUNTING, "--retrieval"], "--retrieval needs"),
    ([COUNTING, "--max-sessions", "0"], "max-sessions"), ([COUNTING, "--idle-seconds", "nan"], "idle-seconds"),
    ([COUNTING, "--port", "99999"], "cannot serve"), ([COUNTING, "--host", "no.such.invalid"], "cannot serve")])
def test_what_cannot_be_served_is_one_line(capsys, arguments, said):
    assert serve.main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and said in lines[0]


def test_a_taken_port_is_named(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve.main([COUNTING, "--port", str(port)]) == 2
        assert f"127.0.0.1:{port} cannot be bound" in capsys.readouterr().err


def test_limits_are_checked():
    with pytest.raises(ValueError, match="0"):
        Host(Counting, max_sessions=0)
