import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from rewards.pool import PoolError, TimeLimit, WorkerPool
from tests.processes import alive, wait_until_gone

HERE = "tests.rewards.pool_functions"


@pytest.fixture
def pool():
    pool = WorkerPool(workers=2, limit_s=0.5)
    yield pool
    pool.close()


def test_waiting_in_the_queue_does_not_count_against_the_limit(pool):
    # 300 items of 20 ms on two workers take 3 s, six times the limit of one item.
    results = pool.map(f"{HERE}:slow_double", [{"number": i} for i in range(300)])
    assert results == [2 * i for i in range(300)]


def test_one_poisoned_item_costs_only_itself(pool):
    results = pool.map(f"{HERE}:slow_double", [{"number": -1 if i == 17 else i} for i in range(40)])
    assert isinstance(results.pop(17), TimeLimit)
    assert results == [2 * i for i in range(40) if i != 17]


def test_c_code_that_holds_the_interpreter_is_ended(pool):
    begin = time.monotonic()
    with pytest.raises(TimeLimit, match="time limit"):
        pool.call(f"{HERE}:hold_interpreter")
    assert time.monotonic() - begin < 20
    assert pool.call(f"{HERE}:slow_double", number=4) == 8


def test_memory_is_limited_in_the_worker(pool):
    with pytest.raises(TimeLimit, match="memory"):
        pool.call(f"{HERE}:allocate", size=8 * 2**30)
    assert pool.call(f"{HERE}:allocate", size=10) == 10


def test_a_worker_killed_from_outside_is_replaced_and_the_item_still_answered(pool):
    os.kill(pool.call("os:getpid"), signal.SIGKILL)
    assert pool.call(f"{HERE}:slow_double", number=4) == 8
    os.kill(pool.call("os:getppid"), signal.SIGKILL)
    assert pool.call(f"{HERE}:slow_double", number=4) == 8


def test_an_error_of_the_function_is_an_error_here(pool):
    with pytest.raises(RuntimeError, match="a fault of the function"):
        pool.call(f"{HERE}:fail")


def test_a_pool_that_cannot_start_raises():
    with pytest.raises(PoolError):
        WorkerPool(workers=1, limit_s=1.0, preload=("no_such_module_anywhere",)).call("os:getpid")


def test_closing_ends_the_processes_and_using_it_again_starts_new_ones(pool):
    pids = {pid for pids in pool.map(f"{HERE}:slow_pids", [{"_": i} for i in range(4)]) for pid in pids}
    assert len(pids) == 4 and all(map(alive, pids))
    pool.close()
    assert wait_until_gone(list(pids)) == []
    assert pool.call(f"{HERE}:slow_double", number=1) == 2


@pytest.mark.parametrize("busy", [False, True])
def test_no_worker_outlives_a_killed_parent(busy):
    script = f"""
        import threading
        from rewards.pool import WorkerPool
        pool = WorkerPool(workers=1, limit_s=1.0)
        print(pool.call("os:getpid"), pool.call("os:getppid"), flush=True)
        if {busy}:
            pool.call("{HERE}:slow_double", number=-1)
        threading.Event().wait()
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert all(map(alive, pids))
    parent.kill()
    parent.wait()
    assert wait_until_gone(pids) == []


def test_a_script_without_a_main_guard_may_verify(tmp_path):
    # Process pools of the standard library run such a script again in every worker.
    script = tmp_path / "script.py"
    script.write_text("print('once')\nfrom rewards import verify_math\n"
                      "print(verify_math(gold='x^2-1', answer='(x-1)(x+1)'))\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert (done.stdout, done.stderr) == ("once\nTrue\n", "")
