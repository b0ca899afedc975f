"""vLLM's engine against a small server of its API: what fails, in whatever way, is an error; never a response."""

import asyncio
import threading
import time

import numpy as np
import pytest
import torch

from agents.agent import ModelAgent
from agents.engine import EngineError, Request
from agents.rollout import Rollout, RolloutError
from agents.server_client import ServerUnavailable
from agents.transformers_engine import TransformersEngine
from agents.vllm_engine import VLLMEngine
from agents.vllm_replica import ServerReplica
from agents.weight_transfer import SharedMemoryTransfer
from tests.agents.chat_server import Reply, Talk, failed
from tests.agents.episodes import tasks
from tests.agents.fake_vllm import GENERATE, json_reply, serving_vllm
from tests.agents.policies import generate, logprobs_alone, random_ids, random_policy


@pytest.fixture
def connected():
    """Makes engines over fake servers, and closes them."""
    engines = []

    def connect(*servers, patience=5.0, request_seconds=10.0):
        replicas = [ServerReplica(url=server.url, patience=patience, request_seconds=request_seconds)
                    for server in servers]
        engine = VLLMEngine(replicas, servers[0].policy.end_ids, max_context=128,
                            transfer=SharedMemoryTransfer(torch.float32))
        engines.append(engine)
        engine.connect()
        return engine
    yield connect
    for engine in engines:
        engine.close()


def request(seed=0, length=6, **options):
    return Request(prompt_ids=random_ids(np.random.default_rng(seed), length), max_new_tokens=8, seed=seed, **options)


def spoil(body, **changes):
    """A fault that answers generation requests with a whole answer in which something is wrong."""
    return json_reply({"choices": [{**body, **changes}]})


def test_it_samples_what_the_model_says_with_its_log_probabilities(connected):
    policy = random_policy()
    requests = [request(seed, temperature=temperature, stop=("a",)) for seed in range(4) for temperature in (0.0, 0.5)]
    expected = generate(TransformersEngine(policy), *requests)
    with serving_vllm(policy) as server:
        found = generate(connected(server), *requests)
    for one, other in zip(found, expected):
        assert one.response_ids.tolist() == other.response_ids.tolist()
        assert (one.finish_reason, one.weight_version, one.weight_versions) == (other.finish_reason, 0, ())
        assert np.abs(one.logprobs - other.logprobs).max() < 1e-5


def test_everything_that_shapes_the_distribution_is_said(connected):
    with serving_vllm(random_policy()) as server:
        engine = connected(server)
        generate(engine, request(2**62 + 5, temperature=0.7, stop=("x", "y")))
        sent = server.bodies[-1]["sampling_params"]
    assert sent == {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": 0, "seed": 2**62 + 5,
                    "max_tokens": 8, "stop_token_ids": sorted(server.policy.end_ids), "stop": ["x", "y"],
                    "include_stop_str_in_output": True, "skip_special_tokens": False}


def test_a_response_ends_where_the_context_is_full(connected):
    with serving_vllm(random_policy()) as server:
        engine = connected(server)
        (full,) = generate(engine, request(length=126))
        (over,) = generate(engine, request(length=128))
        assert len(full.response_ids) <= 2 and (len(over.response_ids), over.finish_reason) == (0, "length")
        assert server.generated == 1


def test_an_episode_stays_on_its_replica_and_new_ones_go_where_there_is_room(connected):
    policy = random_policy()
    with serving_vllm(policy) as one, serving_vllm(policy) as other:
        engine = connected(one, other)
        episodes = [request(seed, episode=str(seed)) for seed in range(8)]
        for _ in range(3):
            generate(engine, *episodes)
        prompts = [{tuple(body["token_ids"]) for path, body in zip(server.paths, server.bodies) if path == GENERATE}
                   for server in (one, other)]
    assert [len(those) for those in prompts] == [4, 4] and not prompts[0] & prompts[1]


def test_replicas_sample_by_the_seed_and_not_each_the_same(connected):
    policy = random_policy()
    with serving_vllm(policy) as one, serving_vllm(policy) as other:
        engine = connected(one, other)

        def sampled(seeds):
            prompt = random_ids(np.random.default_rng(0), 6)
            asked = [Request(prompt_ids=prompt, max_new_tokens=8, seed=seed, episode=str(i))
                     for i, seed in enumerate(seeds)]
            return [tuple(found.response_ids) for found in generate(engine, *asked)]
        first = sampled(range(8))
        assert one.generated == other.generated == 4 and len(set(first)) == 8
        assert sampled(range(8)) == first and len(set(sampled([3] * 8))) == 1


def test_weights_that_sleep_forgot_come_back_with_the_next_load(connected):
    learner = random_policy()

    def fault(_, path, body):
        if path == "/sleep?level=2":
            server.policy = random_policy(seed=2)
    with serving_vllm(random_policy(seed=1), fault) as server:
        engine = connected(server)
        engine.shares_gpu = True
        for version in (1, 1, 2):
            engine.load(learner.model.state_dict(), version)
            for seed in (0, 1):
                (found,) = generate(engine, request(seed))
                expected = logprobs_alone(learner, request(seed).prompt_ids, found.response_ids)
                assert np.abs(found.logprobs - expected).max() < 1e-4
            engine.sleep()


def test_many_requests_need_no_thread_each(connected):
    with serving_vllm(random_policy(), lambda _, path, body: Reply(wait=60.0) if path == GENERATE else None) as server:
        engine = connected(server, request_seconds=60.0)

        async def ask():
            asked = [asyncio.create_task(engine.generate(request(seed))) for seed in range(100)]
            while server.now < 100:
                await asyncio.sleep(0.01)
            ours = [thread.name for thread in threading.enumerate() if "process_request" not in thread.name]
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
            return ours
        assert len(asyncio.run(ask())) < 10


# Failures


WHOLE = {"index": 0, "token_ids": [5, 6], "finish_reason": "stop",
         "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}, {"token_id": 6, "logprob": -1.0}]},
         "weight_versions": [{"version": "0", "start": 0, "end": 2}]}


def test_the_whole_answer_that_is_spoilt_below_is_a_response(connected):
    with serving_vllm(random_policy(), lambda _, path, body: spoil(WHOLE) if path == GENERATE else None) as server:
        (found,) = generate(connected(server), request())
    assert found.response_ids.tolist() == [5, 6]


BAD = [failed(500), failed(503), failed(429), Reply(hang_up=True), Reply(body=b"<html>Bad gateway</html>"), Reply(),
       Reply(body=b'{"choices": [', missing=50), Reply(body=json_reply({"choices": [WHOLE]}).body, missing=1),
       Reply(body=b"[" * 100_000), json_reply({"choices": []}), json_reply({"choices": [WHOLE, WHOLE]}),
       spoil(WHOLE, token_ids=[5]), spoil(WHOLE, token_ids=[5, 7]), spoil(WHOLE, token_ids=[5, -6]),
       spoil(WHOLE, token_ids=None), spoil(WHOLE, logprobs=None), spoil(WHOLE, finish_reason="abort"),
       spoil(WHOLE, finish_reason=None), spoil(WHOLE, weight_versions=None), spoil(WHOLE, weight_versions=[]),
       spoil(WHOLE, weight_versions=[{"version": "0", "start": 0, "end": 1}]),
       spoil(WHOLE, weight_versions=[{"version": "0", "start": 0, "end": 3}]),
       spoil(WHOLE, logprobs={"content": [{"token_id": 5, "logprob": 0.5}, {"token_id": 6, "logprob": -1.0}]}),
       spoil(WHOLE, logprobs={"content": [{"token_id": 5, "logprob": None}, {"token_id": 6, "logprob": -1.0}]})]


@pytest.mark.parametrize("bad", BAD)
def test_what_is_no_response_is_asked_for_again(bad, connected):
    def fault(_, path, body):
        return bad if path == GENERATE and server.generated == 1 else None
    with serving_vllm(random_policy(), fault) as server:
        (found,) = generate(connected(server), request())
        assert server.generated == 2
    assert len(found.response_ids) == len(found.logprobs) > 0


@pytest.mark.parametrize("bad", BAD[::4])
def test_a_server_that_goes_on_failing_fails_the_episode_and_gives_no_reward(bad, connected):
    policy = random_policy()
    with serving_vllm(policy, lambda _, path, body: bad if path == GENERATE else None) as server:
        agent = ModelAgent(connected(server, patience=0.0), policy, max_response_tokens=4)
        with pytest.raises(RolloutError) as error:
            Rollout(Talk, retries=0).run(agent, tasks(2), 2, seed=0)
    assert error.value.report.episodes == 0 and error.value.report.dropped_groups == 2
    assert set(error.value.report.errors) == {"error_engine:ServerUnavailable"}


def test_a_server_that_says_nothing_is_given_up_and_its_request_closed(connected):
    with serving_vllm(random_policy(), lambda _, path, body: Reply(wait=20.0) if path == GENERATE else None) as server:
        engine, started = connected(server, patience=0.0, request_seconds=1.0), time.monotonic()
        with pytest.raises(ServerUnavailable, match="did not answer in 1 s"):
            generate(engine, request())
        assert time.monotonic() - started < 10 and server.given_up.wait(10)


def test_what_is_refused_is_not_asked_again(connected):
    with serving_vllm(random_policy(), lambda _, path, body: failed(400, "bad token") if path == GENERATE else None
                      ) as server:
        with pytest.raises(EngineError, match="answers 400: 'bad token'"):
            generate(connected(server), request())
        assert server.generated == 1


def test_a_server_that_is_none_of_vllms_is_named(connected):
    with serving_vllm(random_policy(), lambda _, path, body: failed(404) if path != "/v1/models" else None
                      ) as server, pytest.raises(EngineError, match="--enable-scale-out and VLLM_SERVER_DEV_MODE=1"):
        connected(server)


def test_a_server_with_raw_log_probabilities_is_refused(connected):
    with serving_vllm(random_policy()) as server:
        server.mode = "raw_logprobs"
        with pytest.raises(EngineError, match="start it with --logprobs-mode processed_logprobs"):
            connected(server)


# Weights


def test_new_weights_are_those_that_sample_and_score(connected):
    old, new = random_policy(seed=1), random_policy(seed=2)
    ids = random_ids(np.random.default_rng(0), 12)
    expected = TransformersEngine(new).score([ids])[0]
    with serving_vllm(old) as one, serving_vllm(random_policy(seed=3)) as other:
        engine = connected(one, other)
        engine.load(new.model.state_dict(), 7)
        for found in engine.score([ids] * 2):
            assert np.abs(found - expected).max() < 1e-5
        for completion in generate(engine, *(request(seed) for seed in range(4))):
            assert completion.weight_version == 7
        assert one.version == other.version == "7"


def test_weights_of_a_version_are_sent_once_and_no_cache_outlives_a_load(connected):
    policy = random_policy()
    with serving_vllm(random_policy(seed=1)) as server:
        engine, salts = connected(server), []
        for version in (0, 0, 1):
            engine.load(policy.model.state_dict(), version)
            generate(engine, request())
            salts.append(server.bodies[-1]["cache_salt"])
        engine.load({}, 1)
        assert server.paths.count("/update_weights") == 2 and len(set(salts)) == 3
        with pytest.raises(ValueError, match="no weights of version 2"):
            engine.load({}, 2)


def test_tied_weights_are_sent_once(connected):
    policy = random_policy(tie_word_embeddings=True)
    with serving_vllm(random_policy(seed=1, tie_word_embeddings=True)) as server:
        connected(server).load(policy.model.state_dict(), 1)
        assert torch.equal(server.policy.model.lm_head.weight, policy.model.lm_head.weight)


def test_a_response_during_which_the_weights_change_says_so(connected):
    spans = [{"version": "0", "start": 0, "end": 1}, {"version": "1", "start": 1, "end": 2}]
    loaded = threading.Event()

    def fault(_, path, body):
        if path == GENERATE:
            loaded.wait(10)
            return spoil(WHOLE, weight_versions=spans)
    policy = random_policy()
    with serving_vllm(random_policy(seed=1), fault) as server:
        engine = connected(server)

        async def ask_and_load():
            asked = asyncio.create_task(engine.generate(request()))
            while not server.generated:
                await asyncio.sleep(0.01)
            engine.load(policy.model.state_dict(), 1)  # as asynchronous training does: in the thread of the requests
            loaded.set()
            return await asked
        found = asyncio.run(ask_and_load())
    assert (found.weight_version, found.weight_versions) == (0, ((0, 1), (1, 2)))


def test_a_server_that_was_restarted_gets_its_weights_again_before_its_answers_count(connected):
    policy = random_policy()
    with serving_vllm(random_policy(seed=1)) as server:
        engine = connected(server)
        engine.load(policy.model.state_dict(), 3)
        server.policy, server.version = random_policy(seed=1), "default"  # what it began with
        completions = generate(engine, *(request(seed) for seed in range(3)))
        assert {completion.weight_version for completion in completions} == {3} and server.version == "3"
        assert server.paths.count("/update_weights") == 2
        expected = generate(TransformersEngine(policy), request(0))[0]
    assert completions[0].response_ids.tolist() == expected.response_ids.tolist()


def test_a_server_that_loses_its_weights_again_and_again_is_an_error(connected):
    def fault(_, path, body):
        return spoil(WHOLE, weight_versions=[{"version": "9", "start": 0, "end": 2}]) if path == GENERATE else None
    with serving_vllm(random_policy(), fault) as server:
        engine = connected(server, patience=30.0)
        with pytest.raises(EngineError, match="was lost 3 times since it last got new weights"):
            generate(engine, request())


@pytest.mark.parametrize("path", ["/pause?mode=keep&clear_cache=false", "/start_weight_update", "/update_weights",
                                  "/finish_weight_update", "/update_weight_version", "/resume", "/weight_info"])
@pytest.mark.parametrize("bad", [failed(500, "out of memory"), Reply(hang_up=True)])
def test_a_sync_that_half_happened_is_an_error_at_once(path, bad, connected):
    broken = threading.Event()
    with serving_vllm(random_policy(), lambda _, asked, body: bad if broken.is_set() and asked == path else None
                      ) as server:
        engine = connected(server)
        broken.set()
        with pytest.raises(EngineError, match="weights of version 4 did not reach every replica"):
            engine.load(random_policy(seed=1).model.state_dict(), 4)


def test_a_server_that_keeps_its_old_version_is_an_error(connected):
    with serving_vllm(random_policy(), lambda _, path, body: json_reply({}) if path == "/update_weight_version" else
                      json_reply({"weight_version": "0"}) if path == "/weight_info" else None) as server:
        engine = connected(server)
        with pytest.raises(EngineError, match="holds weights '0' after version 1 was sent"):
            engine.load(random_policy(seed=1).model.state_dict(), 1)
