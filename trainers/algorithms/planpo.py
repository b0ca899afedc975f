"""Group Planning-aware Policy Optimisation (arXiv 2608.17289): successes compete in being short, failures do not.

With R_i the return, T_i the turns and L_{i,t} the tokens of turn t, of a success; failures count as 0 throughout:

    A_{i,t} = A^E_i + α(k) A^S_{i,t}
    A^E_i = (R_i/T_i − mean) / (std + 1e-6)              over the trajectories of the group
    A^S_{i,t} = (R_i/L_{i,t} − mean) / (std + 1e-6)      over the responses of the group
    α(k) falls linearly from alpha_initial in step 0 to alpha_final in the last
    loss: clipped surrogate, averaged over the turns of the batch

The paper's equations group the responses by turn, its text puts all successful ones into one group: `turn_group` and
`turn_members` choose. `floor` is ours: a success gets at least `floor` times its GRPO advantage, however slow it was.
A success's return must be positive for it to be worth more than a failure.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from agents.trajectory import Group
from trainers.algorithms.base import Algorithm, Scores
from trainers.credit import Credit, by_trajectory, normalise, normalise_within
from trainers.loss import Aggregation
from trainers.settings import settings


@settings
class PlanPO(Algorithm):
    """Advantage = success per turn, and with a decaying weight success per token of a turn."""

    aggregation: Aggregation = "turn_mean_token_mean"
    normalise_by_std: bool = True
    """F: divide by the standard deviation; false: only subtract the mean."""
    alpha_initial: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Weight of the turns' lengths at the start (the paper's ScienceWorld: 0.05)."""
    alpha_final: Annotated[float, Field(ge=0, le=1)] = 0.05
    """The same in the last step; at most `alpha_initial`."""
    total_steps: PositiveInt = 150
    """Steps over which the weight decays; in a config by default `run.steps`."""
    turn_group: Literal["flat", "per_turn"] = "flat"
    """Which responses of the group are compared in length: all, or those at the same turn."""
    turn_members: Literal["all_active", "success_only"] = "all_active"
    """Whether the failures' responses take part, with 0; otherwise their A^S is 0."""
    floor: NonNegativeFloat | None = None
    """Least A^E of a success, in its GRPO advantages. None: a slow success may get a negative one."""

    @model_validator(mode="after")
    def _check_alpha(self):
        if self.alpha_final > self.alpha_initial:
            raise ValueError(f"alpha_final {self.alpha_final} is greater than alpha_initial {self.alpha_initial}: the "
                             "weight of the turns' lengths decays")
        return self

    def alpha(self, step: int) -> float:
        """Weight of A^S in a step, counted from 0."""
        done = min(1.0, step / max(1, self.total_steps - 1))
        return (1 - done) * self.alpha_initial + done * self.alpha_final

    def advantages(self, groups: Sequence[Group], scores: Scores | None = None,
                   step: int = 0) -> list[list[Credit]]:
        credits = self.credits(groups, [self._episode_advantages(group) for group in groups])
        alpha = self.alpha(step)
        return [[credit.plus(alpha * values) for credit, values in zip(members, self._length_advantages(group))]
                for group, members in zip(groups, credits)]

    def _outcomes(self, group: Group) -> np.ndarray:
        """Returns of successes, 0 of failures, NaN where there is no return. # float64 [group_size]"""
        return np.where([t.success for t in group.trajectories], self.returns(group), 0.0 * self.returns(group))

    def _episode_advantages(self, group: Group) -> np.ndarray:
        turns = np.array([max(1, len(trajectory.turns)) for trajectory in group.trajectories])
        advantages = normalise(self._outcomes(group) / turns, divide_by_std=self.normalise_by_std)
        if self.floor is None:
            return advantages
        grpo = normalise(self.returns(group), divide_by_std=self.normalise_by_std)
        return np.where([t.success for t in group.trajectories], np.fmax(advantages, self.floor * grpo), advantages)

    def _length_advantages(self, group: Group) -> list[np.ndarray]:
        """A^S; NaN where a response takes no part. # float64 [turns] each"""
        values, index = [np.zeros(0)], [np.zeros(0, np.int64)]
        for trajectory, outcome in zip(group.trajectories, self._outcomes(group)):
            lengths = np.array([len(turn.response_ids) for turn in trajectory.turns], np.float64)
            lengths[lengths == 0] = np.nan
            active = trajectory.success or self.turn_members == "all_active"
            values.append(outcome / lengths if active else lengths * np.nan)
            index.append(np.arange(len(lengths)) * (self.turn_group == "per_turn"))
        result = normalise_within(np.concatenate(values), np.concatenate(index), divide_by_std=self.normalise_by_std)
        return by_trajectory(group.trajectories, result)
