"""A learner on many ranks: weights sharded, micro-batches spread. In a process of its own all of this does nothing.

Every rank holds the whole batch and does the same things in the same order; what differs is which micro-batches it
reads.
"""

import copy
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from agents.models import Policy
from agents.packing import token_parts
from agents.scoring import score_sequences
from trainers.batch import Batch
from trainers.ranks import gather, rank, world_size

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


def shard(module: M) -> M:
    """Spread the parameters of a model or head over the ranks (FSDP2, arXiv 2304.11277), layer by layer; returns it.

    A sharded model's forward gives its last hidden states: embeddings and head, perhaps one matrix, are gathered
    there and stay so until the backward pass is over. Gradients of all ranks are added up, not averaged.
    """
    if not dist.is_initialized():
        return module
    mesh = init_device_mesh(next(module.parameters()).device.type, (world_size(),))
    units = [module]
    if isinstance(module, PreTrainedModel):
        layers = module._no_split_modules or ()
        units = [part for part in module.modules() if type(part).__name__ in layers] + [module]
        if module is not module.base_model:
            module.forward = lambda **inputs: module.base_model(**inputs)
    for unit in units:
        fully_shard(unit, mesh=mesh)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has a sum, but no sum of products
    return module


def release(module: nn.Module) -> None:
    """Let go of what a forward pass without a backward pass gathered: it would not see the optimiser's next step."""
    if is_sharded(module):
        module.reshard()


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def whole_weights(model: nn.Module, *, trainable: bool = False) -> dict[str, torch.Tensor]:
    """The whole weights by name, perhaps the `trainable` ones alone. All ranks must call it.

    Where they are sharded they are gathered in the leader's CPU memory, and other ranks get none.
    """
    if not is_sharded(model):
        return model.state_dict()
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True,
                                                                   ignore_frozen_params=trainable))
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):  # one matrix for embeddings and head
        if weights.get(names.setdefault(parameter, name)) is not None:
            weights[name] = weights[names[parameter]]
    return weights


def acting_policy(policy: Policy) -> Policy:
    """The policy that is sampled from: on a leader a copy that stays whole when the learner shards its own, else the
    policy itself."""
    leads = dist.is_initialized() and rank() == 0
    return replace(policy, model=copy.deepcopy(policy.model)) if leads else policy


def copy_weights(policy: Policy, acting: Policy) -> None:
    """Bring the `acting_policy` to the weights that the learner's has now. All ranks must call it."""
    if is_sharded(policy.model):
        weights = whole_weights(policy.model, trainable=True)
        if rank() == 0:
            acting.model.load_state_dict(weights, strict=False)


def clip_gradients(parameters: Sequence[nn.Parameter], largest: float) -> float:
    """Scale the gradient down to this norm; returns the norm that it had over all ranks."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, largest)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def rank_parts(lengths: Sequence[int], max_tokens: int) -> list[list[list[int]]]:
    """For each rank its parts of consecutive items, at most `max_tokens` tokens each (or one longer item).

    All ranks have equally many, since a sharded model's forward needs them all, and as equal as the items allow; the
    last ones may be empty.
    """
    ranks, parts = world_size(), list(token_parts(lengths, max_tokens))
    if ranks > 1:
        wanted = ranks * math.ceil(len(parts) / ranks)
        least = bisect_left(range(max_tokens), True,
                            key=lambda limit: len(list(token_parts(lengths, limit))) <= wanted)
        parts = list(token_parts(lengths, least))
        parts += [[]] * (wanted - len(parts))
    return [parts[first::ranks] for first in range(ranks)]


def over_ranks(lengths: Sequence[int], max_tokens: int, work: Callable[[list[int]], T]) -> list[T]:
    """What `work` gives for each of `rank_parts`, in the order of the items, on every rank.

    A rank without a part of its own works on the first item, for the others' sake.
    """
    mine = [(work(part or [0]), part) for part in rank_parts(lengths, max_tokens)[rank()]]
    return [result for result, part in chain.from_iterable(zip(*gather(mine))) if part]


def micro_batches(batch: Batch, max_tokens: int) -> Iterator[tuple[Batch, float]]:
    """This rank's micro-batches of whole trajectories, each with the weight of its loss: 1, or 0 where it only keeps
    step with the other ranks. Trajectories without a trained token are left out: they change nothing."""
    wanted, lengths = batch.trained_trajectories()
    for part in rank_parts(lengths, max_tokens)[rank()]:
        yield batch.select(wanted[part or [0]]), float(bool(part))


def read_batch(batch: Batch, max_tokens: int, read: Callable[[Batch], np.ndarray], width: tuple[int, ...] = ()
               ) -> np.ndarray:
    """What `read` gives for a batch's micro-batches, joined. # float32 [..., *width]"""
    wanted, lengths = batch.trained_trajectories()
    parts = over_ranks(lengths, max_tokens, lambda part: read(batch.select(wanted[part])))
    return np.concatenate([np.zeros((0, *width), np.float32), *parts])


def score_over_ranks(model: PreTrainedModel, sequences: Sequence[np.ndarray], temperature: float, *, max_tokens: int,
                     width: int) -> list[np.ndarray]:
    """`score_sequences`, with the work spread over the ranks. # float32 [length] each"""
    def score(part: list[int]) -> list[np.ndarray]:
        some = [sequences[i] for i in part]
        return score_sequences(model, some, temperature, max_tokens=sum(map(len, some)), width=width)

    return list(chain.from_iterable(over_ranks([len(s) for s in sequences], max_tokens, score)))


def in_step(parts: Sequence[list[int]]) -> list[list[int]]:
    """`parts`, with empty ones behind them up to the number of the rank that has most."""
    most = max(gather(len(parts)))
    return [*parts, *[[]] * (most - len(parts))]
