"""The training loop: sample tasks, roll out, credit, update, sync, log, evaluate, save."""

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch

import envs
from agents.agent import ModelAgent
from agents.models import Policy, load_policy
from agents.rollout import Rollout, RolloutReport, derive_seed
from agents.trajectory import Group
from agents.transformers_engine import TransformersEngine
from envs.core import Task, TextEnv
from trainers.batch import pack
from trainers.config import TrainConfig
from trainers.evaluation import Evaluation, evaluate, select_panel
from trainers.initial import initial_policy, warm_start
from trainers.learner import Learner
from trainers.metrics import rollout_metrics
from trainers.run import Run, RunError
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


def train(run: Run, display: Display) -> list[Evaluation]:
    """Train `run.config`'s agent, from the newest checkpoint of the run's folder if it holds one.

    Returns the evaluations. A KeyboardInterrupt is passed on after a checkpoint of the last whole step.
    """
    config, algorithm = run.config, run.config.algorithm
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    env, training_tasks, panel = open_environment(config)
    tasks = TaskSampler(training_tasks, config.run.seed)
    state = run.load_state()
    policy = starting_policy(run, env, display) if state is None else load_policy(
        str(run.checkpoints[-1]), dtype=config.model.dtype, device=config.model.device)
    learner = make_learner(run, policy, state)
    engine = TransformersEngine(policy, slots=config.rollout.concurrency,
                                max_context=config.rollout.max_context_tokens)
    agent = ModelAgent(engine, policy, temperature=config.rollout.temperature, window=config.rollout.window,
                       max_response_tokens=config.rollout.max_response_tokens)
    rollout = make_rollout(config)
    evaluations: list[Evaluation] = []

    def report_success(step: int, title: str, samples: int) -> None:
        if panel:
            judged = ModelAgent(engine, policy, temperature=config.evaluation.temperature, window=config.rollout.window,
                                max_response_tokens=config.rollout.max_response_tokens)
            evaluations.append(evaluate(rollout, judged, panel, samples=samples, seed=config.evaluation.seed))
            run.log(step, evaluations[-1].to_json(), "evaluations.jsonl")
            display.evaluation(title, evaluations[-1])

    done, whole = 0, True
    few, many = config.evaluation.samples, config.evaluation.final_samples or config.evaluation.samples
    if state is None:
        report_success(0, "before training", many)
    else:
        done, tasks.position = state["step"], state["task_position"]
    display.phase("training", config.run.steps, done)
    try:
        for step in range(done + 1, config.run.steps + 1):
            engine.load({}, version=step - 1)
            groups, report, sampled = gather(config, rollout, agent, tasks, step)
            started = time.perf_counter()
            batch = pack(groups, algorithm.advantages(groups, step=step - 1))
            credit_seconds = time.perf_counter() - started
            whole = False
            update = learner.update(batch, np.random.default_rng(derive_seed(config.run.seed, "minibatches", step)))
            done, whole = step, True
            metrics = {**rollout_metrics(sampled, len(groups), report), **update, "credit_seconds": credit_seconds,
                       "update_seconds": time.perf_counter() - started - credit_seconds}
            run.log(step, metrics)
            run.append("trajectories.jsonl", [trajectory_line(trajectory, step=step) for group in groups
                                              for trajectory in group.trajectories][:config.run.log_trajectories])
            display.advance(metrics)
            last = step == config.run.steps
            if last or (config.evaluation.every and step % config.evaluation.every == 0):
                engine.load({}, version=step)
                report_success(step, "after training" if last else f"after {step} steps", many if last else few)
            if last or (config.run.save_every and step % config.run.save_every == 0):
                save(run, step, policy, learner, tasks)
    except KeyboardInterrupt:
        if whole and done:
            save(run, done, policy, learner, tasks)
        raise
    finally:
        rollout.close()
        run.close()
    return evaluations


def make_env(config: TrainConfig, **options: Any) -> TextEnv:
    """The run's environment, with further options on top of the config's."""
    return envs.make(config.environment.id, **{**config.environment.options, **options})


def make_rollout(config: TrainConfig, **options: Any) -> Rollout:
    """A rollout over the run's environment, with further options for it."""
    return Rollout(lambda: make_env(config, **options), concurrency=config.rollout.concurrency,
                   retries=config.rollout.retries, episode_seconds=config.rollout.episode_seconds)


def open_environment(config: TrainConfig) -> tuple[TextEnv, Sequence[Task], list[Task]]:
    """The environment, its training tasks and the evaluation panel. Raises SettingsError where the config is wrong."""
    split, count, panel = config.environment.split, config.environment.tasks, config.evaluation
    try:
        env = make_env(config)
        tasks = select_panel(env, split, count) if count else env.tasks(split)
        return env, tasks, select_panel(env, panel.split, panel.episodes) if panel.episodes else []
    except (gymnasium.error.Error, ImportError, TypeError, ValueError, OSError) as error:
        raise SettingsError(f"environment {config.environment.id}: {error}") from error


def starting_policy(run: Run, env: TextEnv, display: Display) -> Policy:
    """The policy that training starts from, kept in the run's folder where it was made there."""
    config = run.config
    if run.initial.exists():
        return load_policy(str(run.initial), dtype=config.model.dtype, device=config.model.device)
    policy = initial_policy(config, env)
    if config.warm_start.steps:
        display.phase("warm start", config.warm_start.steps)
        demonstrations = make_rollout(config, **config.warm_start.options)
        warm_start(config, policy, demonstrations, lambda step, metrics: display.advance(metrics))
        demonstrations.close()
    if config.warm_start.steps or config.model.path == "tiny":
        run.save_initial(policy)
    return policy


def make_learner(run: Run, policy: Policy, state: dict[str, Any] | None) -> Learner:
    """The learner of the run, where it left off if `state` is a checkpoint's."""
    config, reference = run.config, None
    if state and config.algorithm.needs.reference_logprobs:
        path = str(run.initial) if run.initial.exists() else config.model.path
        reference = load_policy(path, dtype=config.model.dtype, device=config.model.device).model
    learner = Learner(policy, config.algorithm, config.optimizer, temperature=config.rollout.temperature,
                      total_steps=config.run.steps * config.optimizer.epochs * config.optimizer.minibatches,
                      reference=reference)
    if state:
        learner.load_state(state["learner"])
    return learner


def save(run: Run, step: int, policy: Policy, learner: Learner, tasks: "TaskSampler") -> None:
    """The checkpoint after `step` steps."""
    run.save(step, policy, {"learner": learner.state(), "task_position": tasks.position})


def gather(config: TrainConfig, rollout: Rollout, agent: ModelAgent, tasks: "TaskSampler",
           step: int) -> tuple[list[Group], RolloutReport, list[Group]]:
    """The groups of one training batch, refilled while the algorithm drops some; and all that were sampled for it."""
    wanted, kept, sampled = config.rollout.tasks_per_step, [], []
    total = RolloutReport()
    for attempt in range(config.algorithm.max_generation_batches):
        seed = derive_seed(config.run.seed, "rollout", step, attempt)
        missing = math.ceil((wanted - len(kept)) * max(1, len(sampled)) / max(1, len(kept)))  # at the rate kept so far
        groups, report = rollout.run(agent, tasks.take(min(wanted, missing)), config.rollout.group_size, seed)
        total.add(report)
        sampled += groups
        kept += [group for group in groups if config.algorithm.keep(group)]
        if len(kept) >= wanted:
            break
    if not kept:
        raise RunError(f"none of {len(sampled)} groups is worth training on for {type(config.algorithm).__name__}: all "
                       "episodes of each task earned the same. Start from a policy that sometimes succeeds "
                       "(warm_start.steps), or take easier or harder tasks (environment.options)")
    return kept[:wanted], total, sampled


class TaskSampler:
    """Tasks in an order shuffled anew in each epoch; `position` alone says where it stands."""

    def __init__(self, tasks: Sequence[Task], seed: int):
        self._tasks, self._seed = tasks, seed
        self._epoch, self._order = -1, np.zeros(0, np.int64)
        self.position = 0
        """Tasks taken so far."""

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks; each comes once per epoch."""
        return [self._next() for _ in range(count)]

    def _next(self) -> Task:
        epoch, index = divmod(self.position, len(self._tasks))
        if epoch != self._epoch:
            rng = np.random.default_rng(derive_seed(self._seed, "tasks", epoch))
            self._epoch, self._order = epoch, rng.permutation(len(self._tasks))
        self.position += 1
        return self._tasks[int(self._order[index])]
