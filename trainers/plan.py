"""What a run will cost, worked out without loading a model."""

from collections.abc import Iterator

import torch
from transformers import AutoConfig, PretrainedConfig

from agents.adapters import add_adapter
from agents.tiny import tiny_config
from trainers.config import ActorSettings, LoraSettings, TrainConfig
from trainers.engines import describe_engine
from trainers.memory import Architecture, rank_memory, without_weights
from trainers.ranks import world_size
from trainers.settings import SettingsError

GIB = 2**30


def plan(config: TrainConfig, *, cluster: bool = False) -> Iterator[tuple[str, str]]:
    """Rows (what, how much) of a run's plan: batch, tokens, memory. `cluster`: with what Ray places.

    Raises SettingsError for a model that is no causal language model.
    """
    rollout, optimizer = config.rollout, config.optimizer
    episodes = rollout.tasks_per_step * rollout.group_size
    yield "episodes per step", f"{episodes} ({rollout.tasks_per_step} tasks x {rollout.group_size})"
    if config.algorithm.max_generation_batches > 1:
        yield "sampled at most per step", f"{episodes * config.algorithm.max_generation_batches} episodes"
    yield "gradient steps", str(config.run.steps * optimizer.epochs * optimizer.minibatches)
    if cluster:
        for part in ("learners", "replicas", "workers"):
            yield f"Ray: {part}", describe_actors(getattr(config.cluster, part), computing=part != "workers")
    yield "engine", config.engine.name if cluster else describe_engine(config)
    yield "evaluated problems", f"{config.evaluation.episodes} of {config.evaluation.split}"
    model = model_config(config)
    if model is None:
        yield "memory", f"unknown: the config of {config.model.path} is not on this machine"
        return
    architecture = describe_model(model, config.model.lora)
    needs, lora = config.algorithm.needs, config.model.lora.rank > 0
    bytes_each = torch.finfo(getattr(torch, config.model.dtype)).bits // 8
    frozen = {"reference": needs.reference_logprobs and not lora,
              "teacher": needs.teacher_copy(optimizer.epochs * optimizer.minibatches)}
    ranks = config.cluster.learners.count if cluster else config.run.ranks or world_size()
    context = min(rollout.max_context_tokens or architecture.context, architecture.context)
    yield "parameters", f"{architecture.parameters / 1e6:,.1f} M ({config.model.dtype})"
    if lora:
        yield "parameters of the adapters", f"{architecture.trainable / 1e6:,.1f} M"
    yield "context", f"{context} tokens, at most {rollout.max_response_tokens} in a response"
    passes = (6 if not lora else 4) + 2 * optimizer.gradient_checkpointing
    yield "arithmetic per trained token", f"{passes * architecture.parameters / 1e9:,.3g} GFLOP"
    if beside := [name for name, there in {"critic": needs.critic_network, **frozen}.items() if there]:
        yield "models beside the policy", ", ".join(beside)
    sizes = rank_memory(architecture, ranks=ranks, bytes_each=bytes_each, tokens=optimizer.micro_batch_tokens,
                        frozen=sum(frozen.values()), trained=1 + needs.critic_network,
                        recompute=optimizer.gradient_checkpointing,
                        computing_bytes=2 if config.model.autocast else bytes_each)
    yield f"memory of each of {ranks} ranks" if ranks > 1 else "memory in training", gibibytes(sum(sizes.values()))
    for name, size in sizes.items():
        yield f"  {name}", gibibytes(size)
    beside = rollout.max_staleness > 0 and (config.engine.name == "transformers" or config.engine.transfer == "nccl")
    copies = 1 if cluster else (ranks > 1) + beside
    sampling = {"weights that are sampled from": copies * architecture.parameters * bytes_each,
                "key-value cache, full": architecture.cache_bytes(rollout.concurrency * context, bytes_each)}
    place = " of each replica" if cluster else " on top for sampling" + " (rank 0)" * (ranks > 1)
    yield f"memory{place}", gibibytes(sum(sampling.values()))
    for name, size in sampling.items():
        if size:
            yield f"  {name}", gibibytes(size)
    if not cluster:
        yield "memory in all, at most", gibibytes(sum(sizes.values()) + sum(sampling.values()))


def describe_actors(actors: ActorSettings, *, computing: bool) -> str:
    """How many actors of a kind, and what each has."""
    default = "a GPU where there are some" if computing else "no GPU"
    gpus = default if actors.gpus is None else f"{actors.gpus:g} GPUs"
    return f"{actors.count}, each with {actors.cpus:g} CPUs and {gpus}"


def gibibytes(size: float) -> str:
    return f"{size / GIB:,.2f} GiB"


def model_config(config: TrainConfig) -> PretrainedConfig | None:
    """The architecture of the run's model; None where it cannot be read on this machine."""
    if config.model.path == "tiny":
        return tiny_config(config.model.vocabulary, config.model.hidden_size, config.model.layers,
                           head_size=config.model.head_size)
    try:
        return AutoConfig.from_pretrained(config.model.path, local_files_only=True)
    except (OSError, ValueError):
        return None


def describe_model(config: PretrainedConfig, lora: LoraSettings) -> Architecture:
    """The architecture with its adapters. Raises SettingsError where this is no causal language model's config, or the
    adapters have nowhere to go."""
    try:
        model = without_weights(config)
    except ValueError as error:
        raise SettingsError(f"model.path: a {config.model_type} model is no causal language model: {error}") from error
    if lora.rank:
        try:
            add_adapter(model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
        except ValueError as error:
            raise SettingsError(f"model.lora.targets {list(lora.targets)}: {error}") from error
    return Architecture.of(model)
