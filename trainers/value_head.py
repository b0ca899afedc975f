"""A value head on the policy's hidden states, which it does not change: cheap, and it reads what the policy reads.

Linear(H → width), GELU, Linear(width → 1) on the detached last hidden state before each turn. What it says comes from a
copy that follows it slowly; it learns from the targets of the last few steps.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from agents.models import Policy
from agents.packing import pack_rows
from agents.scoring import can_share, final_hidden
from agents.trajectory import Group
from trainers.batch import Batch, pack_uncredited, per_turn
from trainers.distributed import read_batch
from trainers.settings import settings


@settings
class ValueHeadSettings:
    """A value head and how it learns."""

    width: PositiveInt = 1024
    """Hidden units."""
    learning_rate: PositiveFloat = 1e-4
    target_decay: float = Field(default=0.995, ge=0, lt=1)
    """How much of the slow copy stays in each step."""
    window: PositiveInt = 10
    """Steps whose targets are remembered."""
    samples: PositiveInt = 256
    """Targets in a gradient step, at most."""


class ValueHeadCritic:
    """Learns at the tokens where the batch's extra `value_weights` is 1, towards `value_targets`.

    It is small: each rank has the whole of it and takes the same steps.
    """

    def __init__(self, policy: Policy, settings: ValueHeadSettings, optimizer: Any):
        """`optimizer`: the policy's `OptimizerSettings`, for the size of a forward pass."""
        self.policy, self.settings, self.packing = policy, settings, optimizer
        size = policy.model.config.get_text_config().hidden_size
        self.head = nn.Sequential(nn.Linear(size, settings.width), nn.GELU(), nn.Linear(settings.width, 1))
        generator = torch.Generator().manual_seed(0)
        for layer, gain in ((self.head[0], 2 ** 0.5), (self.head[2], 0.01)):
            nn.init.orthogonal_(layer.weight, gain, generator=generator)
            nn.init.zeros_(layer.bias)
        self.head.to(policy.device)
        self.target = copy.deepcopy(self.head).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.head.parameters(), lr=settings.learning_rate)
        self.remembered: list[tuple[Tensor, Tensor]] = []
        """States and targets of each step, the oldest first. # [targets, hidden], [targets]"""

    @torch.no_grad()
    def values(self, groups: Sequence[Group]) -> list[list[list[np.ndarray]]]:
        """The value before each turn, at all its tokens."""
        batch = pack_uncredited(groups)
        first = np.zeros(len(batch.token_ids), bool)
        first[1:] = batch.trained[1:] & (batch.turn_index[1:] != batch.turn_index[:-1])
        found = self.target(self._states(batch, first).to(self.policy.device))[:, 0].cpu().numpy()
        return per_turn(groups, found[np.cumsum(first[batch.trained]) - 1])

    def update(self, batch: Batch, rng: np.random.Generator) -> dict[str, float]:
        at = batch.extra.get("value_weights", np.zeros(len(batch.token_ids))) > 0
        if at.any():
            targets = torch.from_numpy(batch.extra["value_targets"][at])
            self.remembered = [*self.remembered, (self._states(batch, at), targets)][-self.settings.window:]
        known = sum(len(targets) for _, targets in self.remembered)
        drawn = torch.from_numpy(rng.permutation(known)[:self.settings.samples])
        if known == 0:
            return {}
        states, targets = (torch.cat(parts)[drawn].to(self.policy.device) for parts in zip(*self.remembered))
        loss = (self.head(states)[:, 0] - targets).square().mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.head.parameters()):
                slow.lerp_(fast, 1 - self.settings.target_decay)
        return {"critic_loss": loss.item()}

    def state(self) -> dict[str, Any]:
        return {"head": self.head.state_dict(), "target": self.target.state_dict(),
                "optimizer": self.optimizer.state_dict(), "remembered": self.remembered}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for part in ("head", "target", "optimizer"):
            getattr(self, part).load_state_dict(state[part])
        self.remembered = list(state["remembered"])

    def tensors(self) -> dict[str, Tensor]:
        return {}

    @torch.no_grad()
    def _states(self, batch: Batch, at: np.ndarray) -> Tensor:
        """The policy's last hidden states before the tokens `at`, in CPU memory. # float32 [tokens at, hidden]"""
        def read(part: Batch) -> np.ndarray:
            rows = pack_rows(part.sequences(), self.packing.row_tokens, share=can_share(self.policy.model))
            before = rows.places[np.flatnonzero(part.extra["at"]) - 1]
            with self.policy.precision():
                hidden = final_hidden(self.policy.model, rows)
            return hidden[torch.from_numpy(before).to(self.policy.device)].float().cpu().numpy()

        return torch.from_numpy(read_batch(replace(batch, extra={"at": at}), self.packing.micro_batch_tokens, read,
                                           width=(self.head[0].in_features,)))
