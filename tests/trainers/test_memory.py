"""The memory that a rank is said to need is what it takes."""

import weakref
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.agents.policies import random_policy
from tests.trainers.trajectories import conversation, group
from trainers.algorithms import GRPO
from trainers.batch import pack
from trainers.credit import Credit
from trainers.learner import Learner, OptimizerSettings
from trainers.memory import Architecture, rank_memory

MODELS = {
    "deep": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 8, "head_dim": 24},
    "many words": {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 20_000, "tie_word_embeddings": False},
    "wide": {"family": "qwen2", "hidden_size": 256, "intermediate_size": 900, "head_dim": 64},
}


def some_batch(tokens: int):
    """Sequences of 128 tokens, which fill rows of 512."""
    rng = np.random.default_rng(0)
    some = [conversation(rng.integers(5, 250, 8).tolist(), rng.integers(5, 250, 120).tolist())
            for _ in range(tokens // 128)]
    return pack([group(*some)], [[Credit.uniform(trajectory, 1.0) for trajectory in some]])


class Peak(TorchDispatchMode):
    """The most bytes that tensors hold at once, those given and all that are made inside."""

    def __init__(self, tensors: Iterable[torch.Tensor]):
        super().__init__()
        self.held = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        for tensor in tensors:
            self._count(tensor)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        return made

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._known:
            self._known.add(storage)
            weakref.finalize(storage, self._free, storage.nbytes())
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)

    def _free(self, size: int) -> None:
        self.held -= size


@pytest.mark.parametrize("tokens", [512, 4096])
@pytest.mark.parametrize("name", MODELS)
def test_the_estimate_is_near_the_measured_peak(name, tokens):
    policy = random_policy(**{"max_position_embeddings": 256, **MODELS[name]})
    learner, batch = Learner(policy, GRPO(), OptimizerSettings()), some_batch(tokens)
    rng = np.random.default_rng(0)
    learner.update(batch, rng)  # from now on there is an optimiser's state
    with Peak([*policy.model.parameters(), *learner.tensors().values()]) as measured:
        learner.update(batch, rng)
    sizes = rank_memory(Architecture.of(policy.model), ranks=1, bytes_each=4, tokens=tokens)
    assert 0.8 < sum(sizes.values()) / measured.peak < 1.3, (sizes, measured.peak)
