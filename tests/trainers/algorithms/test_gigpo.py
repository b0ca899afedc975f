"""GiGPO: properties G1 to G3 on random groups, anchor states, and numbers worked by hand."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.trajectory import Trajectory, Turn
from tests.trainers.algorithms.groups import group, per_turn, played, quickly, random_groups, same
from trainers.algorithms import GRPO, GiGPO, PlanPO, find_algorithm
from trainers.algorithms.gigpo import anchors, returns_to_go
from trainers.settings import SettingsError, validate

pytestmark = pytest.mark.filterwarnings("ignore:a group has one scorable trajectory")


def test_a_turn_is_compared_with_the_turns_of_its_group_in_the_same_state():
    # States a-b-c (return 1) and a-b-d (return 0); γ .5. Returns to go: .25 .5 1 and 0 0 0.
    # a: ±.125 around .125, std (ddof 1) .25/√2, so ±.70711; b the same; c and d are alone: 0.
    # Between trajectories: 1 and 0, so ±.70711 too.
    both = group(played(1.0, (1, 1, 1), states="abc"), played(0.0, (1, 1, 1), states="abd"))
    (first, second), = per_turn(GiGPO(gamma=0.5), both)
    assert first == pytest.approx([1.41421, 1.41421, 0.70711], abs=1e-4)
    assert second == pytest.approx([-1.41421, -1.41421, -0.70711], abs=1e-4)
    # Only the mean subtracted: ±.5 between trajectories; ±.125 in a, ±.25 in b; the latter weighed by w = 2.
    (first, second), = per_turn(GiGPO(gamma=0.5, normalise_by_std=False, step_weight=2.0), both)
    assert first == pytest.approx([0.75, 1.0, 0.5])
    assert second == pytest.approx([-0.75, -1.0, -0.5])


@given(random_groups())
@quickly
def test_g1_without_the_step_weight_it_is_grpo(some):
    for options in ({}, {"normalise_by_std": False}, {"statistics_over": "row"}):
        assert same(GiGPO(step_weight=0.0, **options).advantages([some]), GRPO(**options).advantages([some]))


@given(random_groups())
@quickly
def test_g2_a_state_that_no_other_turn_shares_adds_nothing(some):
    states = iter(range(1000))
    alone = group(*(replace(t, turns=[replace(turn, state_key=str(next(states))) for turn in t.turns])
                    for t in some.trajectories))
    unnamed = group(*(replace(t, turns=[replace(turn, state_key="") for turn in t.turns]) for t in some.trajectories))
    assert same(GiGPO().advantages([alone, unnamed]), GRPO().advantages([alone, unnamed]))


@given(random_groups((0.0, 1.0, 0.25, None)), st.booleans())
@quickly
def test_g3_the_steps_advantages_sum_to_zero_in_each_anchor_state(some, normalise_by_std):
    algorithm = GiGPO(normalise_by_std=normalise_by_std)
    sums = {}
    for trajectory, values in zip(some.trajectories, algorithm.step_advantages(some)):
        assert np.isnan(values).all() == (trajectory.reward is None)
        for turn, value in zip(trajectory.turns, np.nan_to_num(values)):
            sums[turn.state_key] = sums.get(turn.state_key, 0.0) + value
    assert list(sums.values()) == pytest.approx([0.0] * len(sums), abs=1e-6)


@given(random_groups((1.0,)), st.floats(0, 1))
@quickly
def test_equal_returns_in_a_state_give_exactly_zero(some, gamma):
    last_only = group(*(replace(t, turns=t.turns[-1:]) for t in some.trajectories))
    assert np.concatenate([*GiGPO(gamma=gamma).step_advantages(last_only)]).tolist() == [0.0] * len(some.trajectories)


def test_states_of_different_tasks_are_different():
    won, lost = played(1.0, states="a"), played(0.0, states="a")
    assert per_turn(GiGPO(), group(won, won), group(lost, lost)) == [[[0.0], [0.0]]] * 2


def test_a_state_visited_twice_counts_twice():
    # γ 1: returns to go 1, 1 | 0, so mean 2/3 and std (ddof 1) .57735.
    twice = group(played(1.0, (1, 1), states="aa"), played(0.0, (1,), states="a"))
    first, second = GiGPO(gamma=1.0).step_advantages(twice)
    assert [*first, *second] == pytest.approx([0.57735, 0.57735, -1.1547], abs=1e-5)


def test_an_unscorable_trajectory_is_in_no_state():
    with_it = group(played(1.0, states="a"), played(None, states="a"), played(0.0, states="a"))
    without = group(*with_it.trajectories[::2])
    ours = GiGPO().advantages([with_it])[0]
    assert ours[1].excluded and not ours[1].advantages[0].any()
    assert same([ours[::2]], GiGPO().advantages([without]))


def test_an_invalid_turn_loses_a_penalty_among_its_state_alone():
    # Both fail: nothing between trajectories; in the state 0 and −.1, so ±.05 around the mean.
    bad = played(0.0, states="a")
    bad = replace(bad, turns=[replace(bad.turns[0], valid=False)])
    (result,) = per_turn(GiGPO(normalise_by_std=False), group(bad, played(0.0, states="a")))
    assert result == [[pytest.approx(-0.05)], [pytest.approx(0.05)]]
    assert per_turn(GiGPO(invalid_penalty=0.0), group(bad, played(0.0, states="a"))) == [[[0.0], [0.0]]]


@pytest.mark.parametrize("rewards, total, gamma, right", [
    ([0, 0, 1], 1.0, 0.9, [0.81, 0.9, 1.0]), ([1, 2, 3], 6.0, 1.0, [6, 5, 3]), ([1, 2, 3], 6.0, 0.0, [1, 2, 3]),
    ([0, 1], 0.6, 0.5, [0.3, 0.6]),  # a penalty of .4 on the return comes with the last turn
    ([], 0.0, 0.9, [])])
def test_the_return_to_go_of_a_turn_is_discounted_per_turn(rewards, total, gamma, right):
    one = played(total, [1] * len(rewards), rewards=rewards)
    assert returns_to_go(one, total, gamma) == pytest.approx(right)


def test_no_warning_is_given_for_states_with_a_single_turn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GiGPO().advantages([group(played(1.0, (1, 1), states="ab"), played(0.0, (1, 1), states="ac"))])


# Anchor states

def seeing(*observations):
    """A trajectory whose turns were taken on these observations."""
    turns = [Turn(response_ids=[1], observation=text) for text in (*observations[1:], "the end")]
    return Trajectory(turns=turns, reward=0.0, first_observation=observations[0])


def test_exact_anchors_are_equal_state_keys():
    some = group(played(1.0, (1, 1, 1), states="aba"), played(None, (), states=""), played(0.0, (1, 1), states="bc"))
    a, b, a_again, b_again, c = anchors(some)
    assert a == a_again != b == b_again != c != a


def test_similar_anchors_are_observations_alike_enough():
    # 19 of 20 characters: ratio exactly .95. Two of 20: .9.
    text, near, far = "abcdefghijklmnopqrst", "abcdefghijklmnopqrsX", "abcdefghijklmnopqrXY"
    some = group(seeing(text, near), seeing(far, text))
    assert anchors(some, 0.95).tolist() == [0, 0, 1, 0]
    assert anchors(some, 0.9).tolist() == [0, 0, 0, 0]
    assert anchors(some, 1.0).tolist() == [0, 1, 2, 0]


@given(st.lists(st.text("ab \n", max_size=6), min_size=1, max_size=8), st.sampled_from([0.5, 0.8, 1.0]))
@quickly
def test_equal_observations_are_similar_and_empty_ones_are_no_state(texts, similarity):
    numbers = anchors(group(seeing(*texts)), similarity)
    assert len(numbers) == len(texts)
    for text, number in zip(texts, numbers):
        others = [n for t, n in zip(texts, numbers) if t == text]
        assert others == [number] * len(others) if text else number < 0 and len(set(others)) == len(others)
    if similarity == 1.0:
        assert len(set(numbers)) == len(set(texts) - {""}) + texts.count("")


def test_a_long_observation_is_compared_whole():
    # difflib's shortcut for texts above 200 characters would take frequent letters for junk, and find no likeness.
    text = "you see a drawer 1, a drawer 2, a cabinet 3 and a shelf. " * 10
    assert anchors(group(seeing(text, text[:-1] + "!")), 0.95).tolist() == [0, 0]


# Settings and composition

@pytest.mark.parametrize("data", [{"gamma": 1.1}, {"gamma": -0.1}, {"step_weight": -1}, {"invalid_penalty": -1},
                                  {"similarity": 0}, {"similarity": 1.5}, {"similarity": "exact"}])
def test_settings_out_of_range_are_refused_by_name(data):
    with pytest.raises(SettingsError, match=next(iter(data))):
        validate(GiGPO, data)


@given(random_groups())
@quickly
def test_planpo_s_signal_over_gigpo_is_the_sum_of_both(some):
    both, steps = find_algorithm("GiGPO+PlanPO")(), GiGPO().step_advantages(some)
    for mine, plan, values in zip(both.advantages([some])[0], PlanPO().advantages([some])[0], steps):
        for ours, its, value in zip(mine.advantages, plan.advantages, values):
            assert ours == pytest.approx(its + np.nan_to_num(value), abs=1e-5)
    neutral = find_algorithm("GiGPO+PlanPO")(step_weight=0.0)
    assert same(neutral.advantages([some]), PlanPO().advantages([some]))
