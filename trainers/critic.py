"""Critics: what the state before a sampled token is worth, learnt beside the policy.

Two heads. With z_k the bins' centres:

    scalar     V,                       loss max((V − R)², (V_old + clip(V − V_old, ±c) − R)²) / 2
    HL-Gauss   V = Σ_k p_k z_k,         loss −Σ_k p*_k log p_k,   p*_k ∝ exp(−(z_k − R)² / 2σ²),  R within the bins

The critic of PPO is a copy of the policy's network of its own: it learns at a rate and for steps that the policy does
not, and its gradient must not move the policy. It costs the memory of a second model in training.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator
from torch import Tensor, nn
from transformers import PreTrainedModel

from agents.models import Policy
from agents.packing import pack_rows
from agents.scoring import can_share, final_hidden
from agents.trajectory import Group
from trainers.batch import Batch, pack_uncredited, per_turn
from trainers.checkpoint import load_outline, named_tensors, optimizer_outline, optimizer_tensors
from trainers.distributed import clip_gradients, micro_batches, read_batch, shard
from trainers.ranks import gather
from trainers.settings import settings


class Critic(Protocol):
    """What learns values beside a policy."""

    def values(self, groups: Sequence[Group]) -> list[list[list[np.ndarray]]]:
        """The value of the state before each sampled token, for each group, trajectory and turn. # [response_length]"""

    def update(self, batch: Batch, rng: np.random.Generator) -> dict[str, float]:
        """Learn from a batch, before the policy does; returns metrics."""

    def state(self) -> dict[str, Any]:
        """What the next step depends on beside `tensors`, the same on every rank."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`; the values of `tensors` are loaded on their own."""

    def tensors(self) -> dict[str, Tensor]:
        """What the next step depends on, by name, where it is sharded over the ranks."""


@settings
class CriticSettings:
    """A critic with a network of its own."""

    head: Literal["scalar", "hl_gauss"] = "scalar"
    """One number with a squared error, or a distribution over bins with a cross-entropy (HL-Gauss, arXiv 2403.03950).
    """
    learning_rate: PositiveFloat = 1e-5
    warmup_steps: NonNegativeInt = 0
    """Steps at the start in which only the critic learns."""
    value_clip: PositiveFloat = 0.5
    """c: the scalar head's error is also taken at the old value plus at most so much; the greater of both counts."""
    bins: int = Field(default=101, ge=2)
    """Of the HL-Gauss head, and the range of returns that they cover."""
    lowest: float = -0.1
    highest: float = 1.1
    sigma: PositiveFloat = 0.024
    """Width of the HL-Gauss target."""

    @model_validator(mode="after")
    def _check_support(self):
        if self.lowest >= self.highest:
            raise ValueError(f"the lowest value {self.lowest} must be below the highest {self.highest}")
        return self


class ScalarHead(nn.Linear):
    """Hidden states to values by one linear map, 0 to begin with."""

    def __init__(self, hidden_size: int, settings: CriticSettings):
        super().__init__(hidden_size, 1)
        self.value_clip = settings.value_clip
        _zero(self)

    def decode(self, outputs: Tensor) -> Tensor:
        """# [tokens, 1] -> [tokens]"""
        return outputs[:, 0]

    def loss(self, outputs: Tensor, returns: Tensor, old_values: Tensor) -> Tensor:
        """Clipped squared error. # [tokens]"""
        values = self.decode(outputs)
        clipped = old_values + (values - old_values).clamp(-self.value_clip, self.value_clip)
        return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())


class HLGaussHead(nn.Linear):
    """Hidden states to a distribution over values, uniform to begin with. The authors' dropout is left out: dropout is
    off everywhere here."""

    def __init__(self, hidden_size: int, settings: CriticSettings):
        super().__init__(hidden_size, settings.bins)
        width = (settings.highest - settings.lowest) / settings.bins
        self.register_buffer("centres", settings.lowest + width * (torch.arange(settings.bins) + 0.5))
        self.lowest, self.highest, self.sigma = settings.lowest, settings.highest, settings.sigma
        _zero(self)

    def decode(self, outputs: Tensor) -> Tensor:
        """The mean of the distribution. # [tokens, bins] -> [tokens]"""
        return outputs.softmax(-1) @ self.centres

    def target(self, returns: Tensor) -> Tensor:
        """A Gaussian's density around each return at the bins' centres, normalised. # [tokens] -> [tokens, bins]"""
        distance = self.centres - returns.clamp(self.lowest, self.highest)[:, None]
        return (-distance.square() / (2 * self.sigma ** 2)).softmax(-1)

    def loss(self, outputs: Tensor, returns: Tensor, old_values: Tensor) -> Tensor:
        """Cross-entropy. # [tokens]"""
        return -(self.target(returns) * outputs.log_softmax(-1)).sum(-1)


def _zero(layer: nn.Linear) -> None:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)


class NetworkCritic:
    """A copy of the policy's network with a value head, and its optimiser.

    It learns at the tokens where the batch's extra `value_weights` is 1, towards `value_targets`; `values` are what it
    said before.
    """

    def __init__(self, policy: Policy, settings: CriticSettings, optimizer: Any):
        """`optimizer`: the policy's `OptimizerSettings`; all but kind, learning rate and schedule holds here too."""
        self.network: PreTrainedModel = shard(copy.deepcopy(policy.model.base_model))
        size = policy.model.config.get_text_config().hidden_size
        head = (HLGaussHead if settings.head == "hl_gauss" else ScalarHead)(size, settings)
        self.head = shard(head.to(policy.device))
        self.policy, self.settings = policy, optimizer
        self.parameters = [p for p in [*self.network.parameters(), *self.head.parameters()] if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=settings.learning_rate, fused=True,
                                           weight_decay=optimizer.weight_decay,
                                           betas=(optimizer.beta1, optimizer.beta2))

    @torch.no_grad()
    def values(self, groups: Sequence[Group]) -> list[list[list[np.ndarray]]]:
        batch = pack_uncredited(groups)
        return per_turn(groups, read_batch(batch, self.settings.micro_batch_tokens,
                                           lambda part: self.head.decode(self._outputs(part)).cpu().numpy()))

    def update(self, batch: Batch, rng: np.random.Generator) -> dict[str, float]:
        nothing = np.zeros(len(batch.token_ids), np.float32)  # where no trajectory is trained on
        batch = replace(batch, extra=dict.fromkeys(("values", "value_targets", "value_weights"), nothing) | batch.extra)
        losses = [self._gradient_step(minibatch) for _ in range(self.settings.epochs)
                  for minibatch in batch.minibatches(self.settings.minibatches, rng)]
        at = batch.extra["value_weights"] > 0
        targets, values = batch.extra["value_targets"][at], batch.extra["values"][at]
        if not len(targets):
            return {}
        return {"critic_loss": float(np.nanmean(losses)), "value": float(values.mean()),
                "value_error": float(np.sqrt(np.mean((targets - values) ** 2)))}

    def state(self) -> dict[str, Any]:
        return {"optimizer": optimizer_outline(self.optimizer)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        load_outline(self.optimizer, state["optimizer"])

    def tensors(self) -> dict[str, Tensor]:
        return named_tensors(self.network, "critic.network") | named_tensors(self.head, "critic.head") | \
            optimizer_tensors(self.optimizer, "critic.optimizer")

    def _outputs(self, batch: Batch) -> Tensor:
        """The head's outputs in the states before the trained tokens. # float32 [trained, outputs]"""
        rows = pack_rows(batch.sequences(), self.settings.row_tokens, share=can_share(self.network))
        before = torch.from_numpy(rows.places[np.flatnonzero(batch.trained) - 1]).to(self.network.device)
        with self.policy.precision():
            hidden = final_hidden(self.network, rows, recompute=self.settings.gradient_checkpointing)[before]
        return self.head(hidden.float())

    def _gradient_step(self, batch: Batch) -> float:
        """One step on the batch, unless it holds nothing to learn from; its loss before the step."""
        total = float(batch.extra["value_weights"].sum())
        if total == 0:
            return math.nan
        self.optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for part, counted in micro_batches(batch, self.settings.micro_batch_tokens):
            returns, weights, old = (torch.from_numpy(part.extra[name][part.trained]).to(self.network.device)
                                     for name in ("value_targets", "value_weights", "values"))
            share = counted * (weights * self.head.loss(self._outputs(part), returns, old)).sum() / total
            share.backward()
            loss += float(share.detach())
        norm = clip_gradients(self.parameters, self.settings.max_gradient_norm)
        if not math.isfinite(norm):
            raise FloatingPointError(f"the critic's loss is {loss}, its gradient's norm {norm}; its weights are those "
                                     "before this step")
        self.optimizer.step()
        return sum(gather(loss))
