"""How good an agent is on a panel of problems, and how sure that is.

Evaluating leaves training as it was: an episode's randomness comes from its seed alone, no global generator is touched,
and what the engine remembers of the panel is dropped. docs/evaluation.md says what each number means.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agents.agent import Agent, ModelAgent
from agents.rollout import Rollout, RolloutError, RolloutReport
from agents.trajectory import Group, Trajectory
from envs.core import Task, TextEnv, panel_sha256
from trainers.statistics import bootstrap_interval, pass_at_k, wilson_interval

__all__ = ["Evaluation", "Rate", "evaluate", "pass_at_k", "play", "select_panel", "summarise", "table"]

PACKAGES = ("torch", "transformers", "turngym", "gymnasium")


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A success rate with its 95% interval."""

    n: int
    """Episodes that it rests on."""
    success_rate: float
    ci_low: float
    ci_high: float
    interval: str
    """How the interval was made: `wilson` or `bootstrap`."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an agent did on a panel. Means are over episodes unless something else is said."""

    env: str
    split: str
    seed: int
    panel_sha256: str
    """Of the task keys asked for, in order; equal hashes mean equal panels."""
    problems: int
    """Problems that count: those asked for without the `dropped` and `unscorable` ones."""
    samples: int
    """Episodes per problem."""
    n: int
    """Episodes that count, problems × samples."""
    successes: int
    success_rate: float
    """successes / n, which is pass@1."""
    ci_low: float
    ci_high: float
    interval: str
    """Of `ci_low` and `ci_high`: `wilson` (one sample per problem) or `bootstrap` (over problems)."""
    score: float
    """Mean of the environment's own grade, 0 to 1."""
    families: Mapping[str, Rate]
    pass_at_k: Mapping[int, Rate]
    """For k in powers of two up to the samples: share of problems that k samples would solve."""
    turns: float
    tokens: float
    """Sampled tokens per episode; 0 for scripted agents."""
    invalid: float
    """Share of turns whose action the environment did not understand."""
    truncated: float
    """Share of episodes that a limit ended."""
    dropped: int
    """Problems left out because an episode failed to the last retry; `errors` says how."""
    unscorable: int
    """Problems left out because the environment could not say what an episode is worth."""
    errors: Mapping[str, int]
    """Failed episodes by status and exception type."""
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """All numbers as plain JSON values."""
        plain = asdict(self)
        return {**plain, "pass_at_k": {str(k): rate for k, rate in plain["pass_at_k"].items()}}

    def print(self, console: Console, title: str) -> None:
        """A table of the numbers."""
        console.print(table({title: self}))


def select_panel(env: TextEnv, split: str, episodes: int) -> list[Task]:
    """The first `episodes` problems of a split, in its order. Raises ValueError where it holds fewer."""
    tasks = env.tasks(split)
    if not len(tasks):
        raise ValueError(f"split {split!r} of {env.env_id} holds no problem")
    if not 1 <= episodes <= len(tasks):
        raise ValueError(f"split {split!r} of {env.env_id} holds {len(tasks):,} problems: ask for 1 to {len(tasks):,}, "
                         f"not {episodes:,}")
    return [replace(tasks[i], env_id=env.env_id) for i in range(episodes)]


def evaluate(rollout: Rollout, agent: Agent, tasks: Sequence[Task], *, samples: int = 1, seed: int = 0,
             on_episode: Callable[[Trajectory], None] | None = None) -> Evaluation:
    """Play every task `samples` times. The same seed gives the same episodes.

    `on_episode` is called after each episode. Raises ValueError for no task or no sample, and RolloutError where no
    problem is left to count.
    """
    groups, report = play(rollout, agent, tasks, samples=samples, seed=seed, on_episode=on_episode)
    return summarise(tasks, groups, report, samples=samples, seed=seed)


def play(rollout: Rollout, agent: Agent, tasks: Sequence[Task], *, samples: int, seed: int,
         on_episode: Callable[[Trajectory], None] | None = None) -> tuple[list[Group], RolloutReport]:
    """The episodes of an evaluation, for who wants them too; `summarise` makes the numbers."""
    if not tasks or samples < 1:
        raise ValueError(f"nothing to evaluate: {len(tasks)} tasks, {samples} samples each")
    try:
        return rollout.run(agent, tasks, samples, seed, on_episode)
    finally:
        if isinstance(agent, ModelAgent):  # what it remembers could change the last bits of what comes next
            agent.engine.load({}, agent.engine.weight_version)


def summarise(tasks: Sequence[Task], groups: Sequence[Group], report: RolloutReport, *, samples: int,
              seed: int) -> Evaluation:
    """The evaluation of `groups`, which a rollout made of the panel `tasks`. Raises RolloutError where none counts."""
    counted = [group for group in groups if all(t.reward is not None for t in group.trajectories)]
    if not counted:
        raise RolloutError(f"none of the {len(tasks)} problems can be scored: every one had an episode that the "
                           "environment would not grade, or that failed")
    right = np.array([sum(t.success for t in group.trajectories) for group in counted])
    families = np.array([group.task.family for group in counted])
    episodes = [trajectory for group in counted for trajectory in group.trajectories]
    turns = [turn for trajectory in episodes for turn in trajectory.turns]
    return Evaluation(
        env=tasks[0].env_id, split=tasks[0].split, seed=seed, panel_sha256=panel_sha256(tasks),
        problems=len(counted), samples=samples, successes=int(right.sum()), **vars(_rate(right, samples)),
        score=float(np.mean([t.score for t in episodes])),
        families={str(name): _rate(right[families == name], samples) for name in np.unique(families)},
        pass_at_k={k: _rate(right, samples, k) for k in (2**i for i in range(samples.bit_length()))},
        turns=len(turns) / len(episodes), tokens=float(np.mean([t.response_length for t in episodes])),
        invalid=float(np.mean([not turn.valid for turn in turns])) if turns else 0.0,
        truncated=float(np.mean([t.truncated for t in episodes])),
        dropped=len(tasks) - len(groups), unscorable=len(groups) - len(counted), errors=dict(report.errors),
        versions={"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}})


def _rate(right: np.ndarray, samples: int, k: int = 1) -> Rate:
    """pass@k from the successes of each problem, each of which was played `samples` times. # right: int64 [problems]"""
    solved = [pass_at_k(samples, int(c), k) for c in right]
    # Where all problems fare alike, drawing them again shows no spread and would claim certainty. Wilson's interval,
    # with one count per problem, does not.
    wilson = samples == 1 or min(solved) == max(solved)
    low, high = wilson_interval(sum(solved), len(solved)) if wilson else bootstrap_interval(solved)
    return Rate(n=len(right) * samples, success_rate=float(np.mean(solved)), ci_low=low, ci_high=high,
                interval="wilson" if wilson else "bootstrap")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "not installed"


def table(evaluations: Mapping[str, Evaluation]) -> Table:
    """A table with a row per agent, and per family and pass@k where there are several."""
    rows = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    rows.add_column("", overflow="fold")
    for heading in ("n", "success", "95% interval", "score", "turns", "tokens", "invalid", "cut off"):
        rows.add_column(heading, justify="right", no_wrap=True)
    for name, evaluation in evaluations.items():
        rows.add_row(escape(name), *_cells(evaluation), f"{evaluation.score:.3f}", f"{evaluation.turns:.1f}",
                      f"{evaluation.tokens:.0f}", f"{evaluation.invalid:.1%}", f"{evaluation.truncated:.1%}")
        for family, rate in evaluation.families.items() if len(evaluation.families) > 1 else ():
            rows.add_row(f"  {escape(family)}", *_cells(rate))
        for k, rate in evaluation.pass_at_k.items():
            if k > 1:
                rows.add_row(f"  pass@{k}", *_cells(rate))
    return rows


def _cells(rate: Rate | Evaluation) -> tuple[str, str, str]:
    return str(rate.n), f"{rate.success_rate:.1%}", f"{100 * rate.ci_low:.1f}–{rate.ci_high:.1%}"
