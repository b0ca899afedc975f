"""Sums over ranks: each holds a part of the batch, and losses, counts and gradients of the parts add up."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def sum_over_ranks(*numbers: float, device: torch.device | str = "cpu") -> list[float]:
    """Each number summed over all ranks; as it is without torch.distributed."""
    if not dist.is_initialized():
        return list(numbers)
    total = torch.tensor(numbers, device=device)
    dist.all_reduce(total)
    return total.tolist()


def sum_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Add up each parameter's gradient over all ranks; one without is 0."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if dist.is_initialized():
            dist.all_reduce(parameter.grad)
