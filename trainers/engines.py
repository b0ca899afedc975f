"""The engine that a run samples with, made from its settings."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from agents.adapters import has_adapter
from agents.engine import Engine
from agents.models import Policy
from agents.transformers_engine import TransformersEngine
from agents.vllm_engine import VLLMEngine
from agents.vllm_in_process import InProcessReplica
from agents.vllm_replica import Replica, ServerReplica
from agents.vllm_server import VLLMServer, engine_arguments
from agents.weight_transfer import AdapterTransfer, NCCLTransfer, SharedMemoryTransfer, WeightTransfer
from trainers.config import EngineSettings, TrainConfig
from trainers.run import Run
from trainers.weight_sync import WeightSync

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Room that vLLM can reserve for an adapter's rank."""
GAP_LIMITS = {"float32": 1e-4, "bfloat16": 0.3, "float16": 0.1}
"""Nats a token, by the lower of both sides' precisions: in bfloat16 rounding alone may reach half of it."""


def make_engine(run: Run, policy: Policy) -> tuple[Engine, WeightSync]:
    """The run's engine, which serves, and what keeps it on the weights of `policy`. Raises EngineError."""
    model = str(run.initial if run.initial.exists() else run.config.model.path)
    engine = build_engine(run.config, policy, model, run.folder)
    shares_weights = run.config.engine.name == "transformers"
    return engine, WeightSync(engine, policy, gap_limit=None if shares_weights else gap_limit(run.config))


def build_engine(config: TrainConfig, policy: Policy, model: str, folder: Path) -> Engine:
    """The engine that the settings name, which serves. vLLM reads `model`, a folder or a hub name, and writes its logs
    to `folder`; `policy` need not have weights then. Raises EngineError."""
    settings = config.engine
    if settings.name == "transformers":
        return TransformersEngine(policy, slots=config.rollout.concurrency,
                                  max_context=config.rollout.max_context_tokens)
    dtype = settings.dtype or config.model.dtype
    max_context = min(config.rollout.max_context_tokens or policy.max_context, policy.max_context)
    arguments = []
    if rank := config.model.lora.rank:
        arguments = ["--enable-lora", "--max-lora-rank", str(min(room for room in LORA_RANKS if room >= rank))]
    replicas = make_replicas(settings, model, dtype=dtype, max_context=max_context, folder=folder,
                             arguments=arguments)
    return connected(VLLMEngine(replicas, policy.end_ids, max_context=max_context, shares_gpu=settings.in_process,
                                keep_cache=config.rollout.keep_cache,
                                transfer=make_transfer(config, policy, dtype)))


def make_engine_beside(config: TrainConfig, policy: Policy) -> tuple[TransformersEngine, WeightSync]:
    """A transformers engine with a copy of the policy's weights, and what brings it those that the policy has later."""
    settings = config.rollout
    own = replace(policy, model=copy.deepcopy(policy.model))
    engine = TransformersEngine(own, slots=settings.concurrency, max_context=settings.max_context_tokens,
                                keep_cache=settings.keep_cache)
    return engine, WeightSync(engine, policy, gap_limit=gap_limit(config))


def connected(engine: VLLMEngine) -> VLLMEngine:
    """The engine once all its replicas serve; closed where one does not. Raises EngineError."""
    try:
        engine.connect()
    except BaseException:
        engine.close()
        raise
    return engine


def describe_engine(config: TrainConfig) -> str:
    """What a run's plan says of its engine."""
    settings = config.engine
    if settings.name == "transformers":
        return "transformers, in this process, on the learner's own weights"
    computing = f"{' '.join(['vLLM', *settings.arguments])} in {settings.dtype or config.model.dtype}"
    if settings.in_process:
        where = "in this process"
    elif settings.servers:
        where = f"at {', '.join(settings.servers)}"
    else:
        count = f"GPUs {' and '.join(settings.devices)}" if settings.devices else f"{settings.replicas} server(s)"
        where = f"on {count} started by {settings.python or 'this interpreter'}"
    return f"{computing}, {where}; weights by {settings.transfer}, gap at most {gap_limit(config):g}"


def gap_limit(config: TrainConfig) -> float:
    """The gap after a sync past which a run stops, in nats a token."""
    learner = "bfloat16" if config.model.autocast else config.model.dtype
    return config.engine.gap_limit or max(GAP_LIMITS[learner], GAP_LIMITS[config.engine.dtype or config.model.dtype])


def make_replicas(settings: EngineSettings, model: str, *, dtype: str, max_context: int, folder: Path,
                  arguments: Sequence[str] = ()) -> list[Replica]:
    """The replicas that the settings name, serving `model`; their logs go to `folder`."""
    if settings.servers:
        return [ServerReplica(url=url) for url in settings.servers]
    backend = "shared_memory" if settings.in_process else settings.transfer
    arguments = engine_arguments(model, dtype=dtype, max_context=max_context, backend=backend,
                                 further=[*arguments, *settings.arguments])
    if settings.in_process:
        sleep = ["--enable-sleep-mode"] if torch.cuda.is_available() else []
        return [InProcessReplica([*arguments, *sleep])]
    devices = settings.devices or [""] * settings.replicas
    return [ServerReplica(VLLMServer(arguments, folder / f"vllm-{i}.log", python=settings.python,
                                     environment={"CUDA_VISIBLE_DEVICES": device} if device else {}))
            for i, device in enumerate(devices)]


def make_transfer(config: TrainConfig, policy: Policy, dtype: str) -> WeightTransfer:
    """How weights in `dtype`, or the policy's adapter alone, come to the replicas."""
    settings, precision = config.engine, getattr(torch, dtype)
    if has_adapter(policy.model):
        return AdapterTransfer(policy)
    if settings.transfer == "nccl" and not settings.in_process:
        return NCCLTransfer(precision, copy=config.rollout.max_staleness > 0)
    return SharedMemoryTransfer(precision)
