"""FACTOR, and SERL beside it: actions share out the return, their tokens the action's credit; nothing is lost.

F2, F5 to F7 and F10 are in tests/trainers/test_action_credit.py.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agents.trajectory import Group, Trajectory, Turn
from tests.agents.policies import random_policy
from tests.trainers.algorithms.groups import quickly, same
from tests.trainers.runs import rows, start
from tests.trainers.trajectories import conversation
from trainers.action_credit import temporal_difference_credit
from trainers.algorithms import FACTOR, GRPO, RLOO, SERL, Scores
from trainers.batch import pack
from trainers.learner import Learner, OptimizerSettings
from trainers.loss import LossInput, clipped_surrogate
from trainers.settings import SettingsError, validate

pytestmark = pytest.mark.filterwarnings("ignore:a group has one scorable trajectory")
LATE = 20
"""A step after the warm-up, at which hindsight still counts."""


def played(reward, *spans, tokens=4, **fields):
    """A trajectory of turns with 4 tokens of which `span` are the action."""
    turns = [Turn(response_ids=range(tokens), prompt_ids=[9], action_span=span, logprobs=np.full(tokens, -1.0))
             for span in spans]
    return Trajectory(turns=turns, reward=reward, **fields)


@st.composite
def cases(draw):
    """A group with random values and teacher log-probabilities."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    trajectories = [played(draw(st.sampled_from([0.0, 1.0, None])),
                           *[tuple(sorted(rng.integers(0, 5, 2).tolist())) for _ in range(draw(st.integers(1, 6)))])
                    for _ in range(draw(st.integers(2, 5)))]

    def numbers(scale):
        return [[[rng.normal(scale=scale, size=4).astype(np.float32) for _ in t.turns] for t in trajectories]]
    return Group(trajectories=trajectories), Scores(values=numbers(2.0), teacher_logprobs=numbers(3.0))


def actions(group, credits):
    """(trajectory, turn, its action's advantages) of every action with tokens."""
    return [(trajectory, turn, values[slice(*turn.action_span)].astype(float))
            for trajectory, credit in zip(group.trajectories, credits) if not credit.excluded
            for turn, values in zip(trajectory.turns, credit.advantages) if turn.action_span[0] < turn.action_span[1]]


# Credit of actions

@pytest.mark.parametrize("baseline", ["leave_one_out", "standardised", "none"])
@given(case=cases(), step=st.sampled_from([0, 9, 10, LATE, 100]))
@quickly
def test_f1_the_mean_credits_of_a_trajectory_s_actions_sum_to_its_advantage(baseline, case, step):
    group, scores = case
    (credits,) = FACTOR(baseline=baseline).advantages([group], scores, step)
    rewards = np.array([np.nan if t.reward is None else t.reward for t in group.trajectories])
    known = rewards[~np.isnan(rewards)]
    for i, (trajectory, credit) in enumerate(zip(group.trajectories, credits)):
        assert credit.excluded == (trajectory.reward is None)
        if credit.excluded or any(a == b for a, b in (turn.action_span for turn in trajectory.turns)):
            continue
        total = sum(v[slice(*turn.action_span)].astype(float).mean()
                    for turn, v in zip(trajectory.turns, credit.advantages))
        others = (known.sum() - rewards[i]) / (len(known) - 1) if len(known) > 1 else rewards[i]
        spread = known.std()
        whole = {"none": rewards[i], "leave_one_out": rewards[i] - others,
                 "standardised": (rewards[i] - known.mean()) / (spread + 1e-8) if spread >= 1e-6 else 0.0}[baseline]
        assert total == pytest.approx(whole, abs=1e-4)


@given(case=cases(), step=st.integers(0, 9))
@quickly
def test_f9_in_the_warm_up_every_action_of_a_trajectory_has_the_same_credit(case, step):
    group, scores = case
    (credits,) = FACTOR().advantages([group], scores, step)
    for trajectory in group.trajectories:
        assert len({v for t, _, values in actions(group, credits) if t is trajectory for v in values.tolist()}) <= 1


def test_actions_have_their_own_credit_from_step_11_on():
    # R = 1, V = .25 before the second action: .25 and .75; before that (the steps are counted from 0) ½ each.
    one = Group(trajectories=[played(1.0, (0, 4), (0, 4))])
    scores = Scores(values=[[[np.full(4, 9.0), np.full(4, 0.25)]]])
    for step, right in ((9, (0.5, 0.5)), (10, (0.25, 0.75))):
        ((credit,),) = FACTOR(baseline="none").advantages([one], scores, step)
        assert [turn.mean() for turn in credit.advantages] == pytest.approx(right)


def test_f12_webshop_groups_of_equal_scores_have_credits_that_sum_to_zero_but_are_not_all_zero():
    group = Group(trajectories=[played(0.5, (0, 2), (0, 2)) for _ in range(3)])
    scores = Scores(values=[[[np.full(4, 0.3), np.full(4, 0.7)]] * 3])
    (credits,) = FACTOR(baseline="standardised").advantages([group], scores, LATE)
    for credit in credits:  # b = R = 0: .7 − 0 and 0 − .7
        first, second = (values[:2].mean() for values in credit.advantages)
        assert (first, second) == pytest.approx((0.7, -0.7))
        assert credit.advantages[0][3] == 0.0


@given(case=cases())
@quickly
def test_f13_scienceworld_failures_sum_to_zero(case):
    group, scores = case
    (credits,) = FACTOR(baseline="none").advantages([group], scores, LATE)
    for trajectory, credit in zip(group.trajectories, credits):
        if trajectory.reward == 0.0 and all(a < b for a, b in (turn.action_span for turn in trajectory.turns)):
            assert sum(v[slice(*turn.action_span)].astype(float).mean() for turn, v in zip(
                trajectory.turns, credit.advantages)) == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("outcome, expected", [("reward", 0.25), ("success", 1.0), ("score", 0.5)])
def test_the_outcome_is_the_return_or_what_the_environment_reports(outcome, expected):
    group = Group(trajectories=[played(0.25, (0, 4), success=True, score=0.5)])
    (credits,) = FACTOR(outcome=outcome, baseline="none").advantages([group], step=LATE)
    assert credits[0].advantages[0].tolist() == [expected] * 4
    assert FACTOR(outcome=outcome).reward(played(None, (0, 1), success=True)) is None


def test_a_teacher_is_asked_only_for_what_its_answer_is_used_for():
    for allocation, coefficient in ((0.7, 1.0), (0.0, 1.0), (0.7, 0.0), (0.0, 0.0)):
        factor = FACTOR(allocation=allocation, teacher_kl_coefficient=coefficient)
        asked = allocation > 0 or coefficient > 0
        assert (factor.needs.teacher_logprobs, factor.needs.teacher_divergence) == (asked, coefficient > 0)
        assert (factor.insertion(played(1.0, (0, 1)), 0, LATE) is not None) == asked
        # In the warm-up nothing is allocated yet.
        assert (factor.insertion(played(1.0, (0, 1)), 0, 9) is not None) == (coefficient > 0)
    assert (FACTOR().needs.continuations, FACTOR().needs.continuation_turns) == (4, 15)


# Allocation to tokens

@given(case=cases())
@quickly
def test_f3_tokens_have_the_sign_of_their_action_s_credit(case):
    group, scores = case
    (credits,) = FACTOR(baseline="none").advantages([group], scores, LATE)
    for trajectory, values, credit in zip(group.trajectories, scores.values[0], credits):
        if credit.excluded:
            continue
        right = temporal_difference_credit(np.array([turn[0] for turn in values]), trajectory.reward, 0.0)
        for turn, its_credit, advantages in zip(trajectory.turns, right, credit.advantages):
            assert (np.sign(advantages[slice(*turn.action_span)]) == np.sign(its_credit)).all()


@given(case=cases(), step=st.sampled_from([0, LATE, 80]))
@quickly
def test_f11_other_tokens_have_the_advantage_of_the_trajectory_and_actions_their_own(case, step):
    group, scores = case
    (credits,) = FACTOR(baseline="none").advantages([group], scores, step)
    for trajectory, credit in zip(group.trajectories, credits):
        for turn, values in zip(trajectory.turns, credit.advantages):
            if not credit.excluded:
                outside = np.delete(values, range(*turn.action_span))
                assert (outside == np.float32(trajectory.reward)).all()


# 0.7 (1 − 11/50) = .546 and 0.7 (1 − 49/50) = .014, at the steps 11 and 49 counted from 1
@pytest.mark.parametrize("step, share", [(0, 0), (9, 0), (10, 0.546), (48, 0.014), (49, 0), (500, 0)])
def test_the_share_of_hindsight_decays(step, share):
    assert FACTOR()._share(step) == pytest.approx(share)
    assert (FACTOR().insertion(played(1.0, (0, 1)), 0, step) is None) == (step >= 49)


# Anchors and value targets

def test_the_value_target_is_the_mean_of_what_branched_off_or_the_episode_s_own_outcome():
    group = Group(trajectories=[played(1.0, (0, 1), (0, 1), (0, 1)), played(0.0, (0, 1), (0, 1), (0, 1))])
    branches = [played(1.0), played(0.0), played(0.0), played(None)]  # the unscorable one does not count
    scores = Scores(continuations=[[{1: branches}, {2: []}]])
    (first, second), = FACTOR().advantages([group], scores, 0)
    assert first.extra["value_targets"][1].tolist() == pytest.approx([1 / 3, 0, 0, 0])
    assert first.extra["value_weights"][1].tolist() == [1, 0, 0, 0]
    assert second.extra["value_targets"][2].tolist() == [0, 0, 0, 0]
    assert [turn.sum() for turn in second.extra["value_weights"]] == [0, 0, 1]
    # Standardised: mean .5, std .5, so 1/3 is (1/3 − 1/2) / (1/2).
    (first, second), = FACTOR(baseline="standardised").advantages([group], scores, 0)
    assert first.extra["value_targets"][1][0] == pytest.approx(-1 / 3)
    assert second.extra["value_targets"][2][0] == pytest.approx(-1.0)


def test_continuations_cost_steps_and_tokens_and_are_not_trained_on(tmp_path):
    # 8 episodes of 4 turns; from each 2 anchors, in 0..1 and in 2..3, 4 episodes that play the 4 − anchor turns left.
    options = {"environment": {"options": {"turns": 4}}, "run": {"steps": 2, "log_trajectories": 1000}}
    start(tmp_path / "factor", algorithm={"name": "FACTOR"}, **options)
    start(tmp_path / "plain", algorithm={"name": "RLOO"}, **options)
    for row, plain_row in zip(rows(tmp_path / "factor"), rows(tmp_path / "plain")):
        assert plain_row["environment_steps"] == 8 * plain_row["turns"]
        assert row["environment_steps"] > 8 * row["turns"]
        assert row["sampled_tokens"] > 8 * row["response_tokens"] and row["critic_loss"] >= 0
        if row["turns"] == 4 and row["truncated"] == 0:
            assert 8 * (4 + 4 * (3 + 1)) <= row["environment_steps"] <= 8 * (4 + 4 * (4 + 2))
    assert len(rows(tmp_path / "factor", "trajectories")) == len(rows(tmp_path / "plain", "trajectories")) == 16
    # Step 1 starts from the same policy and seeds: what branches off leaves the episodes as they were.
    assert [row["sequences"] for row in rows(tmp_path / "factor", "trajectories")[:8]] \
        == [row["sequences"] for row in rows(tmp_path / "plain", "trajectories")[:8]]


# The loss

def loss_input(group, credits, noise=0.0, repeat=1):
    """All of a group's tokens, each `repeat` times, with log-probabilities off by some noise."""
    batch = pack([group], [credits])
    at = np.flatnonzero(batch.trained)
    jitter = noise * np.random.default_rng(0).normal(size=len(at))
    at, jitter = np.repeat(at, repeat), np.repeat(jitter, repeat)
    behaviour = torch.from_numpy(batch.behaviour_logprobs[at]).double()
    counts = batch.counts
    counts = type(counts)(tokens=counts.tokens * repeat, turns=counts.turns, sequences=counts.sequences,
                          action_tokens=counts.action_tokens * repeat, actions=counts.actions)
    return LossInput(
        logprobs=(behaviour + torch.from_numpy(jitter)).requires_grad_(), behaviour_logprobs=behaviour, counts=counts,
        advantages=torch.from_numpy(batch.advantages[at]).double(), turn_index=torch.from_numpy(batch.turn_index[at]),
        trajectory_index=torch.from_numpy(batch.trajectory_index[at]),
        action_mask=torch.from_numpy(batch.action_mask[at]),
        extra={name: torch.from_numpy(values[at]).double() for name, values in batch.extra.items()})


def plain(**options):
    return FACTOR(baseline="none", teacher_kl_coefficient=0.0, **options)


@given(case=cases())
@quickly
def test_f4_at_ratio_one_an_action_counts_its_credit_however_many_tokens_it_has(case):
    group, scores = case
    (credits,) = plain().advantages([group], scores, LATE)
    if all(credit.excluded for credit in credits):
        return
    once, twice = (loss_input(group, credits, repeat=repeat) for repeat in (1, 2))
    loss = plain().loss(once)[0]
    means = [values.mean() for _, _, values in actions(group, credits)]
    others = [value for trajectory, credit in zip(group.trajectories, credits) if not credit.excluded
              for turn, values in zip(trajectory.turns, credit.advantages)
              for value in np.delete(values, range(*turn.action_span))]
    expected = -(np.mean(means) if means else 0.0) - (np.mean(others) if others else 0.0)
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    assert plain().loss(twice)[0].item() == pytest.approx(loss.item(), abs=1e-6)


def test_the_loss_worked_by_hand():
    # Turns with actions of 1 and 3 of 4 tokens and the surrogates l: (l_0 + mean l_5..7)/2 + mean of l_1..3 and l_4.
    group = Group(trajectories=[played(1.0, (0, 1), (1, 4))])
    (credits,) = plain().advantages([group], None, LATE)
    batch = loss_input(group, credits, noise=0.3)
    per_token = clipped_surrogate(batch.logprobs, batch.behaviour_logprobs, batch.advantages)[0]
    expected = (per_token[0] + per_token[5:8].mean()) / 2 + per_token[1:5].mean()
    torch.testing.assert_close(plain().loss(batch)[0], expected)


def test_one_turn_in_the_warm_up_is_rloo_bit_for_bit():
    group = Group(trajectories=[played(reward, (0, 4)) for reward in (1.0, 0.0, 0.3, None)])
    assert same(FACTOR().advantages([group], None, 0), RLOO().advantages([group]))


def test_the_mean_over_tokens_is_another_loss():
    group = Group(trajectories=[played(1.0, (0, 1), (1, 4))])
    scores = Scores(values=[[[np.full(4, 0.0), np.full(4, 0.9)]]])
    (credits,) = plain().advantages([group], scores, LATE)
    assert plain().loss(loss_input(group, credits))[0] != GRPO().loss(loss_input(group, credits))[0]


def test_the_teacher_term_worked_by_hand():
    # Divergences .2 and .4 at the action's two tokens (what lies elsewhere does not count), λ = .5 · (1 − 25/50) = .25.
    group = Group(trajectories=[played(1.0, (0, 2))])
    factor = FACTOR(baseline="none", teacher_kl_coefficient=0.5)
    batch = loss_input(group, factor.advantages([group])[0])
    divergence = torch.tensor([0.2, 0.4, 9.0, 9.0], dtype=torch.float64, requires_grad=True)
    told = replace(batch, teacher_divergence=divergence, step=24)
    loss, metrics = factor.loss(told)
    assert metrics["teacher_kl"].item() == pytest.approx(0.3)
    assert loss.item() == pytest.approx(factor.loss(batch)[0].item() + 0.25 * 0.3) == metrics["loss"].item()
    assert torch.autograd.grad(loss, divergence)[0].tolist() == pytest.approx([0.125, 0.125, 0, 0])


def test_after_the_decay_there_is_no_teacher_term():
    group = Group(trajectories=[played(0.0, (0, 2))])
    batch = loss_input(group, FACTOR().advantages([group])[0])
    for step, there in ((48, True), (49, False)):
        told = replace(batch, teacher_divergence=torch.ones(4, dtype=torch.float64), step=step)
        assert ("teacher_kl" in FACTOR().loss(told)[1]) == there


@pytest.mark.parametrize("gradient_steps", [1, 2])
def test_the_teacher_term_is_the_exact_divergence_from_the_policy_before_the_update(gradient_steps):
    policy = random_policy(max_position_embeddings=256)
    policy.tokenizer.chat_template = None
    talk = conversation([5, 6], [7, 8, 9], [10], [11, 12], [13], [14])
    turns = [replace(turn, action_span=span, observation=str(i))
             for i, (turn, span) in enumerate(zip(talk.turns, [(1, 3), (0, 2), (0, 0)]))]
    some = Group(trajectories=[replace(talk, turns=turns, reward=reward) for reward in (1.0, 0.0)])
    factor = FACTOR(teacher_kl_coefficient=1.0)
    learner = Learner(policy, factor, OptimizerSettings(epochs=gradient_steps, micro_batch_tokens=9), temperature=0.7)
    scores = learner.score([some], 0)
    batch = pack([some], factor.advantages([some], scores), 0)
    if gradient_steps == 2:  # as after the first of them
        for weight in policy.model.parameters():
            weight.data.mul_(0.9)

    def logits(model, prompt, response):
        return model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1:-1] / 0.7
    divergences = []
    for turn, prompt in zip(turns, scores.teacher_prompts[0][0]):
        theirs = logits(learner.teacher, prompt, turn.response_ids).log_softmax(-1).detach()
        ours = logits(policy.model, turn.prompt_ids, turn.response_ids).log_softmax(-1)
        divergences.append((theirs.exp() * (theirs - ours)).sum(-1)[slice(*turn.action_span)])
    expected = torch.cat(divergences).mean()
    metrics = learner.accumulate_gradients(batch)
    assert metrics["teacher_kl"] == pytest.approx(expected.item(), rel=1e-4) and expected > 1e-3
    both = [weight.grad.clone() for weight in learner.parameters]
    policy.model.zero_grad()
    plain_learner = Learner(policy, FACTOR(teacher_kl_coefficient=0.0), OptimizerSettings(), temperature=0.7)
    plain_learner.accumulate_gradients(batch)
    without = [p.grad.clone() for p in learner.parameters]
    policy.model.zero_grad()
    (factor._teacher_weight(0) * expected).backward()
    for weight, with_it, plain_gradient in zip(learner.parameters, both, without):
        torch.testing.assert_close(with_it - plain_gradient, weight.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("data, message", [
    ({"allocation": 1.0}, "allocation"), ({"aggregation": "token_mean"}, "aggregation"),
    ({"baseline": "mean"}, "baseline"), ({"continuations": 0}, "continuations"), ({"gap_clip": 0}, "gap_clip"),
    ({"value_head": {"target_decay": 1.0}}, "value_head.target_decay")])
def test_settings_out_of_range_are_refused_by_name(data, message):
    with pytest.raises(SettingsError, match=message):
        validate(FACTOR, data)


# SERL

def test_serl_worked_by_hand():
    # Rewards 1 and 0: A = ±.70711. λ = .5 · (1 − 25/50) = .25. Gaps .1 and 9 of a success: weights e^.1, 1.2 (clipped).
    group = Group(trajectories=[played(1.0, (1, 3)), played(0.0, (1, 3))])
    teacher = np.array([7.0, -0.9, 8.0, 7.0], np.float32)
    (success, failure), = SERL().advantages([group], Scores(teacher_logprobs=[[[teacher], [teacher]]]), 24)
    a = np.sqrt(0.5)
    assert success.advantages[0] == pytest.approx([a, a * (0.75 + 0.25 * np.exp(0.1)), a * (0.75 + 0.25 * 1.2), a],
                                                  rel=1e-4)
    assert failure.advantages[0] == pytest.approx([-a, -a * (0.75 + 0.25 * np.exp(-0.1)), -a * (0.75 + 0.25 * 0.8), -a],
                                                  rel=1e-4)


@given(case=cases(), step=st.integers(0, 60))
@quickly
def test_serl_keeps_signs_touches_only_actions_and_is_grpo_without_mixing(case, step):
    group, scores = case
    base = GRPO().advantages([group])
    credits = SERL().advantages([group], scores, step)
    for trajectory, ours, theirs in zip(group.trajectories, credits[0], base[0]):
        for turn, a, b in zip(trajectory.turns, ours.advantages, theirs.advantages):
            inside = np.isin(np.arange(4), range(*turn.action_span))
            assert (a[~inside] == b[~inside]).all() and (np.sign(a) == np.sign(b)).all()
            assert (np.abs(a) <= 1.1 * np.abs(b) + 1e-6).all() and (np.abs(a) >= 0.9 * np.abs(b) - 1e-6).all()
    assert same(SERL(mixing=0.0).advantages([group], scores, step), base)
    assert same(SERL().advantages([group], scores, 49), base) and same(SERL().advantages([group], None, step), base)
    assert not SERL(mixing=0.0).needs.teacher_logprobs
