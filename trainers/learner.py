"""Gradient steps on batches: packed micro-batches, global denominators, one optimiser."""

import copy
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from transformers import PreTrainedModel

from agents.adapters import has_adapter, without_adapter
from agents.models import Policy
from agents.packing import pack_rows
from agents.scoring import can_share, check_model, final_hidden, token_logprobs
from agents.trajectory import Group
from trainers.algorithms import Algorithm, Scores
from trainers.algorithms.base import PerTurn
from trainers.batch import Batch, by_turn, pack_uncredited, per_turn
from trainers.checkpoint import load_outline, named_tensors, optimizer_outline, optimizer_tensors
from trainers.distributed import clip_gradients, micro_batches, release, score_over_ranks, shard
from trainers.loss import Counts, LossInput, aggregate
from trainers.mismatch import MismatchSettings, correct, finished, mismatch
from trainers.ranks import gather
from trainers.settings import settings
from trainers.step_size import StepSizeGuard, StepSizeSettings
from trainers.teacher import teacher_divergence, teacher_logprobs, teacher_prompts


@settings
class OptimizerSettings:
    """The optimiser, and how a batch becomes gradient steps."""

    name: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the matrices of the layers, AdamW for embeddings, head and vectors, both at the same learning
    rate. Meant for policies that start from random weights."""
    learning_rate: PositiveFloat = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up; linear and cosine end at 0 with the run's last step."""
    warmup_steps: NonNegativeInt = 0
    """Gradient steps over which the learning rate rises from 0."""
    weight_decay: NonNegativeFloat = 0.0
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    max_gradient_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    epochs: PositiveInt = 1
    """Passes over each batch."""
    minibatches: PositiveInt = 1
    """Gradient steps per pass."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens read in one forward pass; changes memory and speed, never the result."""
    row_tokens: PositiveInt = 512
    """Sequences are packed into rows of this many tokens (or the longest sequence)."""
    gradient_checkpointing: bool = False
    """Layers are computed again in the backward pass: less memory, about a third more time, the same result."""


class Learner:
    """A policy in training. With torch.distributed initialised its models are sharded over the ranks; each is given
    whole batches and reads its part of them."""

    def __init__(self, policy: Policy, algorithm: Algorithm, optimizer: OptimizerSettings, *, temperature: float = 1.0,
                 total_steps: int = 0, reference: PreTrainedModel | None = None,
                 mismatch: MismatchSettings | None = None, step_size: StepSizeSettings | None = None):
        """`temperature` is the one that the behaviour policy sampled with; `total_steps` gradient steps end the
        learning-rate schedule; `reference` is what a KL term holds on to, by default the policy as it is now, or
        without its adapter where it has one."""
        if temperature <= 0:
            raise ValueError(f"temperature {temperature}: a greedy policy has no gradient; sample at more than 0")
        check_model(policy.model)
        self.policy, self.algorithm, self.settings, self.temperature = policy, algorithm, optimizer, temperature
        self.mismatch = mismatch or MismatchSettings()
        self.guard = StepSizeGuard(step_size or StepSizeSettings(),
                                   total_steps // (optimizer.epochs * optimizer.minibatches))
        self.reference = None
        if algorithm.needs.reference_logprobs:
            if reference is None and has_adapter(policy.model):
                self.reference = policy.model
            else:
                self.reference = shard((reference or copy.deepcopy(policy.model)).requires_grad_(False))
        self.teacher = policy.model
        if algorithm.needs.teacher_copy(optimizer.epochs * optimizer.minibatches):
            self.teacher = shard(copy.deepcopy(policy.model).requires_grad_(False))
        self.critic = algorithm.make_critic(policy, optimizer)
        shard(policy.model)  # last: what is sharded cannot be copied
        self.parameters = [p for p in policy.model.parameters() if p.requires_grad]
        self.optimizers = _optimizers(policy.model, optimizer)
        self.schedulers = [torch.optim.lr_scheduler.LambdaLR(
            one, lambda step: _learning_rate_factor(step, optimizer, total_steps)) for one in self.optimizers]

    def score(self, groups: Sequence[Group], step: int = 0) -> Scores:
        """What the algorithm's credit reads, computed with the weights that sampled `groups`. `step` counts from 0."""
        with self.policy.precision():
            return Scores(values=self.critic.values(groups) if self.critic else None,
                          reference_logprobs=self._reference_scores(groups), **self._teacher_scores(groups, step))

    def update(self, batch: Batch, rng: np.random.Generator, *, frozen: bool = False,
               staleness: float = 0.0) -> dict[str, float]:
        """Train on a batch, first the critic, then, unless it is `frozen`, the policy.

        The metrics are means over gradient steps (`logprob_gap` and `mismatch_...`: before the first one). `rng` draws
        the minibatches; `staleness` is the batch's mean age in updates.
        """
        critic_metrics = self.critic.update(batch, rng) if self.critic else {}
        return critic_metrics | ({} if frozen else self._update_policy(batch, rng, staleness))

    def _update_policy(self, batch: Batch, rng: np.random.Generator, staleness: float) -> dict[str, float]:
        corrected = {}
        if self.mismatch.level != "off":
            with self.policy.precision():
                batch, corrected = correct(batch, self._logprobs(self.policy.model, batch), self.mismatch)
        if self.reference is not None:
            with self.policy.precision():
                batch = replace(batch, reference_logprobs=self._reference_logprobs(batch))
        limit = self.guard.limit(staleness)
        history: dict[str, list[float]] = defaultdict(list)
        for _ in range(self.settings.epochs):
            for minibatch in batch.minibatches(self.settings.minibatches, rng):
                for name, value in self._gradient_step(minibatch, limit).items():
                    history[name].append(value)
        metrics = {name: values[0] if name.startswith(("logprob_gap", "mismatch_")) else float(np.mean(values))
                   for name, values in history.items()} | corrected
        if history:
            self.guard.observe(metrics["logprob_gap"], staleness, metrics["learning_rate"])
        return metrics

    def accumulate_gradients(self, batch: Batch) -> dict[str, float]:
        """Add the gradient of the batch's loss to the parameters' `.grad`; returns the metrics."""
        needs = self.algorithm.needs
        other_terms = needs.entropy or needs.reference_logprobs or needs.teacher_divergence
        reports = [self._learn(part, weight, batch.counts, idle=idle)
                   for some, idle in zip([batch] if other_terms else batch.apart(), (False, True))
                   for part, weight in micro_batches(some, self.settings.micro_batch_tokens)]
        release(self.policy.model)
        for parameter in self.parameters:
            if parameter.grad is None:  # nothing had a gradient: a step of 0, with its decay
                parameter.grad = torch.zeros_like(parameter)
        return _merged(gather(_merged(reports)))

    def _learn(self, part: Batch, weight: float, counts: Counts, *, idle: bool) -> dict[str, torch.Tensor]:
        """Add one micro-batch's gradient, `weight` times, and return its share of the metrics (none for a weight of 0).

        An `idle` one seems to have no gradient: it is read without, unless the loss says otherwise on any rank.
        """
        with torch.set_grad_enabled(not idle), self.policy.precision():
            tokens = self.loss_input(part, counts)
        tokens.logprobs.requires_grad_()
        loss, shares = self.algorithm.loss(tokens)
        if not idle:
            (weight * loss).backward()
        elif any(gather(bool(torch.autograd.grad(loss, tokens.logprobs)[0].any()))):
            return self._learn(part, weight, counts, idle=False)
        return {**_monitor(tokens), **shares, "loss": loss.detach()} if weight else {}

    def loss_input(self, part: Batch, counts: Counts) -> LossInput:
        """One micro-batch through the model, as the algorithm's loss reads it."""
        device = self.policy.device
        rows = pack_rows(part.sequences(), self.settings.row_tokens, share=can_share(self.policy.model))
        hidden = final_hidden(self.policy.model, rows, recompute=self.settings.gradient_checkpointing)
        trained = np.flatnonzero(part.trained)

        def tensor(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values[trained]).to(device)

        states = hidden[torch.from_numpy(rows.places[trained - 1]).to(device)]
        logprobs, entropy = token_logprobs(self.policy.model, states, tensor(part.token_ids), self.temperature,
                                           with_entropy=True, entropy_gradient=self.algorithm.needs.entropy)
        divergence = None
        if self.algorithm.needs.teacher_divergence:
            divergence = teacher_divergence(self.policy.model, states, self.teacher, part, self.temperature,
                                            max_tokens=self.settings.micro_batch_tokens, width=self.settings.row_tokens)
        return LossInput(
            logprobs=logprobs, entropy=entropy, behaviour_logprobs=tensor(part.behaviour_logprobs),
            advantages=tensor(part.advantages), turn_index=tensor(part.turn_index), counts=counts,
            trajectory_index=tensor(part.trajectory_index), action_mask=tensor(part.action_mask),
            reference_logprobs=None if part.reference_logprobs is None else tensor(part.reference_logprobs),
            teacher_divergence=divergence, extra={name: tensor(values) for name, values in part.extra.items()},
            step=part.step)

    def state(self) -> dict[str, Any]:
        """Everything beside weights and `tensors` that the next step depends on, the same on every rank."""
        return {"optimizers": [optimizer_outline(one) for one in self.optimizers],
                "schedulers": [one.state_dict() for one in self.schedulers],
                "critic": self.critic.state() if self.critic else None, "guard": self.guard.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`; the weights, and the values of `tensors`, are loaded on their own."""
        for one, its in zip(self.optimizers, state["optimizers"], strict=True):
            load_outline(one, its)
        for one, its in zip(self.schedulers, state["schedulers"], strict=True):
            one.load_state_dict(its)
        self.guard.load_state(state["guard"])
        if self.critic:
            self.critic.load_state(state["critic"])

    def tensors(self) -> dict[str, torch.Tensor]:
        """What the next step depends on beside weights and `state`, by name: large, and sharded over the ranks."""
        found = {} if self.teacher is self.policy.model else named_tensors(self.teacher, "teacher")
        for i, one in enumerate(self.optimizers):
            found |= optimizer_tensors(one, f"optimizers.{i}")
        return found | (self.critic.tensors() if self.critic else {})

    def _gradient_step(self, batch: Batch, limit: float) -> dict[str, float]:
        """One step of the optimisers, at a learning rate of at most `limit`."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        metrics = self.accumulate_gradients(batch)
        if not metrics:
            return metrics
        metrics = finished(metrics)
        norm = clip_gradients(self.parameters, self.settings.max_gradient_norm)
        if not (math.isfinite(norm) and math.isfinite(metrics["loss"])):
            raise FloatingPointError(f"the loss is {metrics['loss']}, the gradient's norm {norm}; the weights are "
                                     "those before this step")
        for group in (group for one in self.optimizers for group in one.param_groups):
            group["lr"] = min(group["lr"], limit)  # the schedule sets it anew after the step
        metrics |= {"gradient_norm": norm, "learning_rate": self.optimizers[0].param_groups[0]["lr"]}
        for one in (*self.optimizers, *self.schedulers):
            one.step()
        return metrics

    def _teacher_scores(self, groups: Sequence[Group], step: int) -> dict[str, Any]:
        """The `Scores` that a teacher gives, where there is one."""
        if not self.algorithm.needs.teacher_logprobs:
            return {}
        if self.teacher is not self.policy.model and step % self.algorithm.needs.teacher_steps == 0:
            self.teacher.load_state_dict(self.policy.model.state_dict())
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        prompts = teacher_prompts(self.policy, turns, [self.algorithm.insertion(trajectory, i, step)
                                                       for trajectory in trajectories
                                                       for i in range(len(trajectory.turns))])
        found = teacher_logprobs(self.teacher, turns, prompts, self.temperature,
                                 max_tokens=self.settings.micro_batch_tokens, width=self.settings.row_tokens)
        return {name: by_turn(groups, values) for name, values in (("teacher_logprobs", found),
                                                                   ("teacher_prompts", prompts))}

    def _reference_scores(self, groups: Sequence[Group]) -> PerTurn | None:
        if not self.algorithm.needs.reference_scores:
            return None
        batch = pack_uncredited(groups)
        return per_turn(groups, self._reference_logprobs(batch)[batch.trained])

    def _reference_logprobs(self, batch: Batch) -> np.ndarray:
        with without_adapter(self.policy.model) if self.reference is self.policy.model else nullcontext():
            return self._logprobs(self.reference, batch)

    def _logprobs(self, model: PreTrainedModel, batch: Batch) -> np.ndarray:
        """0 where not trained. # float32 [tokens]"""
        scores = score_over_ranks(model, batch.sequences(), self.temperature,
                                  max_tokens=self.settings.micro_batch_tokens, width=self.settings.row_tokens)
        return np.where(batch.trained, np.concatenate([*scores, np.zeros(0, np.float32)]), np.float32(0))


def _monitor(tokens: LossInput) -> dict[str, torch.Tensor]:
    """What is reported whatever the algorithm: means per token, as shares of the batch's, and a largest value."""
    return {"entropy": aggregate(tokens.entropy.detach(), counts=tokens.counts),
            **mismatch(tokens.logprobs.detach(), tokens.behaviour_logprobs, tokens.counts)}


def _merged(parts: Sequence[Mapping[str, float | torch.Tensor]]) -> dict[str, float]:
    """Metrics of all parts of a batch: sums of their shares, and the largest `..._max`."""
    names = list(dict.fromkeys(name for part in parts for name in part))
    return {name: float((max if name.endswith("_max") else sum)(part[name] for part in parts if name in part))
            for name in names}


def _optimizers(model: PreTrainedModel, settings: OptimizerSettings) -> list[torch.optim.Optimizer]:
    """One or two optimisers that together hold every trainable parameter once."""
    tables = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.ndim == 2 and id(p) not in tables] if settings.name == "muon" else []
    others = [p for p in trainable if not any(p is matrix for matrix in matrices)]
    # Muon's step scaled to the size of AdamW's (arXiv 2502.16982), so that one learning rate serves both.
    muon = [torch.optim.Muon(matrices, lr=settings.learning_rate, weight_decay=settings.weight_decay,
                             adjust_lr_fn="match_rms_adamw")] if matrices else []
    return [*muon, torch.optim.AdamW(others, lr=settings.learning_rate, fused=True, weight_decay=settings.weight_decay,
                                     betas=(settings.beta1, settings.beta2))]


def _learning_rate_factor(step: int, optimizer: OptimizerSettings, total_steps: int) -> float:
    if step < optimizer.warmup_steps:
        return (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant" or total_steps <= optimizer.warmup_steps:
        return 1.0
    done = min(1.0, (step - optimizer.warmup_steps) / (total_steps - optimizer.warmup_steps))
    return 1.0 - done if optimizer.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
