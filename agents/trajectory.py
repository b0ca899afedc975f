"""What a rollout makes: turns, trajectories, groups. Everything that trains or evaluates reads these."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from envs.core import Task


class Status(StrEnum):
    """How an episode ended. An `error_*` episode has no reward and never reaches training."""

    COMPLETED = "completed"
    """The environment ended it."""
    TRUNCATED_TURNS = "truncated_turns"
    """The environment's turn limit."""
    TRUNCATED_LENGTH = "truncated_length"
    """A turn hit its token limit, or the context is full."""
    ERROR_ENVIRONMENT = "error_environment"
    ERROR_ENGINE = "error_engine"
    ERROR_AGENT = "error_agent"
    ERROR_TIMEOUT = "error_timeout"

    @property
    def truncated(self) -> bool:
        return self in (Status.TRUNCATED_TURNS, Status.TRUNCATED_LENGTH)

    @property
    def error(self) -> bool:
        return self.value.startswith("error")


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """One response of the agent and what it brought about.

    The ids are those that the engine read and sampled; they are never decoded and encoded again. Example, two turns in
    one growing conversation (P prompt, A action, E environment; only A is trained):

        turn 0   prompt_ids = P0 P1         response_ids = A0 A1
        turn 1   prompt_ids = P0 P1 A0 A1 E0 E1   response_ids = A2
    """

    response_ids: np.ndarray
    """What was sampled. # int64 [response_length]"""
    prompt_ids: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    """What the engine read. # int64 [prompt_length]"""
    logprobs: np.ndarray | None = None
    """Log-probabilities of the behaviour policy at the sampling temperature; zeros where not given.
    # float32 [response_length]"""
    weight_version: int = 0
    """Version of the weights that sampled it; where they changed in the middle, of the first tokens."""
    weight_versions: tuple[tuple[int, int], ...] = ()
    """Where they changed in the middle: the version of each span of tokens and the index that it ends before, as
    ((3, 5), (4, 9)) for five tokens of version 3 and four of version 4."""
    finish_reason: str = "stop"
    """`stop` (an end token or a stop text) or `length`."""
    text: str = ""
    """The response, decoded without end tokens."""
    action: str = ""
    """What the environment's `step` received."""
    action_span: tuple[int, int] = (0, 0)
    """The response tokens [start, end) that are the executable action; empty where there was none."""
    imitate: bool = True
    """Supervised fine-tuning learns the whole response; false for an `envs.Mistake` of a demonstration."""
    observation: str = ""
    """What the environment answered."""
    reward: float = 0.0
    state_key: str = ""
    """Names the state that the agent acted in."""
    valid: bool = True
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        ids = np.asarray(self.response_ids, dtype=np.int64)
        logprobs = np.zeros(len(ids), np.float32) if self.logprobs is None else np.asarray(self.logprobs, np.float32)
        if len(logprobs) != len(ids):
            raise ValueError(f"{len(ids)} response ids but {len(logprobs)} log-probabilities")
        ends = [0, *(end for _, end in self.weight_versions)]
        if self.weight_versions and (ends != sorted(set(ends)) or ends[-1] != len(ids)
                                     or self.weight_versions[0][0] != self.weight_version):
            raise ValueError(f"weight versions {self.weight_versions} do not cover {len(ids)} response ids in order "
                             f"from version {self.weight_version} on")
        object.__setattr__(self, "response_ids", ids)
        object.__setattr__(self, "prompt_ids", np.asarray(self.prompt_ids, dtype=np.int64))
        object.__setattr__(self, "logprobs", logprobs)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    """One episode."""

    turns: Sequence[Turn]
    reward: float | None
    """Return: the sum of the turns' rewards. None where the episode cannot be scored."""
    task: Task = field(default_factory=lambda: Task(key=""))
    status: Status = Status.COMPLETED
    success: bool = False
    score: float = 0.0
    """The environment's own grade at the end, 0 to 1."""
    context_breaks: int = 0
    """Turns whose prompt does not extend what came before (the chat template rewrote history)."""
    first_observation: str = ""
    system_prompt: str = ""

    @property
    def truncated(self) -> bool:
        """Any turn was cut at its length, or the episode at a limit."""
        return self.status.truncated or any(turn.finish_reason == "length" for turn in self.turns)

    def age(self, version: int) -> int:
        """Updates between the weights of its oldest token and those of `version`; 0 where nothing was sampled."""
        return version - min((turn.weight_version for turn in self.turns), default=version)

    @property
    def response_length(self) -> int:
        """Sampled tokens over all turns."""
        return sum(len(turn.response_ids) for turn in self.turns)


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The trajectories of one task."""

    trajectories: Sequence[Trajectory]
    task: Task = field(default_factory=lambda: Task(key=""))

    def age(self, version: int) -> int:
        """That of its oldest trajectory."""
        return max(trajectory.age(version) for trajectory in self.trajectories)

    @property
    def rewards(self) -> np.ndarray:
        """Returns; NaN where a trajectory cannot be scored. # float64 [group_size]"""
        return np.array([np.nan if t.reward is None else t.reward for t in self.trajectories], dtype=np.float64)


def starts_with(ids: np.ndarray, beginning: np.ndarray) -> bool:
    """Whether token ids begin with others."""
    return len(ids) >= len(beginning) and np.array_equal(ids[:len(beginning)], beginning)
