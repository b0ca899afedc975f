"""What a run will cost, worked out without loading a model."""

from collections.abc import Iterator

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from agents.adapters import add_adapter
from agents.tiny import tiny_config
from trainers.config import LoraSettings, TrainConfig
from trainers.engines import describe_engine
from trainers.settings import SettingsError

GIB = 2**30
NO_LIMIT = 1_000_000
"""Tokens that a model without a limit of its own is taken to read."""
ACTIVATION_BYTES = 34
"""Held for the backward pass per token, layer and hidden unit, at 2 bytes a number (arXiv 2205.05198)."""
INPUT_SHARE = 2 / 34
"""The part of it that is a layer's input, which stays of layers that are computed again, one at a time."""


def plan(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Rows (what, how much) of a run's plan: batch, tokens, memory.

    Raises SettingsError for a model that is no causal language model.
    """
    rollout, optimizer = config.rollout, config.optimizer
    episodes = rollout.tasks_per_step * rollout.group_size
    yield "episodes per step", f"{episodes} ({rollout.tasks_per_step} tasks x {rollout.group_size})"
    if config.algorithm.max_generation_batches > 1:
        yield "sampled at most per step", f"{episodes * config.algorithm.max_generation_batches} episodes"
    yield "gradient steps", str(config.run.steps * optimizer.epochs * optimizer.minibatches)
    yield "engine", describe_engine(config)
    yield "evaluated problems", f"{config.evaluation.episodes} of {config.evaluation.split}"
    model = model_config(config)
    if model is None:
        yield "memory", f"unknown: the config of {config.model.path} is not on this machine"
        return
    bytes_each = torch.finfo(getattr(torch, config.model.dtype)).bits // 8
    parameters, trainable = count_parameters(model, config.model.lora)
    model = model.get_text_config()
    longest = getattr(model, "max_position_embeddings", None) or NO_LIMIT
    context = min(rollout.max_context_tokens or longest, longest)
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    head_size = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    cache = 2 * model.num_hidden_layers * heads * head_size * bytes_each
    per_layer = ACTIVATION_BYTES * (1 if config.model.autocast else bytes_each / 2) * model.hidden_size
    layers = model.num_hidden_layers
    activations = per_layer * (1 + layers * INPUT_SHARE if optimizer.gradient_checkpointing else layers)
    needs = config.algorithm.needs
    others = {" and reference": needs.reference_logprobs and not config.model.lora.rank,
              " and critic": needs.critic_network,
              " and teacher": needs.teacher_copy(optimizer.epochs * optimizer.minibatches),
              " and engine": rollout.max_staleness > 0}
    trained = (1 + needs.critic_network) * trainable
    yield "parameters", f"{parameters / 1e6:,.1f} M ({config.model.dtype})"
    if config.model.lora.rank:
        yield "parameters of the adapters", f"{trainable / 1e6:,.1f} M"
    yield "context", f"{context} tokens, at most {rollout.max_response_tokens} in a response"
    sizes = {"weights" + "".join(name for name, there in others.items() if there):
             (1 + sum(others.values())) * parameters * bytes_each,
             "gradients and AdamW": 3 * trained * (4 if config.model.lora.rank else bytes_each),
             "key-value cache (full)": rollout.concurrency * context * cache,
             "activations of a micro-batch": optimizer.micro_batch_tokens * activations}
    for name, size in sizes.items():
        yield name, f"{size / GIB:,.2f} GiB"
    yield "memory in all, at most", f"{sum(sizes.values()) / GIB:,.2f} GiB"


def model_config(config: TrainConfig) -> PretrainedConfig | None:
    """The architecture of the run's model; None where it cannot be read on this machine."""
    if config.model.path == "tiny":
        return tiny_config(config.model.vocabulary, config.model.hidden_size, config.model.layers,
                           head_size=config.model.head_size)
    try:
        return AutoConfig.from_pretrained(config.model.path, local_files_only=True)
    except (OSError, ValueError):
        return None


def count_parameters(model: PretrainedConfig, lora: LoraSettings) -> tuple[int, int]:
    """Parameters of a causal language model of this architecture, and those that are trained; no weights are made."""
    try:
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(model)
    except ValueError as error:
        raise SettingsError(f"model.path: a {model.model_type} model is no causal language model: {error}") from error
    whole = sum(p.numel() for p in made.parameters())
    if lora.rank:
        try:
            add_adapter(made, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
        except ValueError as error:
            raise SettingsError(f"model.lora.targets {list(lora.targets)}: {error}") from error
    return whole, sum(p.numel() for p in made.parameters() if p.requires_grad)
