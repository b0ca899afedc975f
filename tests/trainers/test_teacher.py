"""A teacher reads more and scores the same responses."""

import copy

import numpy as np
import pytest

from agents.context import ChatTemplate, Context
from agents.scoring import score_sequences
from agents.trajectory import Group, Trajectory, Turn
from tests.agents.policies import random_policy
from trainers.algorithms import FACTOR, SERL
from trainers.learner import Learner, OptimizerSettings
from trainers.teacher import Insertion, feedback, teacher_logprobs, teacher_prompt

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
    first, second, empty = teacher_logprobs(policy, turns, told, 0.7, max_tokens=99, width=64)
    prompt = teacher_prompt(words, turns[0], told[0], 512)
    (alone,) = score_sequences(policy.model, [np.append(prompt, [3, 4])], 0.7)
    assert first == pytest.approx(alone[-2:], abs=1e-5)
    assert second.tolist() == [-0.5] and len(empty) == 0


def group_of(policy):
    words = template(policy, CHATML)
    return Group(trajectories=[Trajectory(turns=[turn_of(words)], reward=1.0), Trajectory(turns=[], reward=0.0)])


def test_the_learner_asks_the_teacher_only_while_the_algorithm_listens(policy):
    learner, group = Learner(policy, FACTOR(), OptimizerSettings()), group_of(policy)
    ((found, none),) = learner.score([group], 0).teacher_logprobs
    turn = group.trajectories[0].turns[0]
    expected = teacher_logprobs(policy, [turn], [feedback("")], 1.0, max_tokens=99, width=64)
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
    state = copy.deepcopy(learner.state())
    assert teacher_says(2) != before
    learner.load_state(state)
    assert teacher_says(3) == before
    weight.data.copy_(saved)
