"""What each sampled token is worth, and the group statistics that advantages are made of."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from agents.trajectory import Trajectory

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Credit:
    """An algorithm's verdict on one trajectory."""

    advantages: tuple[np.ndarray, ...]
    """One array per turn. # float32 [response_length] each"""
    excluded: bool = False
    """Left out of the loss: neither in its numerator nor in its denominators."""
    extra: Mapping[str, tuple[np.ndarray, ...]] = field(default_factory=dict)
    """What the algorithm's loss needs beside the advantages, one array per turn. # [response_length] each"""
    teacher_prompts: tuple[np.ndarray | None, ...] = ()
    """For `LossInput.teacher_divergence`: `Scores.teacher_prompts` of each turn. # int64 [prompt_length] each"""

    def __post_init__(self):
        if not all(np.isfinite(turn).all() for turn in self.advantages):
            raise ValueError("an advantage is NaN or infinite; a trajectory without one must be excluded")

    @classmethod
    def uniform(cls, trajectory: Trajectory, value: float, *, excluded: bool = False) -> "Credit":
        """The same advantage for every token of the trajectory."""
        return cls.per_turn(trajectory, [value] * len(trajectory.turns), excluded=excluded)

    @classmethod
    def per_turn(cls, trajectory: Trajectory, values: Sequence[float], *, excluded: bool = False) -> "Credit":
        """One advantage for all tokens of each turn. Raises ValueError unless there is one value per turn."""
        if len(values) != len(trajectory.turns):
            raise ValueError(f"{len(values)} advantages for {len(trajectory.turns)} turns; there must be one per turn")
        return cls(advantages=tuple(np.full(len(turn.response_ids), value, np.float32)
                                    for turn, value in zip(trajectory.turns, values)), excluded=excluded)

    def plus(self, values: Sequence[float]) -> "Credit":
        """With one more number per turn, or per token of it, added to the advantages. NaN adds nothing."""
        return replace(self, advantages=tuple(turn + np.nan_to_num(value).astype(np.float32)
                                              for turn, value in zip(self.advantages, values, strict=True)))


def normalise(values: np.ndarray, *, divide_by_std: bool = True, weights: np.ndarray | None = None) -> np.ndarray:
    """`values` minus their mean, divided by their standard deviation (ddof=1) + 1e-6.

    NaN is unscorable: it stays NaN and is in no statistic. Equal values give exactly 0, and so does a single one.
    `weights` are how often each value counts, e.g. a trajectory's turns. # float64 [group_size]
    """
    values = np.asarray(values, dtype=np.float64)
    weights = np.where(np.isnan(values), 0.0, np.ones_like(values) if weights is None else weights)
    members = values[weights > 0]
    _warn_if_alone(values)
    if len(members) == 0 or np.ptp(members) == 0:
        return np.where(np.isnan(values), np.nan, 0.0)
    total, filled = weights.sum(), np.nan_to_num(values)
    centred = values - (weights @ filled) / total
    if not divide_by_std:
        return centred
    return centred / (np.sqrt(weights @ np.nan_to_num(centred) ** 2 / (total - 1)) + EPSILON)


def normalise_within(values: np.ndarray, index: np.ndarray, *, divide_by_std: bool = True) -> np.ndarray:
    """`normalise` among the values of equal `index`; a value alone gives 0, without a warning. # float64 [values]"""
    result = np.where(np.isnan(values), np.nan, 0.0)
    scored = np.flatnonzero(~np.isnan(values))
    for members in (scored[places] for places in equal(index[scored])):
        if len(members) > 1:
            result[members] = normalise(values[members], divide_by_std=divide_by_std)
    return result


def equal(index: np.ndarray) -> list[np.ndarray]:
    """For each number in `index` the places where it stands. # int64 [places] each"""
    order = np.argsort(index, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(index[order])) + 1)


def by_trajectory(trajectories: Sequence[Trajectory], values: np.ndarray) -> list[np.ndarray]:
    """One number for each turn, in order, as an array for each trajectory. # [turns] each"""
    return np.split(values, np.cumsum([len(trajectory.turns) for trajectory in trajectories]))[:len(trajectories)]


def leave_one_out(values: np.ndarray) -> np.ndarray:
    """Each value minus the mean of the others. NaN, equal values and a single one as in `normalise`. # [group_size]"""
    values = np.asarray(values, dtype=np.float64)
    size = np.count_nonzero(~np.isnan(values))
    return normalise(values, divide_by_std=False) * (size / max(size - 1, 1))


def _warn_if_alone(values: np.ndarray) -> None:
    if np.count_nonzero(~np.isnan(values)) == 1:
        warnings.warn("a group has one scorable trajectory: nothing to compare it with, so its advantage is 0",
                      stacklevel=3)
