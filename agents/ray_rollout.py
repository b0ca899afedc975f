"""A rollout whose episodes are played by Ray actors, each of which holds environments of its own.

A group is played whole by one actor, which puts it into the object store. Where the actor is lost, others play its
groups again, with the same seeds, within the rollout's budget of retries.
"""

import asyncio
import traceback
from collections.abc import Callable

import ray

from agents.agent import ModelAgent
from agents.crew import LOST, Crew, CrewGone
from agents.episode import Start
from agents.ray_engine import Weights
from agents.rollout import Rollout, RolloutReport
from agents.trajectory import Group, Status, Trajectory
from envs.core import TextEnv


class EnvironmentWorker:
    """The actor around one `Rollout`."""

    def __init__(self, make_rollout: Callable[[], Rollout]):
        self._rollout = make_rollout()
        self._gate = asyncio.Semaphore(self._rollout.concurrency)
        self._agents: dict[ray.ObjectRef, ModelAgent] = {}

    @ray.method(max_task_retries=-1)
    async def ready(self) -> None:
        """Answers once the worker is there, however often it is started for that."""

    async def play(self, agent: tuple[ray.ObjectRef], weights: Weights, start: Start, size: int, seed: int,
                   place: int) -> tuple[Group | None, RolloutReport]:
        """What `Rollout.group` gives and reports. `agent` is fetched once: a tokenizer is large."""
        if agent[0] not in self._agents:
            self._agents[agent[0]] = await agent[0]
        player, report = self._agents[agent[0]], RolloutReport()
        player.engine.weights = weights
        group = await self._rollout.group(player, start, size, seed, self._gate, report, place=place)
        report.lost_responses = player.engine.take_lost_responses()
        return group, report

    async def close(self) -> None:
        self._rollout.close()


class RayRollout(Rollout):
    """Runs groups of episodes of an agent with a `RayEngine`, on `EnvironmentWorker` actors."""

    def __init__(self, workers: Crew, make_env: Callable[[], TextEnv], *, retries: int):
        """`retries`: times that a group whose worker was lost is played again. `make_env` is not used for episodes."""
        super().__init__(make_env, retries=retries)
        self._crew = workers
        self._shared: dict[ModelAgent, ray.ObjectRef] = {}

    async def group(self, agent: ModelAgent, start: Start, size: int, seed: int, gate: asyncio.Semaphore,
                    report: RolloutReport, *, place: int = 0,
                    on_episode: Callable[[Trajectory], None] | None = None) -> Group | None:
        if agent not in self._shared:
            self._shared[agent] = ray.put(agent)
        asked = (self._shared[agent],), agent.engine.weights, start, size, seed, place
        for attempt in range(self._retries + 1):
            try:
                group, played = await self._crew.ask(await self._crew.pick(), "play", *asked)
            except LOST as error:
                failure = error
                report.lost_episodes += size
                report.retries += size * (attempt < self._retries)
            except CrewGone as error:
                failure = error
                break
            else:
                report.add(played)
                for trajectory in group.trajectories if group and on_episode else ():
                    on_episode(trajectory)
                return group
        report.dropped_groups += 1
        report.errors[f"{Status.ERROR_ENVIRONMENT}:{type(failure).__name__}"] += 1
        report.first_traceback = report.first_traceback or "".join(traceback.format_exception(failure))
        return None

    def close(self) -> None:
        self._crew.close()
