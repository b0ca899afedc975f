"""DAPO: decoupled clip and dynamic sampling (arXiv 2503.14476).

GRPO's advantages and loss with four changes:

    clip higher        clip(q, 1 − 0.2, 1 + 0.28)
    dynamic sampling   groups whose returns are all equal teach nothing: they are dropped and others sampled instead
    token mean         every token of the batch weighs the same; no KL term
    overlong shaping   R ← R − f · clip((L − (L_max − L_buf)) / L_buf, 0, 1)     L: sampled tokens of the trajectory
"""

import numpy as np
from pydantic import NonNegativeFloat, PositiveInt, model_validator

from agents.trajectory import Group, Trajectory
from trainers.algorithms.grpo import GRPO
from trainers.settings import settings


@settings
class DAPO(GRPO):
    """GRPO with a higher upper clip, dynamic sampling, and a soft penalty on overlong responses."""

    clip_high: NonNegativeFloat = 0.28
    max_generation_batches: PositiveInt = 10
    """Rollout batches that may be sampled to fill one training batch."""
    overlong_length: PositiveInt | None = None
    """L_max: sampled tokens at which the penalty is full. None: no penalty."""
    overlong_buffer: PositiveInt = 4096
    """L_buf: over how many tokens before L_max the penalty grows; at most `overlong_length`."""
    overlong_factor: NonNegativeFloat = 1.0
    """f: the full penalty."""

    @model_validator(mode="after")
    def _check_buffer(self):
        if self.overlong_length is not None and self.overlong_buffer > self.overlong_length:
            raise ValueError(f"overlong_buffer {self.overlong_buffer} is greater than overlong_length "
                             f"{self.overlong_length}; set it to at most that")
        return self

    def keep(self, group: Group) -> bool:
        """The environment's returns differ (whatever the length penalty adds), or the group is a single trajectory."""
        rewards = group.rewards[~np.isnan(group.rewards)]
        return len(rewards) > 0 and (len(group.trajectories) == 1 or bool(np.ptp(rewards) > 0))

    def reward(self, trajectory: Trajectory) -> float | None:
        if trajectory.reward is None or self.overlong_length is None:
            return trajectory.reward
        excess = trajectory.response_length - (self.overlong_length - self.overlong_buffer)
        return trajectory.reward - self.overlong_factor * min(max(excess / self.overlong_buffer, 0.0), 1.0)
