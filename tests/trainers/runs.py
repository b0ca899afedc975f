"""An environment in which an untrained policy often succeeds by chance, and small runs in it."""

import json
import string
import zlib
from pathlib import Path

import gymnasium
import torch
from safetensors.torch import load_file

import envs
from trainers.config import TrainConfig, build_config
from trainers.loop import train
from trainers.run import Run
from trainers.settings import merge


class Parity(envs.TextEnv):
    """A turn is right where its text has an even checksum; the episode succeeds where all its turns are right.

    A turn ends at a letter, digit or sign, so that an untrained policy's seldom runs into its limit.
    """

    stop = tuple(string.ascii_letters + string.digits + string.punctuation)

    def __init__(self, turns: int = 2, tasks: int = 50, blocking: bool = False):
        super().__init__(max_turns=turns)
        self.size, self.blocking = tasks, blocking

    def tasks(self, split):
        return [envs.Task(key=f"{split} {i}", split=split) for i in range(self.size)]

    def _reset(self, task, rng):
        self.right = []
        return f"Task {task.key}."

    def _step(self, action):
        self.right.append(self.is_right(action))
        return envs.Outcome(observation=f"Turn {len(self.right)}.", reward=self.right[-1] / self.max_turns,
                            terminated=len(self.right) == self.max_turns, success=all(self.right))

    @staticmethod
    def is_right(action):
        return zlib.crc32(action.encode()) % 2 == 0

    def gold(self, rng):
        texts = (f"gold {i}" for i in range(100))
        return [next(filter(self.is_right, texts))] * self.max_turns


gymnasium.register("test/Parity-v0", entry_point="tests.trainers.runs:Parity")

SMALL = {
    "environment": {"id": "test/Parity-v0", "tasks": 10},
    "model": {"hidden_size": 32, "layers": 1, "vocabulary": 300},
    "rollout": {"tasks_per_step": 2, "group_size": 4, "max_response_tokens": 5, "concurrency": 8},
    "optimizer": {"learning_rate": 1e-2},
    "evaluation": {"episodes": 0},
    "run": {"steps": 2, "log_trajectories": 1000}}


def small_config(**sections: dict) -> TrainConfig:
    return build_config(merge(SMALL, sections))


class Recorder:
    """A display that remembers, and interrupts the run after a step if asked to."""

    def __init__(self, stop_after: int | None = None):
        self.stop_after, self.phases, self.metrics, self.titles = stop_after, [], [], []

    def phase(self, name, total, done=0):
        self.phases.append((name, total, done))
        self.done = done

    def advance(self, metrics):
        self.metrics.append(metrics)
        self.done += 1
        if self.phases[-1][0] == "training" and self.done == self.stop_after:
            raise KeyboardInterrupt

    def evaluation(self, title, evaluation):
        self.titles.append(title)


def start(folder: Path, **sections: dict) -> Recorder:
    """A whole run."""
    recorder = Recorder()
    train(Run.create(folder, small_config(**sections)), recorder)
    return recorder


def go_on(folder: Path, stop_after: int | None = None) -> Recorder:
    recorder = Recorder(stop_after)
    try:
        train(Run.open(folder), recorder)
    except KeyboardInterrupt:
        assert stop_after
    return recorder


def rows(folder: Path, name: str = "metrics") -> list[dict]:
    """A log, without what differs from run to run."""
    found = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in row.items() if "second" not in key} for row in found]


def task_keys(folder: Path) -> list[str]:
    """Task keys of the trained groups, step by step."""
    return list(dict.fromkeys((row["step"], row["task"]["key"]) for row in rows(folder, "trajectories")))


def weights(folder: Path) -> torch.Tensor:
    """All parameters of the newest checkpoint, or of its adapter."""
    newest = sorted(folder.glob("checkpoints/step-*"))[-1]
    return torch.cat([tensor.flatten() for _, tensor in sorted(load_file(*newest.glob("*.safetensors")).items())])
