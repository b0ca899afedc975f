"""The critic: its values, its two heads, and that it learns beside the policy without moving it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.agents.policies import random_policy
from tests.trainers.runs import go_on, rows, small_config, start, weights
from tests.trainers.trajectories import conversation, group, random_conversation
from trainers.algorithms import PPO
from trainers.batch import pack
from trainers.critic import CriticSettings, HLGaussHead, NetworkCritic, ScalarHead
from trainers.learner import Learner, OptimizerSettings
from trainers.run import Run

HEADS = ["scalar", "hl_gauss"]


@pytest.fixture(scope="module")
def policy():
    return random_policy(initializer_range=0.2)


def critic_of(policy, head="scalar", learning_rate=1e-2, **options) -> NetworkCritic:
    critic = NetworkCritic(policy, CriticSettings(head=head, learning_rate=learning_rate),
                           OptimizerSettings(**options))
    torch.nn.init.normal_(critic.head.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    return critic


def some_groups(seed=0):
    rng = np.random.default_rng(seed)
    return [group(*(random_conversation(rng, int(rng.integers(1, 4)), float(rng.integers(2))) for _ in range(3)))
            for _ in range(3)]


def credited(critic, groups, **options):
    learner_scores = type("Scores", (), {"values": critic.values(groups)})
    return pack(groups, PPO(**options).advantages(groups, learner_scores))


# Heads

def test_a_target_is_a_distribution_whose_mean_is_the_return():
    head = HLGaussHead(4, CriticSettings(head="hl_gauss"))
    returns = torch.linspace(0.0, 1.0, 57)
    target = head.target(returns)
    torch.testing.assert_close(target.sum(-1), torch.ones(57))
    assert (target @ head.centres - returns).abs().max() < 1e-3
    # At the edges half of the Gaussian lies outside, so the mean is drawn inward.
    low, high = (head.target(torch.tensor([-5.0, 9.0])) @ head.centres).tolist()
    assert -0.1 < low < -0.07 and 1.07 < high < 1.1


def test_a_target_worked_by_hand():
    # Two bins with centres .25 and .75, R = .25, σ = .5: exp(0) and exp(−.5) over their sum.
    head = HLGaussHead(1, CriticSettings(head="hl_gauss", bins=2, lowest=0.0, highest=1.0, sigma=0.5))
    assert head.centres.tolist() == [0.25, 0.75]
    other = np.exp(-0.5)
    assert head.target(torch.tensor([0.25]))[0].tolist() == pytest.approx([1 / (1 + other), other / (1 + other)])
    # A uniform distribution has mean .5 and cross-entropy log 2 with anything.
    outputs = torch.zeros(1, 2)
    assert head.decode(outputs).item() == 0.5
    assert head.loss(outputs, torch.tensor([0.25]), torch.zeros(1)).item() == pytest.approx(np.log(2))


@given(st.lists(st.floats(-50, 50), min_size=5, max_size=5))
@hypothesis_settings(max_examples=40, deadline=None)
def test_an_hl_gauss_value_lies_within_the_bins(outputs):
    head = HLGaussHead(1, CriticSettings(head="hl_gauss", bins=5))
    assert -0.1 <= head.decode(torch.tensor([outputs])).item() <= 1.1


def test_the_clipped_value_loss_worked_by_hand():
    # c = .5. (V, V_old, R): (1, 0, 2): max(1, 1.5²)/2; (.2, 0, 0): inside the clip, .04/2; (2, 0, 2): max(0, 1.5²)/2
    head = ScalarHead(1, CriticSettings(value_clip=0.5))
    values, old, returns = torch.tensor([[1.0], [0.2], [2.0]]), torch.zeros(3), torch.tensor([2.0, 0.0, 2.0])
    assert head.loss(values, returns, old).tolist() == pytest.approx([1.125, 0.02, 1.125])


@pytest.mark.parametrize("head, value", [("scalar", 0.0), ("hl_gauss", 0.5)])
def test_an_untrained_critic_says_the_same_of_everything(policy, head, value):
    critic = NetworkCritic(policy, CriticSettings(head=head), OptimizerSettings())
    values = critic.values(some_groups())
    assert {round(float(v), 6) for g in values for t in g for turn in t for v in turn} == {value}


# The network

@pytest.mark.parametrize("options", [{}, {"micro_batch_tokens": 1}, {"row_tokens": 1}])
def test_a_value_is_of_the_state_before_its_token(policy, options):
    critic = critic_of(policy, **options)
    trajectory = conversation([5, 6, 7], [8, 9], [10], [11, 12, 13])
    (((first, second),),) = critic.values([group(trajectory)])
    with torch.no_grad():
        ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13]])
        values = critic.head(critic.network(ids).last_hidden_state[0])[:, 0].numpy()
    assert first == pytest.approx(values[[2, 3]], abs=1e-5)
    assert second == pytest.approx(values[[5, 6, 7]], abs=1e-5)


def test_values_stand_where_their_turns_do(policy):
    groups = [*some_groups(1), group(conversation(), conversation([5], [], [6], [7]))]
    for its_group, of_group in zip(groups, critic_of(policy).values(groups), strict=True):
        for trajectory, of_trajectory in zip(its_group.trajectories, of_group, strict=True):
            assert [len(v) for v in of_trajectory] == [len(turn.response_ids) for turn in trajectory.turns]
            alone = critic_of(policy).values([group(trajectory)])[0][0] if trajectory.turns else []
            for a, b in zip(of_trajectory, alone, strict=True):
                assert a == pytest.approx(b, abs=1e-5)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("level", ["token", "turn"])
def test_the_critic_s_gradient_does_not_depend_on_how_the_batch_is_cut(policy, head, level):
    found = []
    for options in ({}, {"micro_batch_tokens": 1}, {"micro_batch_tokens": 40, "row_tokens": 16}):
        critic = critic_of(policy, head, max_gradient_norm=1e9, **options)
        critic.update(credited(critic, some_groups(), gae_over=level), np.random.default_rng(0))
        found.append(torch.cat([p.grad.flatten() for p in critic.parameters]))
    assert found[0].abs().max() > 1e-3
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("level", ["token", "turn"])
def test_a_critic_learns_the_returns(policy, head, level):
    groups = some_groups(2)
    critic = critic_of(policy, head, learning_rate=3e-3)
    errors = [critic.update(credited(critic, groups, gae_over=level), np.random.default_rng(0))["value_error"]
              for _ in range(60)]
    assert errors[-1] < 0.4 * errors[0]


@pytest.mark.parametrize("head", HEADS)
def test_a_critic_does_not_move_the_policy_nor_the_policy_the_critic(policy, head):
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    algorithm, groups = PPO(critic=CriticSettings(head=head, learning_rate=1e-2)), some_groups()
    learner = Learner(policy, algorithm, OptimizerSettings(epochs=2, minibatches=2))
    assert not {p.data_ptr() for p in learner.critic.parameters} & {p.data_ptr() for p in policy.model.parameters()}
    batch = pack(groups, algorithm.advantages(groups, learner.score(groups)))
    metrics = learner.update(batch, np.random.default_rng(0), frozen=True)
    assert set(metrics) == {"critic_loss", "value", "value_error"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.model.state_dict().items())
    assert learner.critic.head.weight.abs().max() > 0


def test_a_critic_takes_as_many_steps_as_the_policy_under_the_same_settings(policy):
    critic = critic_of(policy, epochs=2, minibatches=3, weight_decay=0.25, beta1=0.5, beta2=0.75,
                       max_gradient_norm=1e-3)
    critic.update(credited(critic, some_groups()), np.random.default_rng(0))
    assert {int(state["step"]) for state in critic.optimizer.state.values()} == {2 * 3}
    (parameters,) = critic.optimizer.param_groups
    assert (parameters["lr"], parameters["weight_decay"], parameters["betas"]) == (1e-2, 0.25, (0.5, 0.75))
    norm = torch.cat([p.grad.flatten() for p in critic.parameters]).norm().item()
    assert norm == pytest.approx(1e-3, rel=1e-2)


def test_a_batch_without_a_scorable_episode_changes_nothing(policy):
    critic = critic_of(policy)
    groups = [group(conversation([5], [6, 7], reward=None))]
    before = {name: tensor.clone() for name, tensor in critic.network.state_dict().items()}
    assert critic.update(credited(critic, groups), np.random.default_rng(0)) == {}
    assert all(torch.equal(tensor, before[name]) for name, tensor in critic.network.state_dict().items())


def test_an_infinite_value_is_an_error_and_not_a_step(policy):
    critic = critic_of(policy)
    batch = credited(critic, some_groups())
    batch.extra["value_targets"][:] = np.inf
    with pytest.raises(FloatingPointError, match="critic"):
        critic.update(batch, np.random.default_rng(0))


# Runs

def test_the_policy_waits_while_the_critic_warms_up(tmp_path):
    algorithm = {"name": "PPO", "critic": {"warmup_steps": 2, "learning_rate": 1e-2}, "entropy_coefficient": 0.1}
    start(tmp_path, algorithm=algorithm, optimizer={"weight_decay": 0.5, "schedule": "linear"},
          run={"steps": 4, "save_every": 1, "keep_checkpoints": 9})
    metrics = rows(tmp_path)
    assert ["gradient_norm" in row for row in metrics] == [False, False, True, True]
    assert all(row["critic_loss"] > 0 for row in metrics)
    assert [row["learning_rate"] for row in metrics[2:]] == pytest.approx([1e-2, 5e-3])  # over the policy's own 2 steps


def test_resuming_twice_from_one_checkpoint_keeps_the_critic(tmp_path):
    Run.create(tmp_path, small_config(algorithm={"name": "PPO"}, run={"steps": 3, "save_every": 1}))
    go_on(tmp_path, stop_after=1)
    state = Run.open(tmp_path).load_state()["learner"]["critic"]
    assert state["optimizer"]["with_state"] and weights(tmp_path).numel()
