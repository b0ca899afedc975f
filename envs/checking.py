"""`check_text_env`: what a user runs on their own environment. The properties themselves are in `envs.properties`."""

import copy
import inspect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from envs.core import Task, TextEnv, make
from envs.probing import Case, NotApplicable, Violation, require
from envs.properties import PROPERTIES

SPLITS = ("train", "heldout", "test")


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One property of one environment."""

    name: str
    ok: bool
    """False where the property does not hold."""
    detail: str
    """What was seen; where it does not hold, what was wrong and where; where skipped, why."""
    skipped: bool = False
    """The environment has nothing to check here: neither shown nor broken."""


def check_text_env(env_or_id: TextEnv | str, *, episodes: int = 20,
                   on_result: Callable[[CheckResult], None] = lambda result: None,
                   **make_kwargs: Any) -> list[CheckResult]:
    """Check an environment, given by its id (with the options of its constructor) or as an instance.

    `episodes` is the number of tasks that the gold, random and empty agents play. `on_result` is called as each
    property ends. An instance that was not made by
    `envs.make` is copied where several are needed, and cannot be checked in other processes. Raises Gymnasium's error
    for an unknown id.
    """
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, got {episodes}")
    if not isinstance(env_or_id, str) and make_kwargs:
        raise TypeError(f"options {sorted(make_kwargs)} need an id, not an instance")
    if not isinstance(env_or_id, str):
        env_or_id = env_or_id.unwrapped
        if env_or_id.env_id:
            env_or_id, make_kwargs = env_or_id.env_id, env_or_id.spec.kwargs
    if isinstance(env_or_id, str):
        new, env_id = partial(make, env_or_id, **make_kwargs), env_or_id
    else:
        new, env_id = partial(copy.deepcopy, env_or_id), ""
    env = new()
    try:
        splits = _splits(env)
        split = next(iter(splits))
        indices = sorted({i * len(splits[split]) // episodes for i in range(episodes)})
        tasks = [splits[split][i] for i in indices]
    except Exception as error:  # whatever a user's task set raises is the result
        on_result(result := CheckResult(name="tasks", ok=False, detail=_explain(error, env)))
        return [result]
    case = Case(new, env_id, make_kwargs, env, splits, split, indices, tasks, episodes)
    results = []
    try:
        for name, check in PROPERTIES.items():
            results.append(_run(name, check, case))
            on_result(results[-1])
        return results
    finally:
        env.close()


def _run(name: str, check: Callable[[Case], str], case: Case) -> CheckResult:
    try:
        return CheckResult(name=name, ok=True, detail=check(case))
    except NotApplicable as reason:
        return CheckResult(name=name, ok=True, detail=str(reason), skipped=True)
    except Exception as error:  # whatever a user's environment raises is the result
        return CheckResult(name=name, ok=False, detail=_explain(error, case.env))


def _explain(error: Exception, env: TextEnv) -> str:
    """What a violation says; of another exception its type, its message and the line of the environment's own file."""
    if isinstance(error, Violation):
        return str(error)
    file = getattr(inspect.getmodule(type(env)), "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{type(error).__name__}: {error}" + (f" ({Path(file).name}, line {lines[-1]})" if lines else "")


def _splits(env: TextEnv) -> dict[str, Sequence[Task]]:
    splits = {}
    for name in SPLITS:
        try:
            splits[name] = env.tasks(name)
        except ValueError:  # how an environment says that it lacks a split
            continue
    splits = {name: tasks for name, tasks in splits.items() if len(tasks)}
    require(bool(splits), f"tasks() has none of the splits {', '.join(SPLITS)}")
    return splits
