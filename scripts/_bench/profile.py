"""Where a training step's time goes, by looking at the stack a few hundred times a second.

A timer's signal is handled between two bytecodes, so that the time inside an operation counts for the function that
called it, however long the operation took. Unix only, and in the main thread.
"""

import signal
import time
from collections import Counter
from types import FrameType
from typing import Any

from scripts._bench.child import ROOT

INTERVAL = 0.003
ROOMS = ("envs", "rewards", "agents", "trainers", "scripts", "tests")
PHASES = {("gathering.py", "gather"): "rollout", ("gathering.py", "branch"): "rollout",
          ("learner.py", "score"): "scoring",
          ("learner.py", "update"): "update", ("run.py", "log"): "logging", ("run.py", "append"): "logging",
          ("run.py", "save"): "saving"}
"""Functions of trainers/ that begin a phase; what is in none of them is `credit`, packing included."""
MODEL, ENVIRONMENT, TOKENIZER = "model arithmetic", "environment", "tokenizer"


class Profile:
    """Seconds by phase of the step and by what they went into."""

    def __init__(self):
        self._seconds: Counter[tuple[str, str]] = Counter()
        self._last = 0.0

    def start(self) -> None:
        self._last = time.perf_counter()
        signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, INTERVAL, INTERVAL)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def shares(self) -> list[dict[str, Any]]:
        """Rows of `phase`, `what` and `share`, the largest first."""
        total = self._seconds.total()
        return [{"phase": phase, "what": what, "share": seconds / total}
                for (phase, what), seconds in self._seconds.most_common()]

    def _look(self, number: int, frame: FrameType | None) -> None:
        now = time.perf_counter()
        self._seconds[place(frame)] += now - self._last
        self._last = now


def place(frame: FrameType | None) -> tuple[str, str]:
    """The phase of the step in which a stack is, and what it does there: the first of model, environment and tokenizer
    that was called, else the innermost function of this project."""
    stack = []
    while frame is not None:
        stack.append((frame.f_code.co_filename, frame.f_code.co_name))
        frame = frame.f_back
    phase, what = "credit", "python"
    for path, function in reversed(stack):
        room, _, file = path.removeprefix(f"{ROOT}/").partition("/")
        if room in ("envs", "rewards"):
            return phase, ENVIRONMENT
        if room in ROOMS:
            what = f"{room}/{file}: {function}"
            if room == "trainers":
                phase = PHASES.get((file, function), phase)
        elif "/transformers/" in path and ("tokenization" in path or "chat_template" in path):
            return phase, TOKENIZER
        elif "/transformers/models/" in path or "/torch/nn/" in path or "/torch/optim/" in path \
                or "/torch/autograd/" in path or path.endswith("/torch/_tensor.py"):
            return phase, MODEL
    return phase, what
