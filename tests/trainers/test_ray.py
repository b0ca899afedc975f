"""`--cluster ray`: the run of one process, on actors, some of which are killed."""

import asyncio
import os
import signal
import threading
import time

import gymnasium
import psutil
import pytest
import ray
import torch

from agents.engine import EngineError
from agents.ray_engine import EngineReplica, Weights
from tests.processes import wait_until_gone
from tests.trainers.runs import Parity, Recorder, go_on, rows, small_config, start, weights
from trainers.cluster import train_on_ray
from trainers.run import Run, RunError
from trainers.settings import SettingsError
from trainers.transcripts import read_trajectories

ON_MACHINES = {"environment": {"id": "tests.trainers.test_ray:test/Slow-v0"}, "evaluation": {"episodes": 2},
               "cluster": {"replicas": {"count": 2}, "workers": {"count": 2}}}


class Slow(Parity):
    """Parity whose turns take a while, so that what is killed has work under way."""

    def _step(self, action):
        time.sleep(0.1)
        return super()._step(action)


gymnasium.register("test/Slow-v0", entry_point="tests.trainers.test_ray:Slow")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One of this machine, with room for two learners, two replicas and two workers; nothing of it stays."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    others = {process.pid for process in psutil.Process().children(recursive=True)}
    ray.init(address="local", num_cpus=6, include_dashboard=False, object_store_memory=200 * 2**20,
             logging_level="error", _system_config={"worker_register_timeout_seconds": 600})
    started = [process.pid for process in psutil.Process().children(recursive=True) if process.pid not in others]
    yield
    ray.shutdown()
    assert not wait_until_gone(started)


def actors(kind: str) -> list[int]:
    """Process ids of the actors of a class."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if f"ray::{kind}" in " ".join(process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


class Killer(Recorder):
    """A display that ends one actor of each kind in the middle of the second step."""

    killed = ()

    def advance(self, metrics):
        super().advance(metrics)
        if len(self.metrics) == 1:
            threading.Timer(0.15, self.kill).start()

    def kill(self):
        self.killed = [actors(kind)[0] for kind in ("EnvironmentWorker", "EngineReplica")]
        for pid in self.killed:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(600)
def test_a_run_that_loses_a_worker_and_a_replica_is_the_run_that_lost_none(tmp_path):
    sections = {**ON_MACHINES, "run": {"steps": 4, "log_trajectories": 1000}}
    killer, run = Killer(), Run.create(tmp_path / "killed", small_config(**sections))
    train_on_ray(run, killer)
    start(tmp_path / "alone", **sections)
    assert len(killer.killed) == 2 and killer.titles == ["before training", "after training"]
    logged, alone = rows(run.folder), rows(tmp_path / "alone")
    # The worker had a group of four episodes under way, or was given one before its end was known.
    assert sum(row["lost_episodes"] for row in logged) >= 4 and sum(row["lost_responses"] for row in logged) >= 1
    assert sum(row["retries"] for row in logged) == sum(row["lost_episodes"] for row in logged)
    assert all(row["dropped_groups"] == row["failed_episodes"] == 0 for row in logged)
    assert all(row["sync_gap"] < 1e-4 for row in logged)
    for ours, its in zip(logged, alone, strict=True):
        same = set(its) - {"retries", "lost_episodes", "lost_responses"}
        assert {name: ours[name] for name in same} == pytest.approx({name: its[name] for name in same}, rel=1e-3,
                                                                    abs=1e-4)
    trajectories = read_trajectories(run.folder / "trajectories.jsonl")
    assert len(trajectories) == 4 * 8
    for row, trajectory in zip(rows(run.folder, "trajectories"), trajectories, strict=True):
        right = [Parity.is_right(turn.action) for turn in trajectory.turns]
        assert trajectory.reward == sum(right) / 2 and trajectory.success == all(right)
        assert {turn.weight_version for turn in trajectory.turns} == {row["step"] - 1}
    torch.testing.assert_close(weights(run.folder), weights(tmp_path / "alone"), rtol=0, atol=1e-3)


@pytest.mark.timeout(600)
def test_ctrl_c_ends_all_ranks_with_a_checkpoint_from_which_the_run_goes_on(tmp_path):
    sections = {**ON_MACHINES, "run": {"steps": 6, "log_trajectories": 1000}}
    on_two = {**sections, "cluster": {"learners": {"count": 2}}}
    run = Run.create(tmp_path / "stopped", small_config(**on_two))
    recorder = Recorder(stop_after=2)
    with pytest.raises(KeyboardInterrupt):
        train_on_ray(run, recorder)
    assert 2 <= run.done == len(recorder.metrics) < 6
    assert not wait_until_gone([*actors("LearnerRank"), *actors("EngineReplica"), *actors("EnvironmentWorker")])
    go_on(run.folder)
    start(tmp_path / "alone", **sections)
    torch.testing.assert_close(weights(run.folder), weights(tmp_path / "alone"), rtol=0, atol=1e-3)


@pytest.mark.timeout(600)
def test_what_is_wrong_ends_a_run_with_the_message_of_any_run(tmp_path):
    crowded = small_config(cluster={"workers": {"count": 99}})  # and one CPU each for a learner and a replica
    with pytest.raises(SettingsError, match="the run asks for 101 CPUs in all, Ray has 6"):
        train_on_ray(Run.create(tmp_path / "crowded", crowded), Recorder())
    run = Run.create(tmp_path / "run", small_config(environment={"id": "tests.trainers.runs:test/Parity-v0"}))
    (run.folder / "tensorboard").write_text("a file where a folder belongs")
    with pytest.raises(RunError, match=r"cannot write .*tensorboard"):
        train_on_ray(run, Recorder())


class Counting:
    """An engine of whose methods only `load` is used."""

    loaded = ()

    def load(self, tensors, version):
        self.loaded = (*self.loaded, version)


async def _fetched():
    return {"w": torch.zeros(1)}


def test_a_replica_takes_each_version_once_and_none_that_is_older():
    engine = Counting()
    replica = EngineReplica(lambda: engine)

    async def ask():
        for one in (Weights(0, _fetched()), Weights(1, _fetched())):
            await replica.use(one)
            await replica.use(one)
        with pytest.raises(EngineError, match="asked for weights 0 after 1"):
            await replica.use(Weights(0, None))
    asyncio.run(ask())
    assert engine.loaded == (0, 1)
