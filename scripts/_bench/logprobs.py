"""What log-probabilities and their gradient cost beside full logits: memory, time, and whether they agree."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from agents.scoring import head_logits, token_logprobs

SIZE = {"tokens": 8192, "vocabulary": 150_000, "hidden_size": 128}
QUICK_SIZE = {"tokens": 8192, "vocabulary": 16_000, "hidden_size": 16}


def measure(*, quick: bool) -> dict[str, Any]:
    """Peak bytes and seconds of both ways, forward and backward, and the largest difference of their gradients
    relative to the largest gradient. The full logits of one quarter of the tokens at a time, their gradients added up:
    the whole would not fit into every machine's memory."""
    size = QUICK_SIZE if quick else SIZE
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=size["vocabulary"], hidden_size=size["hidden_size"],
                                         intermediate_size=16, num_hidden_layers=1, num_attention_heads=1))
    hidden = torch.randn(size["tokens"], size["hidden_size"], requires_grad=True)
    targets = torch.randint(size["vocabulary"], (size["tokens"],))
    weights = torch.randn(size["tokens"]) / size["tokens"]
    head = model.get_output_embeddings().weight

    def chunked() -> None:
        logprobs, _ = token_logprobs(model, hidden, targets, 1.0, with_entropy=True)
        (logprobs * weights).sum().backward()

    def full() -> None:
        for h, t, w in zip(hidden.chunk(4), targets.chunk(4), weights.chunk(4)):
            (head_logits(model, h).log_softmax(-1).gather(-1, t[:, None])[:, 0] * w).sum().backward()

    found: dict[str, Any] = {"size": size, "full_logits_bytes": 4 * size["tokens"] * size["vocabulary"]}
    gradients = []
    for name, way in (("chunked", chunked), ("full", full)):
        hidden.grad = torch.zeros_like(hidden)
        head.grad = torch.zeros_like(head)  # held either way
        began = time.perf_counter()
        found[name] = {"peak_bytes": peak_bytes(way), "seconds": time.perf_counter() - began}
        gradients.append((hidden.grad, head.grad))
    found["difference"] = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*gradients))
    return found


def peak_bytes(way: Callable[[], None]) -> int:
    """The most memory that `way` holds at a time, beyond what was held before, by torch's allocator on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        way()
    changes = sorted((event.start_ns(), event.nbytes()) for event in seen.profiler.kineto_results.events()
                     if event.name() == "[memory]")
    return int(np.cumsum([size for _, size in changes]).max(initial=0))


def tables(found: dict[str, Any]) -> list[Table]:
    size = " × ".join(f"{number:,} {name}" for name, number in found["size"].items())
    table = Table(title=f"{size}; gradients differ by {found['difference']:.1e}", title_justify="left", box=None)
    for column in ("", "peak MB", "of full logits", "seconds"):
        table.add_column(column, justify="left" if not column else "right")
    for name in ("chunked", "full"):
        peak = found[name]["peak_bytes"]
        table.add_row(name + " (a quarter at a time)" * (name == "full"), f"{peak / 1e6:,.0f}",
                      f"{peak / found['full_logits_bytes']:.1%}", f"{found[name]['seconds']:.1f}")
    return [table]
