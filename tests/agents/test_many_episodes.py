"""Many episodes of every kind of environment: at once none sees another, and afterwards nothing is left of them."""

import asyncio
import gc
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import psutil
import pytest

import envs
from agents.agent import ScriptedAgent
from agents.rollout import Rollout
from tests.processes import wait_until_gone

pytestmark = pytest.mark.timeout(900)  # ScienceWorld builds a house for each episode, slowly on a busy machine
EPISODES_AT_ONCE, EPISODES = 64, 200
LEAK_BYTES, LEAK_FILES = 30_000_000, 4


@dataclass(frozen=True)
class Kind:
    """An environment with what it needs, and how its episodes are played here."""

    name: str
    package: str
    solved: bool = True
    """Every second episode follows the gold plan; ScienceWorld takes a second to find one."""
    options: dict[str, Any] = field(default_factory=dict)

    def make(self):
        return envs.make(f"turngym/{self.name}-v0", **self.options)

    def tasks(self, count):
        env = self.make()
        tasks = env.tasks("train")[:count]
        env.close()
        return tasks


KINDS = [Kind("Countdown", "gymnasium"), Kind("ALFWorld", "alfworld"), Kind("WebShop", "bm25s"),
         Kind("Search", "tantivy"), Kind("ScienceWorld", "scienceworld", solved=False, options={"max_turns": 2})]
every_kind = pytest.mark.parametrize("kind", [
    pytest.param(kind, id=kind.name, marks=pytest.mark.skipif(
        find_spec(kind.package) is None, reason=f"the extra for {kind.name} is not installed")) for kind in KINDS])


@dataclass
class TakingTurns:
    """The gold and the random agent in turn. Before each response all other episodes have theirs."""

    solved: bool

    def start(self, env, observation, seed):
        agent = ScriptedAgent("gold" if self.solved and seed % 2 else "random")
        return Patient(agent.start(env, observation, seed))


@dataclass
class Patient:
    actor: Any
    breaks: int = 0

    async def act(self):
        await asyncio.sleep(0)
        return await self.actor.act()

    def observe(self, response, observation):
        self.actor.observe(response, observation)


@every_kind
def test_episodes_at_once_play_as_each_does_alone(kind):
    made = []
    rollout = Rollout(lambda: made.append(kind.make()) or made[-1], concurrency=EPISODES_AT_ONCE)
    groups, report = rollout.run(TakingTurns(kind.solved), kind.tasks(EPISODES_AT_ONCE), 1, seed=0)
    rollout.close()
    env = kind.make()
    assert len(groups) == EPISODES_AT_ONCE and report.retries == 0
    assert env.blocking or len(made) == EPISODES_AT_ONCE
    for group in groups:
        trajectory, = group.trajectories
        assert env.reset(options={"task": trajectory.task})[0] == trajectory.first_observation
        for turn in trajectory.turns:
            assert env.state_key() == turn.state_key
            observation, reward, _, _, info = env.step(turn.action)
            assert (observation, reward, info) == (turn.observation, turn.reward, turn.info)
        assert (info["success"], info["score"]) == (trajectory.success, trajectory.score)
    env.close()
    won = sum(group.trajectories[0].success for group in groups)
    assert EPISODES_AT_ONCE / 4 < won < EPISODES_AT_ONCE if kind.solved else won == 0


@every_kind
def test_two_hundred_episodes_leave_no_process_no_socket_and_no_memory(kind):
    process, tasks, agent = psutil.Process(), kind.tasks(EPISODES), TakingTurns(kind.solved)
    gc.collect()
    children, sockets, files = set(process.children()), len(process.net_connections("all")), process.num_fds()
    rollout = Rollout(kind.make, concurrency=8)
    rollout.run(agent, tasks[:EPISODES // 4], 1, seed=0)  # caches fill
    gc.collect()
    memory = process.memory_info().rss
    groups, _ = rollout.run(agent, tasks[EPISODES // 4:], 1, seed=0)
    assert len(groups) == EPISODES - EPISODES // 4
    started = set(process.children(recursive=True)) - children
    del groups
    rollout.close()
    gc.collect()
    assert process.memory_info().rss - memory < LEAK_BYTES
    assert wait_until_gone([child.pid for child in started]) == []
    assert len(process.net_connections("all")) <= sockets and process.num_fds() - files < LEAK_FILES
