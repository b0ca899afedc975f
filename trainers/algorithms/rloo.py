"""REINFORCE with a leave-one-out baseline (arXiv 2402.14740), in the tool-use form of 2608.28447.

    A_i = R_i − mean_{j≠i} R_j
    w_i = sg clip(π(y_i)/π_b(y_i), 1 − clip_low, 1 + clip_high)      y_i: all sampled tokens of trajectory i
    loss = −E_i[w_i A_i log π(y_i)] − 1e-3 H + 1e-3 KL(π‖π_ref)

The clip range is ours; the paper only says that the weight is clipped.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import NonNegativeFloat
from torch import Tensor

from agents.trajectory import Group
from trainers.algorithms.base import Algorithm, Scores
from trainers.credit import Credit, leave_one_out
from trainers.loss import MAX_LOG_RATIO, Aggregation, LossInput, segment_sum
from trainers.settings import settings


@settings
class RLOO(Algorithm):
    """Advantage = return minus the mean of the group's other returns; one importance weight per trajectory."""

    ratio: Literal["sequence"] = "sequence"
    """One weight per trajectory, the product over its tokens: nothing else here."""
    dual_clip: None = None
    """The weight is clipped whatever the advantage's sign: no dual clip here."""
    aggregation: Aggregation = "sequence_mean_token_sum"
    kl_coefficient: NonNegativeFloat = 1e-3
    entropy_coefficient: NonNegativeFloat = 1e-3

    def advantages(self, groups: Sequence[Group], scores: Scores | None = None,
                   step: int = 0) -> list[list[Credit]]:
        return self.credits(groups, [leave_one_out(self.returns(group)) for group in groups])

    def policy_loss(self, tokens: LossInput) -> tuple[Tensor, Tensor]:
        log_ratio = (tokens.logprobs - tokens.behaviour_logprobs).detach()
        weight = segment_sum(log_ratio, tokens.trajectory_index).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        clipped = weight.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -clipped * tokens.advantages * tokens.logprobs, clipped != weight
