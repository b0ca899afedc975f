"""The policy that a run starts from: loaded, or made for the environment, and warm-started on gold solutions."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from agents.adapters import add_adapter
from agents.models import ModelError, Policy, load_policy
from agents.rollout import Rollout, derive_seed
from agents.tiny import make_tiny_policy
from agents.trajectory import Trajectory
from envs.core import TextEnv
from trainers.config import TrainConfig
from trainers.ranks import from_leader
from trainers.settings import SettingsError
from trainers.supervised import fine_tune_policy, gold_texts, gold_trajectories, told

TOKENIZER_TASKS = 512
"""Tasks whose gold episodes a tiny policy's tokenizer is trained on."""


def initial_policy(config: TrainConfig, env: TextEnv) -> Policy:
    """The policy that `config.model` names; `tiny` makes one for the environment. Raises ModelError, and SettingsError
    where the environment has no gold solutions for a tiny one."""
    if config.model.path != "tiny":
        return read_policy(config, config.model.path)
    tasks = env.tasks(config.environment.split)
    try:
        texts = gold_texts(env, tasks[:TOKENIZER_TASKS], derive_seed(config.run.seed, "texts"))
    except LookupError as error:
        raise SettingsError(f"{error}, which a tiny policy's tokenizer is trained on: write gold(), or name a model "
                            "with model.path") from error
    policy = make_tiny_policy(env, texts, vocabulary=config.model.vocabulary, hidden_size=config.model.hidden_size,
                              head_size=config.model.head_size, layers=config.model.layers, seed=config.run.seed)
    policy.model.to(config.model.device or ("cuda" if torch.cuda.is_available() else "cpu"),
                    getattr(torch, config.model.dtype))
    return replace(policy, autocast=config.model.autocast)


def read_policy(config: TrainConfig, path: str | Path) -> Policy:
    """The policy at `path`, in the precision and on the device that `config.model` names. Raises ModelError."""
    return load_policy(str(path), dtype=config.model.dtype, device=config.model.device, autocast=config.model.autocast)


def adapt(config: TrainConfig, policy: Policy, base: str = "") -> None:
    """Put a new adapter, as `config.model.lora` says, into the policy's model. Raises ModelError for unknown targets.

    `base`: see `add_adapter`.
    """
    lora = config.model.lora
    try:
        add_adapter(policy.model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, base=base,
                    seed=derive_seed(config.run.seed, "adapter"))
    except ValueError as error:
        raise ModelError(f"model.lora.targets {list(lora.targets)}: {error}") from error


def warm_start(config: TrainConfig, policy: Policy, demonstrations: Rollout,
               on_step: Callable[[int, dict[str, float]], None]) -> None:
    """Fine-tune `policy` on the gold solutions that the `demonstrations` rollout's environment gives."""
    settings, seed = config.warm_start, config.run.seed

    def demonstrate() -> list[Trajectory]:
        with closing(demonstrations.make_env()) as env:
            count = min(settings.demonstrations, config.environment.tasks or settings.demonstrations)
            tasks = env.tasks(config.environment.split)[:count]
        trajectories = gold_trajectories(demonstrations, policy, tasks, derive_seed(seed, "demonstrations"),
                                         window=config.rollout.window)
        return told(policy, trajectories, derive_seed(seed, "told"), skill_share=settings.skill_share,
                    feedback_share=settings.feedback_share, skills=settings.skills)

    fine_tune_policy(policy, from_leader(demonstrate), steps=settings.steps, batch_size=settings.batch_size,
                     learning_rate=settings.learning_rate, optimizer=settings.optimizer, seed=seed, on_step=on_step,
                     first_token_weight=settings.first_token_weight,
                     micro_batch_tokens=config.optimizer.micro_batch_tokens, row_tokens=config.optimizer.row_tokens,
                     gradient_checkpointing=config.optimizer.gradient_checkpointing)
