"""What a training run is made of. A config file holds only what differs from these defaults."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from agents.server_client import read_address
from trainers.algorithms import Algorithm, find_algorithm
from trainers.algorithms.grpo import GRPO
from trainers.algorithms.modifier import algorithm_name
from trainers.learner import OptimizerSettings
from trainers.mismatch import MismatchSettings
from trainers.settings import (
    SettingsError,
    merge,
    read_overrides,
    read_toml,
    setting_names,
    settings,
    unknown_setting,
    validate,
)
from trainers.step_size import StepSizeSettings

TINY_DEFAULTS = {"optimizer": {"learning_rate": 1e-3}, "warm_start": {"optimizer": "muon", "learning_rate": 2e-2}}
"""What a tiny policy wants instead of the defaults below, which are those of pretrained models."""

SELDOM_MEANT = ("warm_start.", "evaluation.")
"""Sections whose settings an error proposes only where no other fits as well."""


@settings
class EnvironmentSettings:
    """What the agent acts in."""

    id: str = "turngym/Countdown-v0"
    """Gymnasium id; `module:Id` for an environment in a file of your own."""
    split: str = "train"
    """Task set that is trained on."""
    tasks: PositiveInt | None = None
    """Train on the first so many tasks of the split; None: on all."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""


@settings
class LoraSettings:
    """Low-rank adapters (LoRA): they alone are trained. A tiny policy's warm start trains all of its weights."""

    rank: NonNegativeInt = 0
    """0: none, all weights are trained."""
    alpha: PositiveFloat = 32.0
    """The adapters' part is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers that get one, as `q_proj`; none named: all but the head."""


@settings
class ModelSettings:
    """Who acts."""

    path: str = "tiny"
    """A hub name, a folder, a GGUF file; `tiny` makes a small policy for this environment."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the weights."""
    autocast: bool = False
    """Compute in bfloat16 where that is safe, for sampling as for training, over weights of `dtype`."""
    lora: LoraSettings = Field(default_factory=LoraSettings)
    device: str | None = None
    """None: a GPU where there is one."""
    hidden_size: PositiveInt = 192
    """Of a tiny policy; a multiple of 16 and of `head_size`."""
    head_size: PositiveInt = 16
    """Of a tiny policy's attention; vLLM computes with 32 and more."""
    layers: PositiveInt = 4
    """Of a tiny policy."""
    vocabulary: PositiveInt = 512
    """Of a tiny policy, at most; at least 300."""


@settings
class WarmStartSettings:
    """Supervised fine-tuning on the environment's gold solutions before training."""

    steps: NonNegativeInt = 0
    """Gradient steps; 0: none."""
    demonstrations: PositiveInt = 4096
    """Training tasks whose gold solutions are shown, over and over."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment that shows them, beside `environment.options`."""
    skill_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the demonstrations with skills in front of every prompt, as the teacher of ADRS reads them."""
    feedback_share: float = Field(default=0.0, ge=0, le=1)
    """Share with what the environment will answer at the end of every prompt, as the teacher of FACTOR reads it."""
    skills: str | None = None
    """TOML file of skills; None: the one in `trainers/skills` for the environment."""
    batch_size: PositiveInt = 32
    """Transcripts in a gradient step."""
    first_token_weight: PositiveFloat = 1.0
    """Of each turn; see `trainers.algorithms.sft.SFT`."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """See `optimizer.name`."""
    learning_rate: PositiveFloat = 1e-5
    """Rises over the first twentieth of the steps, then falls to 0 as a cosine."""

    @model_validator(mode="after")
    def _check_shares(self):
        if self.skill_share + self.feedback_share > 1:
            raise ValueError(f"skill_share {self.skill_share} and feedback_share {self.feedback_share} are more than 1 "
                             "together")
        return self


@settings
class RolloutSettings:
    """How experience is gathered."""

    tasks_per_step: PositiveInt = 16
    """Groups in one training batch."""
    group_size: PositiveInt = 8
    """Episodes of one task."""
    temperature: PositiveFloat = 1.0
    """Of sampling; the log-probabilities that train are taken at it."""
    max_response_tokens: PositiveInt = 512
    """In one turn; a longer one is cut and ends the episode as truncated."""
    max_context_tokens: PositiveInt | None = None
    """Prompt and response together; None: what the model can read."""
    window: PositiveInt | None = None
    """None: the episode is one growing conversation. k: each turn has its own prompt with the last k turns."""
    concurrency: PositiveInt = 256
    """Episodes under way at once."""
    retries: NonNegativeInt = 2
    """New tries of an episode that failed; then its group is dropped."""
    oversampled_tasks: NonNegativeInt = 0
    """Further tasks begun for each batch. Once enough groups are whole the slowest ones are cancelled, and their tasks
    come first in the next batch: none waits for the longest episodes, and holds fewer of them."""
    episode_seconds: PositiveFloat = 600.0
    """Deadline of one try of an episode."""
    engine_seconds: PositiveFloat = 300.0
    """Deadline of one response."""
    environment_seconds: PositiveFloat = 120.0
    """Deadline of one call of a blocking environment, verification included."""
    max_staleness: NonNegativeInt = 0
    """0: each batch is sampled with the weights that learn from it. k: rollouts go on while the learner works, on
    servers or with a copy of the weights, and a batch may be up to k updates old; episodes under way at an update go on
    with the new weights."""
    keep_cache: bool = True
    """With `max_staleness`: a response under way at an update goes on with the keys and values that the older weights
    computed; false: they are computed anew."""


@settings
class EngineSettings:
    """What samples the responses."""

    name: Literal["transformers", "vllm"] = "transformers"
    """`transformers` runs in this process and reads the learner's own weights."""
    in_process: bool = False
    """vLLM in this process instead of servers; it sleeps while the learner works. For one GPU."""
    servers: tuple[str, ...] = ()
    """Addresses of vLLM servers that run already; none named: they are started here and end with the run."""
    replicas: PositiveInt = 1
    """Servers to start."""
    devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each server to start, as "1" or "2,3"; instead of `replicas`."""
    python: str | None = None
    """Interpreter that has vLLM, to start servers with; None: this one."""
    arguments: tuple[str, ...] = ()
    """Further arguments of `vllm serve` for what is started here."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """In which vLLM computes; None: `model.dtype`."""
    transfer: Literal["shared_memory", "nccl"] = "shared_memory"
    """How new weights come to servers: by a file in the memory of this machine, or from GPU to GPU."""
    gap_limit: PositiveFloat | None = None
    """After each sync a fixed text is scored by engine and learner; past this mean difference (nats a token) the run
    stops. None: 1e-4 in float32, 0.3 in bfloat16, 0.1 in float16."""


@settings
class EvaluationSettings:
    """The panel that success rates are reported on."""

    split: str = "heldout"
    episodes: NonNegativeInt = 256
    """Problems: the first of the split. 0: no evaluation."""
    samples: PositiveInt = 1
    """Episodes per problem."""
    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    every: NonNegativeInt = 0
    """Steps between evaluations during training; 0: only before and after it."""
    final_samples: PositiveInt | None = None
    """Episodes per problem before and after training; None: `samples`."""
    seed: NonNegativeInt = 12345


@settings
class RunSettings:
    """How long, where, and from which seed."""

    steps: PositiveInt = 100
    """Training batches, at most."""
    max_environment_steps: PositiveInt | None = None
    """Training ends with the batch in which so many were taken, continuations included. None: no limit."""
    max_sampled_tokens: PositiveInt | None = None
    """The same for tokens."""
    seed: NonNegativeInt = 0
    save_every: NonNegativeInt = 50
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: PositiveInt = 2
    """Older ones are deleted."""
    log_trajectories: NonNegativeInt = 8
    """Trajectories written to the run folder per step."""
    threads: PositiveInt | None = None
    """Of torch on the CPU; None: one per core."""
    ranks: PositiveInt | None = None
    """Processes that the plan of `--dry-run` is worked out for; None: as many as there are. Torchrun starts them."""


@settings
class ActorSettings:
    """Actors of one kind."""

    count: PositiveInt = 1
    """How many there are."""
    cpus: NonNegativeFloat = 1.0
    """Of each."""
    gpus: NonNegativeFloat | None = None
    """Of each; None: one for a learner or replica where the cluster has some and `model.device` is not `cpu`."""

    def with_gpus(self, default: float) -> "ActorSettings":
        """The same with a number of GPUs."""
        return self if self.gpus is not None else replace(self, gpus=default)


@settings
class ClusterSettings:
    """What `--cluster ray` places, and where there is room for it; without that, nothing of it is read."""

    learners: ActorSettings = Field(default_factory=ActorSettings)
    """Ranks that train together."""
    replicas: ActorSettings = Field(default_factory=ActorSettings)
    """Engines that sample."""
    workers: ActorSettings = Field(default_factory=ActorSettings)
    """Environment workers, which share `rollout.concurrency`."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run. Raises SettingsError where sections do not fit together."""

    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    warm_start: WarmStartSettings = field(default_factory=WarmStartSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    algorithm: Algorithm = field(default_factory=GRPO)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    mismatch: MismatchSettings = field(default_factory=MismatchSettings)
    step_size: StepSizeSettings = field(default_factory=StepSizeSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    run: RunSettings = field(default_factory=RunSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)

    def __post_init__(self):
        if self.algorithm.uses_groups and self.rollout.group_size < 2:
            raise SettingsError(f"rollout.group_size must be >= 2 for {type(self.algorithm).__name__}, which compares "
                                f"the episodes of one task; got {self.rollout.group_size}")
        if self.optimizer.minibatches > self.rollout.tasks_per_step * self.rollout.group_size:
            raise SettingsError(f"optimizer.minibatches {self.optimizer.minibatches} is more than the "
                                f"{self.rollout.tasks_per_step * self.rollout.group_size} episodes of a step")
        if self.rollout.max_staleness and self.rollout.oversampled_tasks:
            raise SettingsError("rollout.oversampled_tasks: where rollouts go on beside the learner "
                                "(rollout.max_staleness), no batch waits for the longest episodes; set one of them")
        if self.rollout.max_staleness and self.engine.in_process:
            raise SettingsError("engine.in_process is a vLLM that sleeps while the learner works: with "
                                "rollout.max_staleness give it servers")
        for address in self.engine.servers:
            try:
                read_address(address)
            except ValueError as error:
                raise SettingsError(f"engine.servers: {error}") from None
        if self.engine.name == "vllm" and self.model.lora.rank > 512:
            raise SettingsError(f"vLLM takes no adapter of a rank above 512: model.lora.rank is {self.model.lora.rank}")
        if self.engine.in_process and (self.engine.servers or self.engine.devices or self.engine.replicas > 1):
            raise SettingsError("engine.in_process is one vLLM in this process: give no engine.servers, engine.devices "
                                "or engine.replicas")
        try:
            torch.device(self.model.device or "cpu")
        except RuntimeError as error:
            raise SettingsError(f"model.device {self.model.device!r} names no device: {error}") from None
        if self.model.path == "tiny" and (self.model.hidden_size % 16 or self.model.hidden_size % self.model.head_size):
            raise SettingsError(f"model.hidden_size must be a multiple of 16 and of model.head_size = "
                                f"{self.model.head_size}, got {self.model.hidden_size}")
        if self.model.path == "tiny" and self.engine.name == "vllm" and self.model.head_size < 32:
            raise SettingsError(f"vLLM computes no attention with heads below 32: set model.head_size = 32, got "
                                f"{self.model.head_size}")
        if self.model.path == "tiny" and self.model.vocabulary < 300:
            raise SettingsError("model.vocabulary must be at least 300 (all bytes and the environment's own texts), "
                                f"got {self.model.vocabulary}")


def check_cluster(config: TrainConfig) -> None:
    """Raises SettingsError for what a run on Ray has no use for."""
    engine = config.engine
    if engine.servers or engine.devices or engine.replicas > 1 or engine.in_process or engine.transfer == "nccl":
        raise SettingsError("with --cluster ray engines are placed by cluster.replicas, and each gets its weights on "
                            "its own machine: give no engine.servers, engine.devices, engine.replicas, "
                            "engine.in_process or engine.transfer")
    if config.rollout.max_staleness:
        raise SettingsError("rollout.max_staleness is not there with --cluster ray so far: set it to 0")


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> TrainConfig:
    """The config of a TOML file with `--section.key VALUE` overrides on top. Raises SettingsError."""
    return build_config(merge({} if path is None else read_toml(path), read_overrides(overrides)))


def build_config(data: Mapping[str, Any]) -> TrainConfig:
    """A config from nested settings. `algorithm.name` says which algorithm the rest of its section is for."""
    data = dict(data)
    section = data.pop("algorithm", {})
    if not isinstance(section, Mapping):
        raise SettingsError(f"algorithm is a section; name one with algorithm.name = {section!r}")
    section = dict(section)
    name = section.pop("name", "GRPO")
    if not isinstance(name, str):
        raise SettingsError(f"algorithm.name: an algorithm's name is text, got {name!r}")
    model = data.get("model", {})
    if isinstance(model, Mapping) and model.get("path", "tiny") == "tiny":
        data = merge(TINY_DEFAULTS, data)
    algorithm, run = find_algorithm(name), data.get("run", {})
    if "total_steps" in setting_names(algorithm) and isinstance(run, Mapping):  # what decays does so over the run
        section.setdefault("total_steps", run.get("steps", RunSettings.steps))
    types = {part.name: part.type for part in fields(TrainConfig)} | {"algorithm": algorithm}
    known = ["algorithm.name", *(name for part, cls in types.items() for name in setting_names(cls, part))]
    known.sort(key=lambda name: name.startswith(SELDOM_MEANT))
    data = {**data, "algorithm": section}
    if unknown := [unknown_setting(part, value, known) for part, value in data.items() if part not in types]:
        raise SettingsError("\n".join(unknown))
    return TrainConfig(**{part: validate(types[part], value, section=part, known=known)
                          for part, value in data.items()})


def config_dict(config: TrainConfig) -> dict[str, Any]:
    """The resolved config as nested settings that `build_config` reads back."""
    data = asdict(config)
    data["algorithm"] = {"name": algorithm_name(type(config.algorithm)), **data["algorithm"]}
    return data
