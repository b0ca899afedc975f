"""Environments in worker processes: one that hangs or crashes is ended at once, and nothing else waits for it.

All workers are forked from one process, itself forked from this one when the pool is made: `make_env` may be any
callable and the user's script is not imported again; whatever threads this process starts later are not in the fork's
way, and the weights it changes later are not kept alive by it. A worker holds a few environments, each served by a
thread through a pipe of its own. It ends when this process ends in whatever way, and with it what its environments
started (a Java process, a verifier).
"""

import asyncio
import gc
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np
import torch

from envs.core import TextEnv

CLOSE_SECONDS = 5.0
"""For environments to close at the end; then their processes are ended."""
NUMBER = struct.Struct("q")


class EnvironmentFailure(RuntimeError):
    """What an environment raised in its worker. `kind` is the exception's class, the message its traceback."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class WorkerLost(RuntimeError):
    """The worker process ended. `blameless`: because of another environment that it held."""

    def __init__(self, message: str, *, blameless: bool = False):
        super().__init__(message)
        self.blameless = blameless


class WorkerPool:
    """Worker processes that hold environments, made when they are needed and used again."""

    def __init__(self, make_env: Callable[[], TextEnv], *, share: int = 1, seconds: float = 120.0):
        """`share`: environments in one process. `seconds`: deadline of a call."""
        self._share, self._seconds = share, seconds
        self._workers: list[_Worker] = []
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else the forked processes would write it again
        self._control, theirs = socket.socketpair()
        with warnings.catch_warnings():
            # Python 3.12 warns where there are threads; the child starts none before it forks again, and takes no lock.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._parent = os.fork()
        if self._parent == 0:
            self._control.close()
            _stay(_fork_workers, theirs, make_env)
        theirs.close()
        _pools.add(self)

    def acquire(self) -> "WorkerEnv":
        """A new environment. Close it after use."""
        for worker in [worker for worker in self._workers if len(worker.envs) < self._share]:
            try:
                return WorkerEnv(worker, self._seconds, alone=self._share == 1)
            except OSError:  # it has ended
                worker.kill()
                self._workers.remove(worker)
        self._workers.append(_Worker(self._control))
        return WorkerEnv(self._workers[-1], self._seconds, alone=self._share == 1)

    def close(self) -> None:
        """Close the environments and end the processes, also those that are in use. Twice is fine."""
        if self not in _pools:
            return
        _pools.discard(self)
        self._shut()
        os.waitpid(self._parent, 0)

    def _shut(self) -> None:
        """Close this process's ends of everything, which ends the others."""
        for worker in self._workers:
            worker.shut()
        self._workers = []
        self._control.close()


class _Worker:
    """The near end of one worker process."""

    def __init__(self, forker: socket.socket):
        self._forker = forker
        self.socket, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(forker, [NUMBER.pack(0)], [theirs.fileno()])
        if len(number := forker.recv(NUMBER.size, socket.MSG_WAITALL)) < NUMBER.size:
            raise WorkerLost("the process that forks workers has ended; is the machine out of memory?")
        (self.pid,) = NUMBER.unpack(number)
        self.envs: set[WorkerEnv] = set()
        self.alive = True

    def open(self) -> Connection:
        """A pipe to a new environment of this process."""
        ours, theirs = Pipe()
        with theirs:
            socket.send_fds(self.socket, [b"e"], [theirs.fileno()])
        return ours

    def kill(self) -> None:
        """End the process at once, with all that it holds."""
        if self.alive:
            self.alive = False
            self._forker.sendall(NUMBER.pack(self.pid))

    def shut(self) -> None:
        for env in list(self.envs):
            env.close()
        self.alive = False
        self.socket.close()


class WorkerEnv:
    """A `TextEnv` in a worker process, with all its attributes and methods; `call` is for the rollout's loop."""

    def __init__(self, worker: _Worker, seconds: float, *, alone: bool):
        self._worker, self._seconds, self._alone = worker, seconds, alone
        self._pipe = worker.open()
        worker.envs.add(self)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(env, *arguments)`, done in the worker. Past its deadline the process is ended at once; so it is
        when the call is cancelled, unless it holds other environments: these then go on without this one.

        Raises EnvironmentFailure where it raised, WorkerLost where the process ended, TimeoutError at the deadline.
        """
        self._send(function, arguments)
        loop, pipe = asyncio.get_running_loop(), self._pipe.fileno()
        ready = loop.create_future()
        loop.add_reader(pipe, lambda: ready.done() or ready.set_result(None))
        try:
            async with asyncio.timeout(self._seconds):
                await ready
        except TimeoutError:
            raise self._late() from None
        except asyncio.CancelledError:
            if self._alone:
                self._worker.kill()
            raise
        finally:
            loop.remove_reader(pipe)
        return self._receive()

    def close(self) -> None:
        """Let go of the environment, which is then closed in its process."""
        self._worker.envs.discard(self)
        self._pipe.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        method, value = self._wait(_attribute, name)
        return value if not method else lambda *args, **kwargs: self._method(name, args, kwargs)

    def _method(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        result, states = self._wait(_call_method, name, args, kwargs)
        for argument, state in zip(args, states):
            if state is not None:  # the generator has moved on, there
                argument.bit_generator.state = state
        return result

    def _wait(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`call`, while everything else waits: for what takes little time."""
        self._send(function, arguments)
        poll = select.poll()
        poll.register(self._pipe.fileno(), select.POLLIN | select.POLLHUP)
        if not poll.poll(1000 * self._seconds):
            raise self._late()
        return self._receive()

    def _late(self) -> TimeoutError:
        self._worker.kill()
        return TimeoutError(f"the environment did not answer within {self._seconds:g} s")

    def _send(self, function: Callable[..., Any], arguments: tuple) -> None:
        try:
            self._pipe.send((function, arguments))
        except OSError as error:
            raise self._lost() from error

    def _receive(self) -> Any:
        try:
            done, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._lost() from error
        if done:
            return value
        raise EnvironmentFailure(*value)

    def _lost(self) -> WorkerLost:
        blameless = not self._worker.alive
        self._worker.kill()
        cause = "was ended, for another environment that it held" if blameless else "ended; is it out of memory?"
        return WorkerLost(f"the environment's worker process {cause}", blameless=blameless)


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def _after_fork() -> None:
    """Leave all pools to the process that this one was forked from."""
    for pool in list(_pools):
        _pools.discard(pool)
        pool._shut()


os.register_at_fork(after_in_child=_after_fork)


# The far end: what runs in the forked processes.


def _stay(work: Callable[..., None], *arguments: Any) -> None:
    """What a forked process does instead of going on as its parent."""
    status = 1
    try:
        work(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _fork_workers(control: socket.socket, make_env: Callable[[], TextEnv]) -> None:
    """Fork a worker for each socket that arrives, end the one whose number arrives, end all with this."""
    signal.set_wakeup_fd(-1)  # it belongs to the parent's event loop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # the parent's threads are gone, and OpenMP would wait for them
    gc.freeze()  # what was inherited is not collected here
    workers = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, NUMBER.size, 1)
        if not message:
            break
        (pid,) = NUMBER.unpack(message)
        if descriptors:
            worker = os.fork()
            if worker == 0:
                control.close()
                _stay(_serve_environments, socket.socket(fileno=descriptors[0]), make_env)
            os.close(descriptors[0])
            workers.add(worker)
            control.sendall(NUMBER.pack(worker))
        else:
            os.kill(pid, signal.SIGKILL)  # it is not waited for before, so the number is still its own
            os.waitpid(pid, 0)
            workers.discard(pid)
    deadline = time.monotonic() + CLOSE_SECONDS
    while workers and time.monotonic() < deadline:
        workers -= {pid for pid in workers if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.01)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)


def _serve_environments(control: socket.socket, make_env: Callable[[], TextEnv]) -> None:
    """A thread for each environment, until the other side is closed."""
    threads = []
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            break
        threads.append(threading.Thread(target=_serve, args=(Connection(descriptors[0]), make_env), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(CLOSE_SECONDS)


def _serve(pipe: Connection, make_env: Callable[[], TextEnv]) -> None:
    env = None
    with pipe:
        while True:
            try:
                function, arguments = pipe.recv()
            except (EOFError, OSError):
                break
            try:
                env = make_env() if env is None else env
                answer = pickle.dumps((True, function(env, *arguments)))
            except Exception as error:
                answer = pickle.dumps((False, (type(error).__name__, traceback.format_exc())))
            try:
                pipe.send_bytes(answer)
            except OSError:  # nobody waits for it any more
                break
    if env is not None:
        env.close()


def _attribute(env: TextEnv, name: str) -> tuple[bool, Any]:
    value = getattr(env, name)
    return (True, None) if callable(value) else (False, value)


def _call_method(env: TextEnv, name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
    result = getattr(env, name)(*args, **kwargs)
    return result, [arg.bit_generator.state if isinstance(arg, np.random.Generator) else None for arg in args]
