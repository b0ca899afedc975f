"""What a teacher's log-probabilities say of each token, and how far to trust them: pure functions on flat arrays."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from agents.trajectory import Group
from trainers.credit import EPSILON, Credit, equal
from trainers.loss import MAX_LOG_RATIO

TINY = 1e-8
"""Added to standard deviations, variances and sums of weights before dividing by them."""


class TokenTable:
    """Where the sampled tokens of a batch stand, those of trajectories without a return left out."""

    def __init__(self, groups: Sequence[Group], returns: Sequence[np.ndarray]):
        """`returns` of each group's trajectories; NaN where there is none."""
        self.places = [(g, i, t) for g, group in enumerate(groups) for i, trajectory in enumerate(group.trajectories)
                       if not np.isnan(returns[g][i]) for t in range(len(trajectory.turns))]
        self._turns = [groups[g].trajectories[i].turns[t] for g, i, t in self.places]
        self.lengths = [len(turn.response_ids) for turn in self._turns]
        self.turn_group = np.array([g for g, _, _ in self.places], np.int64)
        """Group of each turn. # int64 [turns]"""
        self.turn_return = np.array([returns[g][i] for g, i, _ in self.places], np.float64)
        """Return of each turn's trajectory. # float64 [turns]"""
        self.turn = np.repeat(np.arange(len(self.places)), self.lengths)
        """Turn of each token. # int64 [tokens]"""
        self.group = self.turn_group[self.turn]
        """Group of each token. # int64 [tokens]"""

    def flat(self, values: Sequence[Sequence[Sequence[np.ndarray]]]) -> np.ndarray:
        """Something of each group, trajectory and turn as one array. # float64 [tokens]"""
        return np.concatenate([np.zeros(0), *(values[g][i][t] for g, i, t in self.places)])

    def behaviour(self) -> np.ndarray:
        """Log-probabilities of the policy that sampled. # float64 [tokens]"""
        return np.concatenate([np.zeros(0), *(turn.logprobs for turn in self._turns)])

    def of_turns(self, values: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
        """A number for each group, trajectory and turn as one array. # [turns]"""
        return np.array([values[g][i][t] for g, i, t in self.places])

    def put(self, values: np.ndarray, credits: Sequence[Sequence[Credit]]) -> list[list[Credit]]:
        """The credits with these advantages, one per token of the table."""
        turns = {place: part.astype(np.float32)
                 for place, part in zip(self.places, np.split(values, np.cumsum(self.lengths)))}
        return [[replace(credit, advantages=tuple(turns.get((g, i, t), turn)
                                                  for t, turn in enumerate(credit.advantages)))
                 for i, credit in enumerate(members)] for g, members in enumerate(credits)]


def segment_mean(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """At every place, the mean of `values` over the places of equal `index`. # same shape as values"""
    return (np.bincount(index, values) / np.maximum(np.bincount(index), 1))[index]


def centred(logprobs: np.ndarray, turn: np.ndarray, *, over_batch: bool = False) -> np.ndarray:
    """Log-probabilities less their mean in the turn, in standard deviations of the turn or of the batch. # [tokens]"""
    gaps = logprobs - segment_mean(logprobs, turn)
    variance = segment_mean(gaps**2, np.zeros_like(turn) if over_batch else turn)
    return gaps / (np.sqrt(variance) + TINY)


def whitened(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Mean 0 and variance 1 over the tokens of each group. # [tokens]"""
    gaps = values - segment_mean(values, group)
    return gaps / np.sqrt(segment_mean(gaps**2, group) + TINY)


def sigmoid(values: np.ndarray) -> np.ndarray:
    """1 / (1 + e^−x), without overflow."""
    return np.exp(-np.logaddexp(0.0, -values))


def gate_differences(logits: np.ndarray, returns: np.ndarray, index: np.ndarray) -> np.ndarray:
    """d at every unit: the mean return of those of its `index` that the teacher prefers (weights α = σ(logits)), less
    that of the others (weights 1 − α). Exactly 0 where the unit is alone, or α or the return is the same for all.
    # float64 [units]"""
    result = np.zeros(len(logits))
    for members in equal(index):
        if len(members) > 1 and np.ptp(returns[members]) > 0 and np.ptp(logits[members]) > 0:
            liked, others = sigmoid(logits[members]), sigmoid(-logits[members])
            result[members] = (liked @ returns[members] / (liked.sum() + TINY)
                               - others @ returns[members] / (others.sum() + TINY))
    return result


def preference_gate(logprobs: np.ndarray, turn: np.ndarray, returns: np.ndarray, unit: np.ndarray, *,
                    sharpness: float, temperature: float, standardise: bool = False) -> np.ndarray:
    """m = σ(sharpness · d) of each token, d that of its turn among those of its `unit`. # float64 [tokens]

    `returns` and `unit` are of turns, some of which may have no token; they take no part. `standardise` divides every d
    by the standard deviation of all.
    """
    turns, first = np.unique(turn, return_index=True)
    means = segment_mean(logprobs, turn)[first]
    differences = gate_differences((means - means.mean()) / temperature, returns[turns], unit[turns])
    spread = differences.std() if standardise else 1.0
    gate = np.full(len(returns), 0.5)
    gate[turns] = sigmoid(sharpness * differences / (spread or 1.0))
    return gate[turn]


def return_spreads(returns: Sequence[np.ndarray]) -> np.ndarray:
    """Standard deviation (ddof=1) of each group's returns that are not NaN, 0 of a single one. # float64 [groups]"""
    known = [values[~np.isnan(values)] for values in returns]
    return np.array([values.std(ddof=1) if len(values) > 1 else 0.0 for values in known])


def advantage_spreads(credits: Sequence[Sequence[Credit]]) -> np.ndarray:
    """The largest advantage of each group, whatever its sign. # float64 [groups]"""
    return np.array([max((float(np.abs(turn).max(initial=0)) for credit in members for turn in credit.advantages),
                         default=0.0) for members in credits])


def bounds(spreads: np.ndarray, returns: Sequence[np.ndarray], clip: float, *, adaptive: bool) -> np.ndarray:
    """The bound of each group's signal: 0 where its spread is (below 1e-6) or it has but one return that is not NaN,
    `clip` elsewhere, and if `adaptive` less in proportion where the spread is below the median of the others.
    # float64 [groups]"""
    alive = (spreads >= EPSILON) & [np.count_nonzero(~np.isnan(values)) > 1 for values in returns]
    if not adaptive or not alive.any():
        return clip * alive
    return clip * alive * np.minimum(1.0, spreads / np.median(spreads[alive]))


def multiplied(advantages: np.ndarray, gap: np.ndarray, strength: float, clip: float) -> np.ndarray:
    """A ((1 − strength) + strength · clip(e^{sgn(A) gap}, 1 ± clip)): no sign changes. # [tokens]"""
    ratio = np.exp(np.clip(np.sign(advantages) * gap, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return advantages * ((1 - strength) + strength * np.clip(ratio, 1 - clip, 1 + clip))
