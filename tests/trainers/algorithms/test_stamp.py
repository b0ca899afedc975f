"""STAMP: properties S1 to S10 on random groups; S5 and S6 are in tests/rewards/test_evidence.py."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import envs
from agents.trajectory import Turn
from envs.core import Task
from tests.trainers.algorithms.groups import group, per_turn, played, quickly, random_groups, same
from trainers.algorithms import GRPO, RLOO, STAMP, find_algorithm
from trainers.settings import SettingsError, validate

pytestmark = pytest.mark.filterwarnings("ignore:a group has one scorable trajectory")
GRAPH = {"entities": [{"id": f"E{i}", "aliases": [f"name {i}"], "documents": documents}
                      for i, documents in enumerate(["a", "ab", "bc", "d"])],
         "relations": [{"head": "E0", "relation": "r", "tail": "E1", "documents": ["a", "c"]}]}
TASK = Task(key="k", data={"evidence": GRAPH, "answers": ["name 3"]})


def found(trajectory, shown, cited, task=TASK):
    """The trajectory as one whose turns showed these documents and whose last turn cited some."""
    turns = [replace(turn, info={"exposed": names}) for turn, names in zip(trajectory.turns, shown, strict=True)]
    turns[-1] = replace(turns[-1], info={**turns[-1].info, "cited": cited})
    return replace(trajectory, turns=turns, task=task)


@st.composite
def searches(draw, rewards=(0.0, 1.0, None)):
    names = st.lists(st.sampled_from("abcdxy"), max_size=3)
    return group(*(found(t, [draw(names) for _ in t.turns], draw(names))
                   for t in draw(random_groups(rewards)).trajectories))


def pairs(algorithm, some, base=None):
    """(advantage, the base's) of every turn."""
    base = base or GRPO()
    return [(a, b) for ours, theirs in zip(per_turn(algorithm, some)[0], per_turn(base, some)[0])
            for a, b in zip(ours, theirs)]


def test_evidence_steps_weigh_more_in_successes_and_less_in_failures():
    # Advantages ±.70711. The turn that showed `d` first gets unit E3's .03; `a` was not cited.
    won, lost = (found(played(reward, (1, 1, 1)), [["a"], ["d"], ["d"]], ["d"]) for reward in (1.0, 0.0))
    (first, second), = per_turn(STAMP(), group(won, lost))
    assert first == pytest.approx([0.70711, 0.70711 * 1.03, 0.70711], abs=1e-4)
    assert second == pytest.approx([-0.70711, -0.70711 * 0.97, -0.70711], abs=1e-4)


def test_a_step_that_found_much_is_capped():
    # a: E0 .03, half of E1 and of the relation; b: half of E1 and of E2; c: half of E2 and of the relation: .12 in all.
    won, lost = (found(played(reward, (1,)), [["a", "b", "c"]], ["a", "b", "c"]) for reward in (1.0, 0.0))
    assert STAMP().step_credit(won) == pytest.approx([0.1])
    assert STAMP(step_cap=0.5).step_credit(won) == pytest.approx([0.12])
    assert per_turn(STAMP(), group(won, lost))[0][0] == [pytest.approx(0.70711 * 1.1, abs=1e-4)]


@given(searches(), st.floats(0, 0.5), st.floats(0, 0.99))
@quickly
def test_s1_a_step_s_credit_is_between_zero_and_the_cap(some, unit_credit, cap):
    for trajectory in some.trajectories:
        credit = STAMP(unit_credit=unit_credit, step_cap=cap).step_credit(trajectory)
        assert ((credit >= 0) & (credit <= cap)).all() and len(credit) == len(trajectory.turns)


@given(searches(), st.booleans())
@quickly
def test_s2_signs_stay_and_zero_stays_zero(some, renormalise):
    assert all(np.sign(a) == np.sign(b) for a, b in pairs(STAMP(renormalise=renormalise), some))


@given(searches())
@quickly
def test_s3_no_evidence_step_is_hurt(some):
    assert all(a >= b for a, b in pairs(STAMP(), some))


@given(searches(), st.booleans())
@quickly
def test_s4_without_credit_it_is_the_base_bit_for_bit(some, renormalise):
    for options in ({"unit_credit": 0.0}, {"step_cap": 0.0}):
        assert same(STAMP(**options, renormalise=renormalise).advantages([some]), GRPO().advantages([some]))
    uncited = group(*(found(t, [turn.info["exposed"] for turn in t.turns], []) for t in some.trajectories))
    assert same(STAMP().advantages([uncited]), GRPO().advantages([uncited]))
    for name in ("RLOO", "RLOOpp", "PlanPO", "GiGPO"):
        neutral = find_algorithm(f"STAMP+{name}")(unit_credit=0.0)
        assert same(neutral.advantages([some]), find_algorithm(name)().advantages([some]))


@given(searches((0.0, 1.0, 0.5, None)))
@quickly
def test_s7_returns_and_their_order_stay(some):
    assert STAMP().returns(some).tolist() == pytest.approx(GRPO().returns(some).tolist(), nan_ok=True)
    assert [c.excluded for c in STAMP().advantages([some])[0]] == [t.reward is None for t in some.trajectories]


@given(searches(), st.floats(0, 0.99))
@quickly
def test_s8_an_advantage_changes_by_at_most_the_cap(some, cap):
    for a, b in pairs(STAMP(unit_credit=1.0, step_cap=cap), some):
        assert abs(a - b) <= cap * abs(b) * (1 + 1e-5)


def test_s9_tokens_of_different_trajectories_may_cross():
    # Returns 1, .95 and four times 0, mean .325: .675 without evidence is less than .625 with it, times 1.1.
    second = found(played(0.95, (1,)), [["a", "b", "c"]], ["a", "b", "c"])
    best, *failures = (found(played(reward, (1,)), [[]], []) for reward in (1.0, 0.0, 0.0, 0.0, 0.0))
    (a,), (b,), *_ = per_turn(STAMP(), group(best, second, *failures))[0]
    assert b > a


@given(searches())
@quickly
def test_s10_renormalised_factors_have_mean_one_over_a_trajectory_s_tokens(some):
    for ours, theirs in zip(STAMP(renormalise=True).advantages([some])[0], GRPO().advantages([some])[0]):
        ours, theirs = (np.concatenate(credit.advantages, dtype=np.float64) for credit in (ours, theirs))
        assert ours.sum() == pytest.approx(theirs.sum(), abs=1e-4 * len(ours))


def test_it_builds_on_any_base():
    won, lost = (found(played(reward, (1, 1)), [["d"], []], ["d"]) for reward in (1.0, 0.0))
    over = find_algorithm("STAMP+RLOO")()
    assert per_turn(over, group(won, lost)) == [[[pytest.approx(1.03), 1.0], [pytest.approx(-0.97), -1.0]]]
    assert (over.ratio, over.kl_coefficient, over.unit_credit) == ("sequence", RLOO().kl_coefficient, 0.03)
    for a, b in pairs(find_algorithm("STAMP+GiGPO+PlanPO")(), group(won, lost), find_algorithm("GiGPO+PlanPO")()):
        assert a == pytest.approx(b * (1 + np.sign(b) * 0.03)) or a == b


def test_a_citation_rubric_enters_the_return_where_it_is_asked_for():
    # `d` supports one unit of five.
    one = found(played(1.0, (1,)), [["d"]], ["d"])
    assert STAMP(rubric_weight=0.5).reward(one) == pytest.approx(1.1) and STAMP().reward(one) == 1.0
    assert STAMP(rubric_weight=0.5).reward(replace(one, reward=None)) is None
    better, worse = per_turn(STAMP(rubric_weight=0.5, unit_credit=0.0), group(one, found(one, [["d"]], [])))[0]
    assert better[0] > 0 > worse[0]


def test_documents_with_the_answer_are_cited_only_if_asked_for():
    silent = found(played(1.0, (1, 1)), [["d", "a"], {"z": "It is name 3, they say."}], [])
    assert STAMP().step_credit(silent).tolist() == [0.0, 0.0]
    # d is E3's own document and z names it: E3's .03 in halves.
    assert STAMP(cite_answers=True).step_credit(silent) == pytest.approx([0.015, 0.015])


def test_a_task_without_an_evidence_graph_is_left_alone_with_a_warning():
    won, lost = (found(played(reward, (1,)), [["a"]], ["a"], Task(key="k", env_id="E-v0")) for reward in (1.0, 0.0))
    with pytest.warns(UserWarning, match="a task of E-v0 has no evidence graph"):
        assert same(STAMP().advantages([group(won, lost)]), GRPO().advantages([group(won, lost)]))


def test_an_episode_without_turns_or_without_an_answer_has_no_credit():
    nothing = replace(played(0.0, ()), turns=[], task=TASK)
    cut = replace(played(0.0, (1,)), turns=[Turn(response_ids=[1])], task=TASK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [len(c.advantages) for c in STAMP(renormalise=True).advantages([group(nothing, cut)])[0]] == [0, 1]


def test_gold_searches_of_the_search_environment_earn_credit():
    env = envs.make("turngym/Search-v0")
    task = env.tasks("heldout")[0]
    env.reset(options={"task": task})
    turns = [Turn(response_ids=[1], info=env.step(env.parse(response).text)[4])
             for response in env.gold(np.random.default_rng(0))]
    credit = STAMP().step_credit(replace(played(1.0), turns=turns, task=task))
    assert credit[0] > 0 and credit[-1] == 0  # the answer itself shows nothing


@pytest.mark.parametrize("data", [{"unit_credit": -0.1}, {"step_cap": 1.0}, {"step_cap": -0.1}, {"rubric_weight": -1},
                                  {"renormalise": 1}])
def test_settings_out_of_range_are_refused_by_name(data):
    with pytest.raises(SettingsError, match=next(iter(data))):
        validate(STAMP, data)
