"""Algorithms side by side: the runs of a comparison, and what came out.

The runs of a seed start from one policy. All runs in an environment have one budget of environment steps and sampled
tokens and end with the step that uses it up. docs/comparing.md says more.

    starts/ENVIRONMENT/seed-0/           the policy that the runs of a seed start from
    runs/ENVIRONMENT/ALGORITHM/seed-0/   a run's folder, as `trainers.run` describes it
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainers.algorithms.grpo import GRPO
from trainers.config import EvaluationSettings, RunSettings, TrainConfig, build_config
from trainers.files import read_rows
from trainers.run import Cost, Run, RunError, config_toml
from trainers.settings import SettingsError, merge
from trainers.statistics import t_interval

DEFAULTS = {"evaluation": {"every": 10}}
"""Beneath the given settings."""
TINY_DEFAULTS = {"warm_start": {"steps": 1000}}
"""The same for a tiny policy, which never succeeds as it is made."""
ENOUGH_STEPS = 1_000_000
"""More than any budget lasts."""
NUMBERS = ("success_rate", "score", "turns", "tokens_per_turn")
"""What is compared."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Algorithms × seeds in one environment."""

    folder: Path
    environment: str
    algorithms: Sequence[str]
    """The first is what the others are compared with."""
    seeds: Sequence[int]
    settings: Mapping[str, Any]
    """Nested settings of all runs. Beside those of a config, `algorithms.NAME` holds those of one algorithm, among them
    `name` where NAME is not its name, and `environments.ID` those of all runs in one environment."""

    def config(self, algorithm: str, seed: int) -> TrainConfig:
        """The settings of a run, without start and budget. Raises SettingsError."""
        data = {key: value for key, value in self.settings.items() if key not in ("algorithms", "environments")}
        data = merge(data, self._section("environments", self.environment))
        own = {"name": algorithm, **self._section("algorithms", algorithm)}
        data = merge(data, {"environment": {"id": self.environment}, "algorithm": own,
                            "run": {"seed": seed, "threads": 1}})
        tiny = build_config(merge(DEFAULTS, data)).model.path == "tiny"
        config = build_config(merge(merge(DEFAULTS, TINY_DEFAULTS if tiny else {}), data))
        if config.optimizer.schedule != "constant":
            raise SettingsError(f"optimizer.schedule {config.optimizer.schedule!r} falls over run.steps, but here the "
                                "budget says how many steps a run takes: leave it 'constant'")
        if not config.evaluation.episodes:
            raise SettingsError("evaluation.episodes is 0: a comparison needs a panel")
        return config

    def start(self, seed: int) -> Run | None:
        """The folder where the policy that a seed's runs start from is made; None where it is loaded as it is. Raises
        RunError for one with other settings."""
        config = self.config(self.algorithms[0], seed)
        if config.model.path != "tiny" and not config.warm_start.steps:
            return None
        return _open(self.folder / "starts" / _name(self.environment) / f"seed-{seed}", replace(
            config, algorithm=GRPO(), evaluation=EvaluationSettings(), run=RunSettings(seed=seed, threads=1)))

    @property
    def measured(self) -> bool:
        """No budget is given: what the first run uses in `run.steps` steps is that of the others."""
        limits = self.config(self.algorithms[0], self.seeds[0]).run
        return limits.max_environment_steps is None and limits.max_sampled_tokens is None

    def budget(self) -> Cost | None:
        """What each run may use; None where the first run, which says it, has not finished."""
        if not self.measured:
            limits = self.config(self.algorithms[0], self.seeds[0]).run
            return Cost(limits.max_environment_steps, limits.max_sampled_tokens)
        first = self.run(self.algorithms[0], self.seeds[0], None)
        return first.spent(first.done) if finished(first) else None

    def run(self, algorithm: str, seed: int, budget: Cost | None) -> Run:
        """A run's folder. Raises RunError for one with other settings. The first run takes `run.steps` steps where that
        says the budget."""
        config, start = self.config(algorithm, seed), self.start(seed)
        if start is not None:
            config = replace(config, warm_start=replace(config.warm_start, steps=0),
                             model=replace(config.model, path=str(start.initial.resolve())))
        if not (self.measured and (algorithm, seed) == (self.algorithms[0], self.seeds[0])):
            config = replace(config, run=replace(config.run, steps=ENOUGH_STEPS,
                                                 max_environment_steps=budget.environment_steps,
                                                 max_sampled_tokens=budget.sampled_tokens))
        return _open(self.folder / "runs" / _name(self.environment) / _name(algorithm) / f"seed-{seed}", config)

    def _section(self, kind: str, name: str) -> Mapping[str, Any]:
        sections = self.settings.get(kind, {})
        section = sections.get(name, {}) if isinstance(sections, Mapping) else sections
        if not isinstance(section, Mapping):
            raise SettingsError(f"{kind} holds a section of settings for each name, [{kind}.{name!r}]; got {section!r}")
        return section


@dataclass(frozen=True)
class Point:
    """What is read of an evaluation."""

    step: int
    success_rate: float
    score: float
    turns: float
    tokens: float
    panel_sha256: str


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over seeds."""

    mean: float
    ci_low: float | None
    """Of Student's 95% interval; None for one seed."""
    ci_high: float | None
    values: Sequence[float]
    """One per seed."""


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and interval. Raises ValueError for no value."""
    low, high = t_interval(values) or (None, None)
    return Estimate(mean=float(np.mean(values)), ci_low=low, ci_high=high, values=list(values))


def finished(run: Run) -> bool:
    """Whether a run is over and its end evaluated."""
    return run.over(run.done) and run.done in run.evaluated


def read_curve(run: Run) -> list[dict[str, Any]]:
    """A run's evaluations: `step`, what training had cost by then, and NUMBERS. Raises OSError and ValueError."""
    curve = []
    for point in read_rows(run.folder / "evaluations.jsonl", Point):
        numbers = {"success_rate": point.success_rate, "score": point.score, "turns": point.turns,
                   "tokens_per_turn": point.tokens / point.turns if point.turns else 0.0}
        curve.append({"step": point.step, **run.spent(point.step)._asdict(), **numbers,
                      "panel_sha256": point.panel_sha256})
    return curve


def panel_of(curves: Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]]) -> str:
    """The hash of the panel that all evaluations were on. Raises ValueError where they were not on one."""
    panels = {point["panel_sha256"] for of_seed in curves.values() for curve in of_seed.values() for point in curve}
    if len(panels) != 1:
        raise ValueError(f"the runs were evaluated on {len(panels)} panels ({', '.join(sorted(panels))}), not on one: "
                         "did the environment's tasks change between them?")
    return panels.pop()


def summarise(curves: Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]],
              baseline: str) -> dict[str, dict[str, Any]]:
    """Of each algorithm's curves by seed, the last points: `Estimate`s of NUMBERS and of what training cost, and in
    `differences` those of NUMBERS minus the baseline's, over the seeds that both have (none: left out)."""
    ends = {name: {seed: curve[-1] for seed, curve in of_seed.items()} for name, of_seed in curves.items() if of_seed}
    result = {}
    for name, of_seed in ends.items():
        paired = sorted(of_seed.keys() & ends.get(baseline, {}).keys()) if name != baseline else []
        result[name] = {
            "seeds": sorted(of_seed),
            **{number: estimate([of_seed[seed][number] for seed in sorted(of_seed)])
               for number in (*NUMBERS, "step", *Cost._fields)},
            "differences": {number: estimate([of_seed[seed][number] - ends[baseline][seed][number] for seed in paired])
                            for number in NUMBERS if paired}}
    return result


def _open(folder: Path, config: TrainConfig) -> Run:
    if not (folder / "config.toml").exists():
        return Run.create(folder, config)
    run = Run.open(folder)
    if config_toml(run.config) != config_toml(config):
        raise RunError(f"{folder} was made with other settings: give those, or another --out")
    return run


def _name(text: str) -> str:
    """A name for a folder."""
    return re.sub(r"[^\w.+-]+", "-", text)
