"""New weights under running requests: each token has the log-probability, and the version, of the weights it was
sampled with, and no cache outlives its weights beyond the response under way."""

import asyncio

import numpy as np
import pytest

from agents.transformers_engine import TransformersEngine, _spans
from tests.agents.policies import generate, logprobs_alone, random_ids, random_policy
from tests.agents.test_engine import request


def endless(policy=None, **options):
    """An engine whose responses end at their length alone."""
    engine = TransformersEngine(policy or random_policy(), **options)
    engine._end_ids = frozenset()
    return engine


def changed_under_way(engine, requests, sampled, weights, version=7):
    """The completions of requests in whose middle (after so many tokens in all) the weights are replaced."""
    async def play():
        running = [asyncio.create_task(engine.generate(one)) for one in requests]
        while engine.sampled_tokens < sampled:
            await asyncio.sleep(0)
        engine.load(weights, version)
        return await asyncio.gather(*running)
    return asyncio.run(play())


@pytest.mark.parametrize("keep_cache", [True, False])
def test_responses_go_on_over_an_update_and_say_which_tokens_are_whose(keep_cache):
    rng, old, new = np.random.default_rng(1), random_policy(), random_policy(seed=1)
    engine = endless(slots=3, keep_cache=keep_cache)
    prompts = [random_ids(rng, n) for n in (9, 14, 30, 11)]
    requests = [request(p, seed=i, tokens=12, episode=str(i)) for i, p in enumerate(prompts)]
    # Three of four rows run; each of their tokens comes with the others'. The fourth waits and is all new.
    completions = changed_under_way(engine, requests, 15, new.model.state_dict())
    for prompt, completion in zip(prompts[:3], completions):
        (first, at), (second, end) = completion.weight_versions
        assert (first, second, end, completion.weight_version) == (0, 7, 12, 0) and 3 <= at <= 7
        np.testing.assert_allclose(completion.logprobs[:at],
                                   logprobs_alone(old, prompt, completion.response_ids)[:at], atol=1e-4)
        anew = logprobs_alone(new, prompt, completion.response_ids)[at:]
        gap = np.abs(completion.logprobs[at:] - anew).max()
        # Read anew, the rest is the new policy's own; over kept keys and values it is a mixture's.
        assert (gap > 1e-3) if keep_cache else (gap < 1e-4)
    assert completions[3].weight_version == 7 and completions[3].weight_versions == ()
    np.testing.assert_allclose(completions[3].logprobs,
                               logprobs_alone(new, prompts[3], completions[3].response_ids), atol=1e-4)


@pytest.mark.parametrize("keep_cache", [True, False])
def test_the_next_turn_after_an_update_is_the_new_policy_s_own(keep_cache):
    rng, new = np.random.default_rng(2), random_policy(seed=1)
    engine = endless(keep_cache=keep_cache)
    prompt = random_ids(rng, 20)
    (completion,) = changed_under_way(engine, [request(prompt, tokens=10, episode="a")], 4, new.model.state_dict())
    longer = np.concatenate([prompt, completion.response_ids, random_ids(rng, 5)])
    other = np.concatenate([prompt, random_ids(rng, 4)])  # begins like a row whose keys and values are old
    for text, episode in ((longer, "a"), (other, "b")):
        (after,) = generate(engine, request(text, tokens=6, episode=episode))
        np.testing.assert_allclose(after.logprobs, logprobs_alone(new, text, after.response_ids), atol=1e-4)


def test_the_same_weights_again_change_no_token():
    rng, policy = np.random.default_rng(3), random_policy()
    prompts = [random_ids(rng, n) for n in (8, 21)]
    requests = [request(p, seed=i, tokens=15) for i, p in enumerate(prompts)]
    expected = generate(endless(policy), *requests)
    for keep_cache in (True, False):
        engine = endless(policy, keep_cache=keep_cache)
        for found, right in zip(changed_under_way(engine, requests, 9, {}), expected):
            assert found.response_ids.tolist() == right.response_ids.tolist()
            np.testing.assert_allclose(found.logprobs, right.logprobs, atol=1e-4)


def test_several_updates_in_one_response_are_all_told():
    engine = endless()

    async def play():
        running = asyncio.create_task(engine.generate(request([5, 6, 7], tokens=20)))
        for version, sampled in ((1, 3), (2, 3), (5, 11)):
            while engine.sampled_tokens < sampled:
                await asyncio.sleep(0)
            engine.load({}, version)
        return await running
    completion = asyncio.run(play())
    versions, ends = zip(*completion.weight_versions)
    assert versions == (0, 2, 5) and ends[-1] == 20 and completion.weight_version == 0


def test_versions_that_sampled_nothing_are_not_told():
    assert _spans([(0, 3), (1, 3), (2, 8)]) == ((0, 3), (2, 8))
    assert _spans([(4, 2)]) == ((4, 2),)
