"""SERL: GRPO whose action tokens are weighed by a teacher that has read the environment's answer (the baseline that
FACTOR, arXiv 2608.07118, is compared with).

    w_j = clip(exp(sgn(A) (log π_T − log π_b)), 1 ± 0.2)
    A_j = A ((1 − λ_k) + λ_k w_j)    on action tokens, A elsewhere

λ_k = 0.5 max(1 − k/50, 0) at step k = 1, 2, …; the teacher's weights are the policy's, copied every 10 steps.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from pydantic import Field, PositiveInt

from agents.trajectory import Group, Trajectory
from trainers.algorithms.base import Needs, Scores, faded
from trainers.algorithms.grpo import GRPO
from trainers.credit import Credit
from trainers.settings import settings
from trainers.shaping import multiplied
from trainers.teacher import Insertion, feedback


@settings
class SERL(GRPO):
    """GRPO, its action tokens reweighed by hindsight."""

    mixing: float = Field(default=0.5, ge=0, le=1)
    """λ at step 0: how far the weight counts."""
    decay_steps: PositiveInt = 50
    """Step at which λ has come down to 0."""
    weight_clip: float = Field(default=0.2, ge=0, lt=1)
    """The weight stays within 1 ± this."""
    teacher_steps: PositiveInt = 10
    """Steps between copies of the policy to the teacher."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, teacher_logprobs=self.mixing > 0, teacher_steps=self.teacher_steps)

    def insertion(self, trajectory: Trajectory, turn: int, step: int) -> Insertion | None:
        return feedback(trajectory.turns[turn].observation) if self._mixing(step) > 0 else None

    def advantages(self, groups: Sequence[Group], scores: Scores | None = None,
                   step: int = 0) -> list[list[Credit]]:
        credits = super().advantages(groups, scores, step)
        if self._mixing(step) == 0 or scores is None or scores.teacher_logprobs is None:
            return credits
        return [[replace(credit, advantages=tuple(
            self._weighed(turn.action_span, values, teacher - turn.logprobs, self._mixing(step))
            for turn, values, teacher in zip(trajectory.turns, credit.advantages, its_teacher)))
            for trajectory, credit, its_teacher in zip(group.trajectories, group_credits, group_teacher)]
            for group, group_credits, group_teacher in zip(groups, credits, scores.teacher_logprobs)]

    def _weighed(self, span: tuple[int, int], advantages: np.ndarray, gap: np.ndarray, mixing: float) -> np.ndarray:
        at, result = slice(*span), advantages.copy()
        result[at] = multiplied(advantages[at], gap[at], mixing, self.weight_clip)
        return result

    def _mixing(self, step: int) -> float:
        return self.mixing * faded(step, self.decay_steps)
