"""A process that does one job: it reads it as a line of JSON and answers with such lines, the last of them
`{"error": "..."}` where it failed."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]


def ask(module: str, job: Job, *, python: str = sys.executable, seconds: float | None = None) -> list[Job]:
    """What `module`, run by that Python, answers to the job in at most so many seconds. It finds this project's modules
    and that Python's packages."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([python, "-P", "-m", module], env=environment, text=True, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    failure = []
    try:
        answers, said = process.communicate(json.dumps(job), timeout=seconds)
        if process.returncode:
            last = said.strip().rpartition("\n")[2]
            failure = [{"error": f"{module} ended with code {process.returncode}: {last}"}]
    except subprocess.TimeoutExpired:
        process.kill()
        answers, _ = process.communicate()
        failure = [{"error": f"not done after {seconds:.0f} s"}]
    finally:
        process.kill()
    whole = answers[:answers.rfind("\n") + 1]  # a killed process may have written half a line
    return [*map(json.loads, whole.splitlines()), *failure]


def answer(work: Callable[[Job, Callable[[Job], None]], None]) -> None:
    """Do the job that the parent sent; `work` hands each answer to its second argument."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def tell(found: Job) -> None:
        print(json.dumps(found), file=answers, flush=True)

    try:
        work(json.loads(sys.stdin.readline()), tell)
    except Exception as error:  # the parent says why there is no number
        traceback.print_exc()
        tell({"error": f"{type(error).__name__}: {error}"})


def memory() -> dict[str, int]:
    """Bytes of this process in memory: `now`, and `peak` since it began (not `ru_maxrss`, which starts with that of the
    process that started this one). Linux only."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return {name: 1024 * int(status[field].split()[0]) for name, field in (("now", "VmRSS"), ("peak", "VmHWM"))}
