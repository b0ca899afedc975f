"""Log-probabilities of given tokens, without padding and without ever holding full logits.

Several sequences share one row: their positions restart at 0, from which transformers builds a block-diagonal attention
mask (an explicit mask would make it skip that and let the sequences see each other, so none is passed).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

CHUNK = 4096 * 512
"""Logits held at once, in elements."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Sequences laid out in rows of one width."""

    token_ids: torch.Tensor
    """# int64 [rows, width]"""
    positions: torch.Tensor
    """Restart at 0 at each sequence and are 0 in the filler behind the last one. # int64 [rows, width]"""
    places: np.ndarray
    """Where token i of the concatenated sequences stands in the flattened rows. # int64 [tokens]"""


def pack_rows(sequences: Sequence[np.ndarray], width: int) -> Rows:
    """Lay sequences into rows of at most `width` tokens (or the longest one), each where it fits tightest."""
    lengths = np.array([len(s) for s in sequences])
    limit = max(width, int(lengths.max()))
    used: list[int] = []
    row_of, column_of = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    for i in np.argsort(-lengths, kind="stable"):
        fitting = [row for row, length in enumerate(used) if length + lengths[i] <= limit]
        row = max(fitting, key=used.__getitem__, default=len(used))
        if row == len(used):
            used.append(0)
        row_of[i], column_of[i] = row, used[row]
        used[row] += int(lengths[i])
    width = max(used)
    token_ids, positions = np.zeros((len(used), width), np.int64), np.zeros((len(used), width), np.int64)
    for row, column, sequence in zip(row_of, column_of, sequences):
        token_ids[row, column:column + len(sequence)] = sequence
        positions[row, column:column + len(sequence)] = np.arange(len(sequence))
    places = np.concatenate([np.arange(n) + start for n, start in zip(lengths, row_of * width + column_of)])
    return Rows(torch.from_numpy(token_ids), torch.from_numpy(positions), places)


def final_hidden(model: PreTrainedModel, rows: Rows) -> torch.Tensor:
    """The model's last hidden states. # [rows * width, hidden]"""
    output = model.base_model(input_ids=rows.token_ids.to(model.device), position_ids=rows.positions.to(model.device),
                              use_cache=False)
    return output.last_hidden_state.flatten(0, 1)


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
        logits = head_logits(model, h) / temperature
        normaliser = logits.logsumexp(-1)
        chosen = logits.gather(-1, t[:, None])[:, 0] - normaliser
        if not with_entropy:
            return chosen, chosen.detach()
        # Comes last, since the backward pass computes again only as far as it needs.
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            return chosen, normaliser - (logits.softmax(-1) * logits).sum(-1)

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
    size = max(1, CHUNK // model.config.get_text_config().vocab_size)
    chunks = list(zip(*(tensor.split(size) for tensor in tensors)))
    if torch.is_grad_enabled() and len(chunks) > 1:
        return [checkpoint(function, *chunk, use_reentrant=False) for chunk in chunks]
    return [function(*chunk) for chunk in chunks]


def check_model(model: PreTrainedModel) -> None:
    """Raise ValueError unless scoring packed sequences gives the logits of the model's own forward on each alone."""
    sequences = [np.arange(1, 7), np.arange(4, 0, -1)]
    try:
        with torch.no_grad():
            rows = pack_rows(sequences, 12)
            ours = head_logits(model, final_hidden(model, rows))[torch.from_numpy(rows.places).to(model.device)]
            own = torch.cat([model(input_ids=torch.from_numpy(s)[None].to(model.device)).logits[0].float()
                             for s in sequences])
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
        rows = pack_rows(some, width)
        hidden = final_hidden(model, rows)
        ids = torch.from_numpy(np.concatenate(some)).to(model.device)
        before = torch.from_numpy(rows.places).to(model.device).roll(1)
        logprobs = token_logprobs(model, hidden[before], ids, temperature)[0].cpu().numpy()
        for one in np.split(logprobs, np.cumsum([len(s) for s in some])[:-1]):
            one[:1] = 0.0
            results.append(one)
    return results


def token_parts(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Consecutive indices in parts of at most `max_tokens` tokens (or of one item longer than that)."""
    part: list[int] = []
    total = 0
    for i, length in enumerate(lengths):
        if part and total + length > max_tokens:
            yield part
            part, total = [], 0
        part.append(i)
        total += length
    if part:
        yield part
