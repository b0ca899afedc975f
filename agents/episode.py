"""One episode: an agent and an environment in turns, until one of them has enough."""

import asyncio
import math
import time
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agents.agent import Agent, Response
from agents.trajectory import Status, Trajectory, Turn
from agents.workers import EnvironmentFailure, WorkerEnv
from envs.core import ActionSpan, Snapshot, Task, TextEnv

SLOW_SECONDS = 1.0
"""A call of an environment in the loop that takes this long is warned of."""


class EpisodeError(Exception):
    """An episode failed; `status` says where, `name` how."""

    def __init__(self, status: Status, cause: BaseException):
        kind = cause.kind if isinstance(cause, EnvironmentFailure) else type(cause).__name__
        super().__init__(f"{kind}: {cause}")
        self.status, self.cause, self.name = status, cause, f"{status}:{kind}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Start:
    """Where episodes begin: at a task's first observation, or inside an episode that was played before."""

    task: Task
    turns: Sequence[Turn] = ()
    """What was played already."""
    max_turns: int | None = None
    """Further turns after which the episode is cut off; None: only the environment's own limit."""


class Episode:
    """An episode under way. `environment_seconds` is the time that its environment took."""

    def __init__(self, agent: Agent, env: TextEnv | WorkerEnv, start: Start, seed: int, engine_seconds: float):
        """All randomness comes from `seed`; `engine_seconds` is the deadline of one response."""
        self._agent, self._env, self._start, self._seed = agent, env, start, seed
        self._engine_seconds = engine_seconds
        self.environment_seconds = 0.0

    async def play(self) -> Trajectory:
        """Play to the end. Raises EpisodeError where the environment or the engine fails."""
        start, turns = self._start, list(self._start.turns)
        begun = await self._call(_begin, start.task)
        actor = self._agent.start(self._env, begun.observation, self._seed)
        state_key, info = begun.state_key, begun.info
        if turns:
            state_key = await self._call(_restore, Snapshot(begun.task, tuple(turn.action for turn in turns)))
            info = turns[-1].info
        for turn in turns:
            actor.observe(Response(text=turn.text, prompt_ids=turn.prompt_ids, response_ids=turn.response_ids,
                                   logprobs=turn.logprobs), turn.observation)
        limit = math.inf if start.max_turns is None else len(turns) + start.max_turns
        terminated = truncated = cut = False
        while not (terminated or truncated or cut or len(turns) >= limit):
            response = await self._respond(actor)
            cut = response.finish_reason == "length"
            if cut and not (response.text or len(response.response_ids)):
                break
            span, (observation, reward, terminated, truncated, info), next_key = await self._call(_act, response.text)
            turns.append(_turn(self._agent, response, span, observation, reward, state_key, info))
            actor.observe(response, observation)
            state_key = next_key
        return Trajectory(
            task=begun.task, turns=tuple(turns), reward=sum(t.reward for t in turns) if info["scorable"] else None,
            status=Status.COMPLETED if terminated else
            Status.TRUNCATED_LENGTH if cut and not truncated else Status.TRUNCATED_TURNS,
            success=info["success"], score=info["score"], context_breaks=actor.breaks,
            first_observation=begun.observation, system_prompt=begun.system_prompt)

    async def _respond(self, actor) -> Response:
        try:
            async with asyncio.timeout(self._engine_seconds) as deadline:
                return await actor.act()
        except Exception as error:
            if deadline.expired():
                late = TimeoutError(f"no response within engine_seconds = {self._engine_seconds:g}")
                raise EpisodeError(Status.ERROR_TIMEOUT, late) from error
            raise EpisodeError(Status.ERROR_ENGINE, error) from error

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(env, *arguments)`, in the environment's worker if it has one."""
        began, away = time.perf_counter(), isinstance(self._env, WorkerEnv)
        try:
            return await self._env.call(function, *arguments) if away else function(self._env, *arguments)
        except Exception as error:
            late = away and isinstance(error, TimeoutError)
            raise EpisodeError(Status.ERROR_TIMEOUT if late else Status.ERROR_ENVIRONMENT, error) from error
        finally:
            seconds = time.perf_counter() - began
            self.environment_seconds += seconds
            if seconds > SLOW_SECONDS and not away:
                warnings.warn(f"a call of {type(self._env).__name__} took {seconds:.1f} s, in which all episodes "
                              "waited: set `blocking = True` in its class", stacklevel=2)


# What is done with the environment, in its worker if it has one.


@dataclass(frozen=True, kw_only=True)
class _Begun:
    task: Task
    observation: str
    info: dict[str, Any]
    system_prompt: str
    state_key: str


def _begin(env: TextEnv, task: Task) -> _Begun:
    observation, info = env.reset(options={"task": task})
    return _Begun(task=env.task, observation=observation, info=info, system_prompt=env.system_prompt,
                  state_key=env.state_key())


def _restore(env: TextEnv, snapshot: Snapshot) -> str:
    env.restore(snapshot)
    return env.state_key()


def _act(env: TextEnv, text: str) -> tuple[ActionSpan, tuple[str, float, bool, bool, dict[str, Any]], str]:
    span = env.parse(text)
    return span, env.step(span.text), env.state_key()


def _turn(agent: Agent, response: Response, span: ActionSpan, observation: str, reward: float, state_key: str,
          info: dict) -> Turn:
    template, ids, action_span = getattr(agent, "template", None), response.response_ids, (0, 0)
    if template and (span.start, span.end) == (0, len(response.text)) and response.text:  # nothing said but the action
        action_span = 0, len(ids) - (int(ids[-1]) in template.end_ids)
    elif template:
        action_span = token_span(template.tokenizer, ids, span)
    return Turn(
        prompt_ids=response.prompt_ids, response_ids=ids, logprobs=response.logprobs,
        weight_version=response.weight_version, weight_versions=response.weight_versions,
        finish_reason=response.finish_reason, text=response.text, action=span.text, action_span=action_span,
        imitate=response.imitate,
        observation=observation, reward=reward, state_key=state_key, valid=info["valid"], info=info)


def token_span(tokenizer, ids: np.ndarray, span: ActionSpan) -> tuple[int, int]:
    """The tokens [first, last) of `ids` whose text covers the characters of `span`; (0, 0) where it is empty."""
    if span.start == span.end:
        return 0, 0

    def begun(tokens: int) -> int:
        return len(tokenizer.decode(ids[:tokens]))

    def whole(tokens: int) -> int:  # a character of several tokens reads as a replacement until its last one
        return len(tokenizer.decode(ids[:tokens]).rstrip("\N{REPLACEMENT CHARACTER}"))

    counts = range(len(ids) + 1)
    return bisect_right(counts, span.start, key=begun) - 1, min(bisect_left(counts, span.end, key=whole), len(ids))
