"""The half of a run that acts: its environments, engine and agents, the rollouts that a step learns from, evaluations.

With several ranks each holds one and calls its methods in step; the leader's alone samples.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import envs
from agents.agent import ModelAgent
from agents.engine import Engine
from agents.models import Policy
from agents.rollout import Rollout, RolloutReport
from agents.trajectory import Group, Trajectory
from agents.transformers_engine import TransformersEngine
from envs.core import Task, TextEnv
from trainers.asynchronous import AsynchronousRollouts
from trainers.config import TrainConfig
from trainers.distributed import acting_policy, copy_weights
from trainers.engines import make_engine
from trainers.evaluation import Evaluation, evaluate
from trainers.gathering import TaskSampler, branch, gather
from trainers.ranks import from_leader, rank
from trainers.run import Run


class Acting:
    """Samples for the learner of a policy."""

    def __init__(self, run: Run, policy: Policy, tasks: Sequence[Task], state: dict[str, Any] | None):
        """Before a learner shards the `policy`. `state` is a checkpoint's, where the run goes on from one. Raises
        EngineError."""
        self._config, self._policy = run.config, policy
        self._own = acting_policy(policy)
        self._tasks = TaskSampler(tasks, run.config.run.seed)
        self._tasks.position = state["task_position"] if state else 0
        self._unfinished: list[int] = state["unfinished_tasks"] if state else []
        self._ahead: AsynchronousRollouts | None = None
        self._leads = rank() == 0
        if self._leads:
            self._engine, self._bring = make_engine(run, self._own)
            self._rollout = make_rollout(run.config)
            self._agent, self._judged = (make_agent(run.config, self._engine, self._own, part.temperature)
                                         for part in (run.config.rollout, run.config.evaluation))

    def sync(self, version: int) -> dict[str, float]:
        """Sample with the weights that the policy has now, under this version; metrics of how that went."""
        copy_weights(self._policy, self._own)
        return from_leader(lambda: self._bring(version))

    def take(self, step: int) -> tuple[list[Group], RolloutReport, list[Group],
                                       list[list[dict[int, Sequence[Trajectory]]]]]:
        """What `step` trains on, what it cost, all that was sampled for it, and the continuations that its credit
        reads. Raises RolloutError."""
        return from_leader(lambda: self._take(step))

    def evaluate(self, panel: Sequence[Task], samples: int) -> Evaluation:
        """The policy of the last `sync` on a panel."""
        return from_leader(lambda: evaluate(self._rollout, self._judged, panel, samples=samples,
                                            seed=self._config.evaluation.seed))

    def learned(self, step: int) -> None:
        """The policy has learned from a step: rollouts that go on beside the learner do so with what it is now."""
        if self._config.rollout.max_staleness:
            copy_weights(self._policy, self._own)
        if self._ahead:
            self._ahead.load(self._own.model.state_dict(), version=step)

    def progress(self) -> dict[str, Any]:
        """What a checkpoint keeps of the tasks: the next one, and those begun that nothing was learnt from yet."""
        return self._ahead.progress() if self._ahead else {"task_position": self._tasks.position,
                                                           "unfinished_tasks": self._unfinished}

    def close(self) -> None:
        """End what is under way; close environments and engine."""
        if self._ahead:
            self._ahead.close()
        if self._leads:
            self._rollout.close()
            self._engine.close()

    def _take(self, step: int) -> tuple:
        if self._config.rollout.max_staleness:
            self._ahead = self._ahead or self._roll_ahead(step - 1)
            groups, report, sampled = self._ahead.take(step)
        else:
            groups, report, sampled = gather(self._config, self._rollout, self._agent, self._tasks, step)
        continuations = branch(self._config, self._rollout, self._agent, groups, step, report)
        self._engine.sleep()
        return groups, report, sampled, continuations

    def _roll_ahead(self, version: int) -> AsynchronousRollouts:
        """Rollouts beside the learner, with a copy of the policy, from where the checkpoint left off."""
        settings = self._config.rollout
        own = replace(self._own, model=copy.deepcopy(self._own.model))
        engine = TransformersEngine(own, slots=settings.concurrency, max_context=settings.max_context_tokens,
                                    keep_cache=settings.keep_cache)
        engine.load({}, version=version)
        return AsynchronousRollouts(
            self._config, make_rollout(self._config), make_agent(self._config, engine, own, settings.temperature),
            self._tasks, self._unfinished)


def make_env(config: TrainConfig, **options: Any) -> TextEnv:
    """The run's environment, with further options on top of the config's."""
    return envs.make(config.environment.id, **{**config.environment.options, **options})


def make_rollout(config: TrainConfig, **options: Any) -> Rollout:
    """A rollout over the run's environment, with further options for it."""
    settings = config.rollout
    return Rollout(lambda: make_env(config, **options), concurrency=settings.concurrency, retries=settings.retries,
                   episode_seconds=settings.episode_seconds, engine_seconds=settings.engine_seconds,
                   environment_seconds=settings.environment_seconds)


def make_agent(config: TrainConfig, engine: Engine, policy: Policy, temperature: float) -> ModelAgent:
    """The run's agent, sampling at this temperature."""
    return ModelAgent(engine, policy, temperature=temperature, window=config.rollout.window,
                      max_response_tokens=config.rollout.max_response_tokens)
