"""Group Relative Policy Optimisation (arXiv 2402.03300), and Dr. GRPO (2503.20783) by its switches.

    A_i = (R_i − mean_j R_j) / (std_j R_j + 1e-6)        for every token of trajectory i, statistics over its group
    loss = −mean_t min(q_t A, clip(q_t, 1 − clip_low, 1 + clip_high) A) + β KL(π‖π_ref) − c H,   q = π/π_b

Dr. GRPO: `normalise_by_std = false`, `aggregation = "sequence_mean_token_sum_norm"`.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from agents.trajectory import Group
from trainers.algorithms.base import Algorithm, Scores
from trainers.credit import Credit, normalise
from trainers.settings import settings


@settings
class GRPO(Algorithm):
    """Advantage = return relative to the group's mean, in its standard deviations."""

    normalise_by_std: bool = True
    """Divide by the group's standard deviation; false is Dr. GRPO."""
    statistics_over: Literal["trajectory", "row"] = "trajectory"
    """What counts once in mean and standard deviation: a trajectory, or each of its turns (verl-agent's rows)."""

    def advantages(self, groups: Sequence[Group], scores: Scores | None = None,
                   step: int = 0) -> list[list[Credit]]:
        return self.credits(groups, [self._normalise(group) for group in groups])

    def _normalise(self, group: Group) -> np.ndarray:
        turns = np.array([len(trajectory.turns) for trajectory in group.trajectories])
        return normalise(self.returns(group), divide_by_std=self.normalise_by_std,
                         weights=turns if self.statistics_over == "row" else None)
