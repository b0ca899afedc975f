"""SDAR and SkillSD: a teacher that reads skills pulls in the loss, and their advantages are the base's."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.trainers.algorithms.groups import group, played, random_groups, same
from tests.trainers.runs import rows, start
from tests.trainers.test_algorithms import tokens
from trainers.algorithms import FACTOR, GRPO, RLOO, SDAR, Scores, SkillSD, find_algorithm
from trainers.settings import SettingsError, validate

pytestmark = pytest.mark.filterwarnings("ignore:a group has one scorable trajectory")


def told(gaps):
    """Six tokens of which the teacher thinks so much more, log-probability for log-probability, than the policy."""
    batch = tokens()
    return replace(batch, extra={"teacher_logprobs": batch.logprobs.detach() + torch.tensor(gaps, dtype=torch.float64)})


def added(algorithm, batch):
    """The teacher's part of the loss, with its coefficient, and its gradient at each log-probability."""
    term = algorithm.loss(batch)[0] - GRPO().loss(batch)[0]
    return term.item(), torch.autograd.grad(term, batch.logprobs)[0].tolist()


def test_sdar_worked_by_hand():
    # Gaps ln 3 / 5, −ln 3 / 5 and 0: gates σ(±ln 3) = ¾, ¼ and ½. The mean of ¾ ln 3/5 and −¼ ln 3/5 over six tokens is
    # ln 3 / 60; times .5. The gradient at each token is −.5 · gate / 6.
    g = np.log(3) / 5
    term, gradient = added(SDAR(distillation_coefficient=0.5), told([g, -g, 0, 0, 0, 0]))
    assert term == pytest.approx(0.5 * np.log(3) / 60)
    assert gradient == pytest.approx([-0.5 * gate / 6 for gate in (0.75, 0.25, 0.5, 0.5, 0.5, 0.5)])
    blunt = added(SDAR(distillation_coefficient=0.5, gate_sharpness=2.5), told([2 * g, 0, 0, 0, 0, 0]))
    assert blunt[0] == pytest.approx(0.5 * 0.75 * 2 * g / 6)


def test_skill_sd_worked_by_hand():
    # ρ (e^g − 1 − g) with g = ℓᵀ − ℓ; its derivative by ℓ is ρ (e^g − 1 − g) + ρ (1 − e^g) = −ρ g.
    gaps = np.array([0.3, -0.2, 0.0, 1.0, -1.0, 0.1])
    batch = told(gaps)
    ratio = (batch.logprobs - batch.behaviour_logprobs).exp().detach().numpy()
    term, gradient = added(SkillSD(distillation_coefficient=0.5), batch)
    assert term == pytest.approx(0.5 * np.mean(ratio * (np.exp(gaps) - 1 - gaps)))
    assert gradient == pytest.approx(0.5 * -ratio * gaps / 6)


def test_skill_sd_s_expected_loss_and_gradient_are_those_of_the_reverse_divergence():
    # Two possible tokens, sampled by π_b = (.3, .7); expectations are sums over both with these weights.
    logits = torch.tensor([0.2, 0.0], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    behaviour, teacher = (torch.tensor(p, dtype=torch.float64).log() for p in ([0.3, 0.7], [0.8, 0.2]))
    batch = replace(tokens(), behaviour_logprobs=behaviour)
    batch.logprobs = logprobs
    expected = (behaviour.exp() * SkillSD().divergence(batch, teacher)).sum()
    exact = (logprobs.exp() * (logprobs - teacher)).sum()
    torch.testing.assert_close(expected, exact)
    torch.testing.assert_close(*(torch.autograd.grad(value, logits, retain_graph=True) for value in (expected, exact)))


@given(st.lists(random_groups(), min_size=1, max_size=2))
@hypothesis_settings(max_examples=10, deadline=None)
def test_advantages_are_the_base_s_and_without_a_coefficient_so_is_the_loss(groups):
    scores = Scores(teacher_logprobs=[[[np.full(len(turn.response_ids), -2.0) for turn in trajectory.turns]
                                       for trajectory in one.trajectories] for one in groups])
    for name in ("SDAR", "SkillSD"):
        for base in ("GRPO", "GiGPO", "RLOO"):
            over, plain = find_algorithm(f"{name}+{base}"), find_algorithm(base)().advantages(groups)
            assert same(over().advantages(groups, scores), plain)
            assert same(over(distillation_coefficient=0.0).advantages(groups), plain)


@pytest.mark.parametrize("name", ["SDAR", "SkillSD"])
def test_without_a_coefficient_the_loss_is_the_base_s_bit_for_bit(name):
    neutral = find_algorithm(name)(distillation_coefficient=0.0)
    assert neutral.loss(tokens())[0] == GRPO().loss(tokens())[0] and "distillation" not in neutral.loss(tokens())[1]
    over = find_algorithm(f"{name}+RLOO")()
    assert over.loss(told([1.0] * 6))[0] != RLOO().loss(told([1.0] * 6))[0]


def test_every_teacher_s_term_is_added_beside_the_others():
    # FACTOR's: λ = 1 − 1/50 times the mean divergence .3; SDAR's: gates of ½ at gaps of 0, so 0.
    both = find_algorithm("SDAR+FACTOR")()
    batch = replace(told([0.0] * 6), teacher_divergence=torch.full((6,), 0.3, dtype=torch.float64),
                    counts=replace(tokens().counts, action_tokens=6, actions=3))
    terms, (loss, metrics) = both.further_terms(batch), both.loss(batch)
    assert list(terms) == ["teacher_kl", "distillation"] and metrics["distillation"] == 0
    assert loss.item() == pytest.approx(FACTOR(teacher_kl_coefficient=0.0).loss(batch)[0].item() + 0.98 * 0.3)
    assert metrics["loss"] == loss


@pytest.mark.parametrize("name", ["SDAR", "SkillSD"])
def test_training_works(name, tmp_path):
    (tmp_path / "parity.toml").write_text('general = "Say gold."\n')
    # A few supervised steps first: an untrained policy does not read its context, nor a skill in it.
    start(tmp_path / "run", warm_start={"steps": 3},
          algorithm={"name": name, "skills": str(tmp_path / "parity.toml")})
    assert all(np.isfinite(row["distillation"]) and row["distillation"] for row in rows(tmp_path / "run"))


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match=r"SDAR needs scores\.teacher_logprobs"):
        SDAR().advantages([group(played(1.0), played(0.0))])


@pytest.mark.parametrize("cls, data", [(SDAR, {"gate_sharpness": 0}), (SkillSD, {"distillation_coefficient": -1})])
def test_settings_out_of_range_are_refused_by_name(cls, data):
    with pytest.raises(SettingsError, match=next(iter(data))):
        validate(cls, data)
