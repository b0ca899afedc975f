"""What the adapters share: when a foreign episode is a success, tasks from seeds or from files of rows."""

import hashlib
import json
import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.core import LazyTasks, Outcome, Task, TextEnv, json_value, require_json
from envs.data_splits import separate, split_named

SEEDS = {"train": range(1_000_000), "heldout": range(1_000_000, 1_001_024), "test": range(1_001_024, 1_001_524)}
"""The seeds of each split, where a seed is all that names a task."""


class ForeignEnv(TextEnv):
    """Base of the adapters. Others know a reward only, so an episode is a success where it ends by itself and its last
    reward is at least `success_reward`; what the environment reports as `success` or `is_success` goes before that.
    """

    blocking = True  # nobody knows how long others take
    success_reward = 1.0

    def outcome(self, observation: str, reward: Any, *, terminated: bool, truncated: bool = False,
                info: Mapping[Any, Any]) -> Outcome:
        """The outcome of a turn. Of `info` the part that JSON knows is kept. Raises ValueError for a reward that is no
        finite number."""
        try:
            reward = float(reward)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.env_id}: a reward is a number, got {reward!r:.100}") from error
        said = next((bool(info[key]) for key in ("success", "is_success") if info.get(key) is not None), None)
        success = terminated and (reward >= self.success_reward if said is None else said)
        score = info.get("score")
        if isinstance(score, bool) or not isinstance(score, int | float) or not 0.0 <= score <= 1.0:
            score = None
        return Outcome(observation=observation, reward=reward, terminated=terminated, truncated=truncated,
                       success=success, score=score, info=json_part(info))


def json_part(info: Mapping[Any, Any]) -> dict[str, Any]:
    """What of `info` can be written as JSON, as plain values."""
    kept = {}
    for key, value in info.items():
        try:
            require_json({key: value}, "info")
        except TypeError:
            continue
        kept[str(key)] = json.loads(json.dumps(value, default=json_value))
    return kept


def seed_tasks(split: str, env_id: str) -> Sequence[Task]:
    """A task for each seed of the split. Raises ValueError for another split than `SEEDS` has."""
    if split not in SEEDS:
        raise ValueError(f"{env_id} has the splits {', '.join(SEEDS)}, not {split!r}")
    seeds = SEEDS[split]
    return LazyTasks(len(seeds), lambda i: Task(key=f"seed-{seeds[i]}", split=split, env_id=env_id, seed=seeds[i]))


def row_tasks(rows: Mapping[str, Sequence[dict]], split: str, env_id: str) -> Sequence[Task]:
    """A task for each row of the split, the row as its data. Raises ValueError for a split without rows."""
    if split not in rows:
        raise ValueError(f"{env_id} has no split {split!r} here; there are: {', '.join(rows)}")
    return LazyTasks(len(rows[split]), lambda i: Task(
        key=row_key(rows[split][i]), split=split, env_id=env_id, data=rows[split][i],
        family=str(rows[split][i].get("data_source", ""))))


def row_key(row: Mapping[str, Any]) -> str:
    """What names a row: a hash of what it holds."""
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:20]


def read_rows(path: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of each split, every row once and in one split only.

    `path` is a JSONL file or a folder of them. A file belongs to the split that its name says (`train`, `dev`, `test`,
    ...), else to `train`. Without a `heldout` split, a tenth of the training rows, chosen by hash, is held out. Raises
    FileNotFoundError, or ValueError that names the file and the line.
    """
    place = Path(path).expanduser()
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
    splits: dict[str, dict[str, dict[str, Any]]] = {}
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8-sig").split("\n"), start=1):
            if line.strip():
                row = _row(line, f"{file}, line {number}")
                splits.setdefault(split_named(file.stem), {})[row_key(row)] = row
    rows = {split: rows for split, rows in separate(splits).items() if rows}
    if not rows:
        raise ValueError(f"{path} has no rows: give a .jsonl file, or a folder of them, with one JSON object a line")
    return rows


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        require_json({"row": row}, where)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} is no JSON object: {line:.100}")
    return row


def load_class(name: str) -> type:
    """The class that `module:Class` names. Raises ImportError for a module that cannot be imported, else ValueError."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"write a class as module:Class, got {name!r}")
    try:
        found = pkgutil.resolve_name(name)
    except AttributeError as error:
        raise ValueError(f"{name}: {error}") from error
    if not isinstance(found, type):
        raise ValueError(f"{name} is {found!r:.100}, not a class")
    return found


def split_prompt(messages: Any, where: str) -> tuple[str, str]:
    """(system prompt, what the agent reads first) of chat messages, or of a bare text. Raises ValueError."""
    if isinstance(messages, str):
        return "", messages
    if not isinstance(messages, Sequence) or not all(
            isinstance(m, Mapping) and isinstance(m.get("content"), str) for m in messages):
        raise ValueError(f"{where}: a prompt is a text or a list of messages with a role and a text as content, got "
                         f"{messages!r:.200}")
    system = [m["content"] for m in messages if m.get("role") == "system"]
    return "\n\n".join(system), "\n\n".join(m["content"] for m in messages if m.get("role") != "system")
