"""Credit of actions from differences of values, and its allocation to an action's tokens. Pure functions of FACTOR."""

import numpy as np


def temporal_difference_credit(values: np.ndarray, outcome: float, baseline: float) -> np.ndarray:
    """A_t = r_t + V_{t+1} − V_t with V_0 = `baseline`, V_T = 0 and r = `outcome` at the last action alone.

    `values` are V_t; the first is not used. The credits sum to outcome − baseline whatever the values. # [actions]
    """
    if not len(values):
        return np.zeros(0)
    values = np.concatenate([[baseline], np.asarray(values, np.float64)[1:], [outcome]])
    return values[1:] - values[:-1]


def hindsight_weights(gap: np.ndarray, credit: float, *, share: float, clip: float, temperature: float) -> np.ndarray:
    """ω_j = (1 − share) + share · L softmax_j(sgn(credit) clip(gap_j, ±clip) / temperature), of mean 1. # [tokens]

    `gap` is how much likelier each token is in hindsight: such tokens carry more of a positive credit, less of a
    negative one. A credit of 0 is shared equally.
    """
    scaled = np.sign(credit) * np.clip(np.asarray(gap, np.float64), -clip, clip) / temperature
    weights = np.exp(scaled - scaled.max(initial=-np.inf))
    return (1 - share) + share * len(gap) * weights / weights.sum()


def choose_anchors(actions: int, rng: np.random.Generator) -> list[int]:
    """Actions before which continuations begin: none of one, the middle of two or three, and of more one in each half.
    """
    if actions <= 1:
        return []
    half = actions // 2
    return [half] if actions < 4 else [int(rng.integers(half)), int(rng.integers(half, actions))]
