"""What a rank holds in training, worked out from a model's architecture.

    weights     P/N for each model that is kept (policy, reference, critic, teacher)
    gathered    the parameters outside the layers, and of two layers: one computes, the next one arrives
    gradients   T/N, and whole ones of one layer and of what is outside the layers, until they are added up
    optimiser   2 T/N, the two moments of AdamW
    activations what the backward pass of a micro-batch reads
    logits      of a chunk of tokens, with what is computed from them

P parameters, T of them trained, N ranks. Checked against measured peaks in tests/trainers/test_memory.py.
"""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from agents.scoring import CHUNK, CHUNK_TOKENS

NO_LIMIT = 1_000_000
"""Tokens that a model without a limit of its own is taken to read."""
LOGIT_COPIES = 4
"""Logits, their softmax and the gradients of both, in float32."""
WIDE = 10
"""Tensors as wide as the hidden states that a layer keeps: twice the norm's input, what it makes of it in float32 and
in the model's precision, queries, what attention gives, what enters the second norm."""
INNER = 4
"""Tensors as wide as the MLP: before and after its activation function, the gate's partner, their product."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Of a causal language model. Sizes in numbers, not bytes."""

    parameters: int
    trainable: int
    layer: int
    """Parameters of the largest layer."""
    outside: int
    """Parameters of embeddings, head and last norm."""
    layers: int
    hidden: int
    inner: int
    """Width of the MLP."""
    key_value: int
    """Width of a layer's keys or values."""
    vocabulary: int
    context: int
    """Positions that the model reads."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Architecture":
        """`model` may be without weights, on the meta device."""
        config = model.config.get_text_config()
        layers = [sum(p.numel() for p in module.parameters()) for module in model.modules()
                  if type(module).__name__ in (model._no_split_modules or ())]
        parameters = sum(p.numel() for p in model.parameters())
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(parameters=parameters, trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
                   layer=max(layers, default=0), outside=parameters - sum(layers), layers=config.num_hidden_layers,
                   hidden=config.hidden_size, key_value=heads * size, vocabulary=config.vocab_size,
                   inner=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
                   context=getattr(config, "max_position_embeddings", None) or NO_LIMIT)

    def cache_bytes(self, tokens: int, bytes_each: int) -> int:
        """Of the keys and values of so many tokens."""
        return 2 * self.layers * self.key_value * tokens * bytes_each


def without_weights(config: PretrainedConfig) -> PreTrainedModel:
    """A causal language model of this architecture, of which no weights are made. Raises ValueError for another."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def rank_memory(model: Architecture, *, ranks: int, bytes_each: int, tokens: int, frozen: int = 0, trained: int = 1,
                recompute: bool = False, computing_bytes: int | None = None) -> dict[str, int]:
    """Bytes that each rank holds at most, by what they are for.

    `bytes_each`: of a weight; `computing_bytes`: of an activation, where they differ. `tokens`: of a micro-batch.
    `frozen`, `trained`: how many models of the architecture are kept beside each other. `recompute`: layers are
    computed again in the backward pass.
    """
    computing_bytes = computing_bytes or bytes_each
    sharded, gathered = bytes_each / ranks, bytes_each if ranks > 1 else 0
    kept = (WIDE * model.hidden + 2 * model.hidden + INNER * model.inner) * computing_bytes
    per_token = model.layers * model.hidden * computing_bytes + kept if recompute else model.layers * kept
    chunk = min(tokens, max(CHUNK_TOKENS, CHUNK // model.vocabulary))
    found = {
        "weights": (trained + frozen) * model.parameters * sharded,
        "weights gathered to compute": (model.outside + 2 * model.layer) * gathered,
        "gradients": trained * model.trainable * sharded + (model.outside + model.layer) * gathered,
        "AdamW": 2 * trained * model.trainable * sharded,
        "activations of a micro-batch": tokens * per_token,
        "logits of a chunk": LOGIT_COPIES * chunk * model.vocabulary * 4}
    return {name: round(size) for name, size in found.items()}
