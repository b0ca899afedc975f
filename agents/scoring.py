"""Log-probabilities of given tokens, without padding and without ever holding full logits.

Several sequences stand in one row: their positions restart at 0, from which transformers builds a block-diagonal
attention mask (one that says less would make it skip that and let the sequences see each other, so none is passed).
Where sequences share their first tokens positions do not tell them apart, and the whole mask is passed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agents.packing import Rows, pack_rows, token_parts

CHUNK = 4096 * 512
"""Logits of a chunk of tokens, in elements, unless that would be fewer tokens than CHUNK_TOKENS."""
CHUNK_TOKENS = 64
"""Tokens of a chunk at least, for which the head's weights are read once."""


def final_hidden(model: PreTrainedModel, rows: Rows, *, recompute: bool = False) -> torch.Tensor:
    """The model's last hidden states. # [rows * width, hidden]

    `recompute`: only what enters each layer is kept for the backward pass, which computes the rest again.
    """
    positions, visible = (None if x is None else x.to(model.device) for x in (rows.positions, rows.visible))

    def seen(window: int | None) -> torch.Tensor:
        near = True if window is None else positions[:, :, None] - positions[:, None] < window
        return (visible & near)[:, None]

    whole = model if isinstance(model, FSDPModule) else model.base_model  # see `trainers.distributed.shard`
    with _recomputed_layers(model) if recompute else nullcontext():
        output = whole(input_ids=rows.token_ids.to(model.device), position_ids=positions, use_cache=False,
                       attention_mask=None if visible is None else attention_masks(model, seen))
    return output.last_hidden_state.flatten(0, 1)


def can_share(model: PreTrainedModel) -> bool:
    """Whether sequences may share tokens when the model reads them: it must take the mask that this needs."""
    return _layer_kinds(model) <= {"full_attention", "sliding_attention"} and \
        model.config._attn_implementation in ("sdpa", "eager")


def attention_masks(model: PreTrainedModel, seen: Callable[[int | None], torch.Tensor]
                    ) -> torch.Tensor | dict[str, torch.Tensor]:
    """The attention mask, or one for each kind of layer where the model has two.

    `seen` says what each query sees, within a window of positions if given one. # bool [rows, 1, queries, keys]
    """
    def mask(window: int | None) -> torch.Tensor:
        visible = seen(window)
        if model.config._attn_implementation == "sdpa":
            return visible
        hidden = torch.finfo(model.dtype).min  # eager attention adds its mask to the scores
        return torch.zeros_like(visible, dtype=model.dtype).masked_fill(~visible, hidden)

    config = model.config
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = _layer_kinds(model)
    if kinds == {"full_attention", "sliding_attention"}:
        return {"full_attention": mask(None), "sliding_attention": mask(window)}
    return mask(None if kinds == {"full_attention"} else window)


def _layer_kinds(model: PreTrainedModel) -> set[str]:
    return set(getattr(model.config, "layer_types", None) or ())


@contextmanager
def _recomputed_layers(model: PreTrainedModel) -> Iterator[None]:
    # Transformers checkpoints layers in training mode alone; what is inside them stays in the mode that it is in.
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layers that can be computed again: set "
                         "optimizer.gradient_checkpointing to false")
    modes = [layer.training for layer in layers]
    for layer in layers:
        layer.training = layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes):
            layer.training, layer.gradient_checkpointing = mode, False


def head_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Logits as the model's own forward gives them. # float32 [tokens, vocabulary]"""
    logits = model.get_output_embeddings()(hidden).float()
    config = model.config
    if getattr(config, "logit_scale", None):
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None):
        logits = logits / config.logits_scaling
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits


def token_logprobs(model: PreTrainedModel, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, *,
                   with_entropy: bool = False, entropy_gradient: bool = False
                   ) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each target under the hidden state before it, and the entropy there if asked.
    # float32 [tokens]

    Logits exist for one chunk of tokens at a time; under autograd they are computed again in the backward pass.
    """
    def chunk_logprobs(h: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        every = (head_logits(model, h) / temperature).log_softmax(-1)
        chosen = every.gather(-1, t[:, None])[:, 0]
        if not with_entropy:
            return chosen, chosen.detach()
        # Comes last, since the backward pass computes again only as far as it needs.
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            return chosen, -(every.exp() * every).sum(-1)

    logprobs, entropies = zip(*_by_chunks(chunk_logprobs, model, hidden, targets))
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


def token_divergence(model: PreTrainedModel, hidden: torch.Tensor, other: PreTrainedModel, other_hidden: torch.Tensor,
                     temperature: float) -> torch.Tensor:
    """KL(model‖other) over the whole vocabulary between what follows `hidden` by `model` and `other_hidden` by `other`.
    # float32 [tokens]

    Logits exist for one chunk of tokens at a time, as in `token_logprobs`; only `other` gets a gradient.
    """
    def chunk_divergence(h: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logprobs = (head_logits(model, h) / temperature).log_softmax(-1)
        others = (head_logits(other, o) / temperature).log_softmax(-1)
        return (logprobs.exp() * (logprobs - others)).sum(-1)

    return torch.cat(_by_chunks(chunk_divergence, model, hidden, other_hidden))


def _by_chunks(function: Callable, model: PreTrainedModel, *tensors: torch.Tensor) -> list:
    """`function` of each chunk of tokens, small enough for logits; under autograd computed again in the backward pass.
    """
    size = max(CHUNK_TOKENS, CHUNK // model.config.get_text_config().vocab_size)
    chunks = list(zip(*(tensor.split(size) for tensor in tensors)))
    if torch.is_grad_enabled() and len(chunks) > 1:
        return [checkpoint(function, *chunk, use_reentrant=False) for chunk in chunks]
    return [function(*chunk) for chunk in chunks]


def check_model(model: PreTrainedModel) -> None:
    """Raise ValueError unless scoring packed sequences gives the logits of the model's own forward on each alone."""
    apart, alike = [np.arange(1, 7), np.arange(4, 0, -1)], [np.arange(1, 7), np.array([1, 2, 3, 0])]
    try:
        with torch.no_grad():
            own = torch.cat([model(input_ids=torch.from_numpy(s)[None].to(model.device)).logits[0].float()
                             for s in apart + alike])
            packed = []
            for some in apart, alike:
                rows = pack_rows(some, 12, share=can_share(model))
                packed.append(final_hidden(model, rows)[torch.from_numpy(rows.places).to(model.device)])
            ours = head_logits(model, torch.cat(packed))
    except (TypeError, NotImplementedError) as error:
        raise ValueError(f"{type(model).__name__} cannot read sequences packed into one row: {error}") from error
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 2e-2
    if not torch.allclose(own, ours, rtol=0.0, atol=tolerance * float(own.abs().max()) + 1e-6):
        raise ValueError(f"{type(model).__name__} gives packed sequences other logits than its own forward does: it "
                         "changes its logits, or mixes the sequences of a row, in a way that scoring does not know")


@torch.no_grad()
def score_sequences(model: PreTrainedModel, sequences: Sequence[np.ndarray], temperature: float = 1.0, *,
                    max_tokens: int = 16384, width: int = 512) -> list[np.ndarray]:
    """Log-probability of each id of each sequence given those before it; the first is 0. # float32 [length] each"""
    results: list[np.ndarray] = []
    for part in token_parts([len(s) for s in sequences], max_tokens):
        some = [sequences[i] for i in part]
        rows = pack_rows(some, width, share=can_share(model))
        hidden = final_hidden(model, rows)
        ids = torch.from_numpy(np.concatenate(some)).to(model.device)
        before = torch.from_numpy(rows.places).to(model.device).roll(1)
        logprobs = token_logprobs(model, hidden[before], ids, temperature)[0].cpu().numpy()
        for one in np.split(logprobs, np.cumsum([len(s) for s in some])[:-1]):
            one[:1] = 0.0
            results.append(one)
    return results
