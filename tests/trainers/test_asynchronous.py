"""Rollouts beside the learner: bounded in number and age, and no task is lost, whatever ends the run."""

import asyncio
import threading
import time
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import psutil
import pytest
import torch

from agents.agent import Response
from agents.rollout import Rollout, RolloutError
from agents.trajectory import Group, Trajectory, Turn
from tests.agents.episodes import Counting
from tests.trainers.runs import Parity, go_on, rows, small_config, start, task_keys
from trainers.asynchronous import AsynchronousRollouts
from trainers.gathering import TaskSampler
from trainers.run import Run


class Versioned:
    """An agent and its engine in one, which only have a version. Episodes of the task `waits` go on from their second
    turn at version 5."""

    breaks = 0

    def __init__(self, waits=None):
        self.engine, self.waits, self.weight_version = self, waits, 0

    def bring(self, version):
        self.weight_version = version
        return {}

    def start(self, env, observation, seed):
        return Actor(self, env.task.key)


@dataclass
class Actor:
    agent: Versioned
    task: str
    turns: int = 0
    breaks: int = 0

    async def act(self):
        self.turns += 1
        while self.task == self.agent.waits and self.turns == 2 and self.agent.weight_version < 5:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0)
        return Response(text="+", prompt_ids=np.ones(1, np.int64), response_ids=np.ones(2, np.int64),
                        logprobs=np.zeros(2, np.float32), weight_version=self.agent.weight_version)

    def observe(self, response, observation):
        pass


def ahead(agent, make_env=None, *, max_staleness=2, progress=None, **algorithm):
    config = small_config(rollout={"tasks_per_step": 2, "group_size": 2, "max_staleness": max_staleness, "retries": 0},
                          algorithm={"name": "GRPO", **algorithm})
    counting = type("Counting", (Counting,), {"made": []})
    tasks = TaskSampler(Parity(tasks=50).tasks("train"), 0, progress)
    return AsynchronousRollouts(config, Rollout(make_env or counting, retries=0), agent, tasks, agent.bring)


def test_the_age_of_a_trajectory_is_that_of_its_oldest_token():
    turns = [Turn(response_ids=np.ones(2), weight_version=version) for version in (4, 3, 6)]
    trajectory = Trajectory(turns=turns, reward=0.0)
    assert trajectory.age(7) == 4 and Trajectory(turns=(), reward=0.0).age(7) == 0
    assert Group(trajectories=[trajectory, Trajectory(turns=turns[:1], reward=0.0)]).age(7) == 4


def test_as_many_groups_as_the_bound_allows_are_begun_and_no_more():
    rollouts = ahead(Versioned())
    with closing(rollouts):
        for step in range(1, 5):
            groups, report, sampled = rollouts.take(step)
            assert len(groups) == len(sampled) == 2 and report.episodes == 4
            assert max(group.age(step - 1) for group in groups) <= 2
            # 2 groups a step have been taken; of 3 batches of 2 those of the other two may be begun.
            assert rollouts.progress()["task_position"] <= 2 * step + 4 and report.stale_groups == 0
            rollouts.sync(step)


def test_a_group_older_than_the_bound_is_dropped_and_counted_with_its_time_in_the_queue():
    slow = TaskSampler(Parity(tasks=50).tasks("train"), seed=0).at(0).key
    rollouts = ahead(Versioned(waits=slow))  # begun at version 0, done at version 5
    trained, stale = set(), []
    with closing(rollouts):
        for step in range(1, 21):
            groups, report, _ = rollouts.take(step)
            trained |= {group.task.key for group in groups}
            stale.append(report.stale_groups)
            assert len(groups) == 2
            if report.stale_groups:
                break
            rollouts.sync(step)
    assert slow not in trained and sum(stale) >= 1 and not any(stale[:5])


def test_what_waited_in_the_queue_is_as_old_as_it_is():
    rollouts = ahead(Versioned(), max_staleness=1)
    with closing(rollouts):
        rollouts.take(1)
        while len(rollouts._queue) < 2:  # finished at version 0
            time.sleep(0.01)
        rollouts.sync(5)
        groups, report, _ = rollouts.take(6)
    assert report.stale_groups == 2 and all(group.age(5) == 0 for group in groups)


def test_progress_names_every_task_that_nothing_was_learnt_from():
    rollouts = ahead(Versioned(), progress={"task_position": 0, "unfinished_tasks": [40, 41]})
    with closing(rollouts):
        keys = {group.task.key for step in (1, 2) for group in rollouts.take(step)[0]}
        progress = rollouts.progress()
    sampler = TaskSampler(Parity(tasks=50).tasks("train"), seed=0)
    begun = {sampler.at(position).key for position in (40, 41, *range(progress["task_position"]))}
    assert {sampler.at(position).key for position in progress["unfinished_tasks"]} == begun - keys


def test_a_failing_environment_is_an_error_with_its_traceback_and_ends_nothing_else():
    def broken(env, action):
        raise OSError("the world is gone")

    rollouts = ahead(Versioned(), type("Broken", (Counting,), {"made": [], "_step": broken}))
    with closing(rollouts), pytest.raises(RolloutError, match=r"(?s)all 2 groups failed.*the world is gone"):
        rollouts.take(1)


def test_an_agent_that_waits_for_ever_does_not_hold_up_the_end():
    class Silent(Versioned):
        async def act(self):
            await asyncio.sleep(1000)

        def start(self, env, observation, seed):
            return self

    threads = threading.active_count()
    rollouts = ahead(Silent())
    rollouts.close()
    assert threading.active_count() == threads


def test_a_run_beside_its_rollouts_trains_on_what_is_fresh_enough(tmp_path):
    start(tmp_path, rollout={"max_staleness": 2}, run={"steps": 6}, environment={"tasks": 50})
    found = rows(tmp_path)
    assert len(found) == 6 and all(row["groups_kept"] == 2 and row["staleness_max"] <= 2 for row in found)
    assert found[0]["staleness_max"] == 0 and found[0]["logprob_gap"] < 1e-5
    assert len(set(task_keys(tmp_path))) == 12
    versions = {turn["weight_version"] for row in rows(tmp_path, "trajectories") for turn in row["turns"]}
    assert versions <= set(range(6)) and 0 in versions
    assert not [thread for thread in threading.enumerate() if thread.name == "background"]


def test_a_run_that_stops_and_goes_on_learns_from_every_task_once_in_an_epoch(tmp_path):
    Run.create(tmp_path, small_config(rollout={"max_staleness": 1}, run={"steps": 5, "save_every": 1}))
    for stop in (1, 3, None):
        go_on(tmp_path, stop)
    keys = [key for _, key in task_keys(tmp_path)]
    assert len(keys) == 10 == len(set(keys))  # 5 steps of 2 tasks, of which there are 10
    newest = max(tmp_path.glob("checkpoints/step-*"))
    state = torch.load(newest / "state.pt", weights_only=True)
    assert set(state["unfinished_tasks"]) == set(range(10, state["task_position"]))


def test_blocking_environments_work_beside_the_learner_and_leave_no_process(tmp_path):
    before = len(psutil.Process().children())
    start(tmp_path, rollout={"max_staleness": 1}, environment={"options": {"blocking": True}})
    assert len(rows(tmp_path)) == 2
    assert len(psutil.Process().children()) == before
