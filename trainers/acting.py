"""The half of a run that acts: its environments, engine and agents, the rollouts that a step learns from, evaluations.

With several ranks each holds one and calls its methods in step; the leader's alone samples.
"""

from collections.abc import Callable, Sequence
from typing import Any

import envs
from agents.agent import ModelAgent
from agents.engine import Engine
from agents.models import Policy
from agents.rollout import Rollout, RolloutReport
from agents.trajectory import Group, Trajectory
from envs.core import Task, TextEnv
from trainers.asynchronous import AsynchronousRollouts
from trainers.config import TrainConfig
from trainers.distributed import acting_policy, copy_weights
from trainers.engines import make_engine, make_engine_beside
from trainers.evaluation import Evaluation, evaluate
from trainers.gathering import TaskSampler, branch, gather
from trainers.ranks import from_leader, rank
from trainers.run import Run
from trainers.weight_sync import WeightSync

Sampling = Callable[[Run, Policy], tuple[Engine, WeightSync, Rollout]]
"""Makes what a run samples with: an engine, what keeps it on a policy's weights, and a rollout."""


class Acting:
    """Samples for the learner of a policy."""

    def __init__(self, run: Run, policy: Policy, tasks: Sequence[Task], state: dict[str, Any] | None,
                 sampling: Sampling):
        """Before a learner shards the `policy`. `state` is a checkpoint's, where the run goes on from one. Raises
        EngineError."""
        self._config, self._policy = run.config, policy
        self._own = acting_policy(policy)
        self._tasks = TaskSampler(tasks, run.config.run.seed, state)
        self._ahead: AsynchronousRollouts | None = None
        self._leads = rank() == 0
        if self._leads:
            self._engine, self._bring, self._rollout = sampling(run, self._own)
            self._agent, self._judged = (make_agent(run.config, self._engine, self._own, part.temperature)
                                         for part in (run.config.rollout, run.config.evaluation))

    def sync(self, version: int) -> dict[str, float]:
        """Sample with the weights that the policy has now, under this version; metrics of how that went."""
        copy_weights(self._policy, self._own)
        return from_leader(lambda: self._sync(version))

    def take(self, step: int) -> tuple[list[Group], RolloutReport, list[Group],
                                       list[list[dict[int, Sequence[Trajectory]]]]]:
        """What `step` trains on, what it cost, all that was sampled for it, and the continuations that its credit
        reads. Raises RolloutError."""
        return from_leader(lambda: self._take(step))

    def evaluate(self, panel: Sequence[Task], samples: int) -> Evaluation:
        """The policy of the last `sync` on a panel."""
        return from_leader(lambda: evaluate(self._rollout, self._judged, panel, samples=samples,
                                            seed=self._config.evaluation.seed))

    def progress(self) -> dict[str, Any]:
        """What a checkpoint keeps of the tasks: the next one, and those begun that nothing was learnt from yet."""
        return (self._ahead or self._tasks).progress()

    def close(self) -> None:
        """End what is under way; close environments and engine."""
        if self._ahead:
            self._ahead.close()
        if self._leads:
            self._rollout.close()
            self._engine.close()

    def _sync(self, version: int) -> dict[str, float]:
        beside = self._ahead.sync(version) if self._ahead else {}  # first: this may be the same engine
        return self._bring(version) | beside

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
        """Rollouts beside the learner, from where the checkpoint left off."""
        config, engine, bring = self._config, self._engine, self._bring
        if config.engine.name == "transformers":  # this one's weights are the learner's, which change meanwhile
            engine, bring = make_engine_beside(config, self._own)
            bring(version)
        agent = make_agent(config, engine, self._own, config.rollout.temperature)
        return AsynchronousRollouts(config, make_rollout(config), agent, self._tasks, bring)


def sample_here(run: Run, policy: Policy) -> tuple[Engine, WeightSync, Rollout]:
    """The run's engine, and a rollout in this process."""
    return *make_engine(run, policy), make_rollout(run.config)


def make_env(config: TrainConfig, **options: Any) -> TextEnv:
    """The run's environment, with further options on top of the config's."""
    return envs.make(config.environment.id, **{**config.environment.options, **options})


def make_rollout(config: TrainConfig, *, concurrency: int | None = None, **options: Any) -> Rollout:
    """A rollout over the run's environment, with further options for it. `concurrency`: None is the run's."""
    settings = config.rollout
    return Rollout(lambda: make_env(config, **options), concurrency=concurrency or settings.concurrency,
                   retries=settings.retries, episode_seconds=settings.episode_seconds,
                   engine_seconds=settings.engine_seconds, environment_seconds=settings.environment_seconds)


def make_agent(config: TrainConfig, engine: Engine, policy: Policy, temperature: float) -> ModelAgent:
    """The run's agent, sampling at this temperature."""
    return ModelAgent(engine, policy, temperature=temperature, window=config.rollout.window,
                      max_response_tokens=config.rollout.max_response_tokens)
