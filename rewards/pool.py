"""Work on hostile text in worker processes: bounded time and memory per item, from any thread or process.

A worker is a plain `subprocess` of this interpreter that imports the libraries once and then forks a child, which
serves requests. A child that runs out of its time is ended by the kernel (SIGPROF: no Python code has to run for it, so
C code that holds the GIL is ended too) and the next one is forked within milliseconds. The limit is CPU time of the
item, so neither a queue nor a busy machine turns a right answer into a wrong one. Pools built on `multiprocessing` do
not serve here: their workers import the user's main module again, and daemonic processes (Gymnasium's asynchronous
vector environments, data loaders) may not start them.
"""

import atexit
import functools
import importlib
import json
import os
import queue
import resource
import select
import signal
import subprocess
import sys
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MEMORY_LIMIT = 1536 * 2**20
"""Address space of a worker, in bytes."""
ITEMS_PER_CHILD = 500
"""Requests after which a child is replaced, so that the libraries' caches cannot fill its memory."""
USED_UP = 3
"""Exit status of a child that has served that many."""
WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
"""The hash seed makes results that hang on the order of a set the same in every worker, on every machine."""
START_LIMIT_S = 120.0
WALL_FACTOR = 60.0
"""Seconds of real time per second of CPU limit before a silent worker counts as broken, not as slow."""


class PoolError(RuntimeError):
    """The pool itself failed (a worker cannot start or does not answer). Never a reward."""


class TimeLimit(Exception):
    """The item used up its CPU time or memory, or brought its worker down twice."""


class WorkerPool:
    """Calls `module:function` in one of at most `workers` processes, which start when they are first needed."""

    def __init__(self, *, workers: int, limit_s: float, preload: tuple[str, ...] = ()):
        if workers < 1 or limit_s <= 0:
            raise ValueError(f"workers must be at least 1 and limit_s above 0, got {workers} and {limit_s}")
        self.workers, self.limit_s, self.preload = workers, limit_s, preload
        self.forget_workers()
        _pools.add(self)

    def call(self, function: str, *, limit_s: float | None = None, **arguments: Any) -> Any:
        """The function's result (JSON values). Waits for a free worker; the limit runs from when the work starts, and
        is the pool's own unless `limit_s` is given.

        Raises TimeLimit where the item exceeded its limits, PoolError where the pool is broken, and RuntimeError with
        the worker's traceback where the function raised.
        """
        limit_s = limit_s or self.limit_s
        request = json.dumps({"function": function, "arguments": arguments, "limit_s": limit_s}).encode() + b"\n"
        for _ in range(2):
            reply = self._exchange(request, limit_s * WALL_FACTOR)
            if reply["status"] != "died":
                break
        match reply["status"]:
            case "ok":
                return reply["result"]
            case "raised":
                raise RuntimeError(f"{function} raised in the worker:\n{reply['traceback']}")
            case status:
                raise TimeLimit(f"{function}: {status}")

    def map(self, function: str, items: list[dict[str, Any]]) -> list[Any]:
        """`call` for every item, in order; a TimeLimit takes the place of the result that it prevented."""
        def one(arguments: dict[str, Any]) -> Any:
            try:
                return self.call(function, **arguments)
            except TimeLimit as error:
                return error
        if len(items) == 1:
            return [one(items[0])]
        with ThreadPoolExecutor(max(1, min(self.workers, len(items)))) as threads:
            return list(threads.map(one, items))

    def close(self) -> None:
        """End the idle workers; busy ones stay. The pool starts new ones when it is used again."""
        idle = []
        while True:
            try:
                idle.append(self._idle.get_nowait())
            except queue.Empty:
                break
        for worker in idle:
            if worker is not None:
                worker.close()
            self._idle.put(None)

    def forget_workers(self) -> None:
        """Start over without any process: what a pool is in a forked child, whose parent owns the workers."""
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(self.workers):
            self._idle.put(None)

    def _exchange(self, request: bytes, patience_s: float) -> dict[str, Any]:
        worker = self._idle.get()
        answered = False
        try:
            if worker is None:
                worker = _Worker(self.preload)
            reply = worker.ask(request, patience_s)
            answered = reply["status"] != "died"
            return reply
        finally:
            # A worker that lost its child, or whose conversation was broken off, makes room for a fresh one: its next
            # reply might belong to an earlier request.
            if worker is not None and not answered:
                worker.close()
            self._idle.put(worker if answered else None)


class _Worker:
    """The near end of one worker process."""

    def __init__(self, preload: tuple[str, ...]):
        code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); from rewards.pool import serve; "
                f"serve({preload})")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
            start_new_session=True, env={**os.environ, **WORKER_ENVIRONMENT})
        _open_workers.add(self)
        self._buffer = b""
        try:
            if self._reply(START_LIMIT_S)["status"] != "ready":
                raise PoolError("a verification worker was killed while it started; is the machine out of memory?")
        except PoolError:
            self.close()
            raise

    def ask(self, request: bytes, patience_s: float) -> dict[str, Any]:
        try:
            self._send(request)
        except BrokenPipeError:
            return {"status": "died"}
        return self._reply(patience_s)

    def close(self) -> None:
        _open_workers.discard(self)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

    def forget(self) -> None:
        """Drop the pipes of a worker that belongs to the process this one was forked from."""
        self.process.stdin.close()
        self.process.stdout.close()

    def _send(self, request: bytes) -> None:
        view = memoryview(request)
        while view:
            view = view[self.process.stdin.write(view):]

    def _reply(self, patience_s: float) -> dict[str, Any]:
        stdout = self.process.stdout.fileno()
        poll = select.poll()
        poll.register(stdout, select.POLLIN | select.POLLHUP)
        while b"\n" not in self._buffer:
            if not poll.poll(patience_s * 1000):
                raise PoolError(f"a verification worker did not answer within {patience_s:.0f} s; is the machine out "
                                "of memory or CPU time?")
            if not (data := os.read(stdout, 65_536)):
                if self.process.wait() < 0:
                    return {"status": "died"}
                raise PoolError(f"a verification worker ended with exit code {self.process.returncode}; its message "
                                "stands on stderr")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)


_open_workers: set[_Worker] = set()
_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


@functools.cache
def shared_pool(*preload: str, limit_s: float = 1.0) -> WorkerPool:
    """This process's pool whose workers have imported `preload`, made when it is first asked for."""
    return WorkerPool(workers=max(1, min(4, os.cpu_count() or 1)), limit_s=limit_s, preload=preload)


@atexit.register
def _close_all() -> None:
    for worker in list(_open_workers):
        worker.close()


def _after_fork() -> None:
    for worker in _open_workers:
        worker.forget()
    _open_workers.clear()
    for pool in _pools:
        pool.forget_workers()


os.register_at_fork(after_in_child=_after_fork)


# The far end: what runs in the worker process.


def serve(preload: tuple[str, ...]) -> None:
    """Answer requests from stdin on stdout until stdin is closed. Each child serves until it dies or is used up."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends quietly when the parent is gone
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for name in preload:
        importlib.import_module(name)
    _write(replies, {"status": "ready"})
    while True:
        child = os.fork()
        if child == 0:
            _serve_requests(requests, replies)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            if os.WEXITSTATUS(status) == 0:
                os._exit(0)
            if os.WEXITSTATUS(status) == USED_UP:
                continue
        timed_out = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        _write(replies, {"status": "time limit" if timed_out else "died"})


def _serve_requests(requests: int, replies: int) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for _ in range(ITEMS_PER_CHILD):
        line = _read_line(requests)
        if line is None:
            os._exit(0)
        request = json.loads(line)
        module, _, name = request["function"].partition(":")
        signal.setitimer(signal.ITIMER_PROF, request["limit_s"])
        try:
            reply = {"status": "ok",
                     "result": getattr(importlib.import_module(module), name)(**request["arguments"])}
        except MemoryError:
            reply = {"status": "memory limit"}
        except BaseException:
            reply = {"status": "raised", "traceback": traceback.format_exc(limit=-20)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(replies, reply)
    os._exit(USED_UP)


def _read_line(descriptor: int) -> bytes | None:
    """One line. Only one request is under way at a time, so nothing behind the line is lost."""
    line = b""
    while not line.endswith(b"\n"):
        if not (data := os.read(descriptor, 65_536)):
            return None
        line += data
    return line


def _write(descriptor: int, reply: dict[str, Any]) -> None:
    data = memoryview(json.dumps(reply).encode() + b"\n")
    while data:
        data = data[os.write(descriptor, data):]
