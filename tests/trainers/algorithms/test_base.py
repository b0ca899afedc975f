"""What the base of all algorithms gives them: metrics, needs, scores by trajectory, what fades in training."""

import numpy as np
import pytest
import torch

from trainers.algorithms import GRPO, Needs, Scores
from trainers.algorithms.base import faded
from trainers.loss import Counts, LossInput


def test_the_monitored_divergence_and_clip_fraction_worked_by_hand():
    # Log-ratios log 2, −log 4 and 0: KL(π_b‖π) by k3 is ratio − 1 − log ratio: .30685, .63629, 0. A = 1 and 2 > 1.2,
    # A = −1 and ¼ < .8: two tokens of three are clipped.
    gap, zero = torch.tensor([np.log(2), -np.log(4), 0.0]), torch.zeros(3, dtype=torch.float64)
    index = torch.tensor([0, 0, 0])
    metrics = GRPO().loss(LossInput(
        logprobs=gap, behaviour_logprobs=zero, advantages=torch.tensor([1.0, -1.0, 1.0]), turn_index=index,
        trajectory_index=index, action_mask=index > 0, counts=Counts(3, 1, 1)))[1]
    assert metrics["behaviour_kl"].item() == pytest.approx((0.30685 + 0.63629) / 3, abs=1e-5)
    assert metrics["clip_fraction"].item() == pytest.approx(2 / 3)


def test_a_teacher_s_weights_are_kept_apart_only_where_the_policy_moves_on_before_it_is_asked_again():
    asked, once, later = {"teacher_logprobs": True}, {"teacher_divergence": True}, {"teacher_steps": 2}
    cases = [({}, 4, False), (later, 1, False), (asked, 4, False), (asked | later, 1, True), (asked | once, 1, False),
             (asked | once, 2, True)]
    assert [Needs(**needs).teacher_copy(steps) for needs, steps, _ in cases] == [right for *_, right in cases]


def test_what_models_said_is_given_by_trajectory():
    scores = Scores(values=[[["a"], ["b"]], [["c"]]], continuations=[[{}, {1: "d"}], [{}]])
    assert (scores.of(0, 1).values, scores.of(0, 1).continuations, scores.of(1, 0).values) == (["b"], {1: "d"}, ["c"])
    assert scores.of(0, 1).teacher_logprobs is None


# 1 − k/50 at k = 1, 25, 49, 50 and beyond
@pytest.mark.parametrize("step, right", [(0, 0.98), (24, 0.5), (48, 0.02), (49, 0.0), (1000, 0.0)])
def test_what_fades_is_gone_at_its_last_step(step, right):
    assert faded(step, 50) == pytest.approx(right)
