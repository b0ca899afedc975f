import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import trainers.algorithms
from agents.trajectory import Group, Status, Trajectory, Turn
from trainers.algorithms import DAPO, GRPO, RLOO, Algorithm, RLOOpp, find_algorithm
from trainers.credit import Credit, leave_one_out, normalise
from trainers.loss import Counts, LossInput, aggregate, clipped_surrogate
from trainers.settings import SettingsError, validate

ESTIMATORS = [Algorithm(), GRPO(), GRPO(normalise_by_std=False), GRPO(statistics_over="row"), RLOO(), RLOOpp(), DAPO()]
alone = pytest.mark.filterwarnings("ignore:a group has one scorable trajectory")


def trajectory(reward, lengths=(2,), **fields):
    return Trajectory(turns=[Turn(response_ids=range(length)) for length in lengths], reward=reward, **fields)


def group(*rewards, turns=None):
    turns = turns or [1] * len(rewards)
    return Group(trajectories=[trajectory(reward, [2] * n) for reward, n in zip(rewards, turns)])


def values(algorithm, *groups):
    """Advantage of each trajectory, NaN where it is excluded; all its tokens must have the same."""
    result = []
    for credits in algorithm.advantages(groups):
        result.append([])
        for credit in credits:
            (value,) = set(np.concatenate(credit.advantages).tolist())
            assert not (credit.excluded and value)
            result[-1].append(np.nan if credit.excluded else value)
    return result


# Groups of 2 to 8 returns in eighths, some unscorable.
rewards = st.lists(st.one_of(st.integers(0, 80).map(lambda n: n / 8), st.none()), min_size=2, max_size=8)
batches = st.lists(rewards, min_size=1, max_size=4)
quickly = hypothesis_settings(max_examples=60, deadline=None)


# Worked numbers

@pytest.mark.parametrize("algorithm", [Algorithm(), GRPO(), DAPO()])
def test_an_unscorable_trajectory_leaves_its_siblings_alone(algorithm):
    # 1, 0, 1: mean 2/3, std (ddof 1) .57735
    (result,) = values(algorithm, group(1.0, 0.0, None, 1.0))
    assert result == pytest.approx([0.57735, -1.1547, np.nan, 0.57735], abs=1e-5, nan_ok=True)
    credit = algorithm.advantages([group(1.0, 0.0, None, 1.0)])[0][2]
    assert credit.excluded
    assert credit.advantages[0].tolist() == [0.0, 0.0]


def test_an_unscorable_trajectory_is_not_in_the_leave_one_out_mean():
    assert values(RLOO(), group(1.0, 0.0, None, 1.0))[0] == pytest.approx([0.5, -1.0, np.nan, 0.5], nan_ok=True)


@pytest.mark.parametrize("algorithm", ESTIMATORS)
def test_a_group_without_any_return_is_dropped(algorithm):
    nothing = group(None, None, None)
    assert not algorithm.keep(nothing)
    assert all(credit.excluded for credit in algorithm.advantages([nothing])[0])
    both = values(algorithm, nothing, group(1.0, 0.0))
    assert both[1] == values(algorithm, group(1.0, 0.0))[0]


@pytest.mark.parametrize("algorithm", ESTIMATORS)
@pytest.mark.parametrize("single", [group(0.7), group(0.7, turns=[3]), group(None, 0.7, None)])
def test_a_single_trajectory_has_advantage_zero_and_a_warning(algorithm, single):
    with pytest.warns(UserWarning, match="one scorable trajectory"):
        result = values(algorithm, single, group(0.2, 0.6))
    assert np.nansum(np.abs(result[0])) == 0
    assert result[1][0] < 0 < result[1][1]


@alone
def test_leave_one_out_of_a_pair_is_their_difference():
    assert values(RLOO(), group(0.7), group(0.2, 0.6)) == [[0.0], pytest.approx([-0.4, 0.4])]


def test_the_single_trajectory_warning_is_given_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(5):
            GRPO().advantages([group(0.7)])
    assert len(caught) == 1


def test_statistics_are_over_trajectories_or_over_rows():
    # 14 rows of return 1 and 300 of 0: mean .0446, std .2067; of 8 trajectories: mean .25, std .4629
    successes_are_quick = group(1.0, 1.0, *[0.0] * 6, turns=[6, 8] + [50] * 6)
    assert values(GRPO(), successes_are_quick)[0] == pytest.approx([1.62] * 2 + [-0.54] * 6, abs=5e-3)
    assert values(GRPO(statistics_over="row"), successes_are_quick)[0] == pytest.approx([4.62] * 2 + [-0.22] * 6,
                                                                                      abs=5e-3)


def test_statistics_over_rows_of_one_turn_each_are_those_over_trajectories():
    some = group(1.0, 0.25, None, 0.5)
    assert values(GRPO(statistics_over="row"), some)[0] == pytest.approx(values(GRPO(), some)[0], nan_ok=True)


def test_without_the_standard_deviation_only_the_mean_is_subtracted():
    assert values(GRPO(normalise_by_std=False), group(1.0, 0.0, 0.0, 0.0))[0] == [0.75, -0.25, -0.25, -0.25]


def test_rloo_plus_plus_scales_the_batch():
    # Leave-one-out: ±1, ±.5, 0, 0. Their std (ddof 1, n 6) is sqrt(2.5/5); times .3.
    result = values(RLOOpp(), group(1.0, 0.0), group(0.5, 1.0), group(1.0, 1.0))
    scale = 0.3 / np.sqrt(0.5)
    assert np.concatenate(result) == pytest.approx(np.array([1, -1, -0.5, 0.5, 0, 0]) * scale, rel=1e-5)
    assert result[2] == [0.0, 0.0]


@given(batches)
@quickly
@alone
def test_c6_rloo_plus_plus_has_its_target_spread_in_every_batch(batch):
    result = np.concatenate(values(RLOOpp(target_std=0.7), *[group(*rewards) for rewards in batch]))
    result = result[~np.isnan(result)]
    assert len(result) < 2 or not result.any() or result.std(ddof=1) == pytest.approx(0.7, rel=1e-4)


# Properties on random groups (docs/algorithms.md holds them as a table)

@pytest.mark.parametrize("algorithm", [GRPO(), DAPO(), RLOO(), RLOOpp(), GRPO(normalise_by_std=False)])
@given(batch=batches)
@quickly
@alone
def test_advantages_sum_to_zero_in_each_group_and_keep_its_order(algorithm, batch):
    for result, rewards in zip(values(algorithm, *[group(*rewards) for rewards in batch]), batch):
        assert np.nansum(result) == pytest.approx(0.0, abs=1e-4)
        assert [np.isnan(value) for value in result] == [reward is None for reward in rewards]
        scored = [(reward, value) for reward, value in zip(rewards, result) if reward is not None]
        assert all(a < b for (r, a) in scored for (s, b) in scored if r < s)


@pytest.mark.parametrize("algorithm", ESTIMATORS)
@given(batch=st.lists(st.lists(st.sampled_from([0.0, 1.0, None]), min_size=2, max_size=8), min_size=1, max_size=4))
@quickly
@alone
def test_a_success_is_never_negative_and_a_failure_never_positive(algorithm, batch):
    for result, rewards in zip(values(algorithm, *[group(*rewards) for rewards in batch]), batch):
        assert all(value >= 0 if reward else value <= 0 for value, reward in zip(result, rewards) if reward is not None)


@pytest.mark.parametrize("algorithm", ESTIMATORS)
@given(reward=st.floats(-1e6, 1e6), size=st.integers(2, 9), unscorable=st.integers(0, 2))
@quickly
@alone
def test_equal_returns_give_exactly_zero(algorithm, reward, size, unscorable):
    same = group(*[reward] * size, *[None] * unscorable, turns=[*range(1, size + 1), *[1] * unscorable])
    assert values(algorithm, same, group(0.0, 1.0))[0][:size] == [0.0] * size
    assert algorithm.keep(same) == (not isinstance(algorithm, DAPO))


@pytest.mark.parametrize("algorithm, power", [(GRPO(), 0), (DAPO(), 0), (RLOOpp(), 0), (RLOO(), 1)])
@given(batch=batches, scale=st.sampled_from([0.25, 3.0, 10.0]), shift=st.sampled_from([-5.0, 0.0, 7.0]))
@quickly
@alone
def test_rescaling_returns_changes_only_rloo_and_shifting_them_nothing(algorithm, power, batch, scale, shift):
    moved = [[None if reward is None else reward * scale + shift for reward in rewards] for rewards in batch]
    before = values(algorithm, *[group(*rewards) for rewards in batch])
    after = values(algorithm, *[group(*rewards) for rewards in moved])
    for old, new in zip(before, after):
        assert new == pytest.approx(np.multiply(old, scale**power), rel=1e-3, abs=1e-4, nan_ok=True)


@pytest.mark.parametrize("algorithm", [GRPO(), DAPO(), RLOO(), RLOOpp()])
@given(batch=batches)
@quickly
@alone
def test_an_added_unscorable_trajectory_changes_nothing(algorithm, batch):
    before = values(algorithm, *[group(*rewards) for rewards in batch])
    after = values(algorithm, *[group(None, *rewards) for rewards in batch])
    for old, new in zip(before, after):
        assert new[1:] == pytest.approx(old, rel=1e-6, nan_ok=True)


@given(rewards=rewards)
@quickly
@alone
def test_the_order_of_a_group_does_not_matter(rewards):
    for statistic in (normalise, leave_one_out):
        array = np.array([np.nan if reward is None else reward for reward in rewards])
        assert statistic(array[::-1])[::-1] == pytest.approx(statistic(array), abs=1e-9, nan_ok=True)


# Credit

@pytest.mark.parametrize("algorithm", ESTIMATORS)
def test_credit_has_one_number_per_sampled_token(algorithm):
    groups = [Group(trajectories=[trajectory(1.0, (3, 1)), trajectory(0.0, (2, 0, 4)), trajectory(0.5, ())])]
    for credit, played in zip(algorithm.advantages(groups)[0], groups[0].trajectories):
        assert [len(turn) for turn in credit.advantages] == [len(turn.response_ids) for turn in played.turns]
        assert all(turn.dtype == np.float32 for turn in credit.advantages)


def test_credit_is_per_trajectory_or_per_turn():
    played = trajectory(1.0, (2, 1))
    assert [turn.tolist() for turn in Credit.uniform(played, 0.5).advantages] == [[0.5, 0.5], [0.5]]
    assert [turn.tolist() for turn in Credit.per_turn(played, [1, -2]).advantages] == [[1, 1], [-2]]
    with pytest.raises(ValueError, match="3 advantages for 2 turns"):
        Credit.per_turn(played, [1, 2, 3])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_credit_is_never_nan(value):
    with pytest.raises(ValueError, match="NaN or infinite"):
        Credit.uniform(trajectory(1.0), value)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("algorithm", [GRPO(), RLOO(), RLOOpp()])
def test_a_return_that_is_no_number_is_refused(algorithm, reward):
    with pytest.raises(ValueError, match="must be finite, or None"):
        algorithm.advantages([group(1.0, reward)])


def test_an_empty_batch_and_an_empty_group_give_no_credit():
    for algorithm in ESTIMATORS:
        assert algorithm.advantages([]) == []
        assert algorithm.advantages([group()]) == [[]]


@pytest.mark.parametrize("algorithm", [GRPO(mask_truncated=True), RLOO(mask_truncated=True),
                                       DAPO(mask_truncated=True)])
def test_a_truncated_trajectory_is_left_out_of_the_loss_but_not_of_the_statistics(algorithm):
    cut_turn = Trajectory(turns=[Turn(response_ids=[1], finish_reason="length"), Turn(response_ids=[2])], reward=0.0)
    cut = Group(trajectories=[trajectory(1.0), trajectory(0.0), cut_turn,
                              trajectory(0.0, status=Status.TRUNCATED_TURNS)])
    credits, (whole,) = algorithm.advantages([cut])[0], values(algorithm, group(1.0, 0.0, 0.0, 0.0))
    assert [credit.excluded for credit in credits] == [False, False, True, True]
    assert [credit.advantages[0][0] for credit in credits[:2]] == pytest.approx(whole[:2])
    assert not any(credit.excluded for credit in GRPO().advantages([cut])[0])


# DAPO

@pytest.mark.parametrize("rewards, kept", [([1.0, 0.0], True), ([1.0, 1.0], False), ([0.0, 0.0, 0.0], False),
                                           ([0.3, 0.3, 0.4], True), ([1.0], True), ([None], False),
                                           ([1.0, None], False), ([1.0, None, 0.0], True), ([1.0, None, 1.0], False),
                                           ([0.1] * 3, False)])
def test_dapo_keeps_groups_whose_returns_differ(rewards, kept):
    assert DAPO().keep(group(*rewards)) is kept
    assert GRPO().keep(group(*rewards)) is (rewards != [None])


def test_dapo_drops_a_group_that_only_its_length_penalty_tells_apart():
    lengths = Group(trajectories=[trajectory(0.0, [10]), trajectory(0.0, [90])])
    assert not DAPO(overlong_length=100, overlong_buffer=20).keep(lengths)


# L_max 100, L_buf 20: from 80 tokens on, 1/20 of the factor per token
@pytest.mark.parametrize("lengths, penalty", [([10], 0.0), ([80], 0.0), ([81], 0.05), ([40, 50], 0.5), ([100], 1.0),
                                              ([60, 60], 1.0)])
def test_the_overlong_penalty_grows_over_the_buffer(lengths, penalty):
    shaped = DAPO(overlong_length=100, overlong_buffer=20, overlong_factor=0.4)
    assert shaped.reward(trajectory(1.0, lengths)) == pytest.approx(1.0 - 0.4 * penalty)
    assert shaped.reward(trajectory(None, lengths)) is None
    assert DAPO().reward(trajectory(1.0, lengths)) == 1.0


def test_the_overlong_penalty_enters_the_advantages():
    both_right = Group(trajectories=[trajectory(1.0, [10]), trajectory(1.0, [100])])
    assert values(DAPO(), both_right)[0] == [0.0, 0.0]
    short, long = values(DAPO(overlong_length=100, overlong_buffer=20), both_right)[0]
    assert long < 0 < short


def test_only_dapo_samples_again():
    assert (GRPO().max_generation_batches, RLOO().max_generation_batches, DAPO().max_generation_batches) == (1, 1, 10)


# Losses

def tokens(on_policy=False, **changes):
    """Two trajectories, of turns with 2 and 1 tokens and with 3 tokens; leaf log-probabilities in double precision."""
    generator = torch.Generator().manual_seed(0)
    def noise(): return torch.randn(6, generator=generator, dtype=torch.float64)
    behaviour = -1 + 0.3 * noise()
    fields = {"logprobs": behaviour + (0 if on_policy else 0.3 * noise()), "behaviour_logprobs": behaviour,
              "reference_logprobs": behaviour + 0.1 * noise(), "entropy": noise().square(),
              "advantages": torch.tensor([1.0, 1, 1, -0.5, -0.5, -0.5], dtype=torch.float64),
              "turn_index": torch.tensor([0, 0, 1, 0, 0, 0]), "trajectory_index": torch.tensor([4, 4, 4, 7, 7, 7]),
              "action_mask": torch.ones(6, dtype=torch.bool), "counts": Counts(6, 3, 2)} | changes
    return LossInput(**fields | {"logprobs": fields["logprobs"].clone().requires_grad_()})


def gradient(algorithm, batch):
    return torch.autograd.grad(algorithm.loss(batch)[0], batch.logprobs)[0]


@pytest.mark.parametrize("mode, share", [("sequence_mean_token_sum", 1 / 2), ("token_mean", 1 / 6)])
def test_rloo_s_first_update_is_reinforce(mode, share):
    batch = tokens(on_policy=True)
    plain = RLOO(aggregation=mode, kl_coefficient=0.0, entropy_coefficient=0.0)
    torch.testing.assert_close(gradient(plain, batch), -batch.advantages * share)
    assert plain.loss(batch)[1]["clip_fraction"] == 0


def test_rloo_weighs_a_trajectory_by_its_clipped_probability_ratio():
    # Ratios: trajectory 4: exp(.05+.05−.02) = e^.08; trajectory 7: exp(−.5), clipped to 1 − clip_low.
    gap = torch.tensor([0.05, 0.05, -0.02, -0.5, 0.0, 0.0], dtype=torch.float64)
    batch = tokens(logprobs=tokens().behaviour_logprobs + gap)
    plain = RLOO(kl_coefficient=0.0, entropy_coefficient=0.0, clip_low=0.3)
    weight = torch.tensor([np.exp(0.08)] * 3 + [0.7] * 3)
    torch.testing.assert_close(gradient(plain, batch), -weight * batch.advantages / 2)
    assert plain.loss(batch)[1]["clip_fraction"] == 0.5


def test_rloo_s_loss_is_its_docstring_s_equation():
    batch = tokens(on_policy=True)
    difference = (batch.logprobs - batch.reference_logprobs).detach()
    per_token = (-batch.advantages * batch.logprobs - 1e-3 * batch.entropy
                 + 1e-3 * (torch.exp(-difference) - 1 + difference))
    torch.testing.assert_close(RLOO().loss(batch)[0], per_token.sum() / 2)


def test_rloo_s_weight_is_finite_and_clipped_however_far_the_policies_are_apart():
    # e^±50 over a trajectory: far above 1 + clip_high, and below 1 − clip_low.
    for gap, weight in ((50.0, 1.2), (-50.0, 0.8), (1e4, 1.2), (-1e4, 0.8)):
        batch = tokens(logprobs=tokens().behaviour_logprobs + gap / 3)
        plain = RLOO(kl_coefficient=0.0, entropy_coefficient=0.0)
        torch.testing.assert_close(gradient(plain, batch), -weight * batch.advantages / 2)


def test_neutral_settings_are_bit_equal_to_the_base():
    batch, groups = tokens(), [group(1.0, 0.0, 0.5, None), group(0.0, 0.0)]
    surrogate = aggregate(clipped_surrogate(batch.logprobs, batch.behaviour_logprobs, batch.advantages)[0])
    assert GRPO().loss(batch)[0] == Algorithm().loss(batch)[0] == surrogate
    assert DAPO(clip_high=0.2).loss(batch)[0] == surrogate
    assert (gradient(DAPO(clip_high=0.2), batch) == gradient(Algorithm(), batch)).all()
    for algorithm in (GRPO(), DAPO(), DAPO(overlong_length=4096, overlong_factor=0.0)):
        for ours, base in zip(algorithm.advantages(groups), Algorithm().advantages(groups)):
            assert [c.advantages[0].tobytes() for c in ours] == [c.advantages[0].tobytes() for c in base]


@pytest.mark.parametrize("change", [{"clip_low": 0.01}, {"clip_high": 0.01}, {"dual_clip": 1.01}, {"ratio": "turn"},
                                    {"ratio": "sequence"}, {"aggregation": "turn_mean_token_mean"},
                                    {"aggregation": "sequence_mean_token_sum"}, {"kl_coefficient": 0.1},
                                    {"kl_coefficient": 0.1, "kl_estimator": "k2"}, {"entropy_coefficient": 0.1},
                                    {"aggregation": "sequence_mean_token_sum_norm", "aggregation_length": 7}])
def test_every_option_of_the_loss_changes_it(change):
    # Ratios of 1.5 at both signs of the advantage and of .5 at a negative one, so that each clip has something to cut.
    gap = torch.tensor([0.4, -0.2, 0.1, 0.4, -0.7, 0.1], dtype=torch.float64)
    batch = tokens(logprobs=tokens().behaviour_logprobs + gap)
    before = {key: value for key, value in change.items() if key == "kl_coefficient" and "kl_estimator" in change}
    assert GRPO(**change).loss(batch)[0] != GRPO(**before).loss(batch)[0]


def test_more_entropy_lowers_the_loss_and_more_kl_raises_it():
    batch, plain = tokens(), GRPO().loss(tokens())[0]
    total, metrics = GRPO(entropy_coefficient=0.1, kl_coefficient=0.2).loss(batch)
    assert total.item() == pytest.approx((plain - 0.1 * metrics["entropy"] + 0.2 * metrics["kl"]).item())
    assert metrics["policy_loss"] == plain
    assert metrics["entropy"] > 0 < metrics["kl"]


def test_metrics_carry_no_gradient():
    assert not any(value.requires_grad for value in RLOO().loss(tokens())[1].values())


@pytest.mark.parametrize("algorithm, missing", [(GRPO(kl_coefficient=0.1), "reference_logprobs"),
                                                (GRPO(entropy_coefficient=0.1), "entropy")])
def test_what_an_algorithm_needs_is_named_where_it_is_missing(algorithm, missing):
    assert getattr(algorithm.needs, missing)
    assert not getattr(GRPO().needs, missing)
    with pytest.raises(ValueError, match=f"the batch holds no {missing}"):
        algorithm.loss(tokens(**{missing: None}))


# Settings and names

@pytest.mark.parametrize("cls, data, message", [
    (GRPO, {"clip_hihg": 0.3}, "unknown setting 'clip_hihg'; the nearest is 'clip_high'"),
    (GRPO, {"overlong_length": 10}, "unknown setting 'overlong_length'"),
    *[(GRPO, {name: value}, name) for name, value in [
        ("clip_low", -0.1), ("clip_low", 1.5), ("clip_high", -1), ("dual_clip", 1.0), ("kl_coefficient", -1),
        ("kl_estimator", "k1"), ("entropy_coefficient", float("nan")), ("aggregation", "mean"),
        ("statistics_over", "token")]],
    (GRPO, {"aggregation_length": 5}, "aggregation_length exactly when"),
    (GRPO, {"aggregation": "sequence_mean_token_sum_norm"}, "aggregation_length exactly when"),
    (RLOO, {"ratio": "token"}, "ratio"),
    (RLOO, {"dual_clip": 3.0}, "dual_clip"), (RLOOpp, {"target_std": 0}, "target_std"),
    (DAPO, {"max_generation_batches": 0}, "max_generation_batches"),
    (DAPO, {"overlong_length": 100}, "overlong_buffer 4096 is greater than overlong_length 100"),
])
def test_settings_out_of_range_are_refused_by_name(cls, data, message):
    with pytest.raises(SettingsError, match=message):
        validate(cls, data)


def test_every_algorithm_is_found_by_its_name():
    names = set(trainers.algorithms.__all__) - {"Algorithm", "Needs", "Scores", "find_algorithm"}
    assert names >= {"GRPO", "RLOO", "RLOOpp", "DAPO"}
    for name in names:
        assert find_algorithm(name) is getattr(trainers.algorithms, name)
        assert issubclass(find_algorithm(name), Algorithm)


@pytest.mark.parametrize("name, nearest", [("grpo", "GRPO"), ("GRP", "GRPO"), ("dapo", "DAPO"), ("RLOOp", "RLOOpp"),
                                           ("", ""), (":GRPO", "GRPO"), ("Needs", ""), ("Algorithm", "")])
def test_an_unknown_algorithm_names_the_nearest(name, nearest):
    with pytest.raises(SettingsError, match=f"unknown algorithm {name!r}; the nearest is '{nearest}"):
        find_algorithm(name)


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    """A folder that modules are imported from, and forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_the_documented_algorithm_is_found_in_a_user_s_file_and_works(user_folder):
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(example.splitlines()) < 60
    (user_folder / "my_algorithms.py").write_text(example, encoding="utf-8")
    algorithm = validate(find_algorithm("my_algorithms:SignBalance"), {"strength": 2.0, "clip_high": 0.28})
    # 3 successes of strength 2 pull with 6; 4 failures push with 6/4 each.
    assert values(algorithm, group(1.0, 0.0, None, 1.0), group(0.0, 0.0, 0.0, 1.0)) == [
        pytest.approx([2.0, -1.5, np.nan, 2.0], nan_ok=True), [-1.5, -1.5, -1.5, 2.0]]
    assert torch.isfinite(algorithm.loss(tokens())[0])


def test_a_user_s_class_without_own_settings_needs_no_decorator(user_folder):
    (user_folder / "mine_plain.py").write_text("from trainers.algorithms import GRPO\n\n\nclass Mine(GRPO):\n"
                                               "    def reward(self, trajectory):\n        return 3.0\n")
    algorithm = validate(find_algorithm("mine_plain:Mine"), {"clip_low": 0.1})
    assert (type(algorithm).__name__, algorithm.clip_low, algorithm.reward(trajectory(0.0))) == ("Mine", 0.1, 3.0)


def test_a_wrong_name_in_a_user_s_file_says_what_is_wrong(user_folder):
    (user_folder / "mine.py").write_text("from trainers.algorithms import GRPO\nclass Bandit(GRPO): pass\nOther = 3\n")
    (user_folder / "broken.py").write_text("import no_such_module_anywhere\n")
    (user_folder / "empty.py").write_text("")
    for name, message in [("mine:Bandti", "'mine' has no algorithm 'Bandti'; the nearest is 'Bandit'"),
                          ("mine:Other", "'mine' has no algorithm 'Other'"), ("nowhere:X", "no module 'nowhere'"),
                          ("mine.deep:X", "no module 'mine.deep'"), ("empty:X", "defines no subclass of Algorithm")]:
        with pytest.raises(SettingsError, match=message):
            find_algorithm(name)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        find_algorithm("broken:X")
