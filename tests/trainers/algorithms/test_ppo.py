"""PPO's credit: generalised advantages over the agent's own tokens or turns."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from agents.trajectory import Group, Status, Trajectory, Turn
from trainers.algorithms import PPO, Scores
from trainers.algorithms.ppo import generalised_advantages
from trainers.settings import SettingsError, validate

quickly = hypothesis_settings(max_examples=60, deadline=None)


def episode(*turns, **fields):
    """From (tokens, reward) of each turn."""
    made = [Turn(response_ids=range(tokens), reward=reward) for tokens, reward in turns]
    return Trajectory(**{"turns": made, "reward": sum(reward for _, reward in turns)} | fields)


def credit(algorithm, trajectory, values=None):
    scores = None if values is None else Scores(values=[[[np.array(turn, np.float32) for turn in values]]])
    ((result,),) = algorithm.advantages([Group(trajectories=[trajectory])], scores)
    return result


def flat(turns):
    return np.concatenate([np.zeros(0), *turns])


def plain(**options):
    return PPO(normalise_advantages=False, **options)


def test_token_level_worked_by_hand():
    # δ = .9·.4 − .2 = .16,  .5 + .9·.6 − .4 = .64,  1 − .6 = .4;  with γλ = .45:  A = .4,  .64 + .45·.4 = .82,
    # .16 + .45·.82 = .529
    result = credit(plain(discount=0.9, gae_lambda=0.5), episode((2, 0.5), (1, 1.0)), [[0.2, 0.4], [0.6]])
    assert flat(result.advantages) == pytest.approx([0.529, 0.82, 0.4])
    assert flat(result.extra["value_targets"]) == pytest.approx([0.729, 1.22, 1.0])
    assert flat(result.extra["values"]) == pytest.approx([0.2, 0.4, 0.6])
    assert flat(result.extra["value_weights"]).tolist() == [1, 1, 1]


def test_turn_level_worked_by_hand():
    # V = .2, .6;  δ = .5 + .9·.6 − .2 = .84,  1 − .6 = .4;  A = .84 + .45·.4 = 1.02, for both tokens of the turn
    result = credit(plain(gae_over="turn", discount=0.9, gae_lambda=0.5), episode((2, 0.5), (1, 1.0)),
                    [[0.2, 0.4], [0.6]])
    assert flat(result.advantages) == pytest.approx([1.02, 1.02, 0.4])
    assert flat(result.extra["value_targets"]) == pytest.approx([1.22, 0, 1.0])
    assert flat(result.extra["value_weights"]).tolist() == [1, 0, 1]


@pytest.mark.parametrize("gae_over", ["token", "turn"])
def test_credit_passes_over_observations_and_they_cost_no_discount(gae_over):
    # Token rewards 0, (observation), 1 with γ .9: the return at the first token is .9, however long the observation.
    for observation in ([7], [7] * 40):
        turns = [Turn(prompt_ids=[5], response_ids=[1]),
                 Turn(prompt_ids=[5, 1, *observation], response_ids=[2], reward=1.0)]
        result = credit(plain(gae_over=gae_over, discount=0.9), Trajectory(turns=turns, reward=1.0))
        assert flat(result.advantages) == pytest.approx([0.9, 1.0])


steps = st.lists(st.tuples(st.integers(0, 4), st.integers(-8, 8).map(lambda n: n / 8)), min_size=1, max_size=5)
fractions = st.sampled_from([0.0, 0.5, 0.9, 1.0])


def some_values(turns, seed):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=tokens) for tokens, _ in turns]


@given(turns=steps, seed=st.integers(0, 99), gae_over=st.sampled_from(["token", "turn"]))
@quickly
def test_with_gamma_and_lambda_one_the_target_is_the_return_to_go_whatever_the_critic_says(turns, seed, gae_over):
    result = credit(plain(gae_over=gae_over), episode(*turns), some_values(turns, seed))
    to_go = np.cumsum([reward for _, reward in turns][::-1])[::-1]
    for i, (tokens, _) in enumerate(turns):
        at = result.extra["value_weights"][i] > 0
        earlier_empty = [turns[j][1] for j in range(i + 1, len(turns))]  # a turn without tokens adds to the one before
        assert at.sum() == (tokens if gae_over == "token" else min(tokens, 1))
        assert result.extra["value_targets"][i][at] == pytest.approx(turns[i][1] + sum(earlier_empty), abs=1e-5)
        assert result.extra["value_targets"][i][at] == pytest.approx(to_go[i], abs=1e-5)


@given(rewards=st.lists(st.floats(-2, 2), min_size=1, max_size=9), seed=st.integers(0, 99), discount=fractions,
       gae_lambda=fractions)
@quickly
def test_advantages_are_the_weighted_sum_of_the_errors_to_come(rewards, seed, discount, gae_lambda):
    values = np.random.default_rng(seed).normal(size=len(rewards))
    errors = np.array(rewards) + discount * np.append(values[1:], 0) - values
    expected = [sum((discount * gae_lambda) ** (k - j) * errors[k] for k in range(j, len(rewards)))
                for j in range(len(rewards))]
    assert generalised_advantages(np.array(rewards), values, discount, gae_lambda) == pytest.approx(expected, abs=1e-9)


@given(rewards=st.lists(st.integers(-8, 8).map(lambda n: n / 8), min_size=1, max_size=6), discount=fractions,
       gae_lambda=fractions)
@quickly
def test_a_critic_that_knows_the_returns_leaves_no_advantage(rewards, discount, gae_lambda):
    returns = [sum(discount ** (k - j) * rewards[k] for k in range(j, len(rewards))) for j in range(len(rewards))]
    assert generalised_advantages(np.array(rewards), np.array(returns), discount, gae_lambda) == pytest.approx(
        np.zeros(len(rewards)), abs=1e-9)


@given(turns=st.lists(st.tuples(st.just(1), st.floats(-1, 1)), min_size=1, max_size=6), seed=st.integers(0, 99))
@quickly
def test_where_turns_have_one_token_both_levels_are_the_same(turns, seed):
    token, turn = (credit(plain(gae_over=level, discount=0.9, gae_lambda=0.8), episode(*turns),
                          some_values(turns, seed)) for level in ("token", "turn"))
    for a, b in zip([token.advantages, *token.extra.values()], [turn.advantages, *turn.extra.values()]):
        assert (flat(a) == flat(b)).all()


@pytest.mark.parametrize("status", [Status.TRUNCATED_TURNS, Status.TRUNCATED_LENGTH])
def test_nothing_is_expected_behind_a_limit(status):
    values = [[0.3, 0.9], [0.5]]
    cut, whole = (credit(plain(gae_lambda=0.5), episode((2, 0.0), (1, 0.25), status=s), values)
                  for s in (status, Status.COMPLETED))
    assert (flat(cut.advantages) == flat(whole.advantages)).all()
    assert flat(cut.advantages)[-1] == pytest.approx(0.25 - 0.5)
    assert credit(plain(mask_truncated=True), episode((2, 0.0), status=status)).excluded


def test_a_return_that_no_turn_accounts_for_comes_at_the_end():
    assert flat(credit(plain(discount=0.5), episode((2, 0.0), (1, 0.0), reward=1.0)).advantages).tolist() \
        == [0.25, 0.5, 1.0]


@pytest.mark.parametrize("turns", [[], [(0, 1.0)], [(0, 1.0), (0, 0.5)]])
def test_an_episode_without_tokens_has_no_credit(turns):
    result = credit(plain(gae_over="turn"), episode(*turns))
    assert [len(turn) for turn in result.advantages] == [0] * len(turns)


def test_the_reward_of_a_turn_without_tokens_goes_to_the_token_before():
    result = credit(plain(discount=0.5), episode((1, 0.0), (0, 1.0), (1, 0.0)))
    assert [turn.tolist() for turn in result.advantages] == [[1.0], [], [0.0]]


@given(rewards=st.lists(st.one_of(st.integers(0, 8).map(lambda n: n / 8), st.none()), min_size=2, max_size=6))
@quickly
@pytest.mark.filterwarnings("ignore:a group has one scorable trajectory")
def test_normalised_advantages_have_mean_0_and_spread_1_and_an_unscorable_episode_changes_nothing(rewards):
    def trajectory(reward):
        return Trajectory(turns=[Turn(response_ids=[1, 2])], reward=reward)
    credits = PPO().advantages([Group(trajectories=[trajectory(reward) for reward in rewards])])[0]
    assert [credit.excluded for credit in credits] == [reward is None for reward in rewards]
    assert not any(flat(credit.advantages).any() for credit in credits if credit.excluded)
    kept = [flat(credit.advantages) for credit in credits if not credit.excluded]
    if len(set(rewards) - {None}) > 1:
        assert np.mean(kept) == pytest.approx(0, abs=1e-6)
        assert np.std(kept, ddof=1) == pytest.approx(1, rel=1e-4)
    else:
        assert not np.any(kept)
    alone = [reward for reward in rewards if reward is not None]
    without = PPO().advantages([Group(trajectories=[trajectory(reward) for reward in alone])])[0]
    assert [flat(credit.advantages).tolist() for credit in without] == [values.tolist() for values in kept]


def test_a_return_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="must be finite"):
        credit(PPO(), episode((1, float("nan"))))


@pytest.mark.parametrize("data, message", [
    ({"discount": 1.1}, "discount"), ({"gae_lambda": -0.1}, "gae_lambda"), ({"gae_over": "step"}, "gae_over"),
    ({"critic": {"head": "linear"}}, "critic.head"), ({"critic": {"bins": 1}}, "critic.bins"),
    ({"critic": {"value_clip": 0}}, "critic.value_clip"), ({"critic": {"sigma": 0.0}}, "critic.sigma"),
    ({"critic": {"lowest": 2.0}}, "lowest value 2.0 must be below"),
    ({"critic": {"learning_rte": 1}}, "critic.learning_rte'; the nearest is 'critic.learning_rate'")])
def test_settings_out_of_range_are_refused_by_name(data, message):
    with pytest.raises(SettingsError, match=message):
        validate(PPO, data)
