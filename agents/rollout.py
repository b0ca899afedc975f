"""Running many episodes: asynchronously, with deadlines, retries and nothing that turns an error into a reward.

An episode never waits for another; each has an environment of its own, which is used again. Environments that block
stay in worker processes (agents/workers.py), the others in the loop. An episode that fails is retried within its
budget; when that is spent its whole group is dropped at once and counted, with the first traceback. Whatever is
cancelled frees its place in the engine and its environment at once.
"""

import asyncio
import hashlib
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from agents.agent import Agent
from agents.episode import Episode, EpisodeError, Start
from agents.trajectory import Group, Status, Trajectory
from agents.workers import WorkerEnv, WorkerLost, WorkerPool
from envs.core import Task, TextEnv


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
    """Time inside environments' calls, summed over episodes."""
    retries: int = 0
    lost_episodes: int = 0
    """Of groups that were under way in an environment worker of a cluster when it was lost."""
    lost_responses: int = 0
    """Asked of an engine replica of a cluster that was lost, and sampled by another."""
    dropped_groups: int = 0
    """Groups that failed."""
    cancelled: list[int] = field(default_factory=list)
    """Places, among the rollout's tasks, of the groups under way when enough others were whole."""
    stale_groups: int = 0
    """Groups that were too old to learn from; they count in what was spent."""
    errors: Counter[str] = field(default_factory=Counter)
    """Dropped groups by status and exception type of the episode that failed first."""
    first_traceback: str = ""

    def add(self, other: "RolloutReport") -> None:
        """Count another rollout in."""
        for part in fields(self):
            if part.name != "first_traceback":
                setattr(self, part.name, getattr(self, part.name) + getattr(other, part.name))
        self.first_traceback = self.first_traceback or other.first_traceback

    def count(self, start: Start, group: Group) -> None:
        """Count what was played anew in a group that is kept."""
        for trajectory in group.trajectories:
            played = trajectory.turns[len(start.turns):]
            self.episodes += 1
            self.turns += len(played)
            self.sampled_tokens += sum(len(turn.response_ids) for turn in played)


class RolloutError(RuntimeError):
    """No group of a rollout survived; the message holds the first traceback, `report` what was lost."""

    def __init__(self, message: str, report: RolloutReport | None = None):
        super().__init__(message)
        self.report = report or RolloutReport()


class Rollout:
    """Runs groups of episodes of one environment with one agent."""

    def __init__(self, make_env: Callable[[], TextEnv], *, concurrency: int = 256, retries: int = 2,
                 episode_seconds: float = 600.0, engine_seconds: float = 300.0, environment_seconds: float = 120.0):
        """`concurrency`: episodes under way at once. Deadlines: `episode_seconds` of one try of an episode,
        `engine_seconds` of one response, `environment_seconds` of one call of a blocking environment."""
        self.make_env, self.concurrency, self._retries = make_env, concurrency, retries
        self._episode_seconds, self._engine_seconds = episode_seconds, engine_seconds
        self._environment_seconds = environment_seconds
        self._idle: list[TextEnv | WorkerEnv] = []
        self._workers: WorkerPool | None = None

    def close(self) -> None:
        """Close the environments and end their processes."""
        while self._idle:
            self._discard(self._idle.pop())
        if self._workers:
            self._workers.close()
            self._workers = None

    def run(self, agent: Agent, tasks: Sequence[Task], group_size: int, seed: int,
            on_episode: Callable[[Trajectory], None] | None = None,
            wanted: int | None = None) -> tuple[list[Group], RolloutReport]:
        """Play every task `group_size` times. Groups come back whole, in the order of the tasks; with `wanted`, only
        the first so many to be whole: the others are then cancelled.

        `seed` and the task's key decide each episode's randomness. Raises RolloutError where no group survives.
        """
        results, report = asyncio.run(self._run(agent, [Start(task=task) for task in tasks], group_size, seed,
                                                on_episode, wanted))
        groups = [group for group in results if group]
        if tasks and not groups:
            raise RolloutError(f"all {len(tasks)} groups failed ({report.errors}); the first failure was:\n"
                               + report.first_traceback, report)
        return groups, report

    def branch(self, agent: Agent, starts: Sequence[Start], count: int,
               seed: int) -> tuple[list[Group | None], RolloutReport]:
        """Play `count` episodes from each start. Their turns and returns are those of the whole episode, the report
        counts what was played anew. None where a start's episodes failed."""
        return asyncio.run(self._run(agent, starts, count, seed, None, None))

    async def _run(self, agent: Agent, starts: Sequence[Start], group_size: int, seed: int,
                   on_episode: Callable[[Trajectory], None] | None,
                   wanted: int | None) -> tuple[list[Group | None], RolloutReport]:
        report, began = RolloutReport(), time.perf_counter()
        gate = asyncio.Semaphore(self.concurrency)
        groups: list[Group | None] = [None] * len(starts)
        waiting: dict[int, asyncio.Task] = {}
        whole = 0

        async def play(place: int) -> None:
            nonlocal whole
            groups[place] = await self.group(agent, starts[place], group_size, seed, gate, report, place=place,
                                             on_episode=on_episode)
            del waiting[place]
            whole += groups[place] is not None
            if whole == wanted:
                for task in waiting.values():
                    task.cancel()

        async with asyncio.TaskGroup() as running:
            for place in range(len(starts)):
                waiting[place] = running.create_task(play(place))
        report.cancelled = list(waiting)
        report.seconds = time.perf_counter() - began
        return groups, report

    async def group(self, agent: Agent, start: Start, size: int, seed: int, gate: asyncio.Semaphore,
                    report: RolloutReport, *, place: int = 0,
                    on_episode: Callable[[Trajectory], None] | None = None) -> Group | None:
        """Play `size` episodes from one start, each when `gate` lets it through; None where one fails for good, which
        ends the others. `report` counts it. `seed`, `place` and the task's key decide all randomness."""
        trajectories: list[Trajectory | None] = [None] * size

        async def member(index: int) -> None:
            async with gate:
                episode_seed = derive_seed(seed, start.task.key, place, index)
                trajectory = await self._with_retries(agent, start, episode_seed, report)
            trajectories[index] = trajectory
            if on_episode:
                on_episode(trajectory)

        try:
            async with asyncio.TaskGroup() as members:  # one that fails for good cancels the others
                for index in range(size):
                    members.create_task(member(index))
        except* EpisodeError as failures:
            first = failures.exceptions[0]
            report.dropped_groups += 1
            report.errors[first.name] += 1
            report.first_traceback = report.first_traceback or "".join(traceback.format_exception(first.cause))
        if None in trajectories:
            return None
        group = Group(task=start.task, trajectories=tuple(trajectories))
        report.count(start, group)
        return group

    async def _with_retries(self, agent: Agent, start: Start, seed: int, report: RolloutReport) -> Trajectory:
        """Raises EpisodeError where the last try fails too."""
        attempt = 0
        while True:
            try:
                return await self._try(agent, start, derive_seed(seed, attempt), report)
            except EpisodeError as error:
                failure = error
            except TimeoutError as error:
                failure = EpisodeError(Status.ERROR_TIMEOUT, error)
            except Exception as error:  # whatever it is, it must not take the other episodes with it
                failure = EpisodeError(Status.ERROR_AGENT, error)
            if isinstance(failure.cause, WorkerLost) and failure.cause.blameless:
                continue
            if attempt == self._retries:
                raise failure
            attempt += 1
            report.retries += 1

    async def _try(self, agent: Agent, start: Start, seed: int, report: RolloutReport) -> Trajectory:
        try:
            env = self._acquire()
        except Exception as error:
            raise EpisodeError(Status.ERROR_ENVIRONMENT, error) from error
        episode = Episode(agent, env, start, seed, self._engine_seconds)
        try:
            async with asyncio.timeout(self._episode_seconds):
                trajectory = await episode.play()
        except BaseException:  # also where a sibling's failure cancels it
            self._discard(env)
            raise
        finally:
            report.environment_seconds += episode.environment_seconds
        self._idle.append(env)
        return trajectory

    def _acquire(self) -> TextEnv | WorkerEnv:
        if self._idle:
            return self._idle.pop()
        if self._workers is None:
            env = self.make_env()
            if not env.blocking:
                return env
            env.close()
            self._workers = WorkerPool(self.make_env, share=env.worker_share, seconds=self._environment_seconds)
        return self._workers.acquire()

    def _discard(self, env: TextEnv | WorkerEnv) -> None:
        try:
            env.close()
        except Exception as error:
            warnings.warn(f"closing a {type(env).__name__} failed: {type(error).__name__}: {error}", stacklevel=2)


def derive_seed(*parts: object) -> int:
    """A seed below 2**62 that depends on all parts, the same on every machine."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2
