"""Rollouts that go on while the learner works, in a thread with an event loop and an engine of its own.

A group is begun as soon as there is room: at most (max_staleness + 1) · tasks_per_step are under way, wait for the
learner or are being learnt from, so that what it takes is seldom older than the bound (the capacity rule of AReaL,
arXiv 2505.24298). A group is as old as its oldest token: the updates between the weights that sampled this and those
that are about to learn from it, its time in the queue included. One that is older than the bound is dropped and
counted.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from agents.agent import ModelAgent
from agents.background import BackgroundLoop
from agents.episode import Start
from agents.rollout import Rollout, RolloutError, RolloutReport, derive_seed
from agents.trajectory import Group
from trainers.config import TrainConfig
from trainers.gathering import TaskSampler, require_tokens


class AsynchronousRollouts:
    """Groups of episodes, played ahead of the learner, whose thread calls the methods."""

    def __init__(self, config: TrainConfig, rollout: Rollout, agent: ModelAgent, tasks: TaskSampler,
                 bring: Callable[[int], dict[str, float]]):
        """Nobody else may use `rollout`, nor the agent's engine unless it answers several event loops. `bring(version)`
        gives this the learner's weights."""
        self._config, self._rollout, self._agent, self._tasks = config, rollout, agent, tasks
        self._bring = bring
        self._begun: set[int] = set()
        """Positions of the tasks that are under way or in the queue."""
        self._learning = 0
        """Groups that the learner took and has not sent new weights for."""
        self._queue: deque[tuple[int, Group | None, RolloutReport]] = deque()
        self._room, self._arrived = asyncio.Event(), asyncio.Event()
        self._last_taken = time.perf_counter()
        self._loop = BackgroundLoop()
        self._playing = self._loop.call(self._start())

    def take(self, step: int) -> tuple[list[Group], RolloutReport, list[Group]]:
        """What `gather` returns, for the step that learns with the weights of version `step - 1`."""
        return self._do(self._take(step))

    def sync(self, version: int) -> dict[str, float]:
        """Sample from the learner's weights as they are, from the next token on; metrics of how that went. Raises
        EngineError."""
        async def bring() -> dict[str, float]:
            metrics = self._bring(version)
            self._learning = 0
            self._room.set()
            return metrics
        return self._do(bring())

    def progress(self) -> dict[str, Any]:
        """What a checkpoint keeps of the tasks: the next one, and those begun that nothing was learnt from yet."""
        async def progress() -> dict[str, Any]:
            return self._tasks.progress(under_way=self._begun)
        return self._do(progress())

    def close(self) -> None:
        """End all episodes and close their environments."""
        self._loop.close()
        self._rollout.close()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`, done in the rollouts' thread; raises what `_play` raises where it fails."""
        return self._loop.call(self._unless_failed(work))

    async def _unless_failed(self, work: Coroutine[Any, Any, Any]) -> Any:
        doing = asyncio.ensure_future(work)
        try:
            await asyncio.wait([doing, self._playing], return_when=asyncio.FIRST_COMPLETED)
            return doing.result() if doing.done() else self._playing.result()
        finally:
            doing.cancel()

    async def _start(self) -> asyncio.Task:
        return asyncio.create_task(self._play())

    async def _play(self) -> None:
        gate, settings = asyncio.Semaphore(self._rollout.concurrency), self._config.rollout
        async with asyncio.TaskGroup() as groups:
            while True:
                while len(self._begun) + self._learning < (settings.max_staleness + 1) * settings.tasks_per_step:
                    position = self._tasks.draw()
                    self._begun.add(position)
                    groups.create_task(self._group(position, gate))
                self._room.clear()
                await self._room.wait()

    async def _group(self, position: int, gate: asyncio.Semaphore) -> None:
        report, seed = RolloutReport(), derive_seed(self._config.run.seed, "rollout")
        group = await self._rollout.group(self._agent, Start(task=self._tasks.at(position)),
                                          self._config.rollout.group_size, seed, gate, report, place=position)
        self._queue.append((position, group, report))
        self._arrived.set()

    async def _take(self, step: int) -> tuple[list[Group], RolloutReport, list[Group]]:
        wanted, algorithm = self._config.rollout.tasks_per_step, self._config.algorithm
        kept, sampled, total = [], [], RolloutReport()
        while len(kept) < wanted and len(sampled) + total.dropped_groups < wanted * algorithm.max_generation_batches:
            while not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
            position, group, report = self._queue.popleft()
            self._begun.remove(position)
            self._room.set()
            total.add(report)
            if group and group.age(step - 1) > self._config.rollout.max_staleness:
                total.stale_groups += 1
            elif group:
                sampled.append(group)
                kept += [group] if algorithm.keep(group) else []
        if not sampled:
            raise RolloutError(f"all {total.dropped_groups} groups failed ({total.errors}); the first failure was:\n"
                               + total.first_traceback, total)
        require_tokens(self._config, kept, sampled)
        self._learning = len(kept)
        total.seconds, self._last_taken = time.perf_counter() - self._last_taken, time.perf_counter()
        return kept, total, sampled
