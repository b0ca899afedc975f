"""How the learner reads a batch changes memory and speed, never the result: rows, shared tokens, layers computed again,
trajectories without an advantage."""

import numpy as np
import pytest
import torch

from agents.adapters import add_adapter, merge_adapter
from tests.agents.policies import random_policy
from tests.trainers.test_learner import ALGORITHMS, accumulated, double, random_batch
from tests.trainers.trajectories import conversation, group, random_conversation
from trainers.algorithms import DAPO, GRPO
from trainers.algorithms.sft import SFT
from trainers.batch import pack
from trainers.credit import Credit
from trainers.learner import Learner, OptimizerSettings


def some_idle():
    """Three trajectories, the second without an advantage."""
    rng = np.random.default_rng(5)
    some = [random_conversation(rng, 2, 0.0) for _ in range(3)]
    return pack([group(*some)], [[Credit.uniform(t, value) for t, value in zip(some, (1.0, 0.0, -0.5))]])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_trajectories_without_an_advantage_change_no_result_by_being_read_without_a_gradient(name, monkeypatch):
    policy, batch, read = double(), some_idle(), []
    whole = Learner._learn
    monkeypatch.setattr(Learner, "_learn", lambda self, part, weight, counts, idle: (
        read.append((idle, len(np.unique(part.trajectory_index)))),
        whole(self, part, weight, counts, idle=idle))[1])
    skipped, metrics = accumulated(policy, ALGORITHMS[name], batch, 0.8)
    moved_by_kl = ALGORITHMS[name].needs.reference_logprobs
    assert read == ([(False, 3)] if moved_by_kl else [(False, 2), (True, 1)])
    monkeypatch.setattr(Learner, "_learn", lambda self, part, weight, counts, idle: whole(
        self, part, weight, counts, idle=False))
    expected, others = accumulated(policy, ALGORITHMS[name], batch, 0.8)
    torch.testing.assert_close(skipped, expected, rtol=1e-5, atol=2e-6 * float(expected.abs().max()))
    assert metrics == pytest.approx(others, rel=1e-5, abs=1e-6)


def test_a_loss_that_does_not_go_by_the_advantage_is_trained_on_at_every_trajectory():
    class Likelihood(GRPO):
        def policy_loss(self, tokens):
            return -tokens.logprobs, tokens.logprobs.new_zeros(len(tokens.logprobs), dtype=bool)

    found, _ = accumulated(double(), Likelihood(), some_idle())
    batch = some_idle()
    batch.advantages[batch.trained] = 1.0
    expected, _ = accumulated(double(), SFT(), batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6 * float(expected.abs().max()))


def test_a_batch_without_any_advantage_takes_a_step_of_gradient_zero():
    # Weights decay all the same: 1 - 0.1 * 0.5.
    policy, some = random_policy(), conversation([9], [10, 11])
    before = policy.model.get_input_embeddings().weight.detach().clone()
    learner = Learner(policy, GRPO(), OptimizerSettings(learning_rate=0.1, weight_decay=0.5))
    metrics = learner.update(pack([group(some)], [[Credit.uniform(some, 0.0)]]), np.random.default_rng(0))
    assert metrics["gradient_norm"] == 0 and metrics["loss"] == 0
    torch.testing.assert_close(policy.model.get_input_embeddings().weight.detach(), before * 0.95)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_layers_computed_again_give_the_same_gradient_and_metrics(family):
    batch, found = random_batch(), []
    for again in (False, True):
        policy = random_policy(family, initializer_range=0.2)  # torch has no experts in float64
        found.append(accumulated(policy, DAPO(), batch, gradient_checkpointing=again))
        assert not any(module.training or getattr(module, "gradient_checkpointing", False)
                       for module in policy.model.modules())
    torch.testing.assert_close(*(gradient for gradient, _ in found), rtol=1e-4, atol=1e-6)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)


@pytest.mark.parametrize("name", ["grpo", "turns", "sft"])
def test_tokens_that_sequences_share_change_no_result(name, monkeypatch):
    # One prompt; the last two responses begin as others do.
    rng = np.random.default_rng(1)
    prompt, responses = [9, 8, 7, 6, 5, 4], [rng.integers(10, 200, 3).tolist() for _ in range(6)]
    some = [conversation(prompt, one) for one in (*responses, [*responses[0], 12], [*responses[1][:2], 13])]
    credits = [Credit.uniform(t, float(rng.normal())) for t in some]
    batch, found = pack([group(*some)], [credits]), []
    for share in (True, False):
        monkeypatch.setattr("trainers.learner.can_share", lambda model, share=share: share)
        monkeypatch.setattr("agents.scoring.can_share", lambda model, share=share: share)
        for tokens in (40, 10_000):
            found.append(accumulated(double(), ALGORITHMS[name], batch, 0.8, micro_batch_tokens=tokens))
    for other, metrics in found[1:]:
        torch.testing.assert_close(other, found[0][0], rtol=1e-5, atol=2e-6 * float(other.abs().max()))
        assert metrics == pytest.approx(found[0][1], rel=1e-5, abs=1e-6)


def padded_gradient(policy, batch, temperature):
    """GRPO's gradient and the log-probabilities, row by row with padding, from the model's own full logits."""
    sequences = batch.sequences()
    width = max(len(s) for s in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in zip(ids, sequences):
        row[:len(sequence)] = torch.from_numpy(sequence)
    mask = torch.arange(width) < torch.tensor(batch.sequence_lengths)[:, None]
    logits = policy.model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits.float() / temperature
    every = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    every = torch.cat([torch.zeros(len(ids), 1), every], 1)
    flat = torch.cat([row[:length] for row, length in zip(every, batch.sequence_lengths)])
    trained = torch.from_numpy(batch.trained)
    ratio = (flat - torch.from_numpy(batch.behaviour_logprobs))[trained].exp()
    advantages = torch.from_numpy(batch.advantages)[trained]
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    policy.model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.requires_grad]).double(), flat[trained]


@pytest.mark.parametrize("lora", [False, True])
def test_packed_equals_padded_row_by_row(lora):
    policy, batch = double(), random_batch()
    if lora:
        add_adapter(policy.model, rank=4, alpha=8.0)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in policy.model.named_parameters():
            if ".lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4
    for row in (16, 512):
        found, _ = accumulated(policy, GRPO(), batch, 0.8, row_tokens=row)
        learner = Learner(policy, GRPO(), OptimizerSettings(row_tokens=row), temperature=0.8)
        logprobs = learner.loss_input(batch, batch.counts).logprobs
        expected, padded = padded_gradient(policy, batch, 0.8)
        torch.testing.assert_close(logprobs, padded, rtol=0, atol=1e-5)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6 * float(expected.abs().max()))


def test_the_reference_of_an_adapted_policy_is_the_policy_without_its_adapter():
    # A trained adapter, then merged: what goes on from there begins at KL 0, and without a second model.
    policy, batch = random_policy(initializer_range=0.2), random_batch()
    add_adapter(policy.model, rank=4, alpha=8.0)
    settings = OptimizerSettings(learning_rate=1e-2)
    learner = Learner(policy, GRPO(kl_coefficient=0.1), settings)
    assert learner.reference is policy.model
    base = {name: p.clone() for name, p in policy.model.named_parameters() if ".lora_" not in name}
    kls = [learner.update(batch, np.random.default_rng(0))["kl"] for _ in range(3)]
    assert abs(kls[0]) < 1e-9 < 1e-4 < kls[1] < kls[2]
    assert all(torch.equal(p, base[name]) for name, p in policy.model.named_parameters() if name in base)
    merge_adapter(policy.model)
    add_adapter(policy.model, rank=2, alpha=8.0)
    assert abs(Learner(policy, GRPO(kl_coefficient=0.1), settings).update(batch, np.random.default_rng(0))["kl"]) < 1e-9


def test_layers_computed_again_keep_less_for_the_backward_pass():
    kept = []
    for again in (False, True):
        learner = Learner(random_policy(num_hidden_layers=4), GRPO(), OptimizerSettings(gradient_checkpointing=again))
        seen: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
                lambda tensor, seen=seen: (seen.__setitem__(tensor.data_ptr(), tensor.nbytes), tensor)[1], lambda t: t):
            learner.loss_input(random_batch(), random_batch().counts)
        kept.append(sum(seen.values()))
    assert kept[1] < 0.5 * kept[0]
