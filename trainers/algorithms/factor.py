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
from typing import Any, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from agents.models import Policy
from agents.trajectory import Group, Trajectory
from trainers.action_credit import choose_anchors, hindsight_weights, temporal_difference_credit
from trainers.algorithms.base import Algorithm, Needs, Scores
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
        if trajectory.reward is None or self.outcome == "reward":
            return trajectory.reward
        return float(trajectory.success if self.outcome == "success" else trajectory.score)

    def advantages(self, groups: Sequence[Group], scores: Scores | None = None,
                   step: int = 0) -> list[list[Credit]]:
        """As in the base. Without `scores.values` each is 0, without `scores.teacher_logprobs` tokens share equally."""
        scores, result = scores or Scores(), []
        for g, group in enumerate(groups):
            outcomes, mean, spread = self._outcomes(group)
            whole = leave_one_out(outcomes) if self.baseline == "leave_one_out" else outcomes
            (uniform,) = self.credits([group], [whole])
            result.append([credit if credit.excluded or not trajectory.turns else replace(
                credit, advantages=self._advantages(trajectory, outcomes[i], whole[i], scores, (g, i), step),
                extra=self._targets(trajectory, outcomes[i], mean, spread, scores, (g, i)),
                teacher_prompts=tuple(_at(scores.teacher_prompts, (g, i)) or ()))
                for i, (trajectory, credit) in enumerate(zip(group.trajectories, uniform))])
        return result

    def _outcomes(self, group: Group) -> tuple[np.ndarray, float, float]:
        """Outcomes, and the mean and spread that they are counted in. # [group_size]"""
        returns = self.returns(group)
        scored = returns[~np.isnan(returns)]
        if self.baseline != "standardised" or not len(scored):
            return returns, 0.0, 1.0
        spread = scored.std() + 1e-8 if scored.std() >= 1e-6 else np.inf
        return (returns - scored.mean()) / spread, float(scored.mean()), float(spread)

    def _advantages(self, trajectory: Trajectory, outcome: float, whole: float, scores: Scores, place: tuple[int, int],
                    step: int) -> tuple[np.ndarray, ...]:
        turns, values, teacher = trajectory.turns, _at(scores.values, place), _at(scores.teacher_logprobs, place)
        before = [float(values[t][0]) if values and len(values[t]) else 0.0 for t in range(len(turns))]
        credits = temporal_difference_credit(np.array(before), outcome, baseline=outcome - whole)
        if step < self.warmup_steps:
            credits = np.full(len(turns), whole / len(turns))
        advantages = [np.full(len(turn.response_ids), whole, np.float32) for turn in turns]
        for t, (turn, credit) in enumerate(zip(turns, credits)):
            at = slice(*turn.action_span)
            gap = (teacher[t] if teacher else turn.logprobs)[at] - turn.logprobs[at]
            advantages[t][at] = credit * hindsight_weights(gap, credit, share=self._share(step), clip=self.gap_clip,
                                                           temperature=self.allocation_temperature)
        return tuple(advantages)

    def _targets(self, trajectory: Trajectory, outcome: float, mean: float, spread: float, scores: Scores,
                 place: tuple[int, int]) -> dict[str, tuple[np.ndarray, ...]]:
        """What the value head learns from, at the first token of each anchor's turn."""
        targets, weights = ([np.zeros(len(turn.response_ids), np.float32) for turn in trajectory.turns]
                            for _ in range(2))
        for turn, branches in (_at(scores.continuations, place) or {}).items():
            rewards = [reward for branch in branches if (reward := self.reward(branch)) is not None]
            targets[turn][:1] = np.mean([(reward - mean) / spread for reward in rewards] or outcome)
            weights[turn][:1] = 1.0
        return {"value_targets": tuple(targets), "value_weights": tuple(weights)}

    def aggregate(self, loss: Tensor, tokens: LossInput) -> Tensor:
        """The mean over actions of their tokens' mean, and the mean over the other tokens."""
        counts, actions = tokens.counts, tokens.action_mask
        return aggregate(loss, actions, "turn_mean_token_mean", sequence_index=tokens.trajectory_index,
                         turn_index=tokens.turn_index, counts=replace(counts, turns=counts.actions)) \
            + aggregate(loss, ~actions, counts=replace(counts, tokens=counts.tokens - counts.action_tokens))

    def loss(self, tokens: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super().loss(tokens)
        weight = self._teacher_weight(tokens.step)
        if tokens.teacher_divergence is None or weight == 0:
            return loss, metrics
        teacher_kl = aggregate(tokens.teacher_divergence, tokens.action_mask,
                               counts=replace(tokens.counts, tokens=tokens.counts.action_tokens))
        total = loss + weight * teacher_kl
        return total, {**metrics, "loss": total.detach(), "teacher_kl": teacher_kl.detach()}

    def _share(self, step: int) -> float:
        return self.allocation * self._decay(step) if step >= self.warmup_steps else 0.0

    def _teacher_weight(self, step: int) -> float:
        return self.teacher_kl_coefficient * self._decay(step)

    def _decay(self, step: int) -> float:
        return max(1 - (step + 1) / self.decay_steps, 0.0)


def _at(scores: Sequence[Sequence[Any]] | None, place: tuple[int, int]) -> Any:
    return scores[place[0]][place[1]] if scores is not None else None
