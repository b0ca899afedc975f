"""A teacher's signal per token: centring, whitening, the gate, and its multiplicative form."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainers.algorithms.groups import group, played, quickly
from trainers.algorithms import GRPO
from trainers.shaping import (
    TokenTable,
    advantage_spreads,
    bounds,
    centred,
    gate_differences,
    multiplied,
    preference_gate,
    return_spreads,
    segment_mean,
    sigmoid,
    whitened,
)

numbers = st.floats(-30, 0)
tokens = st.lists(st.tuples(numbers, st.integers(0, 3)), min_size=1, max_size=30).map(
    lambda pairs: (np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])))


def test_worked_by_hand():
    # Turn 0: −1, −3, mean −2, std 1. Turn 1: −4 alone. Turn 2: −1, −1, −4, mean −2, std √2.
    logprobs, turn = np.array([-1.0, -3, -4, -1, -1, -4]), np.array([0, 0, 1, 2, 2, 2])
    q = centred(logprobs, turn)
    assert q == pytest.approx([1, -1, 0, 0.70711, 0.70711, -1.41421], abs=1e-4)
    # Over the batch: (1 + 1 + 0 + 1 + 1 + 4) / 6, so σ = √(8/6).
    assert centred(logprobs, turn, over_batch=True) == pytest.approx(np.array([1, -1, 0, 1, 1, -2]) / (8 / 6) ** 0.5)
    assert whitened(np.array([1.0, 3.0, 5.0]), np.array([0, 0, 1])) == pytest.approx([-1, 1, 0])
    assert segment_mean(np.array([1.0, 5.0, 3.0]), np.array([0, 2, 0])).tolist() == [2.0, 5.0, 2.0]


@given(tokens, st.booleans())
@quickly
def test_a1_a_turn_s_preferences_sum_to_zero(some, over_batch):
    logprobs, turn = some
    q = centred(logprobs, turn, over_batch=over_batch)
    assert np.bincount(turn, q) == pytest.approx(np.zeros(turn.max() + 1), abs=1e-5)


@given(tokens, st.floats(-5, 5))
@quickly
def test_a9_adding_a_constant_to_a_turn_changes_no_preference(some, constant):
    logprobs, turn = some
    moved = logprobs + constant * (turn == turn[0])
    # Where all tokens of a turn are equal, rounding is all that there is to divide by.
    for a, b, spread in zip(centred(logprobs, turn), centred(moved, turn),
                            segment_mean((logprobs - segment_mean(logprobs, turn)) ** 2, turn)):
        assert spread < 1e-6 or a == pytest.approx(b, abs=1e-4)


@given(tokens)
@quickly
def test_a12_the_whitened_signal_has_mean_zero_in_each_group(some):
    values, group_of = some
    z = whitened(values, group_of)
    assert segment_mean(z, group_of) == pytest.approx(np.zeros(len(z)), abs=1e-5)
    assert (segment_mean(z**2, group_of) <= 1 + 1e-6).all()


units = st.lists(st.tuples(st.floats(-5, 5), st.floats(-10, 10)), min_size=1, max_size=12).map(
    lambda pairs: (np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])))


@given(units)
@quickly
def test_a3_the_gate_s_difference_is_a_covariance(some):
    logits, returns = some
    alpha = sigmoid(logits)
    result = gate_differences(logits, returns, np.zeros(len(logits), np.int64))
    if len(logits) > 1 and np.ptp(logits) > 0:
        covariance = np.mean((alpha - alpha.mean()) * (returns - returns.mean()))
        assert result == pytest.approx(covariance / (alpha.mean() * (1 - alpha.mean())), abs=1e-5)


@given(units, st.floats(-5, 5))
@quickly
def test_a3_it_is_zero_alone_and_where_returns_or_preferences_are_the_same(some, constant):
    logits, returns = some
    everyone, nobody = np.zeros(len(logits), np.int64), np.arange(len(logits))
    for arguments in ((logits, returns, nobody), (logits, 0 * returns + constant, everyone),
                      (0 * logits + constant, returns, everyone)):
        assert gate_differences(*arguments).tolist() == [0.0] * len(logits)


def test_a_gate_worked_by_hand():
    # α of logits ±ln 3: ¾ and ¼; returns 1 and 0: liked ¾/1, others ¼/1, so ½. The third is alone.
    result = gate_differences(np.log([3, 1 / 3, 5]), np.array([1.0, 0.0, 1.0]), np.array([0, 0, 1]))
    assert result == pytest.approx([0.5, 0.5, 0.0])


def test_a_gate_per_token_worked_by_hand():
    # Turn means ln 3, −ln 3 and (turn 3) 0, so mean 0; turn 2 has no token. Unit 0: d = ½ as above; unit 1 alone: 0.
    logprobs, turn = np.log([9, 1, 1 / 3, 1]), np.array([0, 0, 1, 3])
    arguments = logprobs, turn, np.array([1.0, 0.0, 5.0, 1.0]), np.array([0, 0, 0, 1])
    gate = preference_gate(*arguments, sharpness=2.0, temperature=1.0)
    assert gate == pytest.approx([sigmoid(1.0), sigmoid(1.0), sigmoid(1.0), 0.5])
    # Standardised: d = ½, ½ and 0 have a standard deviation of √2/6.
    gate = preference_gate(*arguments, sharpness=2.0, temperature=1.0, standardise=True)
    assert gate == pytest.approx([sigmoid(1 / (2**0.5 / 6))] * 3 + [0.5])
    # At temperature 2, α = σ(±ln 3 / 2) = .63397, .36603: d is their difference.
    gate = preference_gate(*arguments, sharpness=2.0, temperature=2.0)
    assert gate[0] == pytest.approx(sigmoid(2 * 0.26795), abs=1e-5)


def test_bounds_worked_by_hand():
    # The median of .5, 1 and 4 (a spread of 0 is none, nor is that of a single return) is 1.
    spreads, returns = np.array([0.5, 0.0, 1.0, 4.0, 9.0]), [np.zeros(2)] * 4 + [np.array([1.0, np.nan])]
    assert bounds(spreads, returns, 0.2, adaptive=True) == pytest.approx([0.1, 0, 0.2, 0.2, 0])
    assert bounds(spreads, returns, 0.2, adaptive=False) == pytest.approx([0.2, 0, 0.2, 0.2, 0])
    assert bounds(np.zeros(2), returns[:2], 0.2, adaptive=True).tolist() == [0, 0]


def test_how_far_a_group_s_returns_and_advantages_spread():
    # 1, 0 and 1: standard deviation (ddof 1) .57735. The largest advantage of these counts whatever its sign.
    spreads = return_spreads([np.array([1.0, np.nan, 0.0, 1.0]), np.array([3.0, np.nan]), np.zeros(0)])
    assert spreads == pytest.approx([0.57735, 0, 0], abs=1e-5)
    some = group(played(1.0, (2, 0, 1)), played(0.0, (1,)), played(0.0, (1,)))
    assert advantage_spreads([GRPO().advantages([some])[0], []]) == pytest.approx([1.1547, 0], abs=1e-4)


@pytest.mark.parametrize("value", [-1e4, -40.0, 0.0, 40.0, 1e4])
def test_the_sigmoid_neither_overflows_nor_warns(value):
    assert sigmoid(np.array([value]))[0] == pytest.approx(1 / (1 + np.exp(min(700, -value))))


def test_a_gate_of_extreme_preferences_is_finite():
    assert np.isfinite(gate_differences(np.array([1e4, -1e4]), np.array([0.0, 1.0]), np.zeros(2, np.int64))).all()


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-100, 100)), min_size=1), st.floats(0, 1), st.floats(0, 1))
@quickly
def test_the_multiplicative_form_keeps_signs_and_is_bounded(pairs, strength, clip):
    advantages, gap = (np.array(column) for column in zip(*pairs))
    result = multiplied(advantages, gap, strength, clip)
    assert (np.abs(result - advantages) <= strength * clip * np.abs(advantages) + 1e-9).all()
    assert (result * advantages >= 0).all()
    assert multiplied(advantages, gap, 0.0, clip).tolist() == advantages.tolist()


def test_the_multiplicative_form_worked_by_hand():
    # e^.1 = 1.10517 for A > 0 and e^−.1 = .90484 for A < 0, at strength ½; e^1 is clipped to 1.2, e^−1 to .8.
    result = multiplied(np.array([1.0, -2.0, 1.0, -1.0, 0.0]), np.array([0.1, 0.1, 1.0, 1.0, 1.0]), 0.5, 0.2)
    assert result == pytest.approx([1.052585, -1.90484, 1.1, -0.9, 0.0], abs=1e-5)


def test_the_table_leaves_out_what_cannot_be_scored_and_puts_the_rest_back():
    some = group(played(1.0, (2, 0, 1)), played(None, (3,)), played(0.0, (1,)))
    credits = GRPO().advantages([some])
    table = TokenTable([some], [some.rewards])
    assert table.turn.tolist() == [0, 0, 2, 3] and table.turn_group.tolist() == [0, 0, 0, 0]
    assert table.turn_return.tolist() == [1, 1, 1, 0] and table.behaviour().tolist() == [0, 0, 0, 0]
    assert table.of_turns([[np.array([5, 6, 7]), np.array([np.nan]), np.array([8])]]).tolist() == [5, 6, 7, 8]
    flat = table.flat([[credit.advantages for credit in members] for members in credits])
    assert flat == pytest.approx([0.70711] * 3 + [-0.70711], abs=1e-4)
    changed = table.put(np.arange(4.0), credits)[0]
    assert [turn.tolist() for turn in changed[0].advantages] == [[0, 1], [], [2]]
    assert changed[1].excluded and changed[1].advantages[0].tolist() == [0, 0, 0]
    assert changed[2].advantages[0].tolist() == [3] and changed[2].advantages[0].dtype == np.float32
