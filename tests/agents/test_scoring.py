"""Scoring: sequences packed into rows have the log-probabilities that each has alone, in chunks or at once."""

import numpy as np
import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from agents import scoring
from agents.packing import pack_rows
from agents.scoring import (
    can_share,
    check_model,
    final_hidden,
    score_sequences,
    token_divergence,
    token_logprobs,
)
from tests.agents.policies import FAMILIES, logprobs_alone, random_ids, random_policy


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_scores_packed_sequences_as_each_alone(family):
    # Sequences longer than the windows of 8, several to a row, rows unevenly full.
    rng, policy = np.random.default_rng(0), random_policy(family)
    sequences = [random_ids(rng, length) for length in (30, 7, 50, 2, 12, 1, 40)]
    scores = score_sequences(policy.model, sequences, 0.7, width=64)
    for sequence, score in zip(sequences, scores):
        assert len(score) == len(sequence) and score[0] == 0
        np.testing.assert_allclose(score[1:], logprobs_alone(policy, sequence[:1], sequence[1:], 0.7), atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_scores_sequences_that_share_tokens_as_each_alone(family):
    # A prompt of 20 tokens, longer than the windows of 8; two of the responses begin alike, one is the other's first
    # half; and one sequence is another's.
    rng, policy = np.random.default_rng(1), random_policy(family)
    prompt, response = random_ids(rng, 20), random_ids(rng, 12)
    sequences = [np.concatenate([prompt, *more]) for more in (
        [random_ids(rng, 10)], [response], [response[:6], random_ids(rng, 9)], [response[:6]])]
    sequences.append(random_ids(rng, 15))
    assert can_share(policy.model)
    for width in (64, 40):
        for sequence, score in zip(sequences, score_sequences(policy.model, sequences, 0.7, width=width)):
            expected = logprobs_alone(policy, sequence[:1], sequence[1:], 0.7)
            np.testing.assert_allclose(score[1:], expected, atol=1e-4)


def test_a_model_that_takes_no_masks_shares_nothing():
    policy = random_policy()
    policy.model.config._attn_implementation = "flash_attention_2"
    assert not can_share(policy.model)
    policy = random_policy("gemma3_text")
    policy.model.config.layer_types = ["linear_attention", "full_attention"]
    assert not can_share(policy.model)


def test_a_short_sequence_beside_a_longer_one_keeps_its_positions():
    # GPT-2 has a table of positions: a shifted one is many nats off.
    policy = random_policy("gpt2")
    short, long = np.array([5, 6, 7, 8]), np.arange(10, 17)
    for width in (1, 16):
        rows = pack_rows([long, short], width, share=True)
        assert rows.positions.flatten()[rows.places].tolist() == [*range(7), *range(4)]
        scores = score_sequences(policy.model, [long, short], width=width)
        np.testing.assert_allclose(scores[1][1:], logprobs_alone(policy, short[:1], short[1:]), atol=1e-4)


def test_rows_longer_than_the_table_of_positions_are_read():
    # Rows of 512 tokens hold sequences of at most 128, the model's positions.
    rng, policy = np.random.default_rng(1), random_policy("gpt2")
    sequences = [random_ids(rng, length) for length in (128, 128, 128, 100, 28, 128, 60)]
    for sequence, score in zip(sequences, score_sequences(policy.model, sequences, width=512)):
        np.testing.assert_allclose(score[1:], logprobs_alone(policy, sequence[:1], sequence[1:]), atol=1e-4)


@pytest.mark.parametrize(("max_tokens", "width"), [(1, 1), (20, 8), (60, 64), (10_000, 512)])
def test_scores_do_not_depend_on_how_the_sequences_are_laid_out(max_tokens, width):
    rng, policy = np.random.default_rng(2), random_policy()
    sequences = [random_ids(rng, length) for length in (9, 4, 17, 1, 30)]
    whole = score_sequences(policy.model, sequences)
    parts = score_sequences(policy.model, sequences, max_tokens=max_tokens, width=width)
    np.testing.assert_allclose(np.concatenate(whole), np.concatenate(parts), atol=1e-5)


def test_no_sequences_have_no_scores():
    assert score_sequences(random_policy().model, []) == []


def scored(policy, ids, temperature=1.0, **options):
    hidden = final_hidden(policy.model, pack_rows([ids], 1, share=False))
    return token_logprobs(policy.model, hidden[:-1], torch.from_numpy(ids[1:]), temperature, **options)


def gradients(policy, value):
    policy.model.zero_grad()
    value.backward()
    return torch.cat([p.grad.flatten() for p in policy.model.parameters()])


def test_chunks_change_neither_values_nor_gradients(monkeypatch):
    rng, policy = np.random.default_rng(3), random_policy()
    ids, results = random_ids(rng, 40), []
    for chunk in (scoring.CHUNK, 279 * 7, 1):
        monkeypatch.setattr(scoring, "CHUNK", chunk)
        monkeypatch.setattr(scoring, "CHUNK_TOKENS", 1)
        logprobs, entropy = scored(policy, ids, 0.7, with_entropy=True, entropy_gradient=True)
        results.append((logprobs.detach(), entropy.detach(), gradients(policy, (logprobs + 0.3 * entropy).sum())))
    for other in results[1:]:
        for a, b in zip(results[0], other):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(a.abs().max()))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probability_and_entropy_are_those_of_the_tempered_distribution(temperature):
    rng, policy = np.random.default_rng(4), random_policy()
    ids = random_ids(rng, 20)
    logprobs, entropy = scored(policy, ids, temperature, with_entropy=True)
    logits = policy.model(input_ids=torch.from_numpy(ids)[None]).logits[0, :-1] / temperature
    distribution = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(logprobs, distribution.log_prob(torch.from_numpy(ids[1:])), rtol=0, atol=1e-4)
    torch.testing.assert_close(entropy, distribution.entropy(), rtol=0, atol=1e-4)


def test_temperature_divides_logits_and_not_log_probabilities():
    # Logits [2, 0], token 0, T = 0.5: -0.01815 = -log(1 + e^-4), not -0.12693 (raw) or -0.25386 (log-prob / T).
    policy = random_policy()
    policy.model.get_output_embeddings().forward = lambda hidden: torch.tensor([[2.0, 0.0]])
    logprobs, _ = token_logprobs(policy.model, torch.zeros(1, 32), torch.tensor([0]), 0.5)
    assert logprobs.tolist() == pytest.approx([-0.01815], abs=1e-5)


def test_a_divergence_is_over_the_whole_vocabulary_whatever_the_chunks_and_moves_the_other_model_alone(monkeypatch):
    rng, ours, theirs = np.random.default_rng(6), random_policy(), random_policy(seed=1)
    hidden, other = (torch.tensor(rng.normal(size=(30, 32)), dtype=torch.float32) for _ in range(2))
    p, q = (torch.distributions.Categorical(logits=policy.model.get_output_embeddings()(states) / 0.7)
            for policy, states in ((ours, hidden), (theirs, other)))
    expected = torch.distributions.kl_divergence(p, q)
    heads = [policy.model.get_output_embeddings().weight for policy in (ours, theirs)]
    (exact,) = torch.autograd.grad(expected.sum(), heads[1:])
    for chunk in (scoring.CHUNK, 279 * 7):
        monkeypatch.setattr(scoring, "CHUNK", chunk)
        monkeypatch.setattr(scoring, "CHUNK_TOKENS", 1)
        found = token_divergence(ours.model, hidden, theirs.model, other, 0.7)
        torch.testing.assert_close(found, expected)
        of_ours, of_theirs = torch.autograd.grad(found.sum(), heads, allow_unused=True)
        torch.testing.assert_close(of_theirs, exact, rtol=1e-4, atol=1e-4)
        assert of_ours is None
    assert not token_divergence(ours.model, hidden, ours.model, hidden, 0.7).any()


def test_entropy_has_a_gradient_only_where_asked(monkeypatch):
    ids, policy = random_ids(np.random.default_rng(5), 20), random_policy()
    for chunk in (scoring.CHUNK, 500):
        monkeypatch.setattr(scoring, "CHUNK", chunk)
        monkeypatch.setattr(scoring, "CHUNK_TOKENS", 1)
        logprobs, entropy = scored(policy, ids, with_entropy=True)
        assert not entropy.requires_grad and logprobs.requires_grad
        alone = gradients(policy, logprobs.sum())
        torch.testing.assert_close(alone, gradients(policy, scored(policy, ids)[0].sum()), rtol=1e-5, atol=1e-5)
        assert scored(policy, ids)[1] is None
        assert scored(policy, ids, with_entropy=True, entropy_gradient=True)[1].requires_grad


def test_a_model_whose_logits_scoring_does_not_know_is_refused():
    policy = random_policy()
    forward = policy.model.forward

    def scaled(*arguments, **options):
        output = forward(*arguments, **options)
        output.logits = output.logits * 1.5
        return output

    policy.model.forward = scaled
    with pytest.raises(ValueError, match="LlamaForCausalLM gives packed sequences other logits"):
        check_model(policy.model)


def test_a_model_that_mixes_the_sequences_of_a_row_is_refused():
    # OPT counts its positions from the attention mask: a packed sequence would be read in the wrong place.
    model = OPTForCausalLM(OPTConfig(vocab_size=50, hidden_size=32, ffn_dim=32, num_hidden_layers=2, init_std=0.4,
                                     num_attention_heads=2, word_embed_proj_dim=32, max_position_embeddings=64))
    with pytest.raises(ValueError, match="OPTForCausalLM"):
        check_model(model.eval())
