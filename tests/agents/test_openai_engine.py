"""A server of chat completions that fails, in whatever way, is an error that says how; never an action or a reward."""

import asyncio
import random
import time
from email.utils import formatdate

import pytest

from agents.engine import EngineError
from agents.openai_engine import OpenAIEngine
from agents.rollout import RolloutError
from tests.agents.chat_server import MESSAGES, Reply, Talk, ask, failed, play, said, serving

KEY = "sk-secret-0123456789"


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.mark.parametrize("bad", [
    failed(500), failed(502), failed(503), failed(529), failed(408), failed(429), Reply(hang_up=True),
    Reply(body=b'{"choices": [', missing=50), Reply(body=said("<do>x</do>").body, missing=1),
    Reply(body=b"<html>Bad gateway</html>"), Reply(body=b""), Reply(status=204)])
def test_what_may_pass_is_tried_again(bad):
    with serving(lambda number, _: bad if number < 3 else said("x")) as server:
        assert ask(server) == ("x", "stop")
        assert len(server.bodies) == 3


GARBAGE = [
    b"", b"hello", b"\xff\xfe", b"[" * 100_000, b"null", b"[]", b"{}", b'{"choices": null}', b'{"choices": []}',
    b'{"choices": [null]}', b'{"choices": [{}]}', b'{"choices": [{"message": null, "finish_reason": "stop"}]}',
    b'{"choices": [{"message": {}, "finish_reason": "stop"}]}', said("x").body[:-1], said(5).body, said(["x"]).body,
    said({"text": "<do>x</do>"}).body, said("<do>x</do>", None).body, said("<do>x</do>", "abort").body,
    said("", "content_filter").body, said("<do>x</do>", 1).body, b'{"error": {"message": "overloaded", "code": 502}}',
    b'{"choices": [{"message": {"content": "\\ud800"}, "finish_reason": "stop"}]}', b"data: [DONE]\n\n"]


@pytest.mark.parametrize("body", GARBAGE)
def test_an_answer_that_is_none_fails_the_episode_and_is_never_an_action(body):
    with serving(lambda *_: Reply(body=body)) as server:
        with pytest.raises(RolloutError, match="answers no chat completion") as error:
            play(server, engine_options={"patience": 0.0})
        assert error.value.report.errors == {"error_engine:ServerUnavailable": 1}


def test_a_failed_episode_is_counted_and_the_others_are_whole():
    def answer(_, body):
        return failed(500) if body["messages"][1]["content"] == "start 1" else said("<do>x</do>")

    class Numbered(Talk):
        def _reset(self, task, rng):
            super()._reset(task, rng)
            return f"start {task.key}"
    with serving(answer) as server:
        groups, report = play(server, env=Numbered, tasks=3, retries=1, engine_options={"patience": 0.0})
        assert [group.task.key for group in groups] == ["0", "2"]
        assert [group.trajectories[0].reward for group in groups] == [3.0, 3.0]
        assert report.dropped_groups == 1 and "answers 500" in report.first_traceback


def test_the_budget_ends_the_tries():
    with serving(lambda *_: failed(500, "disk full")) as server:
        started = time.monotonic()
        with pytest.raises(EngineError, match=r"answers 500: 'disk full'"):
            ask(server, patience=2.0)  # the first pause is at most 1 s
        assert time.monotonic() - started < 10 and len(server.bodies) >= 2


@pytest.mark.parametrize("header", [lambda: "1", lambda: "1.0", lambda: formatdate(time.time() + 2, usegmt=True)])
@pytest.mark.parametrize("status", [429, 503])
def test_what_retry_after_asks_for_is_waited(status, header):
    times = []

    def answer(number, _):
        times.append(time.monotonic())
        return failed(status, headers={"Retry-After": header()}) if number == 1 else said("x")
    with serving(answer) as server:
        assert ask(server) == ("x", "stop")
        assert times[1] - times[0] >= 0.95  # a date has whole seconds: 2 s ahead is at least 1


def test_a_longer_wait_than_the_budget_is_not_begun():
    with serving(lambda *_: failed(429, "daily limit", {"Retry-After": "3600"})) as server:
        with pytest.raises(EngineError, match=r"daily limit.*asks to wait 3600 s"):
            ask(server)
        assert len(server.bodies) == 1


@pytest.mark.parametrize("value", ["", "soon", "nan", "inf", "-5", "1e9999", "9" * 400, "Thu, 99 Foo 2026 99:99:99 GMT",
                                   "Thu, 01 Jan 1970 00:00:00 GMT"])
def test_an_odd_retry_after_is_no_reason_to_wait(value):
    with serving(lambda number, _: failed(429, headers={"Retry-After": value}) if number == 1 else said("x")) as server:
        assert ask(server, patience=5.0) == ("x", "stop")


def test_a_silent_server_is_given_up_at_the_deadline_and_its_request_closed():
    with serving(lambda *_: Reply(wait=20.0)) as server:
        started = time.monotonic()
        with pytest.raises(EngineError, match=r"did not answer in 1 s"):
            ask(server, request_seconds=1.0, patience=0.0)
        assert time.monotonic() - started < 8
        assert server.given_up.wait(10)


def test_a_cancelled_request_is_closed():
    async def cancel(engine, server):
        task = asyncio.create_task(engine.complete(MESSAGES, max_tokens=9, temperature=0, seed=0, stop=()))
        while not server.bodies:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and await asyncio.to_thread(server.given_up.wait, 10)
    with serving(lambda *_: Reply(wait=20.0)) as server:
        asyncio.run(cancel(OpenAIEngine(server.url, "m"), server))


def test_an_episode_past_its_deadline_closes_its_request():
    with serving(lambda *_: Reply(wait=20.0)) as server:
        with pytest.raises(RolloutError) as error:
            play(server, episode_seconds=2.0)
        assert error.value.report.errors == {"error_timeout:TimeoutError": 1} and server.given_up.wait(10)


def test_an_endless_answer_is_an_error(monkeypatch):
    monkeypatch.setattr("agents.server_client.ANSWER_BYTES", 1_000)
    with serving(lambda *_: Reply(body=b" " * 5_000)) as server, pytest.raises(EngineError, match="more than 1,000"):
        ask(server, patience=0.0)


# Refusals


@pytest.mark.parametrize(("reply", "message"), [
    (failed(401, "who?"), "answers 401: 'who\\?'. Set OPENAI_API_KEY"),
    (failed(402, "Insufficient Balance"), "402: 'Insufficient Balance'"),
    (failed(404, "The model `m` does not exist."), "404: 'The model `m` does not exist.'. Is there a model 'm'"),
    (Reply(status=404, body=b'{"detail": "Not Found"}'), "404: 'Not Found'.*most end in /v1"),
    (Reply(status=301, headers={"Location": "/elsewhere"}), "answers 301: 'nothing'"),
    (Reply(status=405, body=b"[" * 100_000), "answers 405"),
    (failed(429, "You exceeded your quota", code="insufficient_quota"), "exceeded your quota")])
def test_what_is_refused_to_all_is_named_and_not_asked_again(reply, message):
    with serving(lambda *_: reply) as server:
        engine = OpenAIEngine(server.url, "m")
        for _ in range(3):
            with pytest.raises(EngineError, match=message):
                ask(server, engine=engine)
        assert len(server.bodies) == 1


@pytest.mark.parametrize("reply", [failed(400, "bad words"), failed(403, "bad words"), failed(422, "bad words"),
                                   Reply(status=400, body=b'{"error": "bad words"}'),
                                   Reply(status=400, body=b"bad words"), Reply(status=400, body=b'["bad words"]')])
def test_what_is_refused_to_one_is_not_tried_again_and_leaves_the_others(reply):
    with serving(lambda number, _: reply if number == 1 else said("x")) as server:
        engine = OpenAIEngine(server.url, "m")
        with pytest.raises(EngineError, match="bad words"):
            ask(server, engine=engine)
        assert len(server.bodies) == 1 and ask(server, engine=engine) == ("x", "stop")


def test_a_server_that_is_not_there_is_named_soon_and_asked_for_no_more():
    with serving(lambda *_: said("x")) as server:
        pass
    engine, started = OpenAIEngine(server.url, "m"), time.monotonic()
    with pytest.raises(EngineError, match=rf"no answer from {server.url}.*is it running\?"):
        ask(server, engine=engine)
    assert time.monotonic() - started < 20 and "is it running?" in engine.refusal


def test_a_parameter_that_the_model_does_not_know_is_replaced_once_for_all():
    def answer(_, body):  # what OpenAI's reasoning models answer
        unknown = next((name for name in ("max_tokens", "stop") if name in body), None)
        return failed(400, f"Unsupported parameter: '{unknown}'", param=unknown, code="unsupported_parameter") \
            if unknown else said("<do>x</do> <do>y</do>")
    with serving(answer) as server:
        engine = OpenAIEngine(server.url, "m")
        assert ask(server, engine=engine, stop=("</do>",), count=4) == [("<do>x</do>", "stop")] * 4
        before = len(server.bodies)
        assert ask(server, engine=engine, stop=("</do>",)) == ("<do>x</do>", "stop")
        assert server.bodies[before:] == [{"model": "m", "messages": MESSAGES, "temperature": 0.5, "seed": 3,
                                           "max_completion_tokens": 9}]


@pytest.mark.parametrize("name", ["temperature", "max_completion_tokens", "model", "", None, ["stop"]])
def test_no_other_parameter_is_left_out_in_silence(name):
    with serving(lambda *_: failed(400, f"not {name}", param=name, code="unsupported_parameter")) as server:
        with pytest.raises(EngineError, match="answers 400"):
            ask(server)
        assert len(server.bodies) == 1


# Key and address


@pytest.mark.parametrize("reply", [failed(401, f"bad key: Bearer {KEY}"), failed(400, KEY), failed(500, KEY),
                                   Reply(body=KEY.encode()), Reply(status=404, body=KEY.encode())])
def test_the_key_is_sent_and_never_shown(reply, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", f" {KEY}\n")
    with serving(lambda *_: reply) as server:
        with pytest.raises(RolloutError) as error:
            play(server, engine_options={"patience": 0.0})
        assert server.authorizations == [f"Bearer {KEY}"]
        assert KEY not in str(error.value) + error.value.report.first_traceback and "***" in str(error.value)


@pytest.mark.parametrize("key", ["sk-a\nb", "sk-é", "sk a", "sk-\x7f"])
def test_what_cannot_be_a_key_is_refused_unseen(key, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ValueError, match="OPENAI_API_KEY holds a space") as error:
        OpenAIEngine("http://127.0.0.1/v1", "m")
    assert key not in str(error.value)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000/v1", "ftp://h/v1", "http://", "file:///etc", "http://h:x/v1",
                                 "http://me:hush@h/v1", "http://h/v1?key=hush", "http://h/v1#hush", "http://hush@h:x"])
def test_what_is_no_address_is_refused_without_showing_secrets(url):
    with pytest.raises(ValueError, match="the base URL must") as error:
        OpenAIEngine(url, "m")
    assert "hush" not in str(error.value)


# Many at once


def test_requests_share_connections_that_end_with_the_rollout():
    with serving(lambda *_: said("<do>x</do>")) as server:
        groups, _ = play(server, tasks=4, concurrency=2)
        assert len(groups) == 4 and len(server.bodies) == 12  # 4 episodes of 3 turns
        assert server.opened <= 2
        deadline = time.monotonic() + 10
        while server.open and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.open == 0


def test_the_rollouts_concurrency_bounds_the_requests():
    with serving(lambda *_: Reply(wait=0.05, body=said("<do>x</do>").body)) as server:
        play(server, tasks=12, concurrency=3)
        assert server.most == 3


def test_an_engine_serves_one_event_loop_after_another():
    with serving(lambda *_: said("x")) as server:
        engine = OpenAIEngine(server.url, "m")
        assert [ask(server, engine=engine) for _ in range(3)] == [("x", "stop")] * 3
        assert not engine._server._clients  # each was closed with its loop


def test_evaluating_leaves_the_global_generator_as_it_was():
    before = random.getstate()
    with serving(lambda number, _: failed(500) if number == 1 else said("<do>x</do>")) as server:
        play(server)
    assert random.getstate() == before
