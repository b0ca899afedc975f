"""Credit of actions and its shares among their tokens: FACTOR's properties F1, F2, F5 to F7 and F10."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainers.algorithms.groups import quickly
from trainers.action_credit import choose_anchors, hindsight_weights, standardise, temporal_difference_credit


def test_credit_worked_by_hand():
    # b = .25, V = (unused), .5, .4, R = 1: .5 − .25, .4 − .5, 1 − .4; together 1 − .25.
    assert temporal_difference_credit(np.array([9.0, 0.5, 0.4]), 1.0, 0.25) == pytest.approx([0.25, -0.1, 0.6])
    assert temporal_difference_credit(np.array([9.0]), 1.0, 0.25) == pytest.approx([0.75])
    assert temporal_difference_credit(np.zeros(0), 1.0, 0.25).tolist() == []


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=12), st.floats(-9, 9), st.floats(-9, 9))
@quickly
def test_f1_credits_sum_to_the_outcome_less_the_baseline_whatever_the_values(values, outcome, baseline):
    credits = temporal_difference_credit(np.array(values), outcome, baseline)
    assert len(credits) == len(values) and np.isfinite(credits).all()
    assert credits.sum() == pytest.approx(outcome - baseline, abs=1e-9)


def test_outcomes_in_the_group_s_deviations_worked_by_hand():
    # 1 and 0 (the unscorable is not of them): mean ½, deviation ½ (ddof 0); so .75 is half of one above the mean.
    among = np.array([1.0, np.nan, 0.0])
    assert standardise(among, among) == pytest.approx([1.0, np.nan, -1.0], nan_ok=True)
    assert standardise(np.array([0.75]), among) == pytest.approx([0.5])
    # A deviation below 1e-6 is none; 5e-6 is one, and 1e-8 beside it.
    assert standardise(np.array([3.0]), np.array([1.0, 1.0 + 1e-7])).tolist() == [0.0]
    assert standardise(np.array([1e-5]), np.array([0.0, 1e-5]))[0] == pytest.approx(5e-6 / (5e-6 + 1e-8), rel=1e-6)
    assert standardise(np.array([np.nan, 2.0]), np.array([np.nan])).tolist()[1] == 2.0


gaps = st.lists(st.floats(-20, 20), min_size=1, max_size=9)
shares = st.floats(0, 0.9)


def weights(gap, credit, share):
    return hindsight_weights(np.array(gap), credit, share=share, clip=3.0, temperature=1.0)


def test_weights_worked_by_hand():
    # Gaps log 3 and 0: softmax 3/4, 1/4; share .5 of 2 tokens: .5 + .75, .5 + .25; for a negative credit the reverse.
    assert weights([np.log(3), 0.0], 2.0, 0.5) == pytest.approx([1.25, 0.75])
    assert weights([np.log(3), 0.0], -2.0, 0.5) == pytest.approx([0.75, 1.25])


def test_a_higher_temperature_shares_more_evenly():
    # Gaps 2 log 3 and 0 at τ = 2 are log 3 and 0: 3/4 and 1/4 again; at τ = 1 they are 9/10 and 1/10.
    options = {"credit": 1.0, "share": 0.5, "clip": 3.0}
    gap = np.array([2 * np.log(3), 0.0])
    assert hindsight_weights(gap, temperature=2.0, **options) == pytest.approx([1.25, 0.75])
    assert hindsight_weights(gap, temperature=1.0, **options) == pytest.approx([1.4, 0.6])


@given(gaps, st.sampled_from([-2.0, 0.5]), shares)
@quickly
def test_f2_weights_have_mean_one_and_a_floor(gap, credit, share):
    found = weights(gap, credit, share)
    assert found.mean() == pytest.approx(1.0)
    assert (found >= 1 - share - 1e-9).all()


@given(gaps, st.sampled_from([-2.0, 0.5]))
@quickly
def test_f5_without_a_share_every_token_counts_the_same(gap, credit):
    assert (weights(gap, credit, 0.0) == 1.0).all()


@given(gaps, shares)
@quickly
def test_a_credit_of_zero_is_shared_equally(gap, share):
    assert weights(gap, 0.0, share) == pytest.approx(np.ones(len(gap)))


@given(gaps, st.floats(0.1, 0.9))
@quickly
def test_f6_likelier_tokens_in_hindsight_carry_more_of_a_gain_and_less_of_a_loss(gap, share):
    order = np.argsort(np.clip(gap, -3, 3), kind="stable")
    assert (np.diff(weights(gap, 1.0, share)[order]) >= -1e-9).all()
    assert (np.diff(weights(gap, -1.0, share)[order]) <= 1e-9).all()


@given(gaps, st.sampled_from([-1.0, 1.0]), shares)
@quickly
def test_f7_no_weight_is_above_its_bound(gap, credit, share):
    length, top = len(gap), np.exp(6.0)
    assert weights(gap, credit, share).max() <= (1 - share) + share * length * top / (top + length - 1) + 1e-9


@given(st.integers(0, 40), st.integers(0, 99))
@quickly
def test_f10_anchors_are_none_the_middle_or_one_in_each_half(length, seed):
    found = choose_anchors(length, np.random.default_rng(seed))
    if length <= 1:
        assert found == []
    elif length < 4:
        assert found == [1]
    else:
        assert 0 <= found[0] < length // 2 <= found[1] < length
