"""Batches: every sampled token is trained once, as it was sampled and in the context it had; nothing else is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.trajectory import Trajectory, Turn
from tests.trainers.trajectories import conversation, group
from trainers.algorithms import GRPO
from trainers.batch import pack, sequence_starts
from trainers.credit import Credit
from trainers.distributed import micro_batches


def packed(*trajectories, values=None, excluded=()):
    credits = [Credit.uniform(t, 1.0 if values is None else values[i], excluded=i in excluded)
               for i, t in enumerate(trajectories)]
    return pack([group(*trajectories)], [credits])


def test_the_agent_s_tokens_are_trained_and_those_of_prompt_and_environment_are_not():
    batch = packed(conversation([1, 2, 3], [4, 5], [6, 7, 8, 9], [10]))
    assert batch.token_ids.tolist() == list(range(1, 11))
    assert batch.trained.astype(int).tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 1]
    assert batch.turn_index.tolist() == [-1, -1, -1, 0, 0, -1, -1, -1, -1, 1]
    assert batch.sequence_lengths.tolist() == [10]
    np.testing.assert_allclose(batch.behaviour_logprobs[batch.trained], [-0.04, -0.05, -0.1], rtol=1e-6)
    assert not batch.behaviour_logprobs[~batch.trained].any() and not batch.advantages[~batch.trained].any()


def test_an_observation_that_repeats_the_agent_s_own_tokens_is_not_trained():
    # The action 4 5 comes back inside the observation: masks come from places, not from what stands there.
    batch = packed(conversation([1], [4, 5], [4, 5, 4], [4, 5]))
    assert batch.trained.astype(int).tolist() == [0, 1, 1, 0, 0, 0, 1, 1]


def test_a_rewritten_history_begins_a_new_sequence_and_each_response_is_trained_in_the_context_it_had():
    turns = [Turn(prompt_ids=np.array([1, 2]), response_ids=np.array([8, 9])),
             Turn(prompt_ids=np.array([1, 2, 9, 3]), response_ids=np.array([8, 7])),
             Turn(prompt_ids=np.array([1, 2, 9, 3, 8, 7, 4]), response_ids=np.array([6]))]
    batch = packed(Trajectory(turns=turns, reward=1.0))
    assert [s.tolist() for s in batch.sequences()] == [[1, 2, 8, 9], [1, 2, 9, 3, 8, 7, 4, 6]]
    assert batch.trained.astype(int).tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1]
    assert batch.turn_index[batch.trained].tolist() == [0, 0, 1, 1, 2]
    assert batch.trajectory_index.tolist() == [0] * 12
    assert sequence_starts(Trajectory(turns=turns, reward=1.0)) == [0, 1]


@pytest.mark.parametrize("change", [lambda ids: ids[:-1], lambda ids: [*ids[:-1], 99], lambda ids: [99, *ids[1:]]])
def test_a_prompt_that_lacks_or_changes_a_token_of_what_came_before_does_not_extend_it(change):
    first = Turn(prompt_ids=np.array([1, 2]), response_ids=np.array([3, 4]))
    second = Turn(prompt_ids=np.array(change([1, 2, 3, 4])), response_ids=np.array([5]))
    assert sequence_starts(Trajectory(turns=[first, second], reward=0.0)) == [0, 1]


def test_a_prompt_that_is_exactly_what_came_before_extends_it():
    first = Turn(prompt_ids=np.array([1, 2]), response_ids=np.array([3, 4]))
    second = Turn(prompt_ids=np.array([1, 2, 3, 4]), response_ids=np.array([5]))
    batch = packed(Trajectory(turns=[first, second], reward=0.0))
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5] and batch.trained.astype(int).tolist() == [0, 0, 1, 1, 1]


ids = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@st.composite
def trajectories(draw):
    """Turns whose prompts extend the last one, repeat it, or have nothing to do with it."""
    turns, history, serial = [], draw(ids), 0
    for _ in range(draw(st.integers(1, 5))):
        history = history if draw(st.booleans()) else draw(ids)
        response = draw(st.lists(st.integers(0, 3), max_size=4))
        logprobs = [-float(serial + i + 1) for i in range(len(response))]  # names each sampled token
        serial += len(response)
        turns.append(Turn(prompt_ids=np.array(history), response_ids=np.array(response, np.int64), logprobs=logprobs))
        history = [*history, *response, *draw(st.lists(st.integers(0, 3), max_size=3))]
    return Trajectory(turns=turns, reward=0.0)


@settings(deadline=None)
@given(st.lists(trajectories(), min_size=1, max_size=4))
def test_every_sampled_token_is_trained_exactly_once_after_exactly_what_the_engine_read(some):
    batch = packed(*some)
    found, position = [], 0
    for length in batch.sequence_lengths:
        at = slice(position, position + length)
        for i in np.flatnonzero(batch.trained[at]):
            place = position + i
            found.append((batch.trajectory_index[place], batch.turn_index[place], batch.behaviour_logprobs[place],
                          batch.token_ids[at][:i + 1].tolist()))
        position += length
    assert position == len(batch.token_ids)
    expected = [(index, number, turn.logprobs[i], [*turn.prompt_ids, *turn.response_ids[:i + 1]])
                for index, t in enumerate(some) for number, turn in enumerate(t.turns)
                for i in range(len(turn.response_ids))]
    assert found == expected
    assert batch.counts.tokens == len(expected)
    assert batch.counts.turns == len({entry[:2] for entry in expected})
    assert batch.counts.sequences == len({entry[0] for entry in expected})


@settings(deadline=None)
@given(st.lists(trajectories(), min_size=1, max_size=6), st.integers(1, 30))
def test_micro_batches_hold_every_trained_token_once_and_whole_trajectories(some, limit):
    batch = packed(*some)
    parts = [part for part, weight in micro_batches(batch, limit) if weight]
    assert sum(part.counts.tokens for part in parts) == batch.counts.tokens
    assert sum(part.counts.turns for part in parts) == batch.counts.turns
    assert sum(part.counts.sequences for part in parts) == batch.counts.sequences
    for part in parts:
        members = np.unique(part.trajectory_index)
        assert len(part.token_ids) <= limit or len(members) == 1
        assert part.sequence_lengths.sum() == len(part.token_ids)
        np.testing.assert_array_equal(part.token_ids, batch.token_ids[np.isin(batch.trajectory_index, members)])


@settings(deadline=None)
@given(st.lists(trajectories(), min_size=1, max_size=7), st.integers(1, 9), st.integers(0, 5))
def test_minibatches_are_disjoint_nearly_equal_and_as_many_as_asked(some, count, seed):
    batch = packed(*some)
    members = [np.unique(part.trajectory_index).tolist()
               for part in batch.minibatches(count, np.random.default_rng(seed))]
    assert len(members) == count
    assert sorted(i for part in members for i in part) == list(range(len(some)))
    assert max(map(len, members)) - min(map(len, members)) <= 1


def test_minibatches_are_drawn_by_the_generator():
    batch = packed(*(conversation([1], [2]) for _ in range(8)))

    def drawn(seed):
        return [part.trajectory_index.tolist() for part in batch.minibatches(2, np.random.default_rng(seed))]
    assert drawn(0) == drawn(0) != drawn(1)


def test_an_excluded_trajectory_has_no_trained_token_and_counts_nowhere():
    batch = packed(conversation([1], [2, 3]), conversation([4], [5, 6, 7]), excluded={1})
    assert batch.trained.astype(int).tolist() == [0, 1, 1, 0, 0, 0, 0]
    assert (batch.counts.tokens, batch.counts.turns, batch.counts.sequences) == (2, 1, 1)
    assert [(len(part.token_ids), weight) for part, weight in micro_batches(batch, 100)] == [(3, 1.0)]
    assert list(micro_batches(packed(conversation([1], [2]), excluded={0}), 100)) == []


def test_an_unscorable_trajectory_is_excluded_and_keeps_its_siblings_statistics():
    # Rewards [1, 0, None, 1]: mean 2/3, std (ddof 1) 0.57735 of the three.
    some = [conversation([1], [2, 3], reward=r) for r in (1.0, 0.0, None, 1.0)]
    batch = pack([group(*some)], GRPO().advantages([group(*some)]))
    np.testing.assert_allclose(batch.advantages[batch.trained][::2], [0.57735, -1.1547, 0.57735], atol=1e-4)
    assert np.unique(batch.trajectory_index[batch.trained]).tolist() == [0, 1, 3]


def test_an_episode_without_turns_leaves_nothing_behind():
    empty = Trajectory(turns=(), reward=0.0)
    batch = packed(conversation([1], [2]), empty, conversation([3], [4]), values=[1.0, 2.0, 3.0])
    assert batch.token_ids.tolist() == [1, 2, 3, 4] and batch.advantages.tolist() == [0, 1, 0, 3]
    with pytest.raises(ValueError, match="no tokens to train on"):
        packed(empty)


def test_the_action_mask_marks_the_executable_part_of_each_response():
    turns = [Turn(prompt_ids=np.array([1]), response_ids=np.array([2, 3, 4]), action_span=(1, 3)),
             Turn(prompt_ids=np.array([1, 2, 3, 4, 5]), response_ids=np.array([6, 7]), action_span=(0, 0)),
             Turn(prompt_ids=np.array([1, 2, 3, 4, 5, 6, 7]), response_ids=np.array([8]), action_span=(0, 1))]
    batch = packed(Trajectory(turns=turns, reward=0.0))
    assert batch.action_mask.astype(int).tolist() == [0, 0, 1, 1, 0, 0, 0, 1]


def test_what_the_algorithm_adds_lies_at_the_tokens_it_belongs_to_and_is_zero_elsewhere():
    one, two = conversation([1], [2, 3], [4], [5]), conversation([6], [7])
    credits = [Credit(advantages=(np.array([1., 2.]), np.array([3.])),
                      extra={"weight": (np.array([.1, .2]), np.array([.3]))}), Credit.uniform(two, 4.0)]
    batch = pack([group(one, two)], [credits])
    np.testing.assert_allclose(batch.extra["weight"], [0, .1, .2, 0, .3, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(batch.advantages, [0, 1, 2, 0, 3, 0, 4])
    selected = batch.select([1])
    assert selected.extra["weight"].tolist() == [0, 0] and selected.trajectory_index.tolist() == [1, 1]


def test_credit_that_does_not_fit_the_tokens_is_refused():
    one = conversation([1], [2, 3], [4], [5])
    with pytest.raises(ValueError, match=r"advantages of \[2\] tokens for turns of \[2, 1\] tokens"):
        pack([group(one)], [[Credit(advantages=(np.zeros(2),))]])
    with pytest.raises(ValueError, match=r"weight of \[1, 1\] tokens"):
        pack([group(one)], [[Credit(advantages=(np.zeros(2), np.zeros(1)),
                                    extra={"weight": (np.zeros(1), np.zeros(1))})]])
    with pytest.raises(ValueError, match="shorter"):
        pack([group(one)], [[]])
    prompted = Trajectory(turns=[Turn(prompt_ids=np.zeros(0), response_ids=np.array([1]))], reward=0.0)
    with pytest.raises(ValueError, match="nothing predicts its first token"):
        packed(prompted)
