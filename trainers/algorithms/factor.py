"""FACTOR: credit-conserving action-to-token allocation (arXiv 2608.07118).

Credit of actions (TAC). With b a baseline, V_0 = b, V_T = 0, V_t else a value head's in the state before turn t:

    A*_t = r_t + V_{t+1} − V_t,    Σ_t A*_t = R − b = A^seq;    in the first 10 steps A*_t = A^seq / T

The head learns from episodes that branch off at anchors: their mean outcome, or without any the episode's own.

Allocation to tokens (HTA). A teacher, the policy that reads what the environment will answer, gives
Δ_j = log π_T − log π_b (its prompt ends as SERL's does; the authors' is unpublished):

    ω_j = (1 − η_k) + η_k L softmax_j(sgn(A*_t) clip(Δ_j, ±3) / τ),    C_j = ω_j A*_t on the tokens of action t

    L = mean over actions of the mean over its tokens of the clipped surrogate with C
        + mean over the other sampled tokens of the clipped surrogate with A^seq
        + λ_k · mean over action tokens of KL(π_T‖π)

η_k = 0.7 max(1 − k/50, 0) from step k = 11, λ_k = max(1 − k/50, 0).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from agents.models import Policy
from agents.trajectory import Group, Trajectory
from trainers.action_credit import (
    anchor_targets,
    choose_anchors,
    hindsight_weights,
    standardise,
    temporal_difference_credit,
)
from trainers.algorithms.base import Algorithm, Needs, Scores, faded
from trainers.credit import Credit, leave_one_out
from trainers.loss import LossInput, aggregate
from trainers.settings import settings
from trainers.teacher import Insertion, feedback
from trainers.value_head import ValueHeadCritic, ValueHeadSettings


@settings
class FACTOR(Algorithm):
    """Advantage = what an action changed in the expected outcome, shared among its tokens in hindsight."""

    aggregation: Literal["turn_mean_token_mean"] = "turn_mean_token_mean"
    """Of the actions' tokens; the others always count one by one."""
    aggregation_length: None = None
    """Of another aggregation."""
    outcome: Literal["reward", "success", "score"] = "reward"
    """R: the return, or what the environment reports at the end."""
    baseline: Literal["leave_one_out", "standardised", "none"] = "leave_one_out"
    """b: the mean of the group's others (ALFWorld); R in the group's standard deviations with b = 0 (WebShop); b = 0
    (ScienceWorld)."""
    warmup_steps: NonNegativeInt = 10
    """Steps at the start in which the value head only learns."""
    decay_steps: PositiveInt = 50
    """Step at which allocation and KL term have come down to 0."""
    allocation: float = Field(default=0.7, ge=0, lt=1)
    """η at step 0: how much of an action's credit goes where hindsight says."""
    allocation_temperature: PositiveFloat = 1.0
    """τ."""
    gap_clip: PositiveFloat = 3.0
    teacher_kl_coefficient: NonNegativeFloat = 1.0
    """λ at step 0."""
    continuations: PositiveInt = 4
    """Episodes from each anchor."""
    continuation_turns: PositiveInt = 15
    """Turns that each of them plays at most."""
    value_head: ValueHeadSettings = ValueHeadSettings()

    @property
    def needs(self) -> Needs:
        return replace(super().needs, teacher_logprobs=self.allocation > 0 or self.teacher_kl_coefficient > 0,
                       teacher_divergence=self.teacher_kl_coefficient > 0, continuations=self.continuations,
                       continuation_turns=self.continuation_turns)

    def make_critic(self, policy: Policy, optimizer) -> ValueHeadCritic:
        return ValueHeadCritic(policy, self.value_head, optimizer)

    def anchors(self, trajectory: Trajectory, rng: np.random.Generator) -> list[int]:
        return choose_anchors(len(trajectory.turns), rng)

    def insertion(self, trajectory: Trajectory, turn: int, step: int) -> Insertion | None:
        asked = self._share(step) > 0 or self._teacher_weight(step) > 0
        return feedback(trajectory.turns[turn].observation) if asked else None

    def reward(self, trajectory: Trajectory) -> float | None:
        return None if trajectory.reward is None else float(getattr(trajectory, self.outcome))

    def advantages(self, groups: Sequence[Group], scores: Scores | None = None,
                   step: int = 0) -> list[list[Credit]]:
        """As in the base. Without `scores.values` each is 0, without `scores.teacher_logprobs` tokens share equally."""
        scores, result = scores or Scores(), []
        for g, group in enumerate(groups):
            returns = self.returns(group)
            outcomes = self._counted(returns, returns)
            whole = leave_one_out(outcomes) if self.baseline == "leave_one_out" else outcomes
            (uniform,) = self.credits([group], [whole])
            result.append([credit if credit.excluded or not trajectory.turns else replace(
                credit, advantages=self._allocated(trajectory, outcomes[i], whole[i], scores.of(g, i), step),
                extra=self._targets(trajectory, outcomes[i], returns, scores.of(g, i)),
                teacher_prompts=tuple(scores.of(g, i).teacher_prompts or ()))
                for i, (trajectory, credit) in enumerate(zip(group.trajectories, uniform))])
        return result

    def _counted(self, returns: np.ndarray, among: np.ndarray) -> np.ndarray:
        """Returns as outcomes are counted, those of the group being `among`."""
        return standardise(returns, among) if self.baseline == "standardised" else returns

    def _allocated(self, trajectory: Trajectory, outcome: float, whole: float, scores: Scores,
                   step: int) -> tuple[np.ndarray, ...]:
        turns = trajectory.turns
        values = [turn[0] if len(turn) else 0.0 for turn in scores.values or [()] * len(turns)]
        credits = temporal_difference_credit(np.array(values, np.float64), outcome, baseline=outcome - whole)
        if step < self.warmup_steps:
            credits = np.full(len(turns), whole / len(turns))
        advantages = tuple(np.full(len(turn.response_ids), whole, np.float32) for turn in turns)
        teacher = scores.teacher_logprobs or [turn.logprobs for turn in turns]
        for turn, credit, tokens, told in zip(turns, credits, advantages, teacher):
            at = slice(*turn.action_span)
            tokens[at] = credit * hindsight_weights(told[at] - turn.logprobs[at], credit, share=self._share(step),
                                                    clip=self.gap_clip, temperature=self.allocation_temperature)
        return advantages

    def _targets(self, trajectory: Trajectory, outcome: float, returns: np.ndarray,
                 scores: Scores) -> dict[str, tuple[np.ndarray, ...]]:
        branched = {turn: self._counted(self.returns(Group(trajectories=branches)), returns)
                    for turn, branches in (scores.continuations or {}).items()}
        return anchor_targets(trajectory.turns, branched, outcome)

    def aggregate(self, loss: Tensor, tokens: LossInput) -> Tensor:
        """The mean over actions of their tokens' mean, and the mean over the other tokens."""
        return aggregate(loss, tokens.action_mask, "turn_mean_token_mean", sequence_index=tokens.trajectory_index,
                         turn_index=tokens.turn_index, counts=tokens.counts.in_actions) \
            + aggregate(loss, ~tokens.action_mask, counts=tokens.counts.outside_actions)

    def further_terms(self, tokens: LossInput) -> dict[str, tuple[float, Tensor]]:
        weight = self._teacher_weight(tokens.step)
        if tokens.teacher_divergence is None or weight == 0:
            return {}
        return {"teacher_kl": (weight, aggregate(tokens.teacher_divergence, tokens.action_mask,
                                                 counts=tokens.counts.in_actions))}

    def _share(self, step: int) -> float:
        return self.allocation * faded(step, self.decay_steps) if step >= self.warmup_steps else 0.0

    def _teacher_weight(self, step: int) -> float:
        return self.teacher_kl_coefficient * faded(step, self.decay_steps)
