"""Jobs in processes of their own, so many at a time: one that fails takes no other with it."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """`work(folder)`, with what it says written to `output`."""

    name: str
    work: Callable[[Path], None]
    folder: Path

    @property
    def output(self) -> Path:
        return self.folder / "output.txt"


def run_jobs(jobs: Sequence[Job], processes: int, on_end: Callable[[Job, str], None]) -> None:
    """Run all jobs, `processes` at a time. `on_end` is told how each failed, "" where it did not.

    KeyboardInterrupt is passed on after the running jobs got one too and ended.
    """
    spawn, waiting, running = multiprocessing.get_context("spawn"), deque(jobs), {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                job = waiting.popleft()
                process = spawn.Process(target=_work, args=(job,))
                process.start()
                running[process.sentinel] = process, job
            for sentinel in connection.wait(running):
                process, job = running.pop(sentinel)
                process.join()
                on_end(job, _failure(job, process.exitcode))
    finally:
        for process, _ in running.values():
            os.kill(process.pid, signal.SIGINT)
        for process, _ in running.values():
            process.join()


def _work(job: Job) -> None:
    os.setsid()  # a Ctrl-C in the terminal is the parent's to pass on, once
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where a shell started all this with &
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(job.output, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    job.work(job.folder)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os.kill(os.getpid(), signal.SIGINT)


def _failure(job: Job, code: int) -> str:
    if code == 0:
        return ""
    if code < 0:
        return f"its process was ended by signal {-code}"
    said = job.output.read_text(encoding="utf-8", errors="replace").strip() if job.output.exists() else ""
    return said.rpartition("\n")[2] or f"its process ended with code {code}"
