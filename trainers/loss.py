"""The loss, from per-token log-probabilities to one scalar. Pure functions.

The gradient does not depend on how a batch is cut into micro-batches and ranks: every mean divides by `Counts` of the
whole batch, so the parts' losses (and gradients) are *added*, never averaged. Under data parallelism that means summing
gradients over ranks; where the framework averages them, multiply the loss by the number of ranks.
"""

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "turn_mean_token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum",
                      "sequence_mean_token_sum_norm"]
RatioLevel = Literal["token", "turn", "sequence"]
Estimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before `exp`: e^20 is far outside every clip range, and still finite in float32."""


@dataclass(frozen=True)
class Counts:
    """How many units a whole batch trains on, over all its micro-batches and ranks: the denominators of every mean."""

    tokens: int
    turns: int
    """Turns with at least one trained token."""
    sequences: int
    """Sequences (trajectories) with at least one trained token."""
    action_tokens: int = 0
    """Trained tokens of executable actions."""
    actions: int = 0
    """Turns with at least one of those."""

    @property
    def in_actions(self) -> "Counts":
        """Of the tokens of actions alone."""
        return replace(self, tokens=self.action_tokens, turns=self.actions)

    @property
    def outside_actions(self) -> "Counts":
        """Of the other tokens alone; turns stay as they are."""
        return replace(self, tokens=self.tokens - self.action_tokens)


@dataclass(kw_only=True, eq=False)
class LossInput:
    """A micro-batch as a loss sees it: flat, over the trained tokens only (sampled, of trajectories not excluded)."""

    logprobs: Tensor
    """Of the current policy, with gradient. # [tokens]"""
    behaviour_logprobs: Tensor
    """Of the policy that sampled. # [tokens]"""
    advantages: Tensor  # [tokens]
    turn_index: Tensor
    """The turn that a token belongs to, unique within its trajectory. # int64 [tokens]"""
    trajectory_index: Tensor
    """The trajectory that a token belongs to; a trajectory is never split over micro-batches. # int64 [tokens]"""
    action_mask: Tensor
    """True at the tokens of the executable action. # bool [tokens]"""
    counts: Counts
    """Of the whole batch."""
    reference_logprobs: Tensor | None = None
    """Where the algorithm needs them. # [tokens]"""
    entropy: Tensor | None = None
    """Of the current policy at each token, with gradient, where the algorithm needs it. # [tokens]"""
    teacher_divergence: Tensor | None = None
    """KL(π_T‖π) over the whole vocabulary, 0 outside actions; where the algorithm needs it. # [tokens]"""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """What the algorithm put into `Credit.extra`. # each [tokens]"""
    step: int = 0
    """Updates before this batch's, for what changes in training."""


def segment_sum(values: Tensor, index: Tensor) -> Tensor:
    """At every token, the sum of `values` over the tokens with the same `index`. # same shape as values"""
    index = torch.unique(index, return_inverse=True)[1]
    sums = values.new_zeros(values.numel()).index_add(0, index.flatten(), values.flatten())
    return sums[index]


def aggregate(loss: Tensor, mask: Tensor | None = None, mode: Aggregation = "token_mean", *,
              sequence_index: Tensor | None = None, turn_index: Tensor | None = None, counts: Counts | None = None,
              max_length: int | None = None) -> Tensor:
    """One scalar from per-token losses.

    `loss` is [sequences, length], each row a sequence, or flat [tokens] with `sequence_index` (and `turn_index`, unique
    within a sequence) [tokens]. Where `mask` is False, loss and gradient are 0, even at NaN. Units without a trained
    token do not count; without any the result is 0 with zero gradient.

        token_mean                     mean over tokens
        turn_mean_token_mean           mean over turns of the mean over the turn's tokens
        sequence_mean_token_mean       mean over sequences of the mean over the sequence's tokens
        sequence_mean_token_sum        mean over sequences of the sum over the sequence's tokens
        sequence_mean_token_sum_norm   the same divided by the constant `max_length` (Dr. GRPO)

    `counts` are the whole batch's units where this call sees a part of it; None counts this call's. Inner means are
    taken here, so a turn or sequence must be whole. Raises ValueError for an unknown mode, wrong shapes or a missing
    index.
    """
    if mode not in get_args(Aggregation):
        raise ValueError(f"unknown aggregation {mode!r}; one of {', '.join(get_args(Aggregation))}")
    mask = _checked_mask(loss, mask)
    loss = torch.where(mask, loss, 0.0)
    level, _, inner = mode.partition("_mean")
    key = None if level == "token" else _segment_key(loss, level, sequence_index, turn_index)
    if counts is not None:
        units = getattr(counts, level + "s")
    else:
        units = int(mask.sum()) if key is None else key[mask].unique().numel()
    if inner == "_token_mean":
        loss = loss / segment_sum(mask.to(loss.dtype), key).clamp(min=1)
    if inner == "_token_sum_norm":
        if max_length is None or max_length < 1:
            raise ValueError(f"{mode} needs a max_length of at least 1, got {max_length}")
        loss = loss / max_length
    return loss.sum() / max(units, 1)


def importance_ratio(logprobs: Tensor, behaviour_logprobs: Tensor, level: RatioLevel = "token", *,
                     mask: Tensor | None = None, sequence_index: Tensor | None = None,
                     turn_index: Tensor | None = None) -> Tensor:
    """π_θ/π_b at every token: the token's own, or the geometric mean over its turn or sequence (GSPO, 2507.18071).

    At a level above the token the value is s = exp(mean log-ratio) at all tokens of the unit, and the gradient that of
    s_t = sg[s] π_t/sg[π_t]: every token keeps its own. Shapes and indices as in `aggregate`. Tokens' log-ratios are
    clamped to ±20 before all else; beyond, a token has no gradient.
    """
    if level not in get_args(RatioLevel):
        raise ValueError(f"unknown ratio {level!r}; one of {', '.join(get_args(RatioLevel))}")
    mask = _checked_mask(logprobs, mask)
    log_ratio = torch.where(mask, logprobs - behaviour_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if level == "token":
        return log_ratio.exp()
    key = _segment_key(logprobs, level, sequence_index, turn_index)
    length = segment_sum(mask.to(logprobs.dtype), key).clamp(min=1)
    mean = segment_sum(log_ratio.detach(), key) / length
    return mean.exp() * (log_ratio - log_ratio.detach()).exp()


def clipped_surrogate(logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, *, clip_low: float = 0.2,
                      clip_high: float = 0.2, dual_clip: float | None = None, ratio: RatioLevel = "token",
                      mask: Tensor | None = None, sequence_index: Tensor | None = None,
                      turn_index: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Per-token loss −min(q A, clip(q, 1−clip_low, 1+clip_high) A), and where the clip cut the gradient.

    q is `importance_ratio` at level `ratio`; an infinite clip range leaves it alone. Where A < 0, `dual_clip` c > 1
    bounds the loss by −c A. Clipped are, by the sign rule, tokens with A > 0 and q > 1+clip_high or A < 0 and
    q < 1−clip_low; the dual clip is not counted. Shapes as in `aggregate`; masked tokens give 0 and False.
    """
    mask = _checked_mask(logprobs, mask)
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be greater than 1, got {dual_clip}")
    q = importance_ratio(logprobs, behaviour_logprobs, ratio, mask=mask, sequence_index=sequence_index,
                         turn_index=turn_index)
    advantages = torch.where(mask, advantages, 0.0)
    loss = torch.maximum(-advantages * q, -advantages * q.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    clipped = ((advantages > 0) & (q > 1 + clip_high)) | ((advantages < 0) & (q < 1 - clip_low))
    return loss, clipped


def kl(logprobs: Tensor, reference_logprobs: Tensor, estimator: Estimator = "k3") -> Tensor:
    """Per-token estimate of KL(π‖π_ref) at tokens sampled from π. With d = log π − log π_ref:

        k1 = d               unbiased; a penalty on the reward or a metric, for as a loss its expected gradient is 0
        k2 = d²/2            biased; as a loss its expected gradient is that of the KL
        k3 = e^−d − 1 + d    unbiased, never negative; as a loss its expected gradient is that of KL(π_ref‖π)

    k3 clamps d to ±20 before `exp`. Raises ValueError for an unknown estimator.
    """
    difference = logprobs - reference_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        difference = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return torch.expm1(-difference) + difference
    raise ValueError(f"unknown KL estimator {estimator!r}; one of {', '.join(get_args(Estimator))}")


def _checked_mask(values: Tensor, mask: Tensor | None) -> Tensor:
    if values.ndim not in (1, 2):
        raise ValueError(f"expected [tokens] or [sequences, length], got shape {list(values.shape)}")
    if mask is None:
        return torch.ones_like(values, dtype=torch.bool)
    if mask.shape != values.shape:
        raise ValueError(f"mask has shape {list(mask.shape)}, the values {list(values.shape)}; they must be equal")
    return mask.bool()


def _segment_key(values: Tensor, level: str, sequence_index: Tensor | None, turn_index: Tensor | None) -> Tensor:
    """A number per token that is equal exactly within one sequence or turn. # int64, shape of values"""
    if sequence_index is None and values.ndim == 2:
        sequence_index = torch.arange(len(values), device=values.device)[:, None].expand(values.shape)
    needed = {"sequence_index": sequence_index} if level == "sequence" else {"turn_index": turn_index}
    for name, index in needed.items():
        if index is None or index.shape != values.shape:
            shape = None if index is None else list(index.shape)
            raise ValueError(f"level {level!r} needs {name} of shape {list(values.shape)}, got {shape}")
    if level == "sequence":
        return sequence_index
    if sequence_index is None:
        return turn_index
    # Turns are numbered within their sequence, so the pair names a turn.
    sequence, turn = (torch.unique(index, return_inverse=True)[1] for index in (sequence_index, turn_index))
    return sequence * values.numel() + turn
