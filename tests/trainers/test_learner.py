"""The learner: its policy is the one that sampled, and gradients do not depend on how a batch is cut or spread."""

import copy
import math

import numpy as np
import pytest
import torch

import envs
from agents.agent import ModelAgent
from agents.models import Policy
from agents.packing import pack_rows
from agents.rollout import Rollout
from agents.tiny import make_tiny_policy
from agents.transformers_engine import TransformersEngine
from tests.agents.policies import random_policy
from tests.trainers.trajectories import conversation, group, random_conversation
from trainers.algorithms import DAPO, GRPO, RLOO
from trainers.algorithms.sft import SFT
from trainers.batch import pack
from trainers.credit import Credit
from trainers.learner import Learner, OptimizerSettings
from trainers.loss import Counts
from trainers.supervised import gold_texts


def double(family: str = "llama", **options) -> Policy:
    policy = random_policy(family, **{"initializer_range": 0.2, **options})
    return Policy(policy.model.double(), policy.tokenizer)


def random_batch(seed: int = 0, groups: int = 3, excluded: bool = True):
    rng = np.random.default_rng(seed)
    made = [group(*(random_conversation(rng, int(rng.integers(1, 4)), float(rng.integers(2)) + i / 10)
                    for i in range(3))) for _ in range(groups)]
    credits = GRPO().advantages(made)
    if excluded:
        credits[0][1] = Credit.uniform(made[0].trajectories[1], 0.0, excluded=True)
    return pack(made, credits)


def gradient(learner: Learner) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in learner.parameters]).double()


def accumulated(policy, algorithm, batch, temperature=1.0, **settings):
    learner = Learner(policy, algorithm, OptimizerSettings(**settings), temperature=temperature)
    learner.optimizers[0].zero_grad(set_to_none=True)
    if learner.reference is not None:
        for parameter in learner.reference.parameters():  # some other reference, so that the KL term matters
            parameter.mul_(0.9)
        batch = copy.copy(batch)
        object.__setattr__(batch, "reference_logprobs", learner._reference_logprobs(batch))
    metrics = learner.accumulate_gradients(batch)
    return gradient(learner), metrics


@pytest.fixture(scope="module")
def countdown():
    """The environment and an untrained tiny policy for it."""
    env = envs.make("turngym/Countdown-v0")
    policy = make_tiny_policy(env, gold_texts(env, env.tasks("train")[:32], 0), hidden_size=32, layers=2,
                              max_context=256)
    return env, policy


def played(countdown, temperature, **options):
    env, policy = countdown
    agent = ModelAgent(TransformersEngine(policy, slots=12), policy, temperature=temperature, max_response_tokens=24,
                       **options)
    agent.template.end_ids = frozenset(range(0, 400, 7))  # many short turns
    agent.engine._end_ids = agent.template.end_ids
    return Rollout(lambda: envs.make("turngym/Countdown-v0")).run(agent, env.tasks("train")[:4], 4, seed=1)[0]


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_ratio_to_the_policy_that_sampled_is_one_at_every_token(countdown, temperature, window):
    groups = played(countdown, temperature, window=window)
    assert max(len(t.turns) for g in groups for t in g.trajectories) > 3
    batch = pack(groups, GRPO().advantages(groups))
    learner = Learner(countdown[1], GRPO(), OptimizerSettings(row_tokens=300), temperature=temperature)
    tokens = learner.loss_input(batch, batch.counts)
    assert len(tokens.logprobs) == sum(t.response_length for g in groups for t in g.trajectories)
    ratio = (tokens.logprobs.detach().double() - tokens.behaviour_logprobs.double()).exp()
    assert (ratio - 1).abs().max() < 1e-5
    metrics = learner.accumulate_gradients(batch)
    assert metrics["clip_fraction"] == 0 and metrics["logprob_gap"] <= metrics["logprob_gap_max"] < 1e-5
    wrong = Learner(countdown[1], GRPO(), OptimizerSettings(), temperature=temperature + 0.3)
    assert wrong.accumulate_gradients(batch)["logprob_gap"] > 0.05


def test_autocast_computes_in_bfloat16_over_weights_of_float32_and_engine_and_learner_agree(countdown):
    # bfloat16 has 8 bits: log-probabilities are off by 1e-2 or so, the gradient's direction by less than 1%.
    env, policy = countdown
    cast = Policy(policy.model, policy.tokenizer, autocast=True)
    groups = played((env, cast), 1.0)
    batch = pack(groups, GRPO().advantages(groups))
    if not batch.advantages.any():
        batch.advantages[batch.trained] = np.resize([1.0, -0.5], batch.trained.sum())
    (exact, plain), (found, metrics) = (accumulated(one, GRPO(), batch) for one in (policy, cast))
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in policy.model.parameters())
    assert metrics["logprob_gap"] < 0.02 and 1e-4 < plain["logprob_gap"] < 0.02
    assert torch.nn.functional.cosine_similarity(exact, found, dim=0) > 0.99


def test_the_kl_to_the_reference_is_zero_before_the_first_update_and_not_after(countdown):
    env, policy = countdown
    policy = Policy(copy.deepcopy(policy.model), policy.tokenizer)
    groups = played((env, policy), 1.0)
    learner = Learner(policy, GRPO(kl_coefficient=0.1), OptimizerSettings(learning_rate=1e-2))
    credits = [[Credit.uniform(t, 1.0) for t in g.trajectories] for g in groups]
    rng = np.random.default_rng(0)
    assert abs(learner.update(pack(groups, credits), rng)["kl"]) < 1e-9
    assert learner.update(pack(groups, credits), rng)["kl"] > 1e-4


def test_another_reference_may_be_given():
    policy, other = random_policy(seed=0), random_policy(seed=1)
    learner = Learner(policy, GRPO(kl_coefficient=0.1), OptimizerSettings(), reference=other.model)
    assert learner.update(random_batch(), np.random.default_rng(0))["kl"] > 0.1
    assert not any(p.requires_grad for p in other.model.parameters())


ALGORITHMS = {"grpo": GRPO(kl_coefficient=0.1, entropy_coefficient=0.01), "dapo": DAPO(), "rloo": RLOO(), "sft": SFT(),
              "turns": GRPO(aggregation="turn_mean_token_mean", ratio="turn"),
              "sequences": GRPO(aggregation="sequence_mean_token_mean", ratio="sequence"),
              "dr grpo": GRPO(aggregation="sequence_mean_token_sum_norm", aggregation_length=40)}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_and_metrics_do_not_depend_on_micro_batches_or_rows(name):
    policy, batch = double(), random_batch()
    whole, metrics = accumulated(policy, ALGORITHMS[name], batch, 0.8)
    assert whole.abs().max() > 0
    for tokens, row in ((1, 1), (40, 16), (100, 512), (10_000, 1)):
        cut, others = accumulated(policy, ALGORITHMS[name], batch, 0.8, micro_batch_tokens=tokens, row_tokens=row)
        # Log-probabilities are float32 from the head on.
        torch.testing.assert_close(cut, whole, rtol=1e-5, atol=2e-6 * float(whole.abs().max()))
        assert others == pytest.approx(metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["grpo", "rloo", "sequences"])
def test_gradients_do_not_depend_on_the_order_of_trajectories(name):
    policy, rng = double(), np.random.default_rng(3)
    some = [random_conversation(rng, 2, 0.0) for _ in range(5)]
    credits = [Credit.uniform(t, float(rng.normal())) for t in some]
    one, _ = accumulated(policy, ALGORITHMS[name], pack([group(*some)], [credits]))
    other, _ = accumulated(policy, ALGORITHMS[name], pack([group(*some[::-1])], [credits[::-1]]))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6 * float(one.abs().max()))


def test_a_token_mean_is_over_the_tokens_of_the_whole_batch():
    # A: 2 tokens of loss 1, B: 8 tokens of loss 0 -> 0.2 however cut; a mean per micro-batch would give 0.5.
    policy = random_policy()
    some = [conversation([9], [10, 11]), conversation([9], list(range(20, 28)))]
    batch = pack([group(*some)], [[Credit.uniform(some[0], -1.0), Credit.uniform(some[1], 0.0)]])
    scores = Learner(policy, GRPO(), OptimizerSettings()).loss_input(batch, batch.counts).logprobs
    batch.behaviour_logprobs[batch.trained] = scores.detach().numpy()
    results = [accumulated(policy, GRPO(), batch, micro_batch_tokens=tokens) for tokens in (1, 1000)]
    assert [metrics["loss"] for _, metrics in results] == pytest.approx([0.2, 0.2], rel=1e-5)
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-6)


def test_masked_truncated_trajectories_are_in_no_denominator():
    # 4 tokens of loss 1 kept, 6 of a truncated trajectory masked: 1.0, not 0.4.
    policy = random_policy()
    kept, cut = conversation([9], [10, 11, 12, 13]), conversation([9], list(range(20, 26)))
    credits = [Credit.uniform(kept, -1.0), Credit.uniform(cut, -1.0, excluded=True)]
    batch = pack([group(kept, cut)], [credits])
    scores = Learner(policy, GRPO(), OptimizerSettings()).loss_input(batch, batch.counts).logprobs
    batch.behaviour_logprobs[batch.trained] = scores.detach().numpy()
    assert accumulated(policy, GRPO(), batch)[1]["loss"] == pytest.approx(1.0, rel=1e-5)
    alone = pack([group(kept)], [credits[:1]])
    alone.behaviour_logprobs[:] = batch.behaviour_logprobs[:5]
    torch.testing.assert_close(accumulated(policy, GRPO(), batch)[0], accumulated(policy, GRPO(), alone)[0])


def test_metrics_of_a_row_with_observations_are_those_of_its_own_tokens():
    policy = random_policy()
    some = conversation([9, 8], [10, 11], [30, 31, 32], [12], reward=1.0)
    batch = pack([group(some)], [[Credit.uniform(some, 1.0)]])
    learner = Learner(policy, GRPO(), OptimizerSettings())
    metrics = learner.accumulate_gradients(batch)
    ids = torch.tensor([[9, 8, 10, 11, 30, 31, 32, 12]])
    logits = policy.model(input_ids=ids).logits[0].detach()
    before = [1, 2, 6]  # the tokens before 10, 11 and 12
    distribution = torch.distributions.Categorical(logits=logits[before])
    assert metrics["entropy"] == pytest.approx(float(distribution.entropy().mean()), rel=1e-4)
    gaps = (distribution.log_prob(torch.tensor([10, 11, 12])) - torch.tensor([-.1, -.11, -.12])).abs()
    assert metrics["logprob_gap"] == pytest.approx(float(gaps.mean()), rel=1e-4)
    assert metrics["logprob_gap_max"] == pytest.approx(float(gaps.max()), rel=1e-4)


def test_nothing_flows_to_the_prediction_of_a_token_that_the_agent_did_not_write():
    # The last hidden state's gradient is zero except right before trained tokens with an advantage.
    policy, batch, seen = double(), random_batch(), []
    learner = Learner(policy, GRPO(), OptimizerSettings(row_tokens=10_000))
    hook = policy.model.base_model.norm.register_forward_hook(
        lambda module, inputs, output: (seen.append(output), output.retain_grad())[1])
    tokens = learner.loss_input(batch, batch.counts)
    hook.remove()
    (tokens.logprobs * tokens.advantages).sum().backward()
    moved = torch.nonzero(seen[0].grad.flatten(0, 1).abs().sum(-1))[:, 0]
    written = np.flatnonzero(batch.trained & (batch.advantages != 0))
    # Responses that begin alike share places.
    assert moved.tolist() == sorted(set(pack_rows(batch.sequences(), 10_000, share=True).places[written - 1]))


def test_the_entropy_bonus_raises_entropy_and_is_reported_by_every_algorithm():
    batch = random_batch()
    after = {}
    for coefficient in (0.0, 1.0):
        learner = Learner(random_policy(initializer_range=0.2), GRPO(entropy_coefficient=coefficient),
                          OptimizerSettings(learning_rate=1e-3))
        for _ in range(5):
            after[coefficient] = learner.update(batch, np.random.default_rng(0))["entropy"]
    assert after[1.0] > after[0.0] + 0.01


@pytest.mark.parametrize("algorithm", [GRPO(kl_coefficient=0.1, entropy_coefficient=0.1), SFT()])
def test_a_batch_without_a_trained_token_changes_nothing(algorithm):
    policy, some = random_policy(), conversation([9], [10, 11])
    learner = Learner(policy, algorithm, OptimizerSettings(learning_rate=0.1, weight_decay=0.1, epochs=2))
    before = copy.deepcopy(policy.model.state_dict())
    schedule = learner.schedulers[0].state_dict()
    batch = pack([group(some)], [[Credit.uniform(some, 1.0, excluded=True)]])
    assert learner.update(batch, np.random.default_rng(0)) == {}
    assert all(torch.equal(weight, before[name]) for name, weight in policy.model.state_dict().items())
    assert learner.schedulers[0].state_dict() == schedule and not learner.optimizers[0].state


def test_a_trajectory_s_probability_rises_with_a_positive_advantage_and_falls_with_a_negative_one():
    good, bad = conversation([9], [10, 11, 12]), conversation([9], [20, 21, 22])
    batch = pack([group(good, bad)], [[Credit.uniform(good, 1.0), Credit.uniform(bad, -1.0)]])
    policy = random_policy(initializer_range=0.2)
    learner = Learner(policy, GRPO(), OptimizerSettings(learning_rate=1e-3))
    before = learner.loss_input(batch, batch.counts).logprobs.detach()
    batch.behaviour_logprobs[batch.trained] = before.numpy()
    learner.update(batch, np.random.default_rng(0))
    change = learner.loss_input(batch, batch.counts).logprobs.detach() - before
    assert change[:3].sum() > 0 > change[3:].sum()


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change():
    policy, batch = random_policy(), random_batch()
    learner = Learner(policy, GRPO(), OptimizerSettings(learning_rate=0.1))
    before = copy.deepcopy(policy.model.state_dict())
    batch.behaviour_logprobs[np.flatnonzero(batch.trained)[0]] = np.nan
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        learner.update(batch, np.random.default_rng(0))
    assert all(torch.equal(weight, before[name]) for name, weight in policy.model.state_dict().items())


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_greedy_policy_cannot_be_trained(temperature):
    with pytest.raises(ValueError, match="a greedy policy has no gradient"):
        Learner(random_policy(), GRPO(), OptimizerSettings(), temperature=temperature)


@pytest.mark.parametrize(("schedule", "expected"), [
    ("constant", [0.5, 1, 1, 1, 1, 1]), ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
    ("cosine", [0.5, 1, 1, *((1 + math.cos(math.pi * i / 4)) / 2 for i in (1, 2, 3))])])
def test_the_learning_rate_follows_its_schedule(schedule, expected):
    # 2 steps of warm-up, then 4 to the end of 6.
    learner = Learner(random_policy(), GRPO(), OptimizerSettings(learning_rate=1e-3, schedule=schedule, warmup_steps=2),
                      total_steps=6)
    rates = [learner.update(random_batch(), np.random.default_rng(0))["learning_rate"] for _ in range(6)]
    assert rates == pytest.approx([1e-3 * factor for factor in expected])


def test_epochs_and_minibatches_take_as_many_steps():
    learner = Learner(random_policy(), GRPO(), OptimizerSettings(epochs=2, minibatches=3))
    learner.update(random_batch(), np.random.default_rng(0))
    assert learner.schedulers[0].last_epoch == 6


def test_training_goes_on_from_a_saved_state_as_if_never_stopped():
    batch, settings = random_batch(), OptimizerSettings(learning_rate=1e-3, schedule="linear", warmup_steps=2,
                                                        weight_decay=0.1)
    whole = Learner(random_policy(), GRPO(), settings, total_steps=6)
    reports = [whole.update(batch, np.random.default_rng(i)) for i in range(6)]
    first = Learner(random_policy(), GRPO(), settings, total_steps=6)
    for i in range(3):
        first.update(batch, np.random.default_rng(i))
    saved, tensors, weights = (copy.deepcopy(part) for part in (
        first.state(), first.tensors(), first.policy.model.state_dict()))
    policy = random_policy(seed=5)
    policy.model.load_state_dict(weights)
    second = Learner(policy, GRPO(), settings, total_steps=6)
    second.load_state(saved)
    second.load_state(saved)  # twice adds no steps
    for name, tensor in second.tensors().items():
        tensor.copy_(tensors[name])
    assert [second.update(batch, np.random.default_rng(i)) for i in (3, 4, 5)] == reports[3:]
    for one, other in zip(whole.parameters, second.parameters):
        assert torch.equal(one, other)


def test_frozen_parameters_stay_as_they_are():
    policy = random_policy()
    policy.model.get_input_embeddings().requires_grad_(False)
    before = policy.model.get_input_embeddings().weight.clone()
    learner = Learner(policy, GRPO(), OptimizerSettings(learning_rate=0.1))
    learner.update(random_batch(), np.random.default_rng(0))
    assert torch.equal(policy.model.get_input_embeddings().weight, before)


def test_counts_are_those_of_the_whole_batch(monkeypatch):
    seen: list[Counts] = []
    learner, batch = Learner(random_policy(), GRPO(), OptimizerSettings(micro_batch_tokens=1)), random_batch()
    original = learner.loss_input
    monkeypatch.setattr(learner, "loss_input", lambda part, counts: (seen.append(counts), original(part, counts))[1])
    learner.accumulate_gradients(batch)
    assert len(seen) == 8 and set(seen) == {batch.counts}


def test_muon_trains_the_matrices_of_the_layers_and_adamw_everything_else_each_once():
    policy = random_policy()
    learner = Learner(policy, SFT(), OptimizerSettings(name="muon", learning_rate=1e-2))
    held = [id(p) for one in learner.optimizers for group in one.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in policy.model.parameters())
    muon, adamw = ({id(p) for group in one.param_groups for p in group["params"]} for one in learner.optimizers)
    names = {id(p): name for name, p in policy.model.named_parameters()}
    assert {names[i].rsplit(".", 2)[-2] for i in muon} == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj",
                                                          "up_proj", "down_proj"}
    assert id(policy.model.get_input_embeddings().weight) in adamw
