"""What a step trains on: tasks in their order, the groups that the algorithm keeps, episodes that branch off them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from agents.agent import ModelAgent
from agents.episode import Start
from agents.rollout import Rollout, RolloutError, RolloutReport, derive_seed
from agents.trajectory import Group, Trajectory
from envs.core import Task
from trainers.config import TrainConfig


def gather(config: TrainConfig, rollout: Rollout, agent: ModelAgent, tasks: "TaskSampler",
           step: int) -> tuple[list[Group], RolloutReport, list[Group]]:
    """The groups of one training batch, refilled while the algorithm drops some; and all that were sampled for it.

    Raises RolloutError where every group failed, and where none is left to train on.
    """
    wanted, further, kept, sampled = config.rollout.tasks_per_step, config.rollout.oversampled_tasks, [], []
    total = RolloutReport()
    for attempt in range(config.algorithm.max_generation_batches):
        seed = derive_seed(config.run.seed, "rollout", step, attempt)
        missing = math.ceil((wanted - len(kept)) * max(1, len(sampled)) / max(1, len(kept)))  # at the rate kept so far
        count = min(wanted, missing)
        drawn = [tasks.draw() for _ in range(count + further)]
        try:
            groups, report = rollout.run(agent, [tasks.at(position) for position in drawn], config.rollout.group_size,
                                         seed, wanted=count if further else None)
        except RolloutError as error:
            if not sampled:
                raise
            groups, report = [], error.report  # a refill may be a single group
        tasks.give_back(drawn[place] for place in report.cancelled)
        total.add(report)
        sampled += groups
        kept += [group for group in groups if config.algorithm.keep(group)]
        if len(kept) >= wanted:
            break
    require_tokens(config, kept, sampled)
    return kept[:wanted], total, sampled


def require_tokens(config: TrainConfig, kept: Sequence[Group], sampled: Sequence[Group]) -> None:
    """Raises RolloutError where there is nothing to train on."""
    if not kept:
        raise RolloutError(f"none of {len(sampled)} groups is worth training on for {type(config.algorithm).__name__}: "
                           "all episodes of each task earned the same. Start from a policy that sometimes succeeds "
                           "(warm_start.steps), or take easier or harder tasks (environment.options)")
    if not any(trajectory.turns for group in kept for trajectory in group.trajectories):
        raise RolloutError("no episode has room for a response: raise rollout.max_context_tokens, or take a model that "
                           "reads longer prompts")


def branch(config: TrainConfig, rollout: Rollout, agent: ModelAgent, groups: Sequence[Group], step: int,
           report: RolloutReport) -> list[list[dict[int, Sequence[Trajectory]]]]:
    """The episodes that go on from the algorithm's anchors, for each group and trajectory by turn (none
    where they failed); what they cost is added to `report`."""
    needs, found = config.algorithm.needs, [[{} for _ in group.trajectories] for group in groups]
    if not needs.continuations:
        return found
    rng = np.random.default_rng(derive_seed(config.run.seed, "anchors", step))
    places = [(g, i, turn) for g, group in enumerate(groups) for i, trajectory in enumerate(group.trajectories)
              for turn in config.algorithm.anchors(trajectory, rng)]
    starts = [Start(task=groups[g].task, turns=groups[g].trajectories[i].turns[:turn],
                    max_turns=needs.continuation_turns) for g, i, turn in places]
    branches, cost = rollout.branch(agent, starts, needs.continuations, derive_seed(config.run.seed, "branch", step))
    report.add(cost)
    for (g, i, turn), group in zip(places, branches):
        found[g][i][turn] = group.trajectories if group else ()
    return found


class TaskSampler:
    """Tasks in an order shuffled anew in each epoch, once in each. A task goes by its position: the number of those
    before it."""

    def __init__(self, tasks: Sequence[Task], seed: int, progress: Mapping[str, Any] | None = None):
        """`progress`: where an earlier part of the run stood."""
        self._tasks, self._seed = tasks, seed
        self._epoch, self._order = -1, np.zeros(0, np.int64)
        self.position: int = progress["task_position"] if progress else 0
        """Of the next new task."""
        self._given_back: list[int] = list(progress["unfinished_tasks"]) if progress else []

    def progress(self, under_way: Iterable[int] = ()) -> dict[str, Any]:
        """What a checkpoint keeps; of tasks `under_way` nothing was learnt yet."""
        return {"task_position": self.position, "unfinished_tasks": sorted([*self._given_back, *under_way])}

    def draw(self) -> int:
        """The position of the next task: of those given back the oldest, else the next new one."""
        if self._given_back:
            return self._given_back.pop(0)
        self.position += 1
        return self.position - 1

    def give_back(self, positions: Iterable[int]) -> None:
        """Nothing was learnt from these: they come again, before any new one."""
        self._given_back = sorted([*self._given_back, *positions])

    def at(self, position: int) -> Task:
        """The task that comes after `position` others."""
        epoch, index = divmod(position, len(self._tasks))
        if epoch != self._epoch:
            rng = np.random.default_rng(derive_seed(self._seed, "tasks", epoch))
            self._epoch, self._order = epoch, rng.permutation(len(self._tasks))
        return self._tasks[int(self._order[index])]
