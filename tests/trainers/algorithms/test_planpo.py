"""PlanPO: properties P1 to P11 on random groups, and numbers worked by hand."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agents.trajectory import Trajectory, Turn
from tests.trainers.algorithms.groups import group, lengths, per_turn, played, quickly, random_groups, same
from trainers.algorithms import GRPO, PlanPO
from trainers.config import build_config
from trainers.settings import SettingsError, validate

pytestmark = pytest.mark.filterwarnings("ignore:a group has one scorable trajectory")
TRAJECTORIES_ONLY = {"alpha_initial": 0.0, "alpha_final": 0.0}
SWITCHES = [{}, {"turn_group": "per_turn"}, {"turn_members": "success_only"}, {"normalise_by_std": False},
            {"turn_group": "per_turn", "turn_members": "success_only"}]


def first_turns(algorithm, *groups, **arguments):
    """Advantage of each trajectory's first turn."""
    return [[turns[0] for turns in members] for members in per_turn(algorithm, *groups, **arguments)]


# Worked numbers

def test_a_slow_success_may_be_negative_beside_a_fast_one():
    # R/T = 10/4, 10/40, 10/45 and five times 0: mean .37153, std (ddof 1) .86664.
    some = group(*(played(10.0, [1] * turns) for turns in (4, 40, 45)), *[played(0.0, [1] * 50)] * 5)
    (result,) = first_turns(PlanPO(**TRAJECTORIES_ONLY), some)
    assert result == pytest.approx([2.46, -0.14, -0.17, *[-0.43] * 5], abs=5e-3)


def test_shorter_responses_of_successes_are_better():
    # One turn each. A^E: 1, 1, 0 gives .57735 twice and −1.1547. A^S: 1/2, 1/4, 0: mean .25, std .25: 1, 0, −1.
    some = group(played(1.0, [2]), played(1.0, [4]), played(0.0, [3]))
    (result,) = first_turns(PlanPO(alpha_initial=0.5, alpha_final=0.5), some)
    assert result == pytest.approx([0.57735 + 0.5, 0.57735, -1.1547 - 0.5], abs=1e-4)
    # Successes alone: 1/2 and 1/4, so ±.70711; the failure has none.
    (result,) = first_turns(PlanPO(alpha_initial=0.5, alpha_final=0.5, turn_members="success_only"), some)
    assert result == pytest.approx([0.57735 + 0.35355, 0.57735 - 0.35355, -1.1547], abs=1e-4)


def test_responses_are_compared_over_the_group_or_at_their_turn():
    # Lengths 1, 2 | 2, 1, both of return 1 and two turns: A^E 0. Flat: 1, .5, .5, 1. Per turn: 1 with .5, .5 with 1.
    some = group(played(1.0, [1, 2]), played(1.0, [2, 1]))
    kept = {"normalise_by_std": False, "alpha_initial": 1.0, "alpha_final": 1.0}
    assert per_turn(PlanPO(**kept), some) == [[[0.25, -0.25], [-0.25, 0.25]]]
    some = group(played(1.0, [1, 4]), played(1.0, [2, 2]))
    # Flat: 1, .25, .5, .5 around .5625. Per turn: 1 with .5, .25 with .5.
    assert per_turn(PlanPO(**kept), some) == [[[0.4375, -0.3125], [-0.0625, -0.0625]]]
    assert per_turn(PlanPO(**kept, turn_group="per_turn"), some) == [[[0.25, -0.125], [-0.25, 0.125]]]


def test_a_floor_holds_slow_successes_up():
    # GRPO's advantages of 3 successes and 5 failures: mean 3.75, std 5.1755: 1.20761 of a success.
    some = group(*(played(10.0, [1] * turns) for turns in (4, 40, 45)), *[played(0.0, [1] * 50)] * 5)
    (result,) = first_turns(PlanPO(floor=0.1, **TRAJECTORIES_ONLY), some)
    assert result == pytest.approx([2.456, 0.120761, 0.120761, *[-0.42869] * 5], abs=1e-3)
    (result,) = first_turns(PlanPO(floor=0.0, **TRAJECTORIES_ONLY), some)
    assert result[1:3] == [0.0, 0.0]


# Properties

@pytest.mark.parametrize("switch", SWITCHES)
@given(some=random_groups((0.0, None)))
@quickly
def test_p1_a_group_of_failures_has_no_advantage(switch, some):
    for credit in PlanPO(**switch).advantages([some])[0]:
        assert not np.concatenate(credit.advantages).any()


def test_p1_a_failure_with_some_reward_is_a_failure():
    partial = [played(0.3, [2], success=False), played(0.6, [1, 1], success=False)]
    assert per_turn(PlanPO(), group(*partial)) == [[[0.0], [0.0, 0.0]]]


@pytest.mark.parametrize("switch", SWITCHES)
@given(turns=st.integers(1, 5), length=st.integers(1, 5), size=st.integers(2, 8), reward=st.floats(0.1, 100))
@quickly
def test_p2_successes_of_equal_turns_and_lengths_have_no_advantage(switch, turns, length, size, reward):
    some = group(*[played(reward, [length] * turns)] * size)
    assert first_turns(PlanPO(**switch), some) == [[0.0] * size]


@given(turns=st.lists(st.integers(1, 50), min_size=2, max_size=8), normalise_by_std=st.booleans())
@quickly
def test_p3_among_successes_fewer_turns_are_better(turns, normalise_by_std):
    assume(len(set(turns)) > 1)
    algorithm = PlanPO(normalise_by_std=normalise_by_std, **TRAJECTORIES_ONLY)
    (result,) = first_turns(algorithm, group(*(played(1.0, [1] * n) for n in turns)))
    assert any(result) and all((a > b) == (m < n) for a, m in zip(result, turns) for b, n in zip(result, turns))


@given(wins=st.lists(st.booleans(), min_size=2, max_size=8), turns=st.integers(1, 6))
@quickly
def test_p4_at_equal_turns_and_lengths_it_is_grpo(wins, turns):
    some = group(*(played(10.0 * won, [2] * turns) for won in wins))
    (ours,), (theirs,) = (first_turns(algorithm, some) for algorithm in (PlanPO(**TRAJECTORIES_ONLY), GRPO()))
    assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("reward", [1.0, 10.0])
def test_at_one_turn_each_and_alpha_zero_it_is_grpo_bit_for_bit(reward):
    some = group(*(played(reward * won, [3]) for won in (1, 0, 0, 1, 0)))
    assert same(PlanPO(**TRAJECTORIES_ONLY).advantages([some]), GRPO().advantages([some]))


@given(random_groups((0.0, 1.0)))
@quickly
def test_p5_all_failures_are_alike_and_strictly_the_worst(some):
    outcomes = [t.success for t in some.trajectories]
    assume(any(outcomes) and not all(outcomes))
    (result,) = first_turns(PlanPO(**TRAJECTORIES_ONLY), some)
    failures = {value for value, won in zip(result, outcomes) if not won}
    assert len(failures) == 1 and min(value for value, won in zip(result, outcomes) if won) > max(failures)


@given(random_groups(), st.sampled_from([0.5, 10.0, 100.0]))
@quickly
def test_p6_rescaling_returns_changes_nothing_when_divided_by_std(some, scale):
    scaled = group(*(replace(t, reward=None if t.reward is None else t.reward * scale) for t in some.trajectories))
    for ours, theirs in zip(*(np.concatenate([np.concatenate(c.advantages) for c in PlanPO().advantages([g])[0]])
                              for g in (some, scaled))):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-3)


@given(random_groups(), st.booleans())
@quickly
def test_p7_trajectories_advantages_sum_to_zero(some, normalise_by_std):
    algorithm = PlanPO(normalise_by_std=normalise_by_std)
    assert np.nansum(algorithm._episode_advantages(some)) == pytest.approx(0.0, abs=1e-6)


@given(random_groups(), st.integers(1, 9))
@quickly
def test_p8_at_alpha_zero_lengths_do_not_matter(some, factor):
    longer = group(*(replace(t, turns=[replace(turn, response_ids=range(factor * len(turn.response_ids)), logprobs=None)
                                       for turn in t.turns]) for t in some.trajectories))
    assert per_turn(PlanPO(**TRAJECTORIES_ONLY), some) == per_turn(PlanPO(**TRAJECTORIES_ONLY), longer)


@given(random_groups((0.0, 1.0)), lengths)
@quickly
def test_p9_how_long_a_failure_took_changes_nobody_s_advantage_over_trajectories(some, other):
    changed = group(*(t if t.success else played(0.0, other) for t in some.trajectories))
    for switch in ({**TRAJECTORIES_ONLY}, {"turn_members": "success_only"}):
        ours, theirs = (first_turns(PlanPO(**switch), g) for g in (some, changed))
        assert ours == theirs


@given(start=st.floats(0, 1), share=st.floats(0, 1), steps=st.integers(2, 50))
@quickly
def test_p10_alpha_falls_to_its_end_in_the_last_step(start, share, steps):
    algorithm = PlanPO(alpha_initial=start, alpha_final=start * share, total_steps=steps)
    alphas = [algorithm.alpha(step) for step in range(steps)]
    assert alphas[0] == start and alphas[-1] == algorithm.alpha_final == algorithm.alpha(10 * steps)
    assert all(a >= b or a == pytest.approx(b) for a, b in pairwise(alphas))
    # Linear: with 0.1 to 0.05 over 6 steps each takes 0.01.
    worked = PlanPO(total_steps=6)
    assert [worked.alpha(step) for step in range(6)] == pytest.approx([0.1, 0.09, 0.08, 0.07, 0.06, 0.05])


def test_p11_a_failure_s_advantage_is_not_grpo_s():
    some = group(played(1.0, [1]), played(1.0, [1] * 4), played(0.0, [1]))
    ours, theirs = (first_turns(algorithm, some)[0][2] for algorithm in (PlanPO(**TRAJECTORIES_ONLY), GRPO()))
    assert ours != pytest.approx(theirs, abs=0.1) and ours < 0 > theirs


def test_alpha_decays_over_the_run_of_a_config():
    assert build_config({"algorithm": {"name": "PlanPO"}, "run": {"steps": 7}}).algorithm.total_steps == 7
    assert build_config({"algorithm": {"name": "PlanPO", "total_steps": 3}}).algorithm.total_steps == 3
    assert build_config({"algorithm": {"name": "GiGPO+PlanPO"}}).algorithm.total_steps == 100


@pytest.mark.parametrize("switch", SWITCHES)
def test_an_unscorable_trajectory_leaves_its_siblings_alone(switch):
    some = group(played(1.0, [2, 3]), played(0.0, [4]), played(1.0, [5]))
    with_it = group(some.trajectories[0], played(None, [9]), *some.trajectories[1:])
    credits = PlanPO(**switch).advantages([with_it])[0]
    assert credits[1].excluded and not credits[1].advantages[0].any()
    assert same([[credits[0], *credits[2:]]], PlanPO(**switch).advantages([some]))


def test_an_episode_without_turns_and_a_turn_without_tokens_are_no_division_by_zero():
    nothing = Trajectory(turns=[], reward=1.0, success=True)
    silent = Trajectory(turns=[Turn(response_ids=[]), Turn(response_ids=[1])], reward=1.0, success=True)
    credits = PlanPO().advantages([group(nothing, silent, played(0.0, [2]))])[0]
    assert [len(credit.advantages) for credit in credits] == [0, 2, 1]
    assert PlanPO().advantages([group()]) == [[]]


@pytest.mark.parametrize("data, message", [
    ({"alpha_initial": 0.1, "alpha_final": 0.2}, "alpha_final 0.2 is greater"), ({"alpha_initial": 1.1}, "alpha_init"),
    ({"turn_group": "turn"}, "turn_group"), ({"turn_members": "all"}, "turn_members"), ({"floor": -1}, "floor"),
    ({"total_steps": 0}, "total_steps")])
def test_settings_out_of_range_are_refused_by_name(data, message):
    with pytest.raises(SettingsError, match=message):
        validate(PlanPO, data)
