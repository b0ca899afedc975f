"""How long algorithms take to give credit for a large training step, on random trajectories.

Timed is `advantages` alone. The share is that of the gradient step on as many tokens, without the rollout and scoring
that a training step has too.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.table import Table

import trainers.algorithms
from agents.models import load_policy
from agents.tiny import make_tiny_policy
from agents.trajectory import Group, Trajectory, Turn
from envs.core import Task, TextEnv
from trainers.algorithms import Algorithm, Scores
from trainers.algorithms.grpo import GRPO
from trainers.batch import pack, per_turn
from trainers.learner import Learner, OptimizerSettings

SIZE = {"tasks": 16, "group_size": 8, "turns": 50, "tokens": 512}
QUICK_SIZE = {"tasks": 2, "group_size": 4, "turns": 4, "tokens": 16}
REPEATS = 7
STEP = 30
"""The training step, in which every algorithm's signal is on (ADRS has warmed up, FACTOR not yet decayed)."""
STATES, SHOWN = 40, 3
"""Different states in a group; documents that a turn shows."""
EVIDENCE = {
    "entities": [{"id": f"E{i}", "aliases": [f"place {i}"], "documents": [f"document/{i}"]} for i in range(4)],
    "relations": [{"head": f"E{i}", "relation": "next", "tail": f"E{i + 1}", "cues": ["next"]} for i in range(3)]}
TEXT = "place 1 lies next to place 2, as travellers have told for a long time. " * 4


def measure(model: str | None, *, quick: bool) -> dict[str, Any]:
    """Median and quartiles of each algorithm's seconds, and the share of an update with the model at this path (None:
    of a tiny policy's). Raises ModelError."""
    size = QUICK_SIZE if quick else SIZE
    rng = np.random.default_rng(0)
    groups = make_groups(rng, **size)
    sampled = sum(trajectory.response_length for group in groups for trajectory in group.trajectories)
    scores = make_scores(groups, rng.uniform(-3, 0, sampled).astype(np.float32))
    update_seconds = _update_seconds(model, sampled, quick)
    found = {}
    for name in trainers.algorithms.__all__:
        kind = getattr(trainers.algorithms, name)
        if isinstance(kind, type) and issubclass(kind, Algorithm) and kind is not Algorithm:
            algorithm = kind()
            times = _times(lambda: algorithm.advantages(groups, scores, STEP), 2 if quick else REPEATS)  # noqa: B023
            low, median, high = statistics.quantiles(times, n=4, method="inclusive")
            found[name] = {"seconds": median, "low": low, "high": high, "share": median / update_seconds}
    return {"size": size, "update_seconds": update_seconds, "algorithms": found}


def tables(found: dict[str, Any]) -> list[Table]:
    size = " × ".join(f"{number} {name}" for name, number in found["size"].items())
    title = f"credit of {size}; their gradient step takes {found['update_seconds']:,.1f} s"
    table = Table(title=title, title_justify="left", box=None)
    for heading in ("", "median ms", "quartiles", "share of it"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, row in found["algorithms"].items():
        table.add_row(name, f"{1e3 * row['seconds']:.1f}", f"{1e3 * row['low']:.1f}–{1e3 * row['high']:.1f}",
                      f"{row['share']:.3%}")
    return [table]


def make_groups(rng: np.random.Generator, *, tasks: int, group_size: int, turns: int, tokens: int) -> list[Group]:
    """Groups of random episodes, half of them successes; each turn is in one of the group's states."""
    return [Group(task=task, trajectories=[_trajectory(task, rng, turns, tokens) for _ in range(group_size)])
            for task in (Task(key=str(i), data={"evidence": EVIDENCE}) for i in range(tasks))]


def make_scores(groups: list[Group], numbers: np.ndarray) -> Scores:
    """What models could say of the tokens. # float32 [sampled tokens]"""
    each = per_turn(groups, numbers)
    branches = [[{len(trajectory.turns) // 2: group.trajectories[:4]} for trajectory in group.trajectories]
                for group in groups]
    return Scores(values=each, teacher_logprobs=each, reference_logprobs=each, continuations=branches)


def _trajectory(task: Task, rng: np.random.Generator, turns: int, tokens: int) -> Trajectory:
    success = bool(rng.random() < 0.5)
    played = [Turn(response_ids=rng.integers(5, 260, tokens), logprobs=rng.uniform(-3, 0, tokens),
                   action_span=(tokens // 2, tokens), state_key=f"state {rng.integers(STATES)}", observation=TEXT,
                   reward=float(success and turn == turns - 1),
                   info={"exposed": {f"document/{i}": TEXT for i in rng.integers(0, 20, SHOWN)},
                         "cited": ["document/1", "document/2"]}) for turn in range(turns)]
    return Trajectory(task=task, turns=played, reward=float(success), success=success, score=float(success))


def _times(work: Callable[[], object], repeats: int) -> list[float]:
    work()  # what is cached from the first call on is no part of a step
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return times


def _update_seconds(model: str | None, sampled: int, quick: bool) -> float:
    """Of a gradient step on `sampled` tokens with the model at this path, or a policy as small as that of `make train`.

    Measured on a few and scaled by their number; longer episodes cost more than that, since attention grows.
    """
    tokens = 32 if quick else 512
    if model:
        policy = load_policy(model, device="cpu")
    else:
        hidden_size, layers = (32, 1) if quick else (128, 4)
        policy = make_tiny_policy(TextEnv(), [TEXT], vocabulary=300, hidden_size=hidden_size, layers=layers)
    groups = make_groups(np.random.default_rng(0), tasks=1, group_size=4, turns=1, tokens=tokens)
    learner = Learner(policy, GRPO(), OptimizerSettings())
    batch = pack(groups, GRPO().advantages(groups))
    times = _times(lambda: learner.update(batch, np.random.default_rng(0)), 3)
    return statistics.median(times) * sampled / (4 * tokens)
