"""A learner's tensors on disk, in torch's distributed format: each rank writes and reads its own part.

What was saved by some number of ranks loads on any other. The tensors are named; what is small and the same on every
rank (step counts, settings of optimisers) is kept elsewhere.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn


def save_tensors(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write the tensors, sharded ones among them. All ranks must call it. Raises `dcp.CheckpointException`."""
    with _quiet():
        dcp.save(tensors, checkpoint_id=folder)


def load_tensors(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Read into the tensors what was saved under their names. All ranks must call it. Raises `dcp.CheckpointException`.
    """
    with _quiet():
        dcp.load(tensors, checkpoint_id=folder)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is as it should be for one process
        yield


def named_tensors(module: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """The module's parameters and buffers, under names that begin with `name`."""
    return {f"{name}.{key}": value for key, value in module.state_dict().items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer, name: str) -> dict[str, torch.Tensor]:
    """The optimiser's state, under names that begin with `name`."""
    return {f"{name}.{index}.{key}": value for index, state in optimizer.state_dict()["state"].items()
            for key, value in state.items()}


def optimizer_outline(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything about an optimiser but `optimizer_tensors`."""
    state = optimizer.state_dict()
    return {"param_groups": state["param_groups"], "with_state": list(state["state"])}


def load_outline(optimizer: torch.optim.Optimizer, outline: Mapping[str, Any]) -> None:
    """Take over an outline; `optimizer_tensors` are then those that were saved with it, their values to be loaded."""
    optimizer.load_state_dict({"state": {}, "param_groups": outline["param_groups"]})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # the step below makes the state and leaves the weights as they are
    for index in outline["with_state"]:
        parameters[index].grad = torch.zeros_like(parameters[index])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
