"""What log-probabilities and their gradient take beside full logits: memory, time, and whether they agree."""

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
PARTS = 16
"""In which full logits are compared: the whole of them would not fit into every machine's memory."""


def measure(*, quick: bool) -> dict[str, Any]:
    """Peak bytes and seconds of forward and backward, and the largest difference of the gradients to those from full
    logits, relative to the largest gradient."""
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
        for h, t, w in zip(hidden.chunk(PARTS), targets.chunk(PARTS), weights.chunk(PARTS)):
            (head_logits(model, h).log_softmax(-1).gather(-1, t[:, None])[:, 0] * w).sum().backward()

    hidden.grad, head.grad = torch.zeros_like(hidden), torch.zeros_like(head)  # held either way
    began = time.perf_counter()
    found = {"size": size, "full_logits_bytes": 4 * size["tokens"] * size["vocabulary"],
             "peak_bytes": peak_bytes(chunked), "seconds": time.perf_counter() - began}
    gradients = hidden.grad, head.grad
    hidden.grad = head.grad = None
    full()
    found["difference"] = max(float((a - b).abs().max() / b.abs().max())
                              for a, b in zip(gradients, (hidden.grad, head.grad)))
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
    table = Table(title=f"log-probabilities and entropy of {size}", title_justify="left", box=None)
    for column in ("full logits, MB", "peak, MB", "share", "seconds", "gradients differ by"):
        table.add_column(column, justify="right")
    full, peak = found["full_logits_bytes"], found["peak_bytes"]
    table.add_row(f"{full / 1e6:,.0f}", f"{peak / 1e6:,.0f}", f"{peak / full:.1%}", f"{found['seconds']:.1f}",
                  f"{found['difference']:.1e}")
    return [table]
