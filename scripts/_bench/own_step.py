"""One process of `scripts.bench train`: training steps of this project, a first one and then `steps` that count.

    {"model", "environment", "options", "tasks", "group_size", "max_response_tokens", "micro_batch_tokens",
     "row_tokens", "steps", "profile"}
        ->  {"rows": metrics of each step with its "seconds", "imported", "peak": bytes, "profile": see Profile}
"""

import tempfile
import time
from collections.abc import Callable

from scripts._bench.child import Job, answer, memory
from scripts._bench.profile import Profile
from scripts._display import SilentDisplay
from trainers.config import build_config
from trainers.loop import train
from trainers.run import Run


class Clock(SilentDisplay):
    """A training run's display that times the steps."""

    def __init__(self, steps: int, profile: Profile | None):
        self.rows: list[dict[str, float]] = []
        self._steps, self._profile, self._last = steps, profile, 0.0

    def phase(self, name: str, total: int, done: int = 0) -> None:
        self._last = time.perf_counter()

    def advance(self, metrics: dict[str, float]) -> None:
        now = time.perf_counter()
        self.rows.append({**metrics, "seconds": now - self._last})
        self._last = now
        if self._profile and len(self.rows) == 1:
            self._profile.start()
        elif self._profile and len(self.rows) == self._steps:
            self._profile.stop()


def measure(job: Job, tell: Callable[[Job], None]) -> None:
    imported = memory()["now"]
    episodes = job["tasks"] * job["group_size"]
    config = build_config({
        "environment": {"id": job["environment"], "options": job["options"], "tasks": job["tasks"]},
        "model": {"path": job["model"], "device": "cpu"},
        "rollout": {"tasks_per_step": job["tasks"], "group_size": job["group_size"], "concurrency": episodes,
                    "max_response_tokens": job["max_response_tokens"]},
        "optimizer": {"learning_rate": 1e-6, "micro_batch_tokens": job["micro_batch_tokens"],
                      "row_tokens": job["row_tokens"]},
        "evaluation": {"episodes": 0},
        "run": {"steps": 1 + job["steps"], "save_every": 0}})
    profile = Profile() if job["profile"] else None
    clock = Clock(1 + job["steps"], profile)
    with tempfile.TemporaryDirectory() as folder:
        train(Run.create(folder, config), clock)
    tell({"rows": clock.rows[1:], "imported": imported, "peak": memory()["peak"],
          "profile": profile.shares() if profile else None})


if __name__ == "__main__":
    answer(measure)
