"""ADRS: properties A1 to A12 on random groups; A1, A3 and A9 are in tests/trainers/test_shaping.py."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.trajectory import Turn
from envs.core import Task
from tests.agents.policies import random_policy
from tests.trainers.algorithms.groups import group, played, quickly, random_groups, same
from tests.trainers.runs import start
from tests.trainers.test_algorithms import tokens
from trainers.algorithms import ADRS, GRPO, Scores, find_algorithm
from trainers.algorithms.skill_teacher import HEADER
from trainers.learner import Learner, OptimizerSettings
from trainers.settings import SettingsError, validate
from trainers.transcripts import read_trajectories

pytestmark = pytest.mark.filterwarnings("ignore:a group has one scorable trajectory")
ALWAYS = {"shaping_warmup_steps": 0, "shaping_steps": 0}
OVER_GIGPO = find_algorithm("ADRS+GiGPO")
EVERY_WAY = [{}, {"gate_position": "before_whiten"}, {"gate": "none"}, {"gate": "L1"}, {"standardise_over": "batch"},
             {"standardise_gate": True}, {"adaptive_clip": False}, {"sign": -1}, {"positive_only": True},
             {"form": "multiplicative"}]


def scored(groups, seed=0, spread=1.0):
    """Random log-probabilities of a teacher, and of a reference."""
    rng = np.random.default_rng(seed)

    def drawn():
        return [[[-3 + spread * rng.normal(size=len(turn.response_ids)) for turn in trajectory.turns]
                 for trajectory in group.trajectories] for group in groups]
    return Scores(teacher_logprobs=drawn(), reference_logprobs=drawn())


def flat(credits):
    return np.concatenate([turn for members in credits for credit in members for turn in credit.advantages],
                          dtype=np.float64)


def signal(algorithm, groups, scores, base=None):
    """What is added to each token's advantage."""
    base = base or GRPO()
    return flat(algorithm.advantages(groups, scores)) - flat(base.advantages(groups))


def test_worked_by_hand():
    # One turn each. Returns 1 and 0: ±.70711. Teacher −1, −3 and −5, −5: q̂ 1, −1, 0, 0, so mean 0 and variance ½:
    # Z = √2, −√2, 0, 0. Turn means −2 and −5 around −3.5: α = σ(±1.5) = .81757, .18243; d = .81757 − .18243 = .63515;
    # m = σ(2 d) = .78079. η .1: ±.1 · .78079 · 1.41421 = ±.11042.
    some = [group(played(1.0, (2,)), played(0.0, (2,)))]
    scores = Scores(teacher_logprobs=[[[np.array([-1.0, -3.0])], [np.array([-5.0, -5.0])]]])
    assert signal(ADRS(eta=0.1, **ALWAYS), some, scores) == pytest.approx([0.11042, -0.11042, 0, 0], abs=1e-4)
    # The authors' way the gate cancels: ±.1 · 1.41421; η 1 meets the bound of .2.
    faithful = {"gate_position": "before_whiten", **ALWAYS}
    assert signal(ADRS(eta=0.1, **faithful), some, scores) == pytest.approx([0.14142, -0.14142, 0, 0], abs=1e-4)
    assert signal(ADRS(eta=1.0, **ALWAYS), some, scores) == pytest.approx([0.2, -0.2, 0, 0], abs=1e-4)
    assert signal(ADRS(eta=0.1, sign=-1, **ALWAYS), some, scores) == pytest.approx([-0.11042, 0.11042, 0, 0], abs=1e-4)


batches = st.lists(random_groups(), min_size=1, max_size=3)


@pytest.mark.parametrize("form", ["additive", "multiplicative"])
@given(groups=batches)
@quickly
def test_a7_without_strength_or_outside_its_window_it_is_the_base_bit_for_bit(form, groups):
    for name in ("GRPO", "GiGPO"):
        base = find_algorithm(name)().advantages(groups)
        over = find_algorithm(f"ADRS+{name}")
        assert same(over(eta=0.0, form=form, **ALWAYS).advantages(groups, scored(groups)), base)
        for step in (0, 19, 70, 1000):
            assert same(over(form=form).advantages(groups, None, step), base)
        assert same(over(teacher_clip=0.0, form=form, **ALWAYS).advantages(groups, scored(groups)), base)


def test_the_window_is_steps_21_to_70_by_default_and_may_be_open():
    assert [step for step in range(200) if ADRS().active(step)] == list(range(20, 70))
    assert [step for step in range(5) if ADRS(shaping_warmup_steps=3, shaping_steps=0).active(step)] == [3, 4]
    assert not ADRS(eta=0.0, **ALWAYS).active(5)


def test_entropy_is_rewarded_more_while_the_signal_lasts_and_never_less():
    algorithm = ADRS(entropy_coefficient=0.001)
    assert [algorithm.entropy_weight(step) for step in (0, 19, 20, 69, 70)] == [0.001, 0.001, 0.01, 0.01, 0.001]
    assert ADRS(entropy_coefficient=0.05).entropy_weight(20) == 0.05
    batch = tokens()
    for step, weight in ((0, 0.001), (20, 0.01)):
        base, at = GRPO(entropy_coefficient=weight).loss(batch)[0], replace(batch, step=step)
        assert algorithm.loss(at)[0] == base and GRPO(entropy_coefficient=0.5).loss(at)[0] != base
    neutral = ADRS(eta=0.0, **ALWAYS)
    assert neutral.loss(batch)[0] == GRPO().loss(batch)[0] and not neutral.needs.entropy and ADRS().needs.entropy


@pytest.mark.parametrize("options", EVERY_WAY)
@given(groups=batches, clip=st.floats(0, 1), seed=st.integers(0, 99))
@quickly
def test_a6_the_signal_is_bounded(options, groups, clip, seed):
    algorithm = ADRS(eta=1.0, teacher_clip=clip, **ALWAYS, **options)
    bound = clip * (np.abs(flat(GRPO().advantages(groups))) if algorithm.form == "multiplicative" else 1)
    assert (np.abs(signal(algorithm, groups, scored(groups, seed))) <= bound + 1e-5).all()


@pytest.mark.parametrize("options", EVERY_WAY)
@given(some=random_groups((0.0, None)))
@quickly
def test_a8_a_group_in_which_nothing_differs_gets_no_signal(options, some):
    live = group(played(1.0), played(0.0))
    for lonely in (some, group(played(1.0), played(None)), group(played(1.0, (3,)))):
        found = ADRS(eta=1.0, **ALWAYS, **options).advantages([lonely, live], scored([lonely, live]))
        assert same(found[:1], GRPO().advantages([lonely]))
        assert options.get("gate") or options.get("positive_only") or not same(found[1:], GRPO().advantages([live]))


@given(batches)
@quickly
def test_a2_the_shaped_rewards_leave_every_turn_s_score_and_so_the_base_s_advantage(groups):
    # What is added in a turn sums to 0 before the bound, so a turn's tokens have the base's advantage on average.
    algorithm = ADRS(eta=1e-3, adaptive_clip=False, teacher_clip=1.0, gate="none", **ALWAYS)
    found, base = algorithm.advantages(groups, scored(groups)), GRPO().advantages(groups)
    sums = [np.float64(ours.sum() - theirs.sum()) for a, b in zip(found, base) for x, y in zip(a, b)
            for ours, theirs in zip(x.advantages, y.advantages)]
    assert sums == pytest.approx([0.0] * len(sums), abs=1e-5)


@given(batches, st.integers(0, 99))
@quickly
def test_a12_the_unbounded_signal_has_mean_zero_over_a_group(groups, seed):
    algorithm = ADRS(eta=0.01, teacher_clip=1.0, adaptive_clip=False, **ALWAYS)
    for some in groups:
        assert signal(algorithm, [some], scored([some], seed)).mean() == pytest.approx(0.0, abs=1e-6)


@given(batches, st.integers(0, 99))
@quickly
def test_a4_the_gate_is_above_one_half_exactly_where_the_teacher_prefers_what_earned_more(groups, seed):
    scores = scored(groups, seed)
    for some, teacher in zip(groups, scores.teacher_logprobs):
        one = Scores(teacher_logprobs=[teacher])
        returns = np.repeat(some.rewards, [len(t.turns) for t in some.trajectories])
        means = np.array([turn.mean() for member in teacher for turn in member])[~np.isnan(returns)]
        returns = returns[~np.isnan(returns)]
        full, gated = (signal(ADRS(eta=0.01, gate_position=position, adaptive_clip=False, **ALWAYS), [some], one)
                       for position in ("before_whiten", "after_whiten"))
        at = np.argmax(np.abs(full))
        if abs(full[at]) > 1e-3:
            m, logits = gated[at] / full[at], means - means.mean()
            alpha = 1 / (1 + np.exp(-logits))
            covariance = np.mean((alpha - alpha.mean()) * (returns - returns.mean()))
            assert 0 < m < 1 and (abs(covariance) < 1e-3 or (m > 0.5) == (covariance > 0))


def test_w1_the_authors_position_cancels_the_gate_of_a_group_and_ours_keeps_it():
    groups = [group(played(1.0, (3, 2)), played(0.0, (4,)), played(0.0, (2, 2)))]
    scores = scored(groups)
    of_gates = {position: [signal(ADRS(eta=0.1, gate=gate, gate_position=position, **ALWAYS), groups, scores)
                           for gate in ("L2", "none")] for position in ("before_whiten", "after_whiten")}
    assert of_gates["before_whiten"][0] == pytest.approx(of_gates["before_whiten"][1], abs=1e-4)
    assert np.abs(of_gates["after_whiten"][0] - of_gates["after_whiten"][1]).max() > 1e-3


def test_the_gate_over_anchor_states_differs_between_the_turns_of_a_group():
    # State a: the success's turn is preferred; state b: the failure's. So d > 0 in a, < 0 in b.
    groups = [group(played(1.0, (2, 2), states="ab"), played(0.0, (2, 2), states="ab"))]
    teacher = [[[np.array([-1.0, -2]), np.array([-5.0, -6])], [np.array([-5.0, -6]), np.array([-1.0, -2])]]]
    found = signal(OVER_GIGPO(gate="L3", eta=0.1, **ALWAYS), groups, Scores(teacher_logprobs=teacher),
                   find_algorithm("GiGPO")())
    # q̂ is ±1 in each turn, and Z too: the signal is ±.1 m.
    assert (np.abs(found[[0, 1, 4, 5]]) > 0.05 + 1e-3).all() and (np.abs(found[[2, 3, 6, 7]]) < 0.05 - 1e-3).all()
    assert np.abs(found[0]) == pytest.approx(np.abs(found[4]))
    auto = signal(OVER_GIGPO(gate="auto", eta=0.1, **ALWAYS), groups, Scores(teacher_logprobs=teacher),
                  find_algorithm("GiGPO")())
    assert auto.tolist() == found.tolist()


def test_the_bound_shrinks_where_returns_differ_less_than_in_the_median_group():
    # Standard deviations .70711, .35355 and 1.41421: bounds .2 · 1, .2 · ½ and .2 · 1.
    groups = [group(played(high, (4,)), played(0.0, (4,))) for high in (1.0, 0.5, 2.0)]
    found = np.abs(signal(ADRS(eta=1.0, gate="none", **ALWAYS), groups, scored(groups))).reshape(3, -1).max(1)
    assert found == pytest.approx([0.2, 0.1, 0.2], abs=1e-5)


def test_rlsd_s_strength_falls_to_nothing_over_its_steps():
    # η_k = .5 max(1 − k/50, 0) at the steps k = 1, 2, … counted from when it sets in.
    rlsd = {"form": "multiplicative", "eta": 0.5, "eta_decay_steps": 50, "shaping_steps": 0}
    at_once, later = (ADRS(**rlsd, shaping_warmup_steps=steps) for steps in (0, 20))
    assert [at_once.strength(step) for step in (0, 24, 48, 49, 500)] == pytest.approx([0.49, 0.25, 0.01, 0, 0])
    assert [later.strength(step) for step in (19, 20, 44)] == pytest.approx([0, 0.49, 0.25])
    assert at_once.active(48) and not at_once.active(49) and ADRS(**ALWAYS).strength(500) == 0.02
    # η = .25. Teacher above the policy by .1 and 9 (clipped): e^.1 and 1.2 of a success, e^−.1 and .8 of a failure.
    groups, teacher = [group(played(1.0, (2,)), played(0.0, (2,)))], np.array([0.1, 9.0])
    found = flat(at_once.advantages(groups, Scores(teacher_logprobs=[[[teacher], [teacher]]]), 24))
    weights = np.array([np.exp(0.1), 1.2, np.exp(-0.1), 0.8])
    assert found == pytest.approx(np.array([1, 1, -1, -1]) * np.sqrt(0.5) * (0.75 + 0.25 * weights), rel=1e-4)


def test_over_gigpo_the_bound_shrinks_where_advantages_are_smaller():
    # Divided by their standard deviations returns of 1 and of ½ give the same advantages: the same bound of .2.
    # Otherwise ±½ and ±¼ between trajectories and as much again in the state: the median of 1 and .5 is .75.
    groups = [group(played(high, (4,), states="a"), played(0.0, (4,), states="a")) for high in (1.0, 0.5)]
    for by_std, right in ((True, [0.2, 0.2]), (False, [0.2, 0.2 * 0.5 / 0.75])):
        options = {"eta": 1.0, "gate": "none", "normalise_by_std": by_std}
        found = signal(OVER_GIGPO(**options, **ALWAYS), groups, scored(groups),
                       find_algorithm("GiGPO")(normalise_by_std=by_std))
        assert np.abs(found).reshape(2, -1).max(1) == pytest.approx(right, abs=1e-5)


def test_the_gate_per_token_against_the_reference_worked_by_hand():
    # Teacher −1, −3 | −5, −5 and the reference −3: gaps 2, 0, −2, −2 of standard deviation √2.75 = 1.65831 (ddof 0).
    # m = σ(2 · 2 / 1.65831) = .91774 and ½ where Z = ±√2; .1 m Z.
    some = [group(played(1.0, (2,)), played(0.0, (2,)))]
    scores = Scores(teacher_logprobs=[[[np.array([-1.0, -3.0])], [np.array([-5.0, -5.0])]]],
                    reference_logprobs=[[[np.full(2, -3.0)], [np.full(2, -3.0)]]])
    found = signal(ADRS(eta=0.1, gate="L1", **ALWAYS), some, scores)
    assert found == pytest.approx([0.129788, -0.0707107, 0, 0], abs=1e-5)
    needs = ADRS(gate="L1").needs
    assert needs.reference_logprobs and needs.reference_scores and not ADRS().needs.reference_logprobs


@given(groups=batches)
@quickly
def test_the_automatic_gate_is_that_of_groups_over_grpo(groups):
    ours, theirs = (ADRS(gate=gate, **ALWAYS).advantages(groups, scored(groups)) for gate in ("auto", "L2"))
    assert same(ours, theirs)


@pytest.mark.parametrize("form", ["additive", "multiplicative"])
@given(groups=batches, seed=st.integers(0, 99))
@quickly
def test_positive_only_leaves_what_is_not_positive_and_changes_the_rest_as_ever(form, groups, seed):
    scores, options = scored(groups, seed), {"form": form, "eta": 1.0, **ALWAYS}
    every, some = (flat(ADRS(positive_only=only, **options).advantages(groups, scores)) for only in (False, True))
    base = flat(GRPO().advantages(groups))
    assert some.tolist() == np.where(base > 0, every, base).tolist()


def test_positive_only_leaves_an_advantage_of_zero_at_zero():
    middling = [group(played(1.0, (3,)), played(0.5, (3,)), played(0.0, (3,)))]
    options = {"eta": 1.0, "gate": "none", **ALWAYS}
    some, every = (ADRS(positive_only=only, **options).advantages(middling, scored(middling))[0][1].advantages[0]
                   for only in (True, False))
    assert not some.any() and every.any()


def test_the_sign_turns_the_multiplicative_form_round_too():
    # e^∓.1 in place of e^±.1, at η ½ of the advantages ±.70711.
    groups, teacher = [group(played(1.0, (1,)), played(0.0, (1,)))], np.array([0.1])
    scores = Scores(teacher_logprobs=[[[teacher], [teacher]]])
    found = flat(ADRS(form="multiplicative", sign=-1, eta=0.5, **ALWAYS).advantages(groups, scores))
    assert found == pytest.approx(np.sqrt(0.5) * np.array([0.5 + 0.5 * np.exp(-0.1), -0.5 - 0.5 * np.exp(0.1)]),
                                  rel=1e-5)


@given(groups=batches, seed=st.integers(0, 99))
@quickly
def test_the_multiplicative_form_keeps_every_sign_and_the_additive_one_need_not(groups, seed):
    found = ADRS(form="multiplicative", eta=1.0, teacher_clip=1.0, **ALWAYS).advantages(groups, scored(groups, seed))
    assert (flat(found) * flat(GRPO().advantages(groups)) >= 0).all()


def test_the_additive_form_may_turn_a_small_advantage_round():
    wins = [group(*[played(1.0, (5,))] * 7, played(0.0, (5,)))]  # ±: .354 and −2.475
    found = flat(ADRS(eta=1.0, teacher_clip=0.5, gate="none", **ALWAYS).advantages(wins, scored(wins)))
    assert (found * flat(GRPO().advantages(wins)) < 0).any()


@pytest.mark.parametrize("options", EVERY_WAY)
def test_an_unscorable_trajectory_and_an_empty_turn_change_nothing(options):
    whole = group(played(1.0, (2, 1)), played(None, (3,)), played(0.0, (2, 0)))
    scores = scored([whole])
    rest = group(whole.trajectories[0], whole.trajectories[2])
    fewer = Scores(**{name: [[getattr(scores, name)[0][i] for i in (0, 2)]]
                      for name in ("teacher_logprobs", "reference_logprobs")})
    algorithm = ADRS(eta=0.5, **ALWAYS, **options)
    credits = algorithm.advantages([whole], scores)[0]
    assert credits[1].excluded and not flat([credits[1:2]]).any()
    assert same([[credits[0], credits[2]]], algorithm.advantages([rest], fewer))
    assert algorithm.advantages([group()], Scores(teacher_logprobs=[[]], reference_logprobs=[[]])) == [[]]


def test_a5_credit_is_numbers_not_a_graph():
    groups = [group(played(1.0, (2,)), played(0.0, (2,)))]
    for credit in ADRS(**ALWAYS).advantages(groups, scored(groups))[0]:
        assert all(type(turn) is np.ndarray and turn.dtype == np.float32 for turn in credit.advantages)


@pytest.mark.parametrize("options, missing", [({}, "teacher_logprobs"), ({"gate": "L1"}, "reference_logprobs")])
def test_what_is_missing_is_named(options, missing):
    groups = [group(played(1.0, (2,)), played(0.0, (2,)))]
    scores = replace(scored(groups), **{missing: None})
    with pytest.raises(ValueError, match=f"ADRS needs scores.{missing}"):
        ADRS(**ALWAYS, **options).advantages(groups, scores)


@pytest.mark.parametrize("data, message", [
    ({"gate": "L3"}, "name the algorithm ADRS.GiGPO"), ({"eta": 1.5}, "eta"), ({"teacher_clip": 1.1}, "teacher_clip"),
    ({"sign": 0}, "sign"), ({"form": "both"}, "form"), ({"gate_temperature": 0}, "gate_temperature")])
def test_settings_out_of_range_are_refused_by_name(data, message):
    with pytest.raises(SettingsError, match=message):
        validate(ADRS, data)


# The teacher

@pytest.fixture
def skills(tmp_path):
    path = tmp_path / "parity.toml"
    path.write_text('general = "Say gold."\n')
    return str(path)


def test_a11_teacher_reference_and_student_score_the_same_ids(skills):
    policy = random_policy(max_position_embeddings=512)
    ids = policy.tokenizer("Say it.", add_special_tokens=False).input_ids
    one = played(1.0, (3,), task=Task(key="", family="x"))
    one = replace(one, turns=[Turn(prompt_ids=ids, response_ids=[7, 8, 9], logprobs=[-1.0, -2.0, -3.0])])
    learner = Learner(policy, ADRS(gate="L1", skills=skills, **ALWAYS), OptimizerSettings())
    scores = learner.score([group(one, one)], 0)
    # The reference is the policy itself before training, and is told nothing; the teacher is told more.
    assert [len(turn) for turn in scores.teacher_logprobs[0][0]] == [3] == [len(scores.reference_logprobs[0][0][0])]
    assert not np.allclose(scores.teacher_logprobs[0][0][0], scores.reference_logprobs[0][0][0])
    quiet = Learner(policy, ADRS(skills=skills), OptimizerSettings()).score([group(one, one)], 0)
    assert quiet.teacher_logprobs[0][0][0].tolist() == [-1.0, -2.0, -3.0] and quiet.reference_logprobs is None


def test_a10_training_works_and_no_rollout_s_prompt_holds_the_skills(skills, tmp_path):
    run = start(tmp_path / "run", algorithm={"name": "ADRS+GiGPO", "skills": skills, "eta": 0.5, **ALWAYS})
    base = start(tmp_path / "base", algorithm={"name": "GiGPO"})
    assert run.metrics[0]["policy_loss"] != base.metrics[0]["policy_loss"]
    trajectories = list(read_trajectories(tmp_path / "run" / "trajectories.jsonl"))
    assert trajectories and all(HEADER not in text for t in trajectories
                                for text in (t.first_observation, t.system_prompt, *(turn.text for turn in t.turns)))
