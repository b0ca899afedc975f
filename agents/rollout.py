"""Running many episodes: asynchronously, with deadlines, retries and nothing that turns an error into a reward.

An episode never waits for another; each has an environment of its own from a pool that is reused. An episode that fails
is retried within its budget; when that is spent its whole group is dropped at once and counted, with the first
traceback.
"""

import asyncio
import hashlib
import math
import threading
import time
import traceback
import warnings
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from agents.agent import Agent, Response
from agents.trajectory import Group, Status, Trajectory, Turn
from envs.core import ActionSpan, Snapshot, Task, TextEnv


@dataclass
class RolloutReport:
    """What a rollout cost and lost."""

    episodes: int = 0
    """Episodes of the groups that were kept."""
    turns: int = 0
    """Played in kept episodes."""
    sampled_tokens: int = 0
    """Of kept episodes."""
    seconds: float = 0.0
    environment_seconds: float = 0.0
    """Time inside `reset` and `step`, summed over episodes."""
    retries: int = 0
    dropped_groups: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Dropped groups by status and exception type of the episode that failed first."""
    first_traceback: str = ""

    def add(self, other: "RolloutReport") -> None:
        """Count another rollout in."""
        for name in ("episodes", "turns", "sampled_tokens", "seconds", "environment_seconds", "retries",
                     "dropped_groups", "errors"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_traceback = self.first_traceback or other.first_traceback


class RolloutError(RuntimeError):
    """No group of a rollout survived; the message holds the first traceback, `report` what was lost."""

    def __init__(self, message: str, report: RolloutReport | None = None):
        super().__init__(message)
        self.report = report or RolloutReport()


class _EpisodeError(Exception):
    """An episode failed for good; `status` says where."""

    def __init__(self, status: Status, cause: BaseException):
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.status, self.cause = status, cause

    @property
    def name(self) -> str:
        return f"{self.status}:{type(self.cause).__name__}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Start:
    """Where episodes begin: at a task's first observation, or inside an episode that was played before."""

    task: Task
    turns: Sequence[Turn] = ()
    """What was played already."""
    max_turns: int | None = None
    """Further turns after which the episode is cut off; None: only the environment's own limit."""


class Rollout:
    """Runs groups of episodes of one environment with one agent."""

    def __init__(self, make_env: Callable[[], TextEnv], *, concurrency: int = 256, retries: int = 2,
                 episode_seconds: float = 600.0):
        """`concurrency`: episodes under way at once. `episode_seconds`: deadline of one try of an episode."""
        self.make_env = make_env
        self._concurrency, self._retries, self._episode_seconds = concurrency, retries, episode_seconds
        self._idle: list[TextEnv] = []
        self._entered: set[TextEnv] = set()
        """Environments that a thread is in, some of them past their episode's deadline."""

    def close(self) -> None:
        """Close the pool's environments."""
        while self._idle:
            self._discard(self._idle.pop())

    def run(self, agent: Agent, tasks: Sequence[Task], group_size: int, seed: int,
            on_episode: Callable[[Trajectory], None] | None = None) -> tuple[list[Group], RolloutReport]:
        """Play every task `group_size` times. Groups come back whole, in the order of the tasks.

        `seed` and the task's key decide each episode's randomness. Raises RolloutError where no group survives.
        """
        results, report = asyncio.run(self._run(agent, [Start(task=task) for task in tasks], group_size, seed,
                                                on_episode or (lambda trajectory: None)))
        groups = [group for group in results if group]
        if tasks and not groups:
            raise RolloutError(f"all {len(tasks)} groups failed ({report.errors}); the first failure was:\n"
                               + report.first_traceback, report)
        return groups, report

    def branch(self, agent: Agent, starts: Sequence[Start], count: int,
               seed: int) -> tuple[list[Group | None], RolloutReport]:
        """Play `count` episodes from each start. Their turns and returns are those of the whole episode, the report
        counts what was played anew. None where a start's episodes failed."""
        return asyncio.run(self._run(agent, starts, count, seed, lambda trajectory: None))

    async def _run(self, agent, starts, group_size, seed, on_episode):
        report, started = RolloutReport(), time.perf_counter()
        gate = asyncio.Semaphore(self._concurrency)
        results: list[list[Trajectory | None]] = [[None] * group_size for _ in starts]

        async def member(place: int, index: int) -> None:
            async with gate:
                episode_seed = derive_seed(seed, starts[place].task.key, place, index)
                trajectory = await self._with_retries(agent, starts[place], episode_seed, report)
            results[place][index] = trajectory
            on_episode(trajectory)

        async def group(place: int) -> None:
            try:
                async with asyncio.TaskGroup() as members:  # one that fails for good cancels the others
                    for index in range(group_size):
                        members.create_task(member(place, index))
            except* _EpisodeError as failures:
                first = failures.exceptions[0]
                report.errors[first.name] += 1
                report.first_traceback = report.first_traceback or "".join(traceback.format_exception(first.cause))

        async with asyncio.TaskGroup() as running:
            for place in range(len(starts)):
                running.create_task(group(place))
        groups = [Group(task=start.task, trajectories=tuple(members)) if all(members) else None
                  for start, members in zip(starts, results)]
        report.dropped_groups = groups.count(None)
        report.seconds = time.perf_counter() - started
        for start, group in zip(starts, groups):
            for trajectory in group.trajectories if group else ():
                played = trajectory.turns[len(start.turns):]
                report.episodes += 1
                report.turns += len(played)
                report.sampled_tokens += sum(len(turn.response_ids) for turn in played)
        return groups, report

    async def _with_retries(self, agent: Agent, start: Start, seed: int, report: RolloutReport) -> Trajectory:
        """Raises _EpisodeError where the last try fails too."""
        for attempt in range(self._retries + 1):
            try:
                return await self._try(agent, start, derive_seed(seed, attempt), report)
            except _EpisodeError as error:
                failure = error
            except TimeoutError as error:
                failure = _EpisodeError(Status.ERROR_TIMEOUT, error)
            except Exception as error:  # whatever it is, it must not take the other episodes with it
                failure = _EpisodeError(Status.ERROR_AGENT, error)
            report.retries += attempt < self._retries
        raise failure

    async def _try(self, agent: Agent, start: Start, seed: int, report: RolloutReport) -> Trajectory:
        try:
            env = self._idle.pop() if self._idle else self.make_env()
        except Exception as error:
            raise _EpisodeError(Status.ERROR_ENVIRONMENT, error) from error
        try:
            async with asyncio.timeout(self._episode_seconds):
                trajectory = await self._episode(agent, env, start, seed, report)
        except BaseException:  # also where a sibling's failure cancels it
            self._discard(env)
            raise
        self._idle.append(env)
        return trajectory

    def _discard(self, env: TextEnv) -> None:
        """Close an environment that is not reused, unless a thread is in it: then it is closed when that comes out."""
        if env in self._entered:
            return
        try:
            env.close()
        except Exception as error:
            warnings.warn(f"closing a {type(env).__name__} failed: {type(error).__name__}: {error}", stacklevel=2)

    async def _episode(self, agent: Agent, env: TextEnv, start: Start, seed: int, report: RolloutReport) -> Trajectory:
        observation, info = await self._call(env, report, lambda: env.reset(options={"task": start.task}))
        first_observation = observation
        actor = agent.start(env, observation, seed)
        turns = list(start.turns)
        if turns:
            snapshot = Snapshot(env.task, tuple(turn.action for turn in turns))
            await self._call(env, report, lambda: env.restore(snapshot))
        for turn in turns:
            actor.observe(Response(text=turn.text, prompt_ids=turn.prompt_ids, response_ids=turn.response_ids,
                                   logprobs=turn.logprobs), turn.observation)
        limit = math.inf if start.max_turns is None else len(turns) + start.max_turns
        terminated = truncated = cut = False
        while not (terminated or truncated or cut or len(turns) >= limit):
            state_key = env.state_key()
            try:
                response = await actor.act()
            except Exception as error:
                raise _EpisodeError(Status.ERROR_ENGINE, error) from error
            cut = response.finish_reason == "length"
            if cut and not (response.text or len(response.response_ids)):
                break
            span = env.parse(response.text)
            observation, reward, terminated, truncated, info = await self._call(
                env, report, lambda: env.step(span.text))  # noqa: B023 (called at once)
            turns.append(_turn(agent, response, span, observation, reward, state_key, info))
            actor.observe(response, observation)
        return Trajectory(
            task=env.task, turns=tuple(turns), reward=sum(t.reward for t in turns) if info["scorable"] else None,
            status=Status.COMPLETED if terminated else
            Status.TRUNCATED_LENGTH if cut and not truncated else Status.TRUNCATED_TURNS,
            success=info["success"], score=info["score"], context_breaks=actor.breaks,
            first_observation=first_observation, system_prompt=env.system_prompt)

    async def _call(self, env: TextEnv, report: RolloutReport, call: Callable):
        started = time.perf_counter()
        try:
            return await self._in_thread(env, call) if env.blocking else call()
        except Exception as error:
            raise _EpisodeError(Status.ERROR_ENVIRONMENT, error) from error
        finally:
            report.environment_seconds += time.perf_counter() - started

    async def _in_thread(self, env: TextEnv, call: Callable):
        """What `call` returns or raises, from a daemon thread: one that never comes back holds up neither the rollout
        nor the end of the process."""
        loop = asyncio.get_running_loop()
        result = loop.create_future()
        self._entered.add(env)

        def leave(value: object, error: Exception | None) -> None:
            self._entered.discard(env)
            if result.done():  # nobody waits for it any more
                self._discard(env)
            else:
                result.set_result((value, error))

        def work() -> None:
            value = error = None
            try:
                value = call()
            except Exception as raised:
                error = raised
            try:
                loop.call_soon_threadsafe(leave, value, error)
            except RuntimeError:  # the loop is closed: the rollout is over
                leave(value, error)

        threading.Thread(target=work, daemon=True).start()
        value, error = await result
        if error is not None:
            raise error
        return value


def derive_seed(*parts: object) -> int:
    """A seed below 2**62 that depends on all parts, the same on every machine."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


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
