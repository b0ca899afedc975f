"""A teacher reads more and scores the same responses."""

import copy

import numpy as np
import pytest

from agents.context import ChatTemplate, Context
from agents.scoring import score_sequences
from agents.trajectory import Group, Trajectory, Turn
from tests.agents.policies import random_policy
from tests.trainers.trajectories import conversation, random_conversation
from trainers import distributed, teacher
from trainers.algorithms import FACTOR, SERL
from trainers.learner import Learner, OptimizerSettings
from trainers.teacher import Insertion, feedback, teacher_prompt, teacher_prompts

CHATML = ("{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>\n{% endfor %}"
          "{% if add_generation_prompt %}<|assistant|>\n{% endif %}")


@pytest.fixture(scope="module")
def policy():
    return random_policy(max_position_embeddings=512)


def template(policy, chat):
    policy.tokenizer.chat_template = chat
    return ChatTemplate(policy.tokenizer, policy.end_ids)


def turn_of(words, observation="Numbers: 1 2 3.", response=(3, 4)):
    ids = Context(words, "Rules.", observation).prompt_ids
    return Turn(prompt_ids=ids, response_ids=list(response), logprobs=[-0.5] * len(response))


@pytest.mark.parametrize("chat, expected", [
    (CHATML, "skill\n<|system|>Rules.</s>\n<|user|>Numbers: 1 2 3. told</s>\n<|assistant|>\n"),
    (None, "skill\nRules.\nNumbers: 1 2 3. told\n")])
def test_what_the_teacher_is_told_stands_before_the_prompt_and_ends_its_last_message(policy, chat, expected):
    words = template(policy, chat)
    ids = teacher_prompt(words, turn_of(words), Insertion("skill\n", " told"), 512)
    assert policy.tokenizer.decode(ids) == expected


@pytest.mark.parametrize("chat", [CHATML, None])
def test_nothing_told_leaves_the_prompt_as_it_was(policy, chat):
    words = template(policy, chat)
    turn = turn_of(words)
    assert policy.tokenizer.decode(teacher_prompt(words, turn, Insertion(), 512)) \
        == policy.tokenizer.decode(turn.prompt_ids)


def test_a_prompt_that_is_too_long_loses_history_and_nothing_that_was_told(policy):
    words = template(policy, CHATML)
    turn = turn_of(words, "1 " * 200)
    ids = teacher_prompt(words, turn, Insertion("skill\n", " told"), 60)
    text = policy.tokenizer.decode(ids)
    assert len(ids) == 60 - 2 and text.startswith("skill\n") and text.endswith(" told</s>\n<|assistant|>\n")
    with pytest.raises(ValueError, match="leaves no room"):
        teacher_prompt(words, turn, Insertion("skill " * 60), 60)


def test_the_teacher_scores_the_very_ids_and_who_is_told_nothing_keeps_the_behaviour_s(policy):
    words = template(policy, CHATML)
    turns = [turn_of(words), turn_of(words, response=(7,)), turn_of(words, response=())]
    told = [Insertion(after=" told"), None, Insertion("x")]
    first, second, empty = says(policy, turns, told, 0.7)
    prompt = teacher_prompt(words, turns[0], told[0], 512)
    (alone,) = score_sequences(policy.model, [np.append(prompt, [3, 4])], 0.7)
    assert first == pytest.approx(alone[-2:], abs=1e-5)
    assert second.tolist() == [-0.5] and len(empty) == 0


def says(policy, turns, insertions, temperature=1.0):
    """The teacher's log-probabilities of each turn's response."""
    return teacher.teacher_logprobs(policy.model, turns, teacher_prompts(policy, turns, insertions), temperature,
                                    max_tokens=999, width=64)


def alone(policy, turn, insertion):
    """What the teacher says of a turn whose whole sequence is scored on its own."""
    prompt = teacher_prompt(ChatTemplate(policy.tokenizer, policy.end_ids), turn, insertion, policy.max_context)
    return score_sequences(policy.model, [np.concatenate([prompt, turn.response_ids])])[0][len(prompt):]


@pytest.fixture
def read(monkeypatch):
    """The lengths of the sequences that the teacher has read."""
    lengths = []

    def score(model, sequences, *arguments, **options):
        lengths.extend(map(len, sequences))
        return score_sequences(model, sequences, *arguments, **options)
    monkeypatch.setattr(distributed, "score_sequences", score)
    return lengths


@pytest.mark.parametrize("insertion", [Insertion("skill\n"), Insertion(after=" told"), Insertion("skill\n", " told")])
def test_a_turn_is_scored_as_it_would_be_alone_whatever_is_read_beside_it(policy, insertion):
    policy.tokenizer.chat_template = None
    rng = np.random.default_rng(0)
    turns = [turn for length in (4, 1, 3) for turn in random_conversation(rng, length, 0.0).turns]
    for found, turn in zip(says(policy, turns, [insertion] * 8), turns, strict=True):
        assert found == pytest.approx(alone(policy, turn, insertion), abs=1e-4)


def test_a_growing_conversation_is_read_once_where_what_is_told_stands_in_front(policy, read):
    first, second = (conversation([5, 6], [i], [7], [8, 9], [10, 11], [12]).turns for i in (20, 21))
    skills = Insertion("skill\n")
    told = len(policy.tokenizer("skill\n", add_special_tokens=False).input_ids)
    says(policy, [*first, *second], [skills] * 6)
    assert read == [told + 9] * 2
    # A turn that is not told leaves the pass whole; what is told at the end of a prompt is not part of the next one.
    read.clear()
    says(policy, first, [skills, None, skills])
    says(policy, first, [Insertion(after="1")] * 3)
    assert read == [told + 9, 2 + 1 + 1, (3 + 1) + 1 + 2, 8 + 1 + 1]


def test_only_turns_that_outgrow_the_context_lose_history(read):
    policy = random_policy(max_position_embeddings=12)
    policy.tokenizer.chat_template = None
    skills, turns = Insertion("1"), conversation([5, 6], [7, 8], [9, 10], [11, 12], [13, 14], [15, 16]).turns
    found = says(policy, turns, [skills] * 3)
    assert read == [9, 12]  # 1 + 8 ids; then the last turn's 1 + 12, less one of the history
    assert found[1] == pytest.approx(alone(policy, turns[1], skills), abs=1e-4)


def test_ids_sampled_before_stay_as_sampled_and_the_beginning_of_text_stays_first(policy):
    words = template(policy, None)
    one, two = (policy.tokenizer(text, add_special_tokens=False).input_ids for text in ("1", "2"))
    sampled = [*one, *two]  # "12", in other tokens than the tokenizer's own
    turn = Turn(prompt_ids=sampled, response_ids=[5])
    told = policy.tokenizer("skill", add_special_tokens=False).input_ids
    assert teacher_prompt(words, turn, Insertion("skill"), 99).tolist() == [*told, *sampled]
    policy.tokenizer.bos_token = policy.tokenizer.eos_token
    first = policy.tokenizer.bos_token_id
    begun = Turn(prompt_ids=[first, *sampled], response_ids=[5])
    assert teacher_prompt(words, begun, Insertion("skill"), 99).tolist() == [first, *told, *sampled]
    assert teacher_prompt(words, begun, Insertion("skill", "x"), 99)[0] == first
    assert teacher_prompt(words, begun, Insertion("skill"), len(told) + 3).tolist() == [first, *told, *two]
    policy.tokenizer.bos_token = None


def group_of(policy):
    words = template(policy, CHATML)
    return Group(trajectories=[Trajectory(turns=[turn_of(words)], reward=1.0), Trajectory(turns=[], reward=0.0)])


def test_the_learner_asks_the_teacher_only_while_the_algorithm_listens(policy):
    learner, group = Learner(policy, FACTOR(), OptimizerSettings()), group_of(policy)
    ((found, none),) = learner.score([group], 0).teacher_logprobs
    turn = group.trajectories[0].turns[0]
    expected = says(policy, [turn], [feedback("")])
    assert found[0] == pytest.approx(expected[0], abs=1e-5) and none == []
    assert learner.score([group], 60).teacher_logprobs[0][0][0].tolist() == [-0.5, -0.5]
    assert Learner(policy, SERL(mixing=0.0), OptimizerSettings()).score([group], 0).teacher_logprobs is None


def test_serl_s_teacher_keeps_its_weights_between_copies(policy):
    learner, group = Learner(policy, SERL(teacher_steps=2), OptimizerSettings()), group_of(policy)

    def teacher_says(step):
        return learner.score([group], step).teacher_logprobs[0][0][0].tolist()
    before = teacher_says(0)
    weight = next(policy.model.parameters())
    saved = weight.detach().clone()
    weight.data.mul_(0.5)
    assert teacher_says(1) == before
    state, tensors = copy.deepcopy(learner.state()), copy.deepcopy(learner.tensors())
    assert teacher_says(2) != before
    learner.load_state(state)
    for name, tensor in learner.tensors().items():
        tensor.copy_(tensors[name])
    assert teacher_says(3) == before
    weight.data.copy_(saved)
