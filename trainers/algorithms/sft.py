"""Supervised fine-tuning as an algorithm: raise the likelihood of what the agent said, whatever it earned.

    loss = −mean_t log π(a_t | everything before it)        over the agent's own tokens
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor

from agents.trajectory import Group
from trainers.algorithms.base import Algorithm, Scores
from trainers.credit import Credit
from trainers.loss import LossInput
from trainers.settings import settings


@settings
class SFT(Algorithm):
    """Maximum likelihood of the given trajectories."""

    uses_groups: ClassVar[bool] = False

    def advantages(self, groups: Sequence[Group], scores: Scores | None = None,
                   step: int = 0) -> list[list[Credit]]:
        return self.credits(groups, [np.ones(len(group.trajectories)) for group in groups])

    def policy_loss(self, tokens: LossInput) -> tuple[Tensor, Tensor]:
        return -tokens.logprobs, tokens.logprobs.new_zeros(len(tokens.logprobs), dtype=bool)
