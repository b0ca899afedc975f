"""What an algorithm is: settings, and hooks that default to GRPO's behaviour.

The training loop calls the hooks in this order and does not know which algorithm it runs:

    keep(group)                  is this group worth training on? (dropped groups are refilled, see DAPO)
    anchors(trajectory, rng)     turns at which other episodes go on, to see what they are worth
    insertion(trajectory, ...)   what a teacher, the policy with more in its prompt, is told at a turn
    advantages(groups, ...)      credit per token; it may use `returns` and `credits`
    loss(tokens)                 one scalar per micro-batch, and metrics; it may override `policy_loss` alone, or add
                                 `further_terms`

`make_critic` is called once, before training, by algorithms that learn values.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator
from torch import Tensor

from agents.models import Policy
from agents.trajectory import Group, Trajectory
from trainers.credit import Credit, normalise
from trainers.loss import Aggregation, LossInput, RatioLevel, aggregate, clipped_surrogate, kl
from trainers.settings import settings
from trainers.teacher import Insertion

if TYPE_CHECKING:
    from trainers.critic import Critic
    from trainers.learner import OptimizerSettings

PerTurn = Sequence[Sequence[Sequence[np.ndarray]]]
"""For each group, trajectory and turn one array. # [response_length] each"""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the loop must compute for an algorithm beyond log-probabilities of the policy."""

    reference_logprobs: bool = False
    """`LossInput.reference_logprobs`: of the model that training started from."""
    reference_scores: bool = False
    """`Scores.reference_logprobs`, too; `reference_logprobs` must be set."""
    entropy: bool = False
    """`LossInput.entropy`, with gradient."""
    critic_network: bool = False
    """The critic has a network of its own, as large as the policy's."""
    teacher_logprobs: bool = False
    """`Scores.teacher_logprobs`."""
    teacher_steps: int = 1
    """Steps between copies of the policy's weights to the teacher."""
    teacher_divergence: bool = False
    """`LossInput.teacher_divergence` where `Credit.teacher_prompts` says; `teacher_logprobs` must be set."""
    continuations: int = 0
    """Episodes that go on from each anchor; `Scores.continuations`."""
    continuation_turns: int = 0
    """Turns that each of them plays at most."""

    def teacher_copy(self, gradient_steps: int) -> bool:
        """Whether the teacher's weights must be kept beside the policy's, which takes so many steps per batch."""
        return self.teacher_logprobs and (self.teacher_steps > 1 or (self.teacher_divergence and gradient_steps > 1))


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """What models say of the sampled tokens, with the weights that sampled them, before credit is given."""

    values: PerTurn | None = None
    """Of the state before each token; where the algorithm has a critic."""
    teacher_logprobs: PerTurn | None = None
    """Of the sampled tokens, by the policy that `Algorithm.insertion` told more."""
    teacher_prompts: Sequence[Sequence[Sequence[np.ndarray | None]]] | None = None
    """What that policy read before each turn; None where it was told nothing. # int64 [prompt_length] each"""
    reference_logprobs: PerTurn | None = None
    """Of the sampled tokens, by the model that training started from."""
    continuations: Sequence[Sequence[Mapping[int, Sequence[Trajectory]]]] | None = None
    """By group, trajectory and anchor: whole episodes that share what came before it, none where they failed."""

    def of(self, group: int, trajectory: int) -> "Scores":
        """What models said of one trajectory: of every field its part, by turn (`continuations`: by anchor)."""
        whole = {field.name: getattr(self, field.name) for field in fields(self)}
        return Scores(**{name: None if part is None else part[group][trajectory]
                         for name, part in whole.items()})


@settings
class Algorithm:
    """Base of every algorithm. As it stands: GRPO, A_i = (R_i − mean R) / (std R + 1e-6) within the group."""

    uses_groups: ClassVar[bool] = True
    """Compares trajectories of one task, so that a group needs at least two."""
    max_generation_batches: ClassVar[int] = 1
    """Rollout batches that may be sampled to fill one training batch with groups that `keep` accepts."""

    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The importance ratio is clipped below at 1 − this."""
    clip_high: NonNegativeFloat = 0.2
    """The importance ratio is clipped above at 1 + this."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound c on the loss of a negative advantage A: at most −c A. None: no bound."""
    ratio: RatioLevel = "token"
    """Importance ratio of each token, or the geometric mean over its turn or sequence (GSPO)."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number; see `trainers.loss.aggregate`. A sequence is a trajectory."""
    aggregation_length: PositiveInt | None = None
    """The constant that `sequence_mean_token_sum_norm` divides by; only for that mode."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of KL(π‖π_ref) in the loss. 0: no reference model is needed."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """See `trainers.loss.kl`. k1 is none of them: its expected gradient in a loss is 0."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    mask_truncated: bool = False
    """Leave trajectories that were cut off out of the loss. They still count in their group's statistics."""

    @model_validator(mode="after")
    def _check_aggregation_length(self):
        if (self.aggregation == "sequence_mean_token_sum_norm") != (self.aggregation_length is not None):
            raise ValueError(f"aggregation {self.aggregation!r} with aggregation_length {self.aggregation_length}: set "
                             "aggregation_length exactly when aggregation is 'sequence_mean_token_sum_norm'")
        return self

    @property
    def needs(self) -> Needs:
        return Needs(reference_logprobs=self.kl_coefficient > 0, entropy=self.entropy_coefficient > 0)

    @property
    def frozen_steps(self) -> int:
        """Steps at the start of training in which the policy keeps its weights."""
        return 0

    def make_critic(self, policy: Policy, optimizer: "OptimizerSettings") -> "Critic | None":
        """What learns values beside `policy`; None for an algorithm without."""
        return None

    def anchors(self, trajectory: Trajectory, rng: np.random.Generator) -> list[int]:
        """Turns before which `needs.continuations` episodes branch off."""
        return []

    def insertion(self, trajectory: Trajectory, turn: int, step: int) -> Insertion | None:
        """What the teacher reads beside the prompt of a turn; None: it is not asked."""
        return None

    def keep(self, group: Group) -> bool:
        """Whether to train on the group. Here: some trajectory can be scored."""
        return any(trajectory.reward is not None for trajectory in group.trajectories)

    def reward(self, trajectory: Trajectory) -> float | None:
        """The return that advantages are made of; None where it cannot be scored."""
        return trajectory.reward

    def returns(self, group: Group) -> np.ndarray:
        """`reward` of each trajectory, NaN where None. Raises ValueError for one that is not finite. # [group_size]"""
        rewards = [self.reward(trajectory) for trajectory in group.trajectories]
        for reward, trajectory in zip(rewards, group.trajectories):
            if reward is not None and not math.isfinite(reward):
                raise ValueError(f"reward {reward} of a trajectory of task {trajectory.task.key!r}: it must be finite, "
                                 "or None where the trajectory cannot be scored")
        return np.array([np.nan if reward is None else reward for reward in rewards], dtype=np.float64)

    def credits(self, groups: Sequence[Group], values: Sequence[np.ndarray]) -> list[list[Credit]]:
        """One advantage per trajectory ([group_size] per group) for all its tokens. NaN excludes the trajectory."""
        return [[Credit.uniform(trajectory, 0.0 if np.isnan(value) else value,
                                excluded=bool(np.isnan(value)) or (self.mask_truncated and trajectory.truncated))
                 for trajectory, value in zip(group.trajectories, group_values, strict=True)]
                for group, group_values in zip(groups, values, strict=True)]

    def advantages(self, groups: Sequence[Group], scores: Scores | None = None,
                   step: int = 0) -> list[list[Credit]]:
        """Credit for each trajectory of each group of one batch. `scores` holds what models said of them, `step`
        counts updates from 0."""
        return self.credits(groups, [normalise(self.returns(group)) for group in groups])

    def policy_loss(self, tokens: LossInput) -> tuple[Tensor, Tensor]:
        """Loss that raises the probability of advantageous tokens, and where its clip acted. # [tokens], bool [tokens]
        """
        return clipped_surrogate(tokens.logprobs, tokens.behaviour_logprobs, tokens.advantages,
                                 clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip,
                                 ratio=self.ratio, sequence_index=tokens.trajectory_index, turn_index=tokens.turn_index)

    def entropy_weight(self, step: int) -> float:
        """Weight of the entropy bonus in a step, counted from 0."""
        return self.entropy_coefficient

    def further_terms(self, tokens: LossInput) -> dict[str, tuple[float, Tensor]]:
        """What else is added to the loss, under the name of its metric: a weight and this micro-batch's share."""
        return {}

    def loss(self, tokens: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        """policy_loss + kl_coefficient · KL − entropy_weight · entropy, aggregated over the batch, + further_terms; and
        metrics.

        Loss and metrics are this micro-batch's share: their sums over all micro-batches and ranks are the whole batch's
        loss and its means per token (`loss` and `policy_loss` by `aggregation`). Metrics carry no gradient.
        """
        policy_loss, clipped = self.policy_loss(tokens)
        total = policy_loss
        per_token = {"clip_fraction": clipped.to(policy_loss.dtype),
                     "behaviour_kl": kl(tokens.behaviour_logprobs, tokens.logprobs, "k3")}
        if self.kl_coefficient > 0:
            reference_logprobs = _given(tokens.reference_logprobs, "reference_logprobs", "kl_coefficient")
            per_token["kl"] = kl(tokens.logprobs, reference_logprobs, self.kl_estimator)
            total = total + self.kl_coefficient * per_token["kl"]
        if (entropy_weight := self.entropy_weight(tokens.step)) > 0:
            per_token["entropy"] = _given(tokens.entropy, "entropy", "entropy_coefficient")
            total = total - entropy_weight * per_token["entropy"]
        loss = self.aggregate(total, tokens)
        metrics = {"loss": loss, "policy_loss": self.aggregate(policy_loss, tokens)}
        metrics |= {name: aggregate(values, counts=tokens.counts) for name, values in per_token.items()}
        for name, (weight, term) in self.further_terms(tokens).items():
            loss = loss + weight * term
            metrics |= {"loss": loss, name: term}
        return loss, {name: value.detach() for name, value in metrics.items()}

    def aggregate(self, loss: Tensor, tokens: LossInput) -> Tensor:
        """Per-token loss [tokens] as this micro-batch's share of the batch's loss."""
        return aggregate(loss, mode=self.aggregation, sequence_index=tokens.trajectory_index,
                         turn_index=tokens.turn_index, counts=tokens.counts, max_length=self.aggregation_length)


def faded(step: int, steps: int) -> float:
    """What is left, in a step counted from 0, of 1 that falls linearly: 1 − (step + 1) / steps, never below 0."""
    return max(1 - (step + 1) / steps, 0.0)


def _given(values: Tensor | None, name: str, setting: str) -> Tensor:
    if values is None:
        raise ValueError(f"{setting} is set but the batch holds no {name}; fill LossInput.{name} as `needs` asks")
    return values
