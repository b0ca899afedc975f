"""Playing an environment that is under test: a case, episodes as text that can be compared, and what a check raises."""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from envs.core import Task, TextEnv


class Violation(Exception):
    """The property does not hold."""


class NotApplicable(Exception):
    """The environment lacks what the property is about."""


@dataclass
class Case:
    """An environment under test and a few of its tasks."""

    make: Callable[[], TextEnv]
    env_id: str
    """Empty where only an instance is known."""
    options: dict[str, Any]
    env: TextEnv
    splits: dict[str, Sequence[Task]]
    split: str
    """The one that the episodes are taken from."""
    indices: list[int]
    """Places of the played tasks in that split."""
    tasks: list[Task]
    """The tasks that are played."""
    episodes: int
    """Episodes of the random agent."""


def require(condition: bool, message: str) -> None:
    """Raise `Violation` unless the condition holds."""
    if not condition:
        raise Violation(message)


def is_plain(value: Any) -> bool:
    """Whether JSON knows the value."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def record(row: tuple) -> str:
    """What `reset` or `step` returned, as text that can be compared. Values of `info` must be plain JSON."""
    return json.dumps(row, sort_keys=True)


def replay(env: TextEnv, task: Task, actions: Sequence[str]) -> list[str]:
    """The records of an episode with these actions."""
    return [record(env.reset(options={"task": task})), *(record(env.step(action)) for action in actions)]


def respond(env: TextEnv, task: Task, responses: Iterator[str]) -> tuple[list[str], list[tuple]]:
    """Play responses until the episode or the responses end: the actions, and what `step` returned for each."""
    env.reset(options={"task": task})
    actions, steps = [], []
    for response in responses:
        actions.append(env.parse(response).text)
        steps.append(env.step(actions[-1]))
        if steps[-1][2] or steps[-1][3]:
            break
        require(len(steps) < env.max_turns, f"the episode of task {task.key} goes on after max_turns={env.max_turns}")
    return actions, steps


def random_responses(env: TextEnv, seed: int) -> Iterator[str]:
    """The random agent's responses, one for each turn."""
    rng = np.random.default_rng(seed)
    while True:
        yield env.random_action(rng)


def sample_actions(case: Case, position: int) -> list[str]:
    """The actions of an episode of the case's task at `position`: every second one follows the gold plan, if any."""
    env, task = case.env, case.tasks[position]
    responses = random_responses(env, position)
    if position % 2:
        env.reset(options={"task": task})
        # no gold plan: stay with the random agent
        with suppress(LookupError):
            responses = iter(env.gold(np.random.default_rng(position)))
    return respond(env, task, responses)[0]


def compare(before: list[str], after: list[str], where: str) -> None:
    """Raise `Violation` with the first difference of two episodes."""
    for turn, (old, new) in enumerate(zip(before, after)):
        require(old == new, f"{where}: turn {turn} differs: {old[:200]} / {new[:200]}")
    require(len(before) == len(after), f"{where}: {len(before)} / {len(after)} turns")


def digest(task: Task, rows: list[str]) -> str:
    """One hash of a task's key and its episode."""
    return hashlib.sha256("\n".join([task.key, *rows]).encode()).hexdigest()


@contextmanager
def kept_global_generators() -> Iterator[None]:
    """Whatever is drawn from the global generators inside is undone."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
