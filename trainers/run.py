"""A run's folder: its config, metrics, trajectories, evaluations and checkpoints, and coming back to it.

    config.toml          the resolved config; itself a config file
    initial/             the policy that training started from (made here, or warm-started)
    metrics.jsonl        one object per step
    evaluations.jsonl    one object per evaluation
    trajectories.jsonl   some trajectories of each step
    tensorboard/
    checkpoints/step-000050/   policy in transformers' format, training state
"""

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch.utils.tensorboard import SummaryWriter

from agents.models import Policy
from trainers.config import TrainConfig, build_config, config_dict
from trainers.settings import SettingsError, read_toml

LOGS = ("metrics.jsonl", "evaluations.jsonl", "trajectories.jsonl")


class RunError(RuntimeError):
    """The run's folder cannot be used; what it held is untouched."""


class Run:
    """The folder of one run."""

    def __init__(self, folder: str | Path, config: TrainConfig):
        self.folder, self.config = Path(folder), config
        self._tensorboard: SummaryWriter | None = None

    @classmethod
    def create(cls, folder: str | Path, config: TrainConfig) -> "Run":
        """A new run's folder. Raises RunError where it already holds a run."""
        folder = Path(folder)
        if any((folder / name).exists() for name in ("initial", "checkpoints", *LOGS)):
            raise RunError(f"{folder} already holds a run: go on with --resume {folder}, or choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        run = cls(folder, config)
        _write(folder / "config.toml", tomli_w.dumps(without_none(config_dict(config))))
        return run

    @classmethod
    def open(cls, folder: str | Path) -> "Run":
        """An existing run's folder, with the config it was made with."""
        folder = Path(folder)
        try:
            return cls(folder, build_config(read_toml(folder / "config.toml")))
        except SettingsError as error:
            raise RunError(f"{folder} holds no run to resume: {error}") from error

    @property
    def initial(self) -> Path:
        """Where the policy lies that training started from."""
        return self.folder / "initial"

    @property
    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(self.folder.glob("checkpoints/step-*"))

    def save(self, step: int, policy: Policy, state: Mapping[str, Any]) -> None:
        """Write the checkpoint after `step` steps, whole or not at all, and drop the oldest ones. Raises RunError."""
        target = self.folder / "checkpoints" / f"step-{step:06d}"
        if target.exists():
            return
        self._save_folder(target, policy, {"step": step, **state})
        for old in self.checkpoints[:-self.config.run.keep_checkpoints]:
            shutil.rmtree(old)

    def save_initial(self, policy: Policy) -> None:
        """Keep the policy that training starts from, for resuming and as the reference."""
        self._save_folder(self.initial, policy, None)

    def load_state(self) -> dict[str, Any] | None:
        """The newest checkpoint's training state; None where there is none.

        Log rows of later steps are dropped: those steps are about to run again.
        """
        state = torch.load(self.checkpoints[-1] / "state.pt", weights_only=True) if self.checkpoints else None
        self._forget_after(state["step"] if state else -1)
        return state

    def log(self, step: int, metrics: Mapping[str, float], name: str = "metrics.jsonl") -> None:
        """Append one row and plot its numbers. NaN becomes null. Raises RunError where it cannot be written."""
        row = {key: None if isinstance(value, float) and not math.isfinite(value) else value
               for key, value in metrics.items()}
        self.append(name, [json.dumps({"step": step, **row}, allow_nan=False)])
        if self._tensorboard is None:
            self._tensorboard = SummaryWriter(str(self.folder / "tensorboard"), purge_step=step)
        for key, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._tensorboard.add_scalar(f"{name.removesuffix('.jsonl')}/{key}", value, step)

    def append(self, name: str, lines: list[str]) -> None:
        """Append lines to a log. Raises RunError where it cannot be written."""
        try:
            with open(self.folder / name, "a", encoding="utf-8") as file:
                file.write("".join(line + "\n" for line in lines))
        except OSError as error:
            raise RunError(f"cannot write {self.folder / name}: {error}") from error

    def close(self) -> None:
        """Flush and close the plots."""
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _save_folder(self, target: Path, policy: Policy, state: Mapping[str, Any] | None) -> None:
        partial = target.with_name("." + target.name)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            policy.save(partial)
            if state is not None:
                torch.save(dict(state), partial / "state.pt")
            os.replace(partial, target)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            shutil.rmtree(partial, ignore_errors=True)
            last = self.checkpoints[-1:] or ["none"]
            raise RunError(f"cannot write {target}: {error}\nThe last complete checkpoint is {last[0]}") from error

    def _forget_after(self, step: int) -> None:
        for name in LOGS:
            path = self.folder / name
            if path.exists():
                # A row cut off by a crash is the last one, and of a step that runs again.
                lines = [line for line in path.read_text(encoding="utf-8").splitlines() if _row_step(line) <= step]
                _write(path, "".join(line + "\n" for line in lines))


def _row_step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def _write(path: Path, text: str) -> None:
    partial = path.with_name("." + path.name)
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def without_none(data: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings without those that are None, which TOML cannot write; reading gives the default again."""
    return {key: without_none(value) if isinstance(value, Mapping) else value
            for key, value in data.items() if value is not None}
