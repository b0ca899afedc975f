"""A run's folder: its config, metrics, trajectories, evaluations and checkpoints, and coming back to it.

    config.toml          the resolved config; itself a config file
    initial/             the policy that training started from (made here, or warm-started)
    metrics.jsonl        one object per step
    evaluations.jsonl    one object per evaluation
    trajectories.jsonl   some trajectories of each step
    tensorboard/
    checkpoints/step-000050/   policy in transformers' format, training state

With several ranks each has a `Run` of the same folder, on a disk that all see; what is written is written by rank 0,
but for the parts of sharded tensors.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import tomli_w
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.utils.tensorboard import SummaryWriter

from agents.models import Policy
from trainers.checkpoint import load_tensors, save_tensors
from trainers.config import TrainConfig, build_config, config_dict
from trainers.distributed import whole_weights
from trainers.files import replacing
from trainers.ranks import from_leader, rank
from trainers.settings import SettingsError, read_toml

LOGS = ("metrics.jsonl", "evaluations.jsonl", "trajectories.jsonl")


class Cost(NamedTuple):
    """What training cost, episodes that branched off included."""

    environment_steps: int
    sampled_tokens: int


class RunError(RuntimeError):
    """The run's folder cannot be used; what it held is untouched."""


class Run:
    """The folder of one run."""

    def __init__(self, folder: str | Path, config: TrainConfig):
        self.folder, self.config = Path(folder), config
        self._tensorboard: SummaryWriter | None = None

    @classmethod
    def create(cls, folder: str | Path, config: TrainConfig) -> "Run":
        """A new run's folder. Raises RunError where it already holds a run, or cannot be written."""
        folder, text = Path(folder), config_toml(config)
        file = folder / "config.toml"
        try:
            if any((folder / name).exists() for name in ("initial", "checkpoints", *LOGS)):
                raise RunError(f"{folder} already holds a run: go on with --resume {folder}, or choose another folder")
            if file.exists() and file.read_bytes() != text.encode():
                raise RunError(f"{file} is there already and says something else: go on with --resume {folder}, "
                               "delete it, or choose another folder")
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(file) as out:
                out.write(text)
        except OSError as error:
            raise RunError(f"cannot make a run in {folder}: {error}") from error
        return cls(folder, config)

    @classmethod
    def open(cls, folder: str | Path) -> "Run":
        """An existing run's folder, with the config it was made with. Raises RunError where there is none."""
        folder = Path(folder)
        try:
            return cls(folder, build_config(read_toml(folder / "config.toml")))
        except SettingsError as error:
            raise RunError(f"{folder} holds no run to resume: {error}") from error

    def change_steps(self, steps: int) -> None:
        """Let the run end after `steps` steps instead of those it was made for; `save_config` keeps that.

        Raises RunError where it would not be the run that these steps give from the start.
        """
        planned, schedule = self.config.run.steps, self.config.optimizer.schedule
        if steps < self.done:
            raise RunError(f"{self.folder} has done {self.done} steps already: give --run.steps {self.done} or more")
        decays = [f"optimizer.schedule = {schedule!r}"] * (schedule != "constant")
        decays += [f"algorithm.total_steps = {planned}"] * (getattr(self.config.algorithm, "total_steps", 0) == planned)
        if steps != planned and decays:
            raise RunError(f"{self.folder} was made for {planned} steps, and something in it falls over just these "
                           f"({', '.join(decays)}): over {steps} it would have fallen otherwise from the start. Begin "
                           f"a new run, with model.path set to a checkpoint of this one to go on from there")
        self.config = replace(self.config, run=replace(self.config.run, steps=steps))

    def save_config(self) -> None:
        """Write `config.toml`. Raises RunError."""
        with self._writing("config.toml") as file, replacing(file) as out:
            out.write(config_toml(self.config))

    @property
    def done(self) -> int:
        """Steps that the newest checkpoint has behind it; 0 without one."""
        return _checkpoint_step(self.checkpoints[-1]) if self.checkpoints else 0

    def spent(self, step: int) -> Cost:
        """What training up to `step` cost, by the log."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines if _row_step(line) <= step]
        return Cost(*(sum(row[name] for row in rows) for name in Cost._fields))

    def over(self, step: int) -> bool:
        """Whether training ends after `step` steps: those are all, or the log says that they used up a limit."""
        settings = self.config.run
        limits = settings.max_environment_steps, settings.max_sampled_tokens
        return step >= settings.steps or (limits != (None, None) and any(
            limit and used >= limit for used, limit in zip(self.spent(step), limits)))

    @property
    def initial(self) -> Path:
        """Where the policy lies that training started from."""
        return self.folder / "initial"

    @property
    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        found = [path for path in self.folder.glob("checkpoints/step-*") if path.name.removeprefix("step-").isdigit()]
        return sorted(found, key=_checkpoint_step)

    @property
    def evaluated(self) -> set[int]:
        """Steps after which an evaluation is logged."""
        path = self.folder / "evaluations.jsonl"
        return {json.loads(line)["step"] for line in path.read_bytes().splitlines()} if path.exists() else set()

    def save(self, step: int, policy: Policy, state: Mapping[str, Any],
             tensors: dict[str, torch.Tensor] | None = None) -> None:
        """Write the checkpoint after `step` steps, whole or not at all, and drop the oldest ones. Raises RunError.

        All ranks must call it; `tensors` may be sharded over them.
        """
        target = self.folder / "checkpoints" / f"step-{step:06d}"
        if from_leader(target.exists):
            return
        self._save_folder(target, policy, {"step": step, **state}, tensors or {})
        for old in self.checkpoints[:-self.config.run.keep_checkpoints] if rank() == 0 else ():
            shutil.rmtree(old, ignore_errors=True)  # one that stays does no harm

    def save_initial(self, policy: Policy) -> None:
        """Keep the policy that training starts from, for resuming and as the reference."""
        self._save_folder(self.initial, policy, None, {})

    def load_state(self) -> dict[str, Any] | None:
        """The newest checkpoint's training state, without its `tensors`; None where there is none. Raises RunError
        where it is damaged.

        Log rows of later steps are dropped: those steps are about to run again.
        """
        newest = self.checkpoints[-1] if self.checkpoints else None
        try:
            state = torch.load(newest / "state.pt", weights_only=True) if newest else None
            step = state["step"] if state else -1
        except (OSError, RuntimeError, EOFError, KeyError, UnpicklingError) as error:
            raise _damaged(newest, error) from error
        for left in self.folder.glob("checkpoints/.step-*"):  # by a crash in the middle of saving
            shutil.rmtree(left, ignore_errors=True)
        self._forget_after(step)
        return state

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Read the newest checkpoint's tensors of these names into them. All ranks must call it. Raises RunError."""
        newest = self.checkpoints[-1]
        try:
            load_tensors(tensors, newest / "tensors")
        except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError, dcp.CheckpointException) as error:
            raise _damaged(newest, error) from error

    def log(self, step: int, metrics: Mapping[str, float], name: str = "metrics.jsonl") -> None:
        """Append one row and plot its numbers. NaN becomes null. Raises RunError where it cannot be written."""
        if rank() > 0:
            return
        row = {key: None if isinstance(value, float) and not math.isfinite(value) else value
               for key, value in metrics.items()}
        self.append(name, [json.dumps({"step": step, **row}, allow_nan=False)])
        with self._writing("tensorboard") as folder:
            if self._tensorboard is None:
                self._tensorboard = SummaryWriter(str(folder), purge_step=step)
            for key, value in row.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self._tensorboard.add_scalar(f"{name.removesuffix('.jsonl')}/{key}", value, step)

    def append(self, name: str, lines: Iterable[str]) -> None:
        """Append lines to a log. Raises RunError where it cannot be written."""
        if rank() > 0:
            return
        with self._writing(name) as path, open(path, "a", encoding="utf-8", newline="\n") as file:
            file.writelines(line + "\n" for line in lines)

    def close(self) -> None:
        """Flush and close the plots. Raises RunError where they cannot be written."""
        with self._writing("tensorboard"):
            if self._tensorboard is not None:
                self._tensorboard.close()

    @contextmanager
    def _writing(self, name: str) -> Iterator[Path]:
        try:
            yield self.folder / name
        except OSError as error:
            raise RunError(f"cannot write {self.folder / name}: {error}\n{self._last_checkpoint()}") from error

    def _last_checkpoint(self) -> str:
        return f"The last complete checkpoint is {self.checkpoints[-1]}" if self.checkpoints else \
            "There is no complete checkpoint yet"

    def _save_folder(self, target: Path, policy: Policy, state: Mapping[str, Any] | None,
                     tensors: dict[str, torch.Tensor]) -> None:
        partial, weights = target.with_name("." + target.name), whole_weights(policy.model)

        def begin() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            policy.save(partial, weights)
            if state is not None:
                torch.save(dict(state), partial / "state.pt")

        try:
            from_leader(begin)
            if state is not None:
                save_tensors(tensors, partial / "tensors")
            from_leader(lambda: os.replace(partial, target))
        except (OSError, RuntimeError, SafetensorError, dcp.CheckpointException) as error:
            raise RunError(f"cannot write {target}: {error}\n{self._last_checkpoint()}") from error
        finally:
            if rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)

    def _forget_after(self, step: int) -> None:
        for path in (self.folder / name for name in LOGS):
            if path.exists():
                # A row cut off by a crash, perhaps inside a character, is the last one, and of a step that runs again.
                rows = [line.decode() for line in path.read_bytes().splitlines() if _row_step(line) <= step]
                with self._writing(path.name), replacing(path) as file:
                    file.writelines(row + "\n" for row in rows)


def _damaged(checkpoint: Path | None, error: BaseException) -> RunError:
    return RunError(f"{checkpoint} is damaged ({error}); move it away to go on from the one before")


def _checkpoint_step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _row_step(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def config_toml(config: TrainConfig) -> str:
    """The resolved config as a config file."""
    return tomli_w.dumps(_without_none(config_dict(config)))


def _without_none(data: Mapping[str, Any]) -> dict[str, Any]:
    # TOML has no None; reading gives the default again.
    return {key: _without_none(value) if isinstance(value, Mapping) else value
            for key, value in data.items() if value is not None}
