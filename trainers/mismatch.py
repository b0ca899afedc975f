"""The gap between the policy that sampled and the one that learns: what is reported of it, and what corrects it.

The behaviour policy π_b differs from the learner's π in rounding (another engine, another precision) and by updates in
between (asynchronous rollouts). w = π/π_b, of a token or of a whole trajectory, is the importance weight that makes up
for it: truncated (TIS), or only where it is not too large, or only within a band (IcePop). Corrected credit is given
to the learner's own policy at the start of the batch ("decoupled", AReaL, arXiv 2505.24298): the loss then clips
against that one, and no algorithm needs to know.
"""

from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from pydantic import PositiveFloat, model_validator

from trainers.batch import Batch
from trainers.loss import MAX_LOG_RATIO, Counts, aggregate, kl
from trainers.settings import settings


@settings
class MismatchSettings:
    """How the gap between sampling and learning policy is corrected. In float32 with the default engine it is rounding,
    and nothing is to be corrected."""

    level: Literal["off", "token", "sequence"] = "off"
    """The importance weight w is that of each token, or of the whole trajectory (the product over its tokens). Costs a
    forward pass over the batch."""
    rule: Literal["truncate", "mask", "band"] = "truncate"
    """`truncate`: min(w, high). `mask`: w, and what is above `high` is left out. `band`: so is what is below `low`."""
    low: PositiveFloat = 0.5
    """Only for `band`."""
    high: PositiveFloat = 2.0

    @model_validator(mode="after")
    def _check_band(self):
        if self.rule == "band" and self.low > self.high:
            raise ValueError(f"a band from low {self.low} to high {self.high} is empty")
        return self


def mismatch(logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, counts: Counts) -> dict[str, torch.Tensor]:
    """What is reported of a micro-batch, as shares of the batch's means over its tokens (and one maximum): the absolute
    gap of the log-probabilities, KL(π_b‖π) by k3, and the first two moments of w, which `finished` turns into the
    effective sample size. # [tokens] each"""
    log_ratio = logprobs - behaviour_logprobs
    weights = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    per_token = {"logprob_gap": log_ratio.abs(), "mismatch_kl": kl(behaviour_logprobs, logprobs, "k3"),
                 "mismatch_weight": weights, "mismatch_weight_square": weights.square()}
    return {name: aggregate(values, counts=counts) for name, values in per_token.items()} | {
        "logprob_gap_max": log_ratio.abs().max()}


def finished(metrics: dict[str, float]) -> dict[str, float]:
    """A batch's metrics with `mismatch_sample_size` in place of the moments: (Σw)²/(n Σw²), the share of the n tokens
    that would say as much without weights. 1 where π is π_b."""
    mean, square = metrics.pop("mismatch_weight"), metrics.pop("mismatch_weight_square")
    return metrics | {"mismatch_sample_size": mean * mean / square}


def importance_weights(log_ratio: np.ndarray, trajectory_index: np.ndarray, settings: MismatchSettings) -> np.ndarray:
    """The weight of each token by `settings`, 0 where it is left out. # float64 [tokens]; `trajectory_index` int64"""
    if settings.level == "sequence":
        log_ratio = np.bincount(trajectory_index, weights=log_ratio)[trajectory_index]
    weights = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    if settings.rule == "truncate":
        return np.minimum(weights, settings.high)
    low = settings.low if settings.rule == "band" else 0.0
    return np.where((weights >= low) & (weights <= settings.high), weights, 0.0)


def correct(batch: Batch, logprobs: np.ndarray, settings: MismatchSettings) -> tuple[Batch, dict[str, float]]:
    """The batch with weighted advantages, `logprobs` as those of the behaviour policy, and without the tokens that are
    left out; and metrics of what was corrected.

    `logprobs` are the learner's at the start of the batch. The surrogate is homogeneous in a non-negative advantage's
    scale, so that weighting advantages weights the loss. # float32 [tokens]
    """
    at = batch.trained
    weights = importance_weights((logprobs - batch.behaviour_logprobs)[at].astype(np.float64),
                                 batch.trajectory_index[at], settings)
    trained, advantages = at.copy(), batch.advantages.copy()
    trained[at] = weights > 0
    advantages[at] *= weights.astype(np.float32)
    shares = mismatch(torch.from_numpy(logprobs[at]), torch.from_numpy(batch.behaviour_logprobs[at]), batch.counts)
    metrics = finished({name: float(value) for name, value in shares.items()})
    return replace(batch, trained=trained, action_mask=batch.action_mask & trained,
                   advantages=np.where(trained, advantages, np.float32(0)),
                   behaviour_logprobs=np.where(trained, logprobs, np.float32(0)),
                   turn_index=np.where(trained, batch.turn_index, -1)), metrics | {
        "mismatch_left_out": float(1.0 - trained.sum() / max(at.sum(), 1)),
        "mismatch_truncated": float(np.mean(weights == settings.high)) if settings.rule == "truncate" else 0.0}
