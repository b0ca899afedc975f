"""The text environment: Gymnasium's interface, text in, text out, with tasks that have names.

A user's environment writes `tasks`, `_reset` and `_step`; `TextEnv` adds seeding, turn limits, the info keys that every
script reads, `snapshot`/`restore` and clean text. See README.md for a whole environment in 25 lines.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from rewards.tags import last_block


@dataclass(frozen=True, kw_only=True)
class Task:
    """One problem of an environment. The key alone decides the world: same key, same world, on every machine."""

    key: str
    """Stable name, unique within the environment; what evaluation panels hash."""
    split: str = "train"
    """The task set it belongs to: `train`, `heldout`, `test`, or an environment's own."""
    env_id: str = ""
    """Gymnasium id; `TextEnv` fills it in."""
    seed: int = 0
    """Seed of the world's randomness."""
    family: str = ""
    """The kind of task, for success rates per family (ALFWorld's "heat", Countdown's "4 numbers")."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the environment needs to build the problem (question, numbers, ...); plain JSON values."""

    def __post_init__(self):
        if not isinstance(self.key, str):
            raise TypeError(f"a task's key is text, got {self.key!r}: write key=str(...)")


class LazyTasks(Sequence[Task]):
    """A task set whose item i is made when it is asked for, so that millions of tasks cost nothing."""

    def __init__(self, size: int, make: Callable[[int], Task]):
        self._size, self._make = size, make

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        if not -self._size <= index < self._size:
            raise IndexError(f"task {index} of {self._size}")
        return self._make(index % self._size)


def check_choice(option: str, chosen: Sequence[str], known: Collection[str]) -> None:
    """Raise ValueError unless an option chooses at least one of the known names, and no other."""
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        raise ValueError(f"{option}: {', '.join(map(repr, unknown)) or 'none given'}; there are {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one action brought about. `_step` returns it.

    Raises TypeError for an observation that is no text, and ValueError for a reward or a score out of range.
    """

    observation: str = ""
    """What the agent reads next."""
    reward: float = 0.0
    """What training uses, any finite number. None of the other fields is derived from it."""
    terminated: bool = False
    """The task itself ended (solved, failed for good). The turn limit is not this."""
    truncated: bool = False
    """A limit of the engine's own cut the episode off. `TextEnv` sees to `max_turns`."""
    success: bool = False
    """The goal is reached."""
    score: float | None = None
    """The environment's own grade, 0 to 1; None means 1.0 on success and 0.0 otherwise."""
    valid: bool = True
    """The action was understood. An invalid action is counted, never an exception."""
    scorable: bool = True
    """False: nobody can say what this is worth; the sample is left out of training, not given 0."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Anything else worth keeping with the turn; plain JSON values."""

    def __post_init__(self):
        if not isinstance(self.observation, str):
            raise TypeError(f"an observation is text, got {self.observation!r}")
        if not math.isfinite(self.reward):
            raise ValueError(f"a reward is a finite number, got {self.reward!r}; where there is none: scorable=False")
        if self.score is not None and not 0.0 <= self.score <= 1.0:
            raise ValueError(f"a score is between 0 and 1, got {self.score!r}; what may be any number is the reward")


@dataclass(frozen=True)
class ActionSpan:
    """The executable part of a response."""

    text: str
    """What `step` receives."""
    start: int
    """First character of the executable part in the response."""
    end: int
    """One past its last character; equal to `start` where the response holds no action."""


@dataclass(frozen=True)
class Snapshot:
    """A point inside an episode that `restore` returns to."""

    task: Task
    actions: tuple[str, ...]
    state: Any = None
    """An engine's own copied state; None means: reset and replay the actions."""
    over: bool = False
    """The episode had ended."""


class Mistake(str):
    """A response of `gold` that goes wrong, to show how to go on after it. It is played, but supervised fine-tuning
    learns only its first token, which says what kind of action it is."""


class TextSpace(spaces.Text):
    """Any text up to `max_length` characters (Gymnasium's own Text knows no space, newline or accent)."""

    def __init__(self, max_length: int = 1_000_000):
        super().__init__(max_length=max_length, min_length=0)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length


def clean_text(text: str) -> str:
    """`text` without what no tokenizer takes (lone surrogates) or terminals choke on (NUL)."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\x00", "")


def json_value(value: Any) -> Any:
    """`json.dumps(..., default=json_value)` writes numpy's numbers and arrays too. Raises TypeError for what else JSON
    does not know."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{value!r:.200} of type {type(value).__name__}")


def require_json(values: Mapping[str, Any], name: str) -> None:
    """Raise TypeError, which says `name[key]`, where JSON does not know one of the values."""
    for key, value in values.items():
        try:
            json.dumps({key: value}, allow_nan=False, default=json_value)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"{name}[{key!r}] cannot be written as JSON ({error}): give text, finite numbers, "
                            "booleans, None, lists and dicts of these") from error


def panel_sha256(tasks: Sequence[Task]) -> str:
    """Hash of a panel's task keys in order: equal hashes mean that the same problems were played."""
    return hashlib.sha256("\n".join(task.key for task in tasks).encode()).hexdigest()


def task_generator(task: Task) -> np.random.Generator:
    """The generator of everything random in the task's world."""
    digest = hashlib.sha256(f"{task.key}\n{task.seed}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))


class TextEnv(gymnasium.Env[str, str]):
    """Base of every environment here.

    A subclass writes `tasks`, `_reset` and `_step`, and sets the class attributes below.
    `reset(options={"task": task})` plays that task; `reset(seed=n)` plays the task that n names, of `options["split"]`
    (default `train`).
    `step(action)` returns Gymnasium's five values; `info` always holds `success`, `score`, `valid`, `scorable`, `turn`,
    `task_key` and `family`. At the turn limit `truncated` is set after the last action has been applied.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    system_prompt: str = ""
    """The rules and the answer format; the agent's system message."""
    max_turns: int = 1
    """Actions after which the episode is truncated."""
    action_tags: tuple[str, ...] = ()
    """Tags of which the last one outside `<think>` is the action. One tag: its content is the action; several: the
    whole block is, since the tag says what to do. None: the whole response is."""
    stop: tuple[str, ...] = ()
    """Texts at which generation of a turn stops, kept in the response."""
    env_id: str = ""
    """The id it was made by; `make` sets it, and `reset` writes it into the task."""
    blocking: bool = False
    """`step` or `reset` may take longer than about 10 ms, or hang: the rollout then keeps the environment in a worker
    process, which is ended where a call takes too long."""
    worker_share: int = 1
    """Where `blocking`: so many environments live in one worker process, each with a thread of its own, and end
    together. More than 1 where they share something costly (a Java process, a pool) and seldom hang."""

    def __init__(self, *, max_turns: int | None = None):
        if max_turns is not None:
            if max_turns < 1:
                raise ValueError(f"max_turns must be at least 1, got {max_turns}")
            self.max_turns = max_turns
        for name in ("action_tags", "stop"):
            if isinstance(value := getattr(self, name), str):
                raise TypeError(f"{type(self).__name__}.{name} is one text, {value!r}: write a tuple, ({value!r},)")
        self.action_space = TextSpace()
        self.observation_space = TextSpace()
        self.task: Task | None = None
        self._actions: list[str] = []
        self._over = True

    # What a subclass writes

    def tasks(self, split: str) -> Sequence[Task]:
        """The task set of a split, in a fixed order. Raises ValueError for a split that the environment lacks."""
        raise NotImplementedError

    def _reset(self, task: Task, rng: np.random.Generator) -> str:
        """Build the task's world and return the first observation. All randomness comes from `rng`."""
        raise NotImplementedError

    def _step(self, action: str) -> Outcome:
        """Apply one action. Never raises on what a model wrote: odd text is `Outcome(valid=False, ...)`."""
        raise NotImplementedError

    def gold(self, rng: np.random.Generator) -> list[str]:
        """Responses that solve the current task from its start; `rng` may vary the way. Used for reference rows and
        supervised data, which learns all but what a `Mistake` says. Raises LookupError where no solution is known."""
        raise LookupError(f"{type(self).__name__} has no gold solution")

    def random_action(self, rng: np.random.Generator) -> str:
        """A response as an untrained but well-behaved agent might give it."""
        actions = self.admissible_actions()
        text = str(rng.choice(actions)) if actions else ""
        return f"<{self.action_tags[0]}>{text}</{self.action_tags[0]}>" if len(self.action_tags) == 1 else text

    def admissible_actions(self) -> list[str]:
        """Actions that are valid now, where the environment can list them; else an empty list."""
        return []

    def state_key(self) -> str:
        """Names the current state: equal keys within a task are the same state (anchor states)."""
        return hashlib.sha256(json.dumps([self.task.key, *self._actions]).encode()).hexdigest()[:16]

    def copy_state(self) -> Any:
        """A copy of all that actions change, where the engine can give one. None: `restore` replays the actions."""
        return None

    def load_state(self, state: Any) -> None:
        """Go on from what `copy_state` gave in an episode of the same task."""
        raise NotImplementedError

    # What every script relies on

    def parse(self, response: str) -> ActionSpan:
        """The executable part of a response, by `action_tags`. Without one, the empty action, which is invalid."""
        if not self.action_tags:
            return ActionSpan(response, 0, len(response))
        match = last_block(response, self.action_tags)
        if match is None:
            return ActionSpan("", 0, 0)
        part = 2 if len(self.action_tags) == 1 else 0
        start, end = match.span(part)
        text = response[start:end]
        return ActionSpan(text.strip() if part else text, start, end)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        options = options or {}
        task = options.get("task")
        if task is None:
            tasks = self.tasks(options.get("split", "train"))
            if not len(tasks):
                raise ValueError(f"{type(self).__name__} has no tasks in split {options.get('split', 'train')!r}")
            task = tasks[int(self.np_random.integers(len(tasks)))]
        require_json(task.data, f"{type(self).__name__}: task {task.key!r}: data")
        self.task, self._actions, self._over = replace(task, env_id=task.env_id or self.env_id), [], False
        observation = self._reset(task, task_generator(task))
        if not isinstance(observation, str):
            raise TypeError(f"{type(self).__name__}._reset must return the first observation, a text; got "
                            f"{observation!r:.200}")
        observation = clean_text(observation)
        if (clean := clean_text(self.system_prompt)) != self.system_prompt:  # it may be a property, which is not set
            self.system_prompt = clean
        return observation, self._info(Outcome(observation=observation))

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if not isinstance(action, str):
            raise TypeError(f"an action is text, got {type(action).__name__}")
        if self._over:
            raise gymnasium.error.ResetNeeded("the episode is over (or never began): call reset() first")
        self._actions.append(action)
        outcome = self._step(action)
        if not isinstance(outcome, Outcome):
            raise TypeError(f"{type(self).__name__}._step must return an envs.Outcome, got {outcome!r:.200}")
        require_json(outcome.info, f"{type(self).__name__}._step: info")
        truncated = not outcome.terminated and (outcome.truncated or len(self._actions) >= self.max_turns)
        self._over = outcome.terminated or truncated
        return (clean_text(outcome.observation), float(outcome.reward), bool(outcome.terminated), truncated,
                self._info(outcome))

    def snapshot(self) -> Snapshot:
        """The current point of the episode."""
        return Snapshot(self.task, tuple(self._actions), self.copy_state(), self._over)

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot, by its copied state, or without one by resetting and replaying its actions."""
        if snapshot.state is None or self.task != snapshot.task:
            self.reset(options={"task": snapshot.task})
        if snapshot.state is None:
            for action in snapshot.actions:
                self.step(action)
            return
        self.load_state(snapshot.state)
        self._actions, self._over = list(snapshot.actions), snapshot.over

    def _info(self, outcome: Outcome) -> dict[str, Any]:
        score = outcome.score if outcome.score is not None else float(outcome.success)
        return {**outcome.info, "success": bool(outcome.success), "score": float(score), "valid": bool(outcome.valid),
                "scorable": bool(outcome.scorable), "turn": len(self._actions), "task_key": self.task.key,
                "family": self.task.family}


class SingleTurnEnv(TextEnv):
    """A question, one answer, a score: a subclass writes `tasks` (with `data["question"]`) and `score`."""

    max_turns = 1

    def score(self, task: Task, answer: str) -> float | None:
        """Grade of the whole response, 0 to 1; 1 is a success. None: it cannot be scored (left out of training)."""
        raise NotImplementedError

    def question(self, task: Task) -> str:
        """What the agent reads."""
        return str(task.data["question"])

    def _reset(self, task: Task, rng: np.random.Generator) -> str:
        return self.question(task)

    def _step(self, action: str) -> Outcome:
        score = self.score(self.task, action)
        if score is None:
            return Outcome(terminated=True, scorable=False, score=0.0)
        if not 0.0 <= score <= 1.0:
            raise ValueError(f"{type(self).__name__}.score returned {score!r} for {self.task.key}: not in [0, 1]")
        return Outcome(reward=score, terminated=True, success=score == 1.0, score=score)


def make(env_id: str, **options: Any) -> TextEnv:
    """The text environment of a Gymnasium id, without Gymnasium's wrappers; `options` go to its constructor. Another
    environment of Gymnasium's is offered as text by `envs.adapters.gymnasium.GymnasiumEnv`.

    `module:namespace/Name-v0` imports `module` first, for an environment of one's own. An unknown id raises
    `gymnasium.error.NameNotFound` (or `NamespaceNotFound`, `VersionNotFound`), which names the nearest known one. What
    a constructor raises of other kinds than ImportError, OSError, TypeError and ValueError becomes a ValueError.
    """
    try:
        env = gymnasium.make(env_id, **options)
    except (gymnasium.error.Error, ImportError, OSError, TypeError, ValueError):
        raise
    except Exception as error:  # whatever a user's constructor raises
        raise ValueError(f"{env_id} cannot be made: {type(error).__name__}: {error}") from error
    if isinstance(env.unwrapped, TextEnv):
        env = env.unwrapped
    else:
        from envs.adapters.gymnasium import GymnasiumEnv  # it imports this module

        env = GymnasiumEnv(env)
    env.env_id = env_id
    return env
