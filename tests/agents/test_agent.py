"""Agents in a rollout: what the engine read and sampled is what the trajectory holds."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from agents.agent import ModelAgent, ScriptedAgent
from agents.context import ChatTemplate
from agents.engine import Completion
from agents.episode import token_span
from agents.models import Policy
from agents.rollout import Rollout
from agents.trajectory import Status, Turn
from agents.transformers_engine import TransformersEngine
from envs.core import ActionSpan, Outcome, Task, TextEnv
from tests.agents.episodes import tasks
from tests.agents.policies import random_policy
from tests.agents.test_context import DROPS_THINKING, chat, said, toy_tokenizer, words


class Talking(TextEnv):
    """Answers every response with `reply`, three times."""

    max_turns = 3
    system_prompt = "Rules."
    reply = "<obs>5</obs>"

    def tasks(self, split):
        return [Task(key=str(i)) for i in range(3)]

    def _reset(self, task, rng):
        return f"Target: {task.key}."

    def _step(self, action):
        return Outcome(observation=self.reply, reward=0.25)


class StubEngine:
    """Answers with the given ids in turn, after whose first token it got new weights; keeps what it was asked."""

    weight_version = 3

    def __init__(self, *answers):
        self.answers, self.requests = list(answers), []

    async def generate(self, request):
        ids = np.array(self.answers[len(self.requests)])
        self.requests.append(request)
        return Completion(response_ids=ids, logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
                          finish_reason="stop", weight_version=3,
                          weight_versions=((3, 1), (4, len(ids))) if len(ids) > 1 else ())


def with_tokenizer(tokenizer):
    policy = random_policy()
    policy.model.generation_config.eos_token_id = None
    return Policy(policy.model, tokenizer)


def test_what_was_sampled_is_kept_as_it_was_sampled():
    # A merge would write the sampled [a, b] as the one token ab; log-probabilities belong to the two.
    policy = with_tokenizer(toy_tokenizer())
    engine = StubEngine([0, 1], [2], [0, 1, 2])
    groups, _ = Rollout(Talking).run(ModelAgent(engine, policy), tasks(1), 1, seed=0)
    turns = groups[0].trajectories[0].turns
    assert [turn.response_ids.tolist() for turn in turns] == [[0, 1], [2], [0, 1, 2]]
    assert [len(turn.logprobs) for turn in turns] == [2, 1, 3]
    for turn, following, request in zip(turns, turns[1:], engine.requests[1:]):
        whole = [*turn.prompt_ids, *turn.response_ids]
        assert request.prompt_ids[:len(whole)].tolist() == whole == following.prompt_ids[:len(whole)].tolist()
    assert [turn.text for turn in turns] == ["ab", "ab", "abab"]
    assert [(turn.weight_version, turn.weight_versions) for turn in turns] == [
        (3, ((3, 1), (4, 2))), (3, ()), (3, ((3, 1), (4, 3)))]


@pytest.mark.parametrize("versions", [((4, 1), (5, 2)), ((3, 1),), ((3, 1), (4, 3)), ((3, 2), (4, 2)), ((3, 0), (4, 2)),
                                      ((3, 2), (4, 1), (5, 2))])
def test_weight_versions_that_do_not_cover_the_response_are_refused(versions):
    with pytest.raises(ValueError, match="do not cover 2 response ids"):
        Turn(response_ids=[0, 1], weight_version=3, weight_versions=versions)


@pytest.mark.parametrize("window", [None, 1])
@pytest.mark.parametrize("template", [None, DROPS_THINKING])
def test_prompts_in_the_trajectory_are_those_that_the_engine_read(template, window):
    policy = with_tokenizer(words(template))
    chatting = ChatTemplate(policy.tokenizer, policy.end_ids)
    engine = StubEngine(*(said(chatting, f"<think>{i}</think>a{i}") for i in range(3)))
    groups, _ = Rollout(Talking).run(ModelAgent(engine, policy, window=window), tasks(1), 1, seed=0)
    trajectory = groups[0].trajectories[0]
    for turn, request in zip(trajectory.turns, engine.requests):
        assert turn.prompt_ids.tolist() == request.prompt_ids.tolist()
    assert trajectory.context_breaks == (3 if template and not window else 0)
    assert [turn.text for turn in trajectory.turns] == [f"<think>{i}</think>a{i}" for i in range(3)]


def test_an_observation_longer_than_the_context_truncates_the_episode_and_no_other():
    class Verbose(Talking):
        def _step(self, action):
            return Outcome(observation="5 " * 300 if self.task.key == "1" else "5", reward=0.25)

    policy = random_policy(eos_token_id=None)
    agent = ModelAgent(TransformersEngine(policy), policy, max_response_tokens=4)
    agent.template.end_ids = frozenset(range(300))  # any token ends a response, so that none is cut

    class AlwaysStops:
        async def generate(self, request):
            completion = await engine.generate(request)
            reason = "stop" if len(completion.response_ids) else completion.finish_reason
            return Completion(response_ids=completion.response_ids, logprobs=completion.logprobs, finish_reason=reason,
                              weight_version=0)

    engine, agent.engine = agent.engine, AlwaysStops()
    groups, report = Rollout(Verbose).run(agent, tasks(3), 2, seed=0)
    assert not report.errors and len(groups) == 3
    for group in groups:
        for trajectory in group.trajectories:
            long = group.task.key == "1"
            assert trajectory.status == (Status.TRUNCATED_LENGTH if long else Status.TRUNCATED_TURNS)
            assert len(trajectory.turns) == (1 if long else 3) and trajectory.reward == 0.25 * len(trajectory.turns)


def test_a_first_observation_longer_than_the_context_is_an_episode_without_turns():
    class Verbose(Talking):
        def _reset(self, task, rng):
            return "5 " * 300

    policy = random_policy()
    groups, _ = Rollout(Verbose).run(ModelAgent(TransformersEngine(policy), policy), tasks(1), 2, seed=0)
    for trajectory in groups[0].trajectories:
        assert (len(trajectory.turns), trajectory.status, trajectory.success) == (0, Status.TRUNCATED_LENGTH, False)
        assert trajectory.response_length == 0


def test_ids_and_log_probabilities_are_equally_many_in_every_row():
    policy = random_policy()
    agent = ModelAgent(TransformersEngine(policy, slots=32), policy, max_response_tokens=6)
    groups, report = Rollout(Talking).run(agent, tasks(3) * 20, 9, seed=0)
    turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
    assert report.episodes == 540 and report.turns == len(turns)
    assert all(len(turn.response_ids) == len(turn.logprobs) > 0 for turn in turns)
    assert report.sampled_tokens == sum(len(turn.response_ids) for turn in turns)


def test_the_same_seed_plays_the_same_episodes_and_members_of_a_group_differ():
    policy = random_policy()

    def play(seed, concurrency):
        agent = ModelAgent(TransformersEngine(policy, slots=4), policy, max_response_tokens=6)
        groups, _ = Rollout(Talking, concurrency=concurrency).run(agent, tasks(3), 4, seed=seed)
        return [[turn.response_ids.tolist() for turn in t.turns] for group in groups for t in group.trajectories]

    assert play(0, 3) == play(0, 12)
    assert play(0, 12) != play(1, 12)
    assert len({str(episode) for episode in play(0, 12)}) == 12


def test_playing_leaves_the_global_generators_alone():
    policy = random_policy()
    agent = ModelAgent(TransformersEngine(policy), policy, max_response_tokens=6)

    def states():
        return str((random.getstate(), np.random.get_state())), torch.get_rng_state().tolist()
    before = states()
    Rollout(Talking).run(agent, tasks(3), 2, seed=0)
    assert states() == before


def test_two_copies_of_a_task_in_one_rollout_are_played_differently():
    policy = random_policy()
    agent = ModelAgent(TransformersEngine(policy), policy, max_response_tokens=8)
    groups, _ = Rollout(Talking).run(agent, tasks(1) * 2, 4, seed=0)
    assert len({str(t.turns[0].response_ids) for group in groups for t in group.trajectories}) == 8


@pytest.mark.parametrize(("kind", "success"), [("gold", True), ("random", False), ("noop", False)])
def test_scripted_agents_play_without_a_model(counting, kind, success):
    groups, _ = Rollout(counting).run(ScriptedAgent(kind), tasks(2), 2, seed=0)
    assert [t.success for group in groups for t in group.trajectories] == [success] * 4


def test_demonstrations_hold_the_ids_that_a_model_would_have_read_and_written(counting):
    policy = random_policy()
    groups, _ = Rollout(counting).run(ScriptedAgent("gold", policy), tasks(1), 1, seed=0)
    turns = groups[0].trajectories[0].turns
    assert [turn.text for turn in turns] == ["+"] * 3
    for turn, following in pairwise(turns):
        assert turn.response_ids[-1] in policy.end_ids
        whole = [*turn.prompt_ids, *turn.response_ids]
        assert following.prompt_ids[:len(whole)].tolist() == whole


@pytest.mark.parametrize("window", [None, 1])
def test_demonstrations_have_the_prompts_that_a_model_reads_under_the_same_window(counting, window):
    policy = with_tokenizer(words(None))
    shown, _ = Rollout(counting).run(ScriptedAgent("gold", policy, window=window), tasks(1), 1, seed=0)
    turns = shown[0].trajectories[0].turns
    engine = StubEngine(*(turn.response_ids for turn in turns))
    played, _ = Rollout(counting).run(ModelAgent(engine, policy, window=window), tasks(1), 1, seed=0)
    assert played[0].trajectories[0].success
    for turn, other in zip(turns, played[0].trajectories[0].turns, strict=True):
        assert turn.prompt_ids.tolist() == other.prompt_ids.tolist()


def test_an_unknown_scripted_agent_is_refused():
    with pytest.raises(ValueError, match="there are gold, random and noop"):
        ScriptedAgent("perfect")


@pytest.mark.parametrize(("text", "part"), [
    ("<think>1</think><tool>1+2</tool>", "1+2"), ("go néar 終わり", "終わり"), ("<tool>x</tool>", "<tool>x</tool>"),
    ("abc", "a"), ("😀😀 up", "😀 up"), ("x", "x"),
])
def test_the_span_of_an_action_is_the_fewest_tokens_that_hold_its_characters(text, part):
    template = chat(None)
    ids, start = said(template, text), text.rindex(part)
    first, last = token_span(template.tokenizer, ids, ActionSpan(part, start, start + len(part)))
    assert part in template.tokenizer.decode(ids[first:last])
    assert part not in template.tokenizer.decode(ids[first + 1:last])
    assert part not in template.tokenizer.decode(ids[first:last - 1])


def test_no_action_has_an_empty_span():
    template = chat(None)
    assert token_span(template.tokenizer, said(template, "abc"), ActionSpan("", 0, 0)) == (0, 0)
