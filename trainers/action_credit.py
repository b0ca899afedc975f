"""Credit of actions from differences of values, and its allocation to an action's tokens. Pure functions of FACTOR."""

from collections.abc import Mapping, Sequence

import numpy as np

from agents.trajectory import Turn


def standardise(outcomes: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Outcomes less the mean of `among` (NaN is not of them), in its standard deviations (ddof 0, + 1e-8); 0 where that
    is below 1e-6. # same shape as outcomes"""
    scored = among[~np.isnan(among)]
    if not len(scored):
        return outcomes
    deviation = scored.std()
    return (outcomes - scored.mean()) / (deviation + 1e-8 if deviation >= 1e-6 else np.inf)


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


def anchor_targets(turns: Sequence[Turn], branched: Mapping[int, np.ndarray],
                   outcome: float) -> dict[str, tuple[np.ndarray, ...]]:
    """What a value head learns at the first token of each anchor's turn: the mean outcome of what branched off there,
    (NaN is none), without any the episode's own. As `value_targets`, with `value_weights` of 1 there.
    # float32 [response_length] each
    """
    targets, weights = ([np.zeros(len(turn.response_ids), np.float32) for turn in turns] for _ in range(2))
    for turn, outcomes in branched.items():
        known = outcomes[~np.isnan(outcomes)]
        targets[turn][:1] = known.mean() if len(known) else outcome
        weights[turn][:1] = 1.0
    return {"value_targets": tuple(targets), "value_weights": tuple(weights)}


def choose_anchors(actions: int, rng: np.random.Generator) -> list[int]:
    """Actions before which continuations begin: none of one, the middle of two or three, and of more one in each half.
    """
    if actions <= 1:
        return []
    half = actions // 2
    return [half] if actions < 4 else [int(rng.integers(half)), int(rng.integers(half, actions))]
