"""Group-in-Group Policy Optimisation (arXiv 2505.10978): GRPO, and beside it a comparison of turns in the same state.

    A_{i,t} = A_i + w A^S_{i,t}                        A_i: GRPO's, or that of the algorithm it is composed with
    A^S_{i,t} = (R_{i,t} − mean R) / (std R + 1e-6)    over the turns of the group taken in the same state; alone: 0
    R_{i,t} = Σ_{k≥t} γ^{k−t} r_{i,k} − p [turn t was invalid]

`normalise_by_std = false` divides neither by its standard deviation (the paper's mean_norm, used on WebShop).
"""

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat

from agents.trajectory import Group, Trajectory
from trainers.algorithms.base import Scores
from trainers.algorithms.grpo import GRPO
from trainers.algorithms.modifier import Modifier
from trainers.credit import Credit, by_trajectory, normalise_within
from trainers.settings import settings


@settings
class AnchorStates(Modifier):
    """Adds to each turn's advantage how its return compares with those of other turns in the same state."""

    normalise_by_std: bool = True
    """Divide by standard deviations, over trajectories and over turns."""
    step_weight: NonNegativeFloat = 1.0
    """w: weight of the comparison of turns."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.95
    """γ: discount per turn of the rewards to come."""
    invalid_penalty: NonNegativeFloat = 0.1
    """p: taken from the return of a turn whose action was invalid, in the comparison of turns alone."""
    similarity: Annotated[float, Field(gt=0, le=1)] | None = None
    """None: states are the same where `Turn.state_key` is. Otherwise where the observations that the agent acted on
    are alike to at least this ratio (difflib's; the paper takes 0.95)."""

    def advantages(self, groups: Sequence[Group], scores: Scores | None = None,
                   step: int = 0) -> list[list[Credit]]:
        credits = super().advantages(groups, scores, step)
        return [[credit.plus(self.step_weight * values) for credit, values in zip(members, self.step_advantages(group))]
                for group, members in zip(groups, credits)]

    def step_advantages(self, group: Group) -> list[np.ndarray]:
        """A^S. # float64 [turns] each"""
        returns = self.step_returns(group)
        values = normalise_within(np.concatenate([np.zeros(0), *returns]), anchors(group, self.similarity),
                                  divide_by_std=self.normalise_by_std)
        return by_trajectory(group.trajectories, values)

    def states(self, group: Group) -> list[np.ndarray]:
        """`anchors` of each trajectory. # int64 [turns] each"""
        return by_trajectory(group.trajectories, anchors(group, self.similarity))

    def step_returns(self, group: Group) -> list[np.ndarray]:
        """R_{i,t} of each trajectory; NaN where it has no return. # float64 [turns] each"""
        return [np.full(len(trajectory.turns), np.nan) if np.isnan(total)
                else returns_to_go(trajectory, total, self.gamma)
                - self.invalid_penalty * np.array([not turn.valid for turn in trajectory.turns])
                for trajectory, total in zip(group.trajectories, self.returns(group))]


@settings
class GiGPO(AnchorStates, GRPO):
    """Advantage over the group's other trajectories, and over its other turns in the same state."""


def returns_to_go(trajectory: Trajectory, total: float, gamma: float) -> np.ndarray:
    """Discounted sum of the rewards from each turn on. What `total` holds beyond the turns' own rewards (a length
    penalty) comes with the last turn. # float64 [turns]"""
    rewards = [turn.reward for turn in trajectory.turns]
    result, following = np.zeros(len(rewards)), total - sum(rewards)
    for t in reversed(range(len(rewards))):
        discount = gamma if t < len(rewards) - 1 else 1.0
        result[t] = following = rewards[t] + discount * following
    return result


def anchors(group: Group, similarity: float | None = None) -> np.ndarray:
    """A number for each turn, trajectory by trajectory; equal where the agent was in the same state.

    A turn without a state key (with `similarity`: that answers an empty observation) shares its state with no other.
    # int64 [turns of the group]
    """
    if similarity is None:
        states = [turn.state_key for trajectory in group.trajectories for turn in trajectory.turns]
        numbers = {state: number for number, state in enumerate(dict.fromkeys(states))}
    else:
        states = [text for trajectory in group.trajectories if trajectory.turns
                  for text in (trajectory.first_observation, *(turn.observation for turn in trajectory.turns[:-1]))]
        numbers = _cluster(states, similarity)
    return np.array([numbers[state] if state else -1 - place for place, state in enumerate(states)], np.int64)


def _cluster(texts: Sequence[str], similarity: float) -> dict[str, int]:
    """Each text joins the first earlier state whose first text it is like, else begins a new one."""
    numbers: dict[str, int] = {}
    firsts: list[str] = []
    for text in dict.fromkeys(texts):
        matcher = SequenceMatcher(None, b=text, autojunk=False)
        for number, first in enumerate(firsts):
            matcher.set_seq1(first)
            # The first two are upper bounds of the third, and cheap.
            if all(ratio() >= similarity for ratio in (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)):
                numbers[text] = number
                break
        else:
            numbers[text] = len(firsts)
            firsts.append(text)
    return numbers
