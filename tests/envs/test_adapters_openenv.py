"""An OpenEnv server's environment is played by id; a server that fails is an error, never a reward."""

import json
import pickle
import threading
import time
from contextlib import contextmanager

import pytest
from websockets.sync.server import serve

import envs
from envs.adapters.openenv import OpenEnv, ServerError
from tests.envs.adapted import Counting
from tests.envs.serving import eventually, serving

FIRST = {"type": "observation", "data": {"observation": {"board": "empty"}, "reward": None, "done": False}}


@contextmanager
def answering(answer):
    """A server that answers message number n with `answer(n, message)`: an object, a text, or None for silence."""
    seen = []

    def handler(connection):
        for raw in connection:
            seen.append(json.loads(raw))
            reply = answer(len(seen), seen[-1])
            if reply is not None:
                connection.send(reply if isinstance(reply, str) else json.dumps(reply))
    server = serve(handler, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}", seen
    finally:
        server.shutdown()
        thread.join(10)


def start(url, **options):
    env = envs.make("turngym/OpenEnv-v0", server=url, **options)
    env.reset(options={"task": env.tasks("train")[7]})
    return env


def scripted(*answers):
    return lambda number, _: answers[min(number, len(answers)) - 1]


def ended(reward, **observation):
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": True}}


def test_our_own_server_is_played_as_the_environment_itself():
    with serving("turngym/Countdown-v0", "max_sessions=8") as url:
        env, there = envs.make("turngym/Countdown-v0"), envs.make("turngym/OpenEnv-v0", server=url)
        first, _ = env.reset(seed=7)
        assert there.reset(options={"task": there.tasks("train")[7]})[0] == first  # seed 7 there
        assert there.system_prompt == env.system_prompt
        for response in ["no action", "<tool>1+</tool>", "<answer>1</answer>"]:
            here = env.step(env.parse(response).text)
            assert there.step(there.parse(response).text)[:4] == here[:4]
        there.close()
        assert [r for r in envs.check_text_env(OpenEnv(server=url, max_turns=2), episodes=2) if not r.ok] == []
    eventually(lambda: Counting.open == 0)


def test_openenvs_own_client_plays_ours():
    client = pytest.importorskip("openenv.core.generic_client").GenericEnvClient
    with serving("adapted/Counting-v0") as url, client(base_url=url).sync() as session:
        assert session.reset(seed=7).observation["system_prompt"] == "Count."
        result = session.step({"text": "win"})
        assert (result.reward, result.done, result.observation["success"]) == (1.0, True, True)
        assert session.state()["step_count"] == 1
        with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
            session.step({"words": "win"})


def test_a_copy_plays_its_own_session():
    with serving("adapted/Counting-v0") as url:
        env = start(url, max_turns=10)
        env.step("a")
        copy = pickle.loads(pickle.dumps(env))
        assert copy.step("b")[0] == env.step("b")[0]
        assert env.step("win")[4]["success"]
        assert copy.step("c")[3]  # its third step, the server's limit
        env.close()
        copy.close()
        eventually(lambda: Counting.open == 0)


def test_the_fields_of_other_servers_are_named_by_options():
    done = ended(True, board="full")
    with answering(scripted(FIRST, done, FIRST, done)) as (url, seen):
        env = start(url, action_field="message", observation_field="board")
        observation, reward, terminated, _, info = env.step("put é 😀")
        assert (observation, reward, terminated, info["success"]) == ("full", 1.0, True, True)
        assert seen == [{"type": "reset", "data": {"seed": 7}}, {"type": "step", "data": {"message": "put é 😀"}}]
        env.close()
    with answering(scripted(FIRST, done)) as (url, seen):
        env = start(url, action_field=None)
        for text in ("x", "[1]", "[" * 100_000, ""):
            assert env.step(text)[4]["valid"] is False
        assert json.loads(env.step('{"row": 1, "column": 2}')[0]) == {"board": "full"}
        assert seen[1:] == [{"type": "step", "data": {"row": 1, "column": 2}}]
        env.close()


@pytest.mark.parametrize(("answer", "expected"), [
    (ended(1.0), (True, False, True)), (ended(0.5), (True, False, False)), (ended(None), (True, False, False)),
    (ended(-1), (True, False, False)), (ended(1.0, truncated=True), (False, True, False)),
    (ended(0.0, success=True), (True, False, True)), (ended(5.0, success=False), (True, False, False))])
def test_success_needs_an_end_and_a_reward(answer, expected):
    with answering(scripted(FIRST, answer)) as (url, _):
        env = start(url)
        _, _, terminated, truncated, info = env.step("x")
        assert (terminated, truncated, info["success"]) == expected
        env.close()


def test_a_field_that_the_server_lacks_is_an_error_not_an_invalid_action():
    with serving("adapted/Counting-v0") as url:
        env = start(url, action_field="words")
        with pytest.raises(ServerError, match="action_field='words'"):
            env.step("x")
        env.close()
    eventually(lambda: Counting.open == 0)


def test_what_the_server_refuses_as_an_action_is_invalid():
    refusal = {"type": "error", "data": {"message": "no such move", "code": "VALIDATION_ERROR"}}
    with answering(scripted(FIRST, refusal)) as (url, _):
        env = start(url)
        observation, reward, terminated, _, info = env.step("x")
        assert "no such move" in observation and (reward, terminated, info["valid"]) == (0.0, False, False)
        env.close()


@pytest.mark.parametrize("answer", [
    {"type": "error", "data": {"message": "boom", "code": "EXECUTION_ERROR"}},
    {"type": "error", "data": {"message": "boom", "code": "CAPACITY_REACHED"}}, "no json", "[" * 100_000, [], {},
    {"type": "observation"}, {"type": "observation", "data": []}, {"type": "state", "data": {"observation": {}}},
    {"type": "observation", "data": {"observation": "text"}}, {"type": "error", "data": "x"}])
def test_a_server_that_fails_is_an_error(answer):
    with answering(scripted(FIRST, answer)) as (url, _):
        env = start(url)
        with pytest.raises(ServerError, match="ws://127"):
            env.step("x")
        env.close()
    with answering(scripted(answer)) as (url, _), pytest.raises(ServerError, match="ws://127"):
        start(url)


@pytest.mark.parametrize("reward", ["high", [1], {}, "", float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_an_error(reward):
    with answering(scripted(FIRST, ended(reward))) as (url, _):
        env = start(url)
        with pytest.raises(ValueError, match="number"):
            env.step("x")
        env.close()


def test_a_silent_server_is_given_up_at_the_deadline():
    with answering(scripted(FIRST, None)) as (url, _):
        env = start(url, seconds=0.5)
        started = time.monotonic()
        with pytest.raises(ServerError, match="is it running"):
            env.step("x")
        assert time.monotonic() - started < 8
        env.close()


def test_a_server_that_is_down_is_a_clear_error():
    with answering(scripted(FIRST)) as (url, _):
        env = start(url)
    with pytest.raises(ServerError, match="is it running"):
        env.step("x")
    with pytest.raises(ServerError, match=r"no answer from the OpenEnv server ws://127\.0\.0\.1"):
        start(url)


@pytest.mark.parametrize("server", ["", "127.0.0.1:8000", "ftp://x", "http://"])
def test_an_address_that_is_none_is_refused(server):
    with pytest.raises(ValueError, match="server must be an address"):
        envs.make("turngym/OpenEnv-v0", server=server)
