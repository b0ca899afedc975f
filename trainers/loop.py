"""The training loop: sample tasks, roll out, credit, update, sync, log, evaluate, save."""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch

from agents.adapters import merge_adapter
from agents.engine import EngineError
from agents.models import Policy, load_adapter
from agents.rollout import RolloutError, derive_seed
from envs.core import Task, TextEnv
from trainers.acting import Acting, Sampling, make_env, make_rollout, sample_here
from trainers.batch import pack
from trainers.config import TrainConfig
from trainers.distributed import is_sharded
from trainers.evaluation import Evaluation, select_panel
from trainers.initial import adapt, initial_policy, read_policy, warm_start
from trainers.learner import Learner
from trainers.metrics import rollout_metrics
from trainers.ranks import from_leader, stopping_together
from trainers.run import Run
from trainers.settings import SettingsError
from trainers.transcripts import trajectory_line


class Display(Protocol):
    """Shows a person how a run is doing."""

    def phase(self, name: str, total: int, done: int = 0) -> None:
        """A phase of `total` steps begins, of which some are already done."""

    def advance(self, metrics: dict[str, float]) -> None:
        """One step of the phase is done."""

    def evaluation(self, title: str, evaluation: Evaluation) -> None:
        """An evaluation is done."""


def train(run: Run, display: Display, sampling: Sampling = sample_here) -> list[Evaluation]:
    """Train `run.config`'s agent, from the newest checkpoint of the run's folder if it holds one.

    Returns the evaluations. KeyboardInterrupt, RolloutError and EngineError are passed on after a checkpoint of the
    last whole step. With torch.distributed initialised every rank must call it: rank 0 rolls out and evaluates, all of
    them learn.
    """
    config, algorithm = run.config, run.config.algorithm
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    env, tasks, panel = open_environment(config)
    evaluations: list[Evaluation] = []
    with ExitStack() as stack:
        for one in (closing(env), closing(run), stopping_together()):
            stack.enter_context(one)
        state, evaluated = from_leader(lambda: (run.load_state(), run.evaluated))
        policy = current_policy(run, env, display)
        acting = stack.enter_context(closing(Acting(run, policy, tasks, state, sampling)))
        learner = make_learner(run, policy, state)
        done, reached = state["step"] if state else 0, acting.progress()

        def evaluate_if_due(step: int) -> None:
            end = step == 0 or over
            due = end or (config.evaluation.every and step % config.evaluation.every == 0)
            if panel and due and step not in evaluated:
                acting.sync(step)
                samples = (config.evaluation.final_samples if end else None) or config.evaluation.samples
                evaluations.append(acting.evaluate(panel, samples))
                run.log(step, evaluations[-1].to_json(), "evaluations.jsonl")
                display.evaluation("after training" if over else f"after {step} steps" if step else "before training",
                                   evaluations[-1])

        def save() -> None:
            run.save(done, policy, {"learner": learner.state(), **reached}, learner.tensors())

        over = from_leader(partial(run.over, done))
        try:
            evaluate_if_due(done)
            display.phase("training", config.run.steps, done)
            while not over:
                step = done + 1
                synced = acting.sync(step - 1)
                groups, report, sampled, continuations = acting.take(step)
                with holding_interrupts():
                    began = time.perf_counter()
                    scores = replace(learner.score(groups, step - 1), continuations=continuations)
                    scored = time.perf_counter()
                    batch = pack(groups, algorithm.advantages(groups, scores, step - 1), step - 1)
                    credited = time.perf_counter()
                    rng = np.random.default_rng(derive_seed(config.run.seed, "minibatches", step))
                    rolled = rollout_metrics(sampled, len(groups), report, step - 1)
                    update = learner.update(batch, rng, frozen=step <= algorithm.frozen_steps,
                                            staleness=rolled["staleness"])
                    metrics = {**rolled, **update, **synced,
                               "score_seconds": scored - began, "credit_seconds": credited - scored,
                               "update_seconds": time.perf_counter() - credited}
                    run.log(step, metrics)
                    shown = islice((t for group in groups for t in group.trajectories), config.run.log_trajectories)
                    run.append("trajectories.jsonl", [trajectory_line(trajectory, step=step) for trajectory in shown])
                    done, reached = step, acting.progress()
                over = from_leader(partial(run.over, step))
                display.advance(metrics)
                evaluate_if_due(step)
                if over or (config.run.save_every and step % config.run.save_every == 0):
                    save()
        except (KeyboardInterrupt, RolloutError, EngineError):
            if done:
                save()
            raise
    return evaluations


@contextmanager
def holding_interrupts() -> Iterator[None]:
    """A Ctrl-C in the block takes effect at its end, so that a step is done as a whole or not at all."""
    if threading.current_thread() is not threading.main_thread():  # which alone is interrupted
        yield
        return
    arrived: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if arrived:
        signal.raise_signal(signal.SIGINT)


def open_environment(config: TrainConfig) -> tuple[TextEnv, Sequence[Task], list[Task]]:
    """The environment, its training tasks and the evaluation panel. Raises SettingsError where the config is wrong."""
    split, count, panel = config.environment.split, config.environment.tasks, config.evaluation
    setting = f"environment {config.environment.id}"
    try:
        env = make_env(config)
        tasks = select_panel(env, split, count) if count else env.tasks(split)
        if not len(tasks):
            raise ValueError(f"split {split!r} holds no task to train on")
        setting = f"evaluation.episodes of {config.environment.id}"
        return env, tasks, select_panel(env, panel.split, panel.episodes) if panel.episodes else []
    except (gymnasium.error.Error, ImportError, TypeError, ValueError, LookupError, NotImplementedError,
            OSError) as error:
        raise SettingsError(f"{setting}: {error or type(error).__name__}") from error


def check_device(config: TrainConfig) -> None:
    """Raises SettingsError where this machine has not the device that the config names."""
    try:
        torch.zeros(1, device=config.model.device).item()
    except (RuntimeError, AssertionError) as error:
        raise SettingsError(f"model.device {config.model.device!r} is not on this machine: {error}") from error


def starting_policy(run: Run, env: TextEnv, display: Display) -> Policy:
    """The policy that training starts from, kept in the run's folder where it was made there."""
    config = run.config
    if run.initial.exists():
        return read_policy(config, run.initial)
    make = partial(initial_policy, config, env)
    policy = from_leader(make) if config.model.path == "tiny" else make()
    if config.warm_start.steps:
        adapted = config.model.lora.rank and config.model.path != "tiny"
        if adapted:
            adapt(config, policy)
        display.phase("warm start", config.warm_start.steps)
        with closing(make_rollout(config, **config.warm_start.options)) as demonstrations:
            warm_start(config, policy, demonstrations, lambda step, metrics: display.advance(metrics))
        if adapted:
            merge_adapter(policy.model)
    unreadable = config.engine.name == "vllm" and config.model.path.endswith(".gguf")
    if config.warm_start.steps or config.model.path == "tiny" or unreadable:
        run.save_initial(policy)
    return starting_policy(run, env, display) if is_sharded(policy.model) else policy  # whole again, from the folder


def current_policy(run: Run, env: TextEnv, display: Display) -> Policy:
    """The policy that the next step trains: the newest checkpoint's, else the one that training starts from."""
    config, checkpoint = run.config, run.checkpoints[-1] if run.checkpoints else None
    if checkpoint and not config.model.lora.rank:
        return read_policy(config, checkpoint)
    policy = starting_policy(run, env, display)
    if checkpoint:
        load_adapter(policy.model, checkpoint)
    elif config.model.lora.rank:
        given = Path(config.model.path).expanduser()
        beside_checkpoints = f"../../{run.initial.name}" if run.initial.exists() else None
        adapt(config, policy, base=beside_checkpoints or (str(given.resolve()) if given.exists() else str(given)))
    return policy


def make_learner(run: Run, policy: Policy, state: dict[str, Any] | None) -> Learner:
    """The learner of the run, where it left off if `state` is a checkpoint's."""
    config, reference = run.config, None
    training_steps = max(0, config.run.steps - config.algorithm.frozen_steps)
    if state and config.algorithm.needs.reference_logprobs and not config.model.lora.rank:
        reference = read_policy(config, run.initial if run.initial.exists() else config.model.path).model
    learner = Learner(policy, config.algorithm, config.optimizer, temperature=config.rollout.temperature,
                      total_steps=training_steps * config.optimizer.epochs * config.optimizer.minibatches,
                      reference=reference, mismatch=config.mismatch, step_size=config.step_size)
    if state:
        learner.load_state(state["learner"])
        run.load_tensors(learner.tensors())
    return learner
