"""The value head: it reads the policy's states, learns from the last few steps' targets, and changes nothing else."""

import copy

import numpy as np
import pytest
import torch

from tests.agents.policies import random_policy
from tests.trainers.trajectories import conversation, group
from trainers.batch import pack
from trainers.credit import Credit
from trainers.learner import OptimizerSettings
from trainers.value_head import ValueHeadCritic, ValueHeadSettings


@pytest.fixture(scope="module")
def policy():
    return random_policy(initializer_range=0.2)


def head_of(policy, **options) -> ValueHeadCritic:
    return ValueHeadCritic(policy, ValueHeadSettings(**{"width": 16} | options), OptimizerSettings())


def some_group():
    return group(conversation([5, 6, 7], [8, 9], [10], [11, 12, 13]), conversation([5, 6], [7], [], [8], [9], [10]))


def targets(made, value=1.0, turns=(0, 1)):
    """The batch in which the first token of some turns has a value target."""
    def extra(trajectory, number):
        return tuple(np.array([number * (t in turns)] + [0.0] * (len(turn.response_ids) - 1), np.float32)
                     for t, turn in enumerate(trajectory.turns))
    credits = [Credit(advantages=Credit.uniform(t, 0.0).advantages,
                      extra={"value_targets": extra(t, value), "value_weights": extra(t, 1.0)})
               for t in made.trajectories]
    return pack([made], [credits])


def test_a_value_is_of_the_policy_s_state_before_the_turn(policy):
    critic, made = head_of(policy), some_group()
    ((first, second),) = critic.values([made])
    with torch.no_grad():
        for ids, starts, found in (([5, 6, 7, 8, 9, 10, 11, 12, 13], [3, 6], first), ([5, 6, 7, 8, 9, 10], [2, 3, 5],
                                                                                    second)):
            hidden = policy.model.base_model(torch.tensor([ids])).last_hidden_state[0]
            expected = critic.target(hidden[[start - 1 for start in starts]])[:, 0].tolist()
            assert [turn[0] for turn in found] == pytest.approx(expected, abs=1e-6)
            assert all(len(set(turn.tolist())) == 1 for turn in found)
    assert [len(turn) for turn in first] == [2, 3] and [len(turn) for turn in second] == [1, 1, 1]


def test_f8_the_head_learns_without_moving_the_policy(policy):
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    critic, batch = head_of(policy, learning_rate=1e-2, target_decay=0.5), targets(some_group())
    losses = [critic.update(batch, np.random.default_rng(i))["critic_loss"] for i in range(30)]
    assert losses[0] == pytest.approx(1.0, abs=0.1) and losses[-1] < 0.01
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.model.state_dict().items())
    assert all(p.grad is None for p in policy.model.parameters())
    assert critic.values([some_group()])[0][0][0][0] == pytest.approx(1.0, abs=0.2)


def test_the_slow_copy_follows(policy):
    critic = head_of(policy, target_decay=0.75)
    before = critic.target[2].bias.clone()
    critic.update(targets(some_group()), np.random.default_rng(0))
    torch.testing.assert_close(critic.target[2].bias, 0.75 * before + 0.25 * critic.head[2].bias)
    assert not torch.equal(critic.target[2].bias, before)


def test_only_the_window_is_remembered_and_only_so_many_targets_are_drawn(policy):
    critic = head_of(policy, window=3, samples=2)
    for value in range(5):
        critic.update(targets(some_group(), float(value)), np.random.default_rng(0))
    assert [values.unique().tolist() for _, values in critic.remembered] == [[2.0], [3.0], [4.0]]
    assert [len(values) for _, values in critic.remembered] == [4, 4, 4]


def test_no_more_targets_are_drawn_than_asked_for(policy):
    # Two targets of 0 and two of 10 from the same states: the mean loss of all is ~50, of a single one ~0 or ~100.
    losses = set()
    for seed in range(8):
        critic, made = head_of(policy, samples=1), some_group()
        critic.remembered = [(critic._states(targets(made), targets(made).extra["value_weights"] > 0),
                              torch.tensor([0.0, 0.0, 10.0, 10.0]))]
        losses.add(round(critic.update(targets(made, turns=()), np.random.default_rng(seed))["critic_loss"], -1))
    assert losses == {0.0, 100.0}


def test_without_any_target_nothing_is_learnt_and_remembered_ones_go_on(policy):
    critic = head_of(policy)
    assert critic.update(targets(some_group(), turns=()), np.random.default_rng(0)) == {}
    critic.update(targets(some_group()), np.random.default_rng(0))
    assert critic.update(targets(some_group(), turns=()), np.random.default_rng(0))["critic_loss"] > 0
    assert len(critic.remembered) == 1


def test_it_goes_on_from_its_state(policy):
    ours, theirs = head_of(policy), head_of(policy)
    ours.update(targets(some_group()), np.random.default_rng(0))
    theirs.load_state(copy.deepcopy(ours.state()))
    for critic in (ours, theirs):
        critic.update(targets(some_group(), 0.5), np.random.default_rng(1))
    assert all(torch.equal(a, b) for a, b in zip(ours.target.parameters(), theirs.target.parameters()))


def test_the_head_s_first_weights_are_orthogonal_and_the_same_each_time(policy):
    first, second = head_of(policy), head_of(policy)
    weight = first.head[0].weight.detach()  # 16 rows of norm √2 in 32 dimensions
    torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(16), atol=1e-5, rtol=0)
    assert first.head[2].weight.norm().item() == pytest.approx(0.01, rel=1e-4)
    assert torch.equal(weight, second.head[0].weight)
