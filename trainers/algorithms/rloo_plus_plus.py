"""RLOO++ (arXiv 2608.28447): RLOO whose advantages have the same spread in every batch.

    A ← 0.3 · A / (std_B A + 1e-6)        std_B over all trajectories of the batch

The mean over the batch need not be subtracted: leave-one-out advantages sum to 0 in every group. So groups with equal
returns keep advantages of exactly 0.
"""

from collections.abc import Sequence

import numpy as np
from pydantic import PositiveFloat

from agents.trajectory import Group
from trainers.algorithms.base import Scores
from trainers.algorithms.rloo import RLOO
from trainers.credit import EPSILON, Credit, leave_one_out
from trainers.settings import settings


@settings
class RLOOpp(RLOO):
    """RLOO, rescaled over the whole batch."""

    target_std: PositiveFloat = 0.3
    """Standard deviation of the batch's advantages."""

    def advantages(self, groups: Sequence[Group], scores: Scores | None = None,
                   step: int = 0) -> list[list[Credit]]:
        values = [leave_one_out(self.returns(group)) for group in groups]
        batch = np.concatenate([np.zeros(0), *values])
        batch = batch[~np.isnan(batch)]
        scale = self.target_std / (batch.std(ddof=1) + EPSILON) if len(batch) > 1 else 0.0
        return self.credits(groups, [value * scale for value in values])
