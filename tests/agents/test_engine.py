"""The transformers engine: its log-probabilities are the model's, whatever it keeps, shares, batches or drops."""

import asyncio
import gc
from itertools import chain, repeat

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from agents.engine import Request
from agents.models import ModelError, Policy
from agents.transformers_engine import TransformersEngine, sample, uniform_numbers
from tests.agents.policies import FAMILIES, generate, logprobs_alone, random_ids, random_policy


def request(prompt, *, tokens=6, **options) -> Request:
    return Request(prompt_ids=np.asarray(prompt, np.int64), max_new_tokens=tokens, **options)


def play(engine, policy, prompts, turns, rng, temperature=1.0):
    """Episodes of several turns at once; each response must have the log-probabilities of its whole text alone."""
    for turn in range(turns):
        lengths = rng.integers(1, 9, len(prompts))
        completions = generate(engine, *(
            request(prompt, tokens=int(length), seed=100 * i + turn, temperature=temperature, episode=str(i))
            for i, (prompt, length) in enumerate(zip(prompts, lengths))))
        for prompt, completion in zip(prompts, completions):
            assert 1 <= len(completion.response_ids) == len(completion.logprobs)
            np.testing.assert_allclose(completion.logprobs, logprobs_alone(
                policy, prompt, completion.response_ids, temperature), atol=1e-4)
        prompts = [np.concatenate([prompt, completion.response_ids, random_ids(rng, rng.integers(1, 9))])
                   for prompt, completion in zip(prompts, completions)]
    return prompts


def grouped_prompts(rng, groups=3, size=3):
    """A group's prompts begin alike; all are of uneven lengths."""
    beginnings = [random_ids(rng, 12) for _ in range(groups)]
    return [np.concatenate([beginning, random_ids(rng, rng.integers(1, 15))])
            for beginning in beginnings for _ in range(size)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_log_probabilities_of_reading_everything_anew(family):
    # 5 rows for 9 episodes: some keep their rows between turns, others lose them; prompts outgrow the windows of 8.
    rng, policy = np.random.default_rng(0), random_policy(family)
    play(TransformersEngine(policy, slots=5), policy, grouped_prompts(rng), 3, rng, temperature=0.7)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("slots", [1, 4, 64])
def test_rows_kept_shared_and_evicted_change_nothing(attention, slots):
    rng, policy = np.random.default_rng(1), random_policy(attention=attention)
    play(TransformersEngine(policy, slots=slots), policy, grouped_prompts(rng, 5, 4), 4, rng)


def test_a_common_prompt_is_read_once_and_a_next_turn_only_from_its_new_tokens():
    rng, policy = np.random.default_rng(2), random_policy()
    engine, prompt = TransformersEngine(policy, slots=8), random_ids(rng, 40)
    completions = generate(engine, *(request(prompt, seed=i, episode=str(i)) for i in range(8)))
    assert engine.prefilled_tokens == 40 + 7  # one reads all, the others the last token, which they sample from
    following = [np.concatenate([prompt, c.response_ids, random_ids(rng, 5)]) for c in completions]
    generate(engine, *(request(p, seed=i, episode=str(i)) for i, p in enumerate(following)))
    assert engine.prefilled_tokens == 47 + 8 * 6  # the last sampled token was never read, and 5 are new


def test_a_history_that_was_rewritten_is_read_from_where_it_differs():
    rng, policy = np.random.default_rng(3), random_policy()
    engine, prompt = TransformersEngine(policy, slots=2), random_ids(rng, 30)
    generate(engine, request(prompt, episode="a"))
    changed = np.concatenate([prompt[:17], random_ids(rng, 20)])
    changed[17] = prompt[17] + 1
    read = engine.prefilled_tokens
    completion, = generate(engine, request(changed, episode="a", seed=3))
    assert engine.prefilled_tokens == read + 20
    np.testing.assert_allclose(completion.logprobs, logprobs_alone(policy, changed, completion.response_ids), atol=1e-4)


def test_a_prompt_shorter_than_what_is_kept_is_answered():
    rng, policy = np.random.default_rng(4), random_policy()
    engine, prompt = TransformersEngine(policy, slots=2), random_ids(rng, 30)
    for kept in (prompt, prompt, prompt[:12], prompt[:1]):
        completion, = generate(engine, request(kept, episode="a"))
        np.testing.assert_allclose(completion.logprobs, logprobs_alone(policy, kept, completion.response_ids),
                                   atol=1e-4)


def test_no_more_tokens_are_read_at_once_than_memory_allows(monkeypatch):
    monkeypatch.setattr("agents.transformers_engine.JOIN_TOKENS", 40)
    rng, policy = np.random.default_rng(5), random_policy()
    engine = TransformersEngine(policy, slots=16)
    sizes = []
    advance = engine._advance
    monkeypatch.setattr(engine, "_advance", lambda first, end, news: (sizes.append(len(news) * max(news)),
                                                                       advance(first, end, news)))
    play(engine, policy, [random_ids(rng, n) for n in (5, 30, 12, 12, 60, 3, 20)], 2, rng)
    assert max(sizes) == 60  # the prompt of 60 alone, every other pass within 40


def test_the_same_seed_gives_the_same_response_whatever_runs_beside():
    rng, policy = np.random.default_rng(6), random_policy()
    prompts = [random_ids(rng, n) for n in (9, 21, 14, 30)]
    alone = [generate(TransformersEngine(policy), request(p, seed=i, tokens=12))[0] for i, p in enumerate(prompts)]
    together = generate(TransformersEngine(policy, slots=3), *(
        request(p, seed=i, tokens=12) for i, p in enumerate([*prompts, *prompts[:2]])))
    for one, other in zip(alone, together):
        assert one.response_ids.tolist() == other.response_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert together[4].response_ids.tolist() != together[0].response_ids.tolist()  # another seed


def test_temperature_zero_takes_the_likeliest_token_and_reports_it_at_temperature_one():
    rng, policy = np.random.default_rng(7), random_policy()
    prompt = random_ids(rng, 10)
    greedy = generate(TransformersEngine(policy), *(
        request(prompt, seed=i, temperature=t) for i, t in enumerate([0, 0, 0, 1, 1])))
    answers = [completion.response_ids.tolist() for completion in greedy]
    assert answers[0] == answers[1] == answers[2] and answers[3] != answers[4]
    ids = torch.from_numpy(np.concatenate([prompt, greedy[0].response_ids]))[None]
    logits = policy.model(input_ids=ids).logits[0, len(prompt) - 1:-1]
    assert logits.argmax(-1).tolist() == answers[0]
    np.testing.assert_allclose(greedy[0].logprobs, logprobs_alone(policy, prompt, greedy[0].response_ids), atol=1e-4)


def test_log_probabilities_are_those_of_the_tempered_logits():
    # Logits [2, 0] at T = 0.5 are [4, 0]: log softmax = -log(1 + e^-4) = -0.01815 for token 0; neither the raw
    # -log(1 + e^-2) = -0.12693 nor that divided by T.
    ids, logprobs = sample(torch.tensor([[2.0, 0.0]]), [0.5], [1], [0])
    assert ids == [0] and logprobs == pytest.approx([-0.01815], abs=1e-5)


def test_tokens_are_drawn_as_often_as_the_softmax_says():
    # 20,000 draws of 8 tokens: chi-square with 7 degrees of freedom exceeds 24.3 once in a thousand seeds.
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.2, -3.0, 0.7, -0.5])
    for temperature in (1.0, 0.5):
        ids, _ = sample(logits.expand(20_000, 8), [temperature] * 20_000, range(20_000), [0] * 20_000)
        expected = 20_000 * (logits / temperature).softmax(-1).numpy()
        assert ((np.bincount(ids, minlength=8) - expected) ** 2 / expected).sum() < 24.3


def test_a_token_without_probability_is_never_drawn():
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]).expand(2000, 5)
    assert set(sample(logits, [1.0] * 2000, range(2000), [0] * 2000)[0]) == {1, 3}


def test_uniform_numbers_are_spread_over_seeds_and_steps():
    # Standard error of a correlation over 250,000 pairs is 0.002, that of a tenth's share 0.0006.
    table = np.array([uniform_numbers(range(500), [step] * 500) for step in range(500)])
    assert table.min() >= 0 and table.max() < 1 and len(np.unique(table)) == table.size
    assert np.histogram(table, bins=10, range=(0, 1))[0] / table.size == pytest.approx(0.1, abs=0.004)
    for a, b in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1]), (table[1:, :-1], table[:-1, 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.01
    assert uniform_numbers([2**64 + 5], [3]) == uniform_numbers([5], [3])


def ids_of(policy, text):
    return policy.tokenizer(text, add_special_tokens=False).input_ids


def made_to_say(policy, ids):
    """An engine whose one request is answered by these ids, the last one repeated."""
    engine, words = TransformersEngine(policy), chain(ids, repeat(ids[-1]))
    vocabulary = policy.model.get_output_embeddings().out_features
    policy.model.get_output_embeddings().forward = lambda hidden: 100.0 * torch.nn.functional.one_hot(
        torch.tensor([next(words)]), vocabulary)
    return engine


@pytest.mark.parametrize(("text", "stop", "said"), [
    ("1+2</answer>3", ("</tool>", "</answer>"), "1+2</answer>"),
    ("ab.\ncd", (".",), "ab."),
    ("x ENDy", (" END",), "x END"),
    ("say 終 now", ("終",), "say 終"),  # a character of several tokens, whose last one alone is no text
    ("né à", ("é à",), "né à"),
    ("a: b", (": ",), "a: "),
])
def test_generation_ends_with_the_token_that_completes_a_stop_text(text, stop, said):
    policy = random_policy()
    engine = made_to_say(policy, ids_of(policy, text))
    completion, = generate(engine, request([5], tokens=40, stop=stop, temperature=0))
    assert completion.finish_reason == "stop"
    assert policy.tokenizer.decode(completion.response_ids).startswith(said)
    assert not policy.tokenizer.decode(completion.response_ids[:-1]).startswith(said)


def test_a_stop_text_may_end_inside_a_token():
    policy = random_policy()
    policy.tokenizer.add_tokens(["ab"])
    policy.model.resize_token_embeddings(len(policy.tokenizer))
    joined, = ids_of(policy, "ab")
    engine = made_to_say(policy, [*ids_of(policy, "x"), joined, *ids_of(policy, "cd")])
    completion, = generate(engine, request([5], tokens=20, stop=("xa",), temperature=0))
    assert policy.tokenizer.decode(completion.response_ids) == "xab" and completion.finish_reason == "stop"


def test_a_stop_text_may_end_with_the_space_that_begins_a_token():
    # As in SentencePiece: "▁x" is " x", but reads "x" where it comes first.
    made = Tokenizer(models.WordLevel({"a": 0, "▁x": 1, "e": 2, "b": 3}, "e"))
    made.decoder = decoders.Metaspace()
    policy = Policy(random_policy().model, PreTrainedTokenizerFast(tokenizer_object=made, eos_token="e"))
    policy.model.generation_config.eos_token_id = None
    completion, = generate(made_to_say(policy, [0, 3, 1, 0, 3]), request([5], tokens=9, stop=("b ",), temperature=0))
    assert policy.tokenizer.decode(completion.response_ids) == "ab x" and completion.finish_reason == "stop"


def test_a_stop_text_in_the_prompt_stops_nothing():
    policy = random_policy()
    engine = made_to_say(policy, ids_of(policy, "ool> word"))
    completion, = generate(engine, request(ids_of(policy, "<t"), tokens=4, stop=("<tool>",), temperature=0))
    assert policy.tokenizer.decode(completion.response_ids).startswith("ool>")
    assert len(completion.response_ids) == 4 and completion.finish_reason == "length"


def test_each_of_several_end_tokens_ends_a_response():
    # End ids {7, 9}: [3, 4, 9] stops at the secondary one, [3, 4, 5, 6, 8] is cut at its length.
    answers = []
    for said in ([3, 4, 9, 6], [3, 4, 7, 6], [3, 4, 5, 6, 8, 2]):
        policy = random_policy()
        policy.model.generation_config.eos_token_id = [7, 9]
        completion, = generate(made_to_say(policy, said), request([5], tokens=5, temperature=0))
        answers.append((completion.response_ids.tolist(), completion.finish_reason))
    assert answers == [([3, 4, 9], "stop"), ([3, 4, 7], "stop"), ([3, 4, 5, 6, 8], "length")]


def test_a_response_ends_where_the_context_is_full():
    rng, policy = np.random.default_rng(8), random_policy(eos_token_id=None)
    engine = TransformersEngine(policy, max_context=20)
    full, over, room, none = generate(engine, request(random_ids(rng, 20)), request(random_ids(rng, 50)),
                                      request(random_ids(rng, 17), tokens=30), request(random_ids(rng, 4), tokens=0))
    for empty in (full, over, none):
        assert len(empty.response_ids) == len(empty.logprobs) == 0 and empty.finish_reason == "length"
    assert len(room.response_ids) <= 3 and (len(room.response_ids) == 3) == (room.finish_reason == "length")
    assert TransformersEngine(policy, max_context=10_000).max_context == 128


def test_positions_of_filler_stay_inside_a_table_of_positions():
    # 128 positions and prompts of 120 and 3 tokens, which share a pass; then a row at its end beside a new one.
    rng, policy = np.random.default_rng(9), random_policy("gpt2")
    engine = TransformersEngine(policy, slots=4)
    long, short = random_ids(rng, 119), random_ids(rng, 3)
    for prompts in ((long, short), (np.append(long, 9), random_ids(rng, 90))):
        completions = generate(engine, *(request(p, episode=str(i)) for i, p in enumerate(prompts)))
        for prompt, completion in zip(prompts, completions):
            np.testing.assert_allclose(completion.logprobs, logprobs_alone(policy, prompt, completion.response_ids),
                                       atol=1e-4)


@pytest.mark.parametrize(("bad", "reason"), [
    (request([]), "at least one prompt token"), (request([5, 279]), "outside the model's 279"),
    (request([-1, 5]), "outside the model's 279"), (request([5], temperature=-1.0), "temperature must be 0 or more"),
    (request([5], temperature=float("nan")), "temperature must be 0 or more")])
def test_a_request_that_cannot_be_answered_is_refused_alone(bad, reason):
    engine = TransformersEngine(random_policy())

    async def both():
        return await asyncio.gather(engine.generate(request([5, 6])), engine.generate(bad), return_exceptions=True)
    good, refused = asyncio.run(both())
    assert len(good.response_ids) > 0
    assert isinstance(refused, ValueError) and reason in str(refused)


def test_new_weights_are_used_from_the_next_request_on_and_nothing_old_is_kept():
    rng, policy, other = np.random.default_rng(10), random_policy(seed=0), random_policy(seed=1)
    engine, prompt = TransformersEngine(policy), random_ids(rng, 20)
    before, = generate(engine, request(prompt, episode="a", seed=3))
    engine.load(other.model.state_dict(), version=4)
    after, shared = generate(engine, request(prompt, episode="a", seed=3), request(prompt, episode="b", seed=4))
    assert (before.weight_version, after.weight_version, engine.weight_version) == (0, 4, 4)
    for completion in (after, shared):
        np.testing.assert_allclose(completion.logprobs, logprobs_alone(other, prompt, completion.response_ids),
                                   atol=1e-4)
    fresh, = generate(TransformersEngine(other), request(prompt, episode="a", seed=3))
    assert fresh.response_ids.tolist() == after.response_ids.tolist()


def test_a_learner_s_own_weights_are_loaded_without_a_copy():
    rng, policy = np.random.default_rng(11), random_policy()
    engine, prompt = TransformersEngine(policy), random_ids(rng, 20)
    generate(engine, request(prompt, episode="a"))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    engine.load(policy.model.state_dict(), version=1)
    completion, = generate(engine, request(prompt, episode="a"))
    np.testing.assert_allclose(completion.logprobs, logprobs_alone(policy, prompt, completion.response_ids), atol=1e-4)


def test_weights_that_the_model_lacks_are_refused():
    with pytest.raises(ValueError, match=r"lacks: model\.extra"):
        TransformersEngine(random_policy()).load({"model.extra": torch.zeros(1)}, version=1)


def test_cancelled_requests_leave_the_others_alone():
    rng, policy = np.random.default_rng(12), random_policy(eos_token_id=None)
    engine = TransformersEngine(policy, slots=3)
    prompts = [random_ids(rng, n) for n in (9, 14, 30, 8, 21, 5)]
    expected = [generate(TransformersEngine(policy), request(p, seed=i, tokens=20))[0] for i, p in enumerate(prompts)]

    async def some_cancelled():
        tasks = [asyncio.create_task(engine.generate(request(p, seed=i, tokens=20, episode=str(i))))
                 for i, p in enumerate(prompts)]
        for _ in range(6):
            await asyncio.sleep(0)
        tasks[1].cancel()  # running
        tasks[4].cancel()  # waiting
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = asyncio.run(some_cancelled())
    assert [i for i, answer in enumerate(answers) if isinstance(answer, asyncio.CancelledError)] == [1, 4]
    for i in (0, 2, 3, 5):
        assert answers[i].response_ids.tolist() == expected[i].response_ids.tolist()
    again = generate(engine, *(request(p, seed=i, tokens=20, episode=str(i)) for i, p in enumerate(prompts)))
    assert [a.response_ids.tolist() for a in again] == [e.response_ids.tolist() for e in expected]


def test_cancelled_requests_cost_no_further_tokens():
    engine = TransformersEngine(random_policy(eos_token_id=None))

    async def given_up():
        tasks = [asyncio.create_task(engine.generate(request([5, i], tokens=120))) for i in range(4)]
        while engine.sampled_tokens < 40:
            await asyncio.sleep(0)
        for task in tasks[1:]:
            task.cancel()
        await tasks[0]
    asyncio.run(given_up())
    assert engine.sampled_tokens <= 40 + 3 * 4 + 120


@pytest.mark.parametrize("place", ["_advance", "_next_row"])
def test_a_failure_reaches_every_request_with_its_cause_and_the_next_one_starts_afresh(monkeypatch, place):
    rng, policy = np.random.default_rng(13), random_policy()
    engine = TransformersEngine(policy, slots=2)
    prompts = [random_ids(rng, n) for n in (9, 14, 30)]
    original, calls = getattr(engine, place), []

    def breaks(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("no memory")
        return original(*arguments)

    async def all_of_them():
        return await asyncio.wait_for(asyncio.gather(
            *(engine.generate(request(p, seed=i, episode=str(i))) for i, p in enumerate(prompts)),
            return_exceptions=True), 20)

    monkeypatch.setattr(engine, place, breaks)
    failures = asyncio.run(all_of_them())
    assert all(isinstance(f, RuntimeError) and isinstance(f.__cause__, MemoryError) for f in failures)
    assert "the engine failed: MemoryError: no memory" in str(failures[0])
    play(engine, policy, prompts, 2, rng)


def test_weights_that_give_nan_are_an_error_and_no_response():
    rng, policy = np.random.default_rng(15), random_policy()
    engine, prompts = TransformersEngine(policy, slots=4), [random_ids(rng, n) for n in (9, 30, 14)]
    whole = {name: weight.clone() for name, weight in policy.model.state_dict().items()}
    engine.load({name: torch.full_like(weight, torch.nan) for name, weight in whole.items()}, version=1)
    with pytest.raises(RuntimeError, match="logits are NaN"):
        generate(engine, *map(request, prompts))
    engine.load(whole, version=2)  # and nothing of it is left in the rows
    play(engine, policy, prompts[::2], 2, rng)
    assert not np.isnan(np.concatenate(engine.score(prompts))).any()


def test_an_engine_serves_one_event_loop_after_another_even_after_one_was_left_early():
    rng, policy = np.random.default_rng(14), random_policy(eos_token_id=None)
    engine, prompt = TransformersEngine(policy), random_ids(rng, 9)

    async def left_early():
        asyncio.create_task(engine.generate(request(prompt, tokens=100)))  # noqa: RUF006 (left on purpose)
        await asyncio.sleep(0.01)

    asyncio.run(left_early())
    gc.collect()
    completion, = generate(engine, request(prompt))
    np.testing.assert_allclose(completion.logprobs, logprobs_alone(policy, prompt, completion.response_ids), atol=1e-4)


def test_models_that_the_engine_cannot_cache_are_refused():
    policy = random_policy()
    policy.model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ModelError, match="linear_attention"):
        TransformersEngine(policy)
    policy = random_policy()
    policy.model.config._attn_implementation = "flex_attention"
    with pytest.raises(ModelError, match="sdpa"):
        TransformersEngine(policy)
