"""Supervised fine-tuning as an algorithm: raise the likelihood of what the agent said, whatever it earned.

    loss = −mean_t w_t log π(a_t | everything before it)        over the agent's own tokens

w is `first_token_weight` at the first token of a turn; after it 0 in a mistake that a demonstration shows, else 1.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import PositiveFloat
from torch import Tensor

from agents.trajectory import Group, Trajectory
from trainers.algorithms.base import Algorithm, Scores
from trainers.credit import Credit
from trainers.loss import LossInput
from trainers.settings import settings


@settings
class SFT(Algorithm):
    """Maximum likelihood of the given trajectories."""

    uses_groups: ClassVar[bool] = False

    first_token_weight: PositiveFloat = 1.0
    """How many tokens the first one of a turn counts as. It often says what kind of action follows (calculate, or
    answer), which is learned late as one token among many."""

    def advantages(self, groups: Sequence[Group], scores: Scores | None = None,
                   step: int = 0) -> list[list[Credit]]:
        return [[self._weights(trajectory) for trajectory in group.trajectories] for group in groups]

    def policy_loss(self, tokens: LossInput) -> tuple[Tensor, Tensor]:
        return -tokens.advantages * tokens.logprobs, tokens.logprobs.new_zeros(len(tokens.logprobs), dtype=bool)

    def _weights(self, trajectory: Trajectory) -> Credit:
        weights = tuple(np.full(len(turn.response_ids), float(turn.imitate), np.float32) for turn in trajectory.turns)
        for turn_weights in weights:
            turn_weights[:1] = self.first_token_weight
        return Credit(advantages=weights, excluded=self.mask_truncated and trajectory.truncated)
