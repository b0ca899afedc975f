"""Environments in worker processes: as good as here, ended at once where they hang, and none is left behind."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pytest

from agents.rollout import Rollout
from agents.workers import WorkerPool
from tests.agents.episodes import tasks
from tests.agents.test_rollout import Script

ROOT = Path(__file__).resolve().parents[2]


def settled(condition, seconds=30.0):
    """Whether `condition` comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def running(pids):
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def noting(counting, tmp_path):
    """An environment that blocks and notes its process."""
    class Noting(counting):
        blocking = True

        def _reset(self, task, rng):
            (tmp_path / f"{os.getpid()}").touch()
            return super()._reset(task, rng)

    Noting.pids = lambda: [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    return Noting


def test_an_environment_in_a_worker_is_that_environment(counting):
    here = counting()
    with closing(WorkerPool(counting)) as pool:
        there = pool.acquire()
        for env in (here, there):
            env.reset(options={"task": tasks(1)[0]})
        assert here.step("+") == there.step("+")
        assert (there.task, there.max_turns, there.system_prompt, there.stop) == (here.task, 3, "", ())
        assert there.state_key() == here.state_key() and there.parse("x + y") == here.parse("x + y")
        assert there.snapshot() == here.snapshot()
        mark, key = there.snapshot(), there.state_key()
        there.step("+")
        assert there.state_key() != key
        there.restore(mark)
        assert there.state_key() == key and there.count == 1
        assert there.gold(np.random.default_rng(0)) == ["+"] * 3
        with pytest.raises(AttributeError):
            there._pages  # noqa: B018
        with pytest.raises(RuntimeError, match=r"AttributeError: 'Counting' object has no attribute 'pages'"):
            there.pages  # noqa: B018


def test_a_generator_moves_on_as_if_it_had_been_used_here(counting):
    counting.admissible_actions = lambda self: ["+", "-", "?"]
    mine, other = np.random.default_rng(3), np.random.default_rng(3)
    with closing(WorkerPool(counting)) as pool:
        there = pool.acquire()
        assert [there.random_action(mine) for _ in range(9)] == [counting().random_action(other) for _ in range(9)]


def test_what_cannot_be_sent_is_an_error_that_says_so_and_the_environment_goes_on(counting):
    counting.gold = lambda self, rng: [lambda: None]
    with closing(WorkerPool(counting)) as pool:
        there = pool.acquire()
        with pytest.raises(RuntimeError, match="pickle") as caught:
            there.gold(np.random.default_rng(0))
        assert caught.value.kind in ("PicklingError", "AttributeError")
        assert there.max_turns == 3


@pytest.mark.parametrize("hang", [lambda: time.sleep(1000), lambda: re.match("(a+)+$", "a" * 60 + "b")],
                         ids=["sleeping", "holding the interpreter's lock"])
def test_an_environment_that_hangs_costs_its_own_group_and_its_process_ends(noting, hang):
    class Stuck(noting):
        def _step(self, action):
            if self.task.key == "1":
                hang()
            return super()._step(action)

    began = time.monotonic()
    with closing(Rollout(Stuck, retries=1, environment_seconds=5.0)) as rollout:
        groups, report = rollout.run(Script(), tasks(3), 2, seed=0)
        assert [group.task.key for group in groups] == ["0", "2"]
        assert report.errors == Counter({"error_timeout:TimeoutError": 1}) and report.retries >= 1
        assert len(rollout.run(Script(), tasks(1), 2, seed=1)[0]) == 1
        ended = set(Stuck.pids()) - set(running(Stuck.pids()))
        assert len(ended) >= 2  # one for each try
    assert time.monotonic() - began < 120 and settled(lambda: not running(Stuck.pids()))


def test_a_worker_that_dies_is_replaced(noting, tmp_path):
    class Dying(noting):
        def _step(self, action):
            if self.task.key == "0" or not (tmp_path / "once").exists():
                (tmp_path / "once").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super()._step(action)

    with closing(Rollout(Dying, retries=1)) as rollout:
        groups, report = rollout.run(Script(), tasks(3), 1, seed=0)
    assert [group.task.key for group in groups] == ["1", "2"]
    assert report.errors == Counter({"error_environment:WorkerLost": 1}) and report.retries in (1, 2)


def test_a_cancelled_group_frees_its_workers_at_once(noting, tmp_path):
    class Waiting(noting):
        def _step(self, action):
            if self.task.key == "1":
                (tmp_path / f"waiting {os.getpid()}").touch()
                time.sleep(1000)
            # An environment that is idle when its group is cancelled keeps its process for the next: both must hang.
            assert settled(lambda: len(list(tmp_path.glob("waiting *"))) == 2)
            return super()._step(action)

    with closing(Rollout(Waiting)) as rollout:
        groups, report = rollout.run(Script(), tasks(2), 2, seed=0, wanted=1)
        assert len(groups) == 1 and report.cancelled == [1]
        assert settled(lambda: len(running(Waiting.pids())) <= 2)


def test_workers_are_used_again_and_no_process_stays(noting):
    children = psutil.Process().children
    before = len(children())
    with closing(Rollout(noting, concurrency=3)) as rollout:
        for seed in range(3):
            rollout.run(Script(), tasks(4), 4, seed=seed)
        assert len(noting.pids()) <= 3
    assert settled(lambda: len(children()) == before) and not running(noting.pids())


def test_environments_that_share_a_process_end_together_and_the_blameless_are_played_again(noting, tmp_path):
    class Shared(noting):
        worker_share = 8

        def _step(self, action):
            if self.task.key == "0":
                time.sleep(1000)
            return super()._step(action)

    class Uneven(Script):
        def start(self, env, observation, seed):
            return Script(seconds=0 if env.task.key == "0" else 1.3)

    # The others' third action, after 3.9 s, finds the process ended.
    with closing(Rollout(Shared, retries=0, environment_seconds=3.0)) as rollout:
        groups, report = rollout.run(Uneven(), tasks(3), 1, seed=0)
        assert len(Shared.pids()) == 2  # the first process, and the one after it was ended
    assert [group.task.key for group in groups] == ["1", "2"]
    assert report.errors == Counter({"error_timeout:TimeoutError": 1}) and report.retries == 0


def test_an_environment_that_fails_is_closed_in_its_worker_and_made_anew(noting, tmp_path):
    class Failing(noting):
        def _step(self, action):
            if self.task.key == "0":
                raise OSError("no")
            return super()._step(action)

        def close(self):
            with open(tmp_path / "closed", "a") as file:
                file.write("c")

    with closing(Rollout(Failing, retries=1, concurrency=1)) as rollout:
        rollout.run(Script(), tasks(2), 1, seed=0)
        # One to learn that it blocks, here; two that failed.
        assert settled(lambda: (tmp_path / "closed").read_text() == "ccc")
        assert len(Failing.pids()) == 1
    assert settled(lambda: (tmp_path / "closed").read_text() == "cccc")


SCRIPT = """
    import os, threading, time
    import envs
    from agents.rollout import Rollout
    from tests.agents.test_rollout import Script

    print("imported", flush=True)

    class Local(envs.TextEnv):
        blocking, max_turns = True, 2

        def _reset(self, task, rng):
            print("worker", os.getpid(), flush=True)
            return ""

        def _step(self, action):
            if {hang}:
                time.sleep(1000)
            return envs.Outcome()

    def play():
        unpicklable = threading.Lock()
        rollout = Rollout(lambda: unpicklable and Local(), concurrency=2)
        groups, _ = rollout.run(Script(), [envs.Task(key=str(i)) for i in range(3)], 2, seed=0)
        print("groups", len(groups), flush=True)

    thread = threading.Thread(target=play)
    thread.start()
    thread.join()
"""


def script(hang):
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(SCRIPT.format(hang=hang))], cwd=ROOT,
                            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_a_user_s_script_needs_no_guard_and_may_use_any_thread():
    with script(hang=False) as process:
        said = process.communicate(timeout=250)[0].split("\n")
    assert process.returncode == 0 and said.count("imported") == 1 and "groups 3" in said
    assert settled(lambda: not running([int(line.split()[1]) for line in said if line.startswith("worker")]))


def test_workers_end_with_a_process_that_is_killed():
    with script(hang=True) as process:
        lines = (line for line in process.stdout if line.startswith("worker"))
        pids = [int(line.split()[1]) for line in islice(lines, 2)]
        assert running(pids) == pids and len(pids) == 2
        process.kill()
    assert settled(lambda: not running(pids))
