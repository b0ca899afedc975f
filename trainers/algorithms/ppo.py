"""Proximal Policy Optimisation with a critic (arXiv 1707.06347) and generalised advantage estimation (1506.02438).

    δ_j = r_j + γ V_{j+1} − V_j,   A_j = δ_j + γλ A_{j+1},   R_j = A_j + V_j          V and A are 0 after the last step

A step j is a token that the agent sampled, V_j the value of the state before it, and a turn's reward is that of its
last token; or a step is a turn, V_j the value before its first token, and its A that of all its tokens. What the
environment says is no step: it costs no discount, and credit passes over it. The critic learns R_j at the steps.

A cut-off ends an episode as the environment's own end does: its limits are part of the task, in evaluation too, and
nothing is earned behind them. So there is no bootstrap there; `mask_truncated` leaves such episodes out altogether.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from agents.models import Policy
from agents.trajectory import Group, Trajectory
from trainers.algorithms.base import Algorithm, Needs, Scores
from trainers.credit import Credit, normalise
from trainers.critic import CriticSettings, NetworkCritic
from trainers.settings import settings


@settings
class PPO(Algorithm):
    """Advantage = what came out against what a learnt critic expected, token by token or turn by turn."""

    uses_groups: ClassVar[bool] = False

    gae_over: Literal["token", "turn"] = "token"
    """What rewards, values and discounts are counted over."""
    discount: float = Field(default=1.0, ge=0, le=1)
    """γ, per step."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """λ: 1 trusts the returns alone, 0 the critic alone."""
    normalise_advantages: bool = True
    """Shift and scale them over the tokens of the batch to mean 0 and standard deviation 1."""
    critic: CriticSettings = CriticSettings()

    @property
    def needs(self) -> Needs:
        return replace(super().needs, critic_network=True)

    @property
    def frozen_steps(self) -> int:
        return self.critic.warmup_steps

    def make_critic(self, policy: Policy, optimizer) -> NetworkCritic:
        return NetworkCritic(policy, self.critic, optimizer)

    def advantages(self, groups: Sequence[Group], scores: Scores | None = None,
                   step: int = 0) -> list[list[Credit]]:
        """As in the base. Without `scores.values` every value is 0."""
        uniform = self.credits(groups, [self.returns(group) for group in groups])
        values = scores.values if scores and scores.values else [[None] * len(g.trajectories) for g in groups]
        credits = [[credit if credit.excluded else self._credit(trajectory, its_values)
                    for credit, trajectory, its_values in zip(group_credits, group.trajectories, group_values)]
                   for group_credits, group, group_values in zip(uniform, groups, values, strict=True)]
        return _normalised(credits) if self.normalise_advantages else credits

    def _credit(self, trajectory: Trajectory, values: Sequence[np.ndarray] | None) -> Credit:
        lengths = np.array([len(turn.response_ids) for turn in trajectory.turns], dtype=np.int64)
        ends, tokens = np.cumsum(lengths), lengths.sum()
        values = np.concatenate(values, dtype=np.float64) if values else np.zeros(tokens)
        rewards = np.zeros(1 + tokens)  # place 0 takes what came before any token
        np.add.at(rewards, ends, [turn.reward for turn in trajectory.turns])
        rewards[-1] += self.reward(trajectory) - rewards.sum()  # what no turn accounts for comes at the end
        steps, rewards = np.arange(tokens), rewards[1:]
        if self.gae_over == "turn":
            steps = (ends - lengths)[lengths > 0]
            rewards = np.add.reduceat(rewards, steps) if len(steps) else rewards
        advantages = generalised_advantages(rewards, values[steps], self.discount, self.gae_lambda)
        targets, weights = np.zeros(tokens), np.zeros(tokens)
        targets[steps], weights[steps] = advantages + values[steps], 1.0

        def by_turn(array: np.ndarray) -> tuple[np.ndarray, ...]:
            return tuple(np.split(array.astype(np.float32), ends)[:len(lengths)])
        return Credit(advantages=by_turn(np.repeat(advantages, np.diff(np.append(steps, tokens)))),
                      extra={"values": by_turn(values), "value_targets": by_turn(targets),
                             "value_weights": by_turn(weights)})


def generalised_advantages(rewards: np.ndarray, values: np.ndarray, discount: float, gae_lambda: float) -> np.ndarray:
    """A_j = δ_j + γλ A_{j+1} with δ_j = r_j + γ V_{j+1} − V_j; V and A are 0 behind the last step. # [steps]"""
    following = np.append(values[1:], 0.0)
    advantages, advantage = [], 0.0
    for delta in (rewards + discount * following - values)[::-1].tolist():
        advantage = delta + discount * gae_lambda * advantage
        advantages.append(advantage)
    return np.array(advantages[::-1], dtype=np.float64)


def _normalised(credits: list[list[Credit]]) -> list[list[Credit]]:
    kept = [turn for group in credits for credit in group if not credit.excluded for turn in credit.advantages]
    values = np.concatenate([np.zeros(0, np.float32), *kept])
    turns = iter(np.split(normalise(values).astype(np.float32), np.cumsum([len(turn) for turn in kept])))
    return [[credit if credit.excluded else replace(credit, advantages=tuple(next(turns) for _ in credit.advantages))
             for credit in group] for group in credits]
