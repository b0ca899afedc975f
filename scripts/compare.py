"""Compare algorithms under an equal budget of environment steps and sampled tokens.

    python -m scripts.compare --env turngym/Countdown-v0 --algorithms GRPO,PlanPO --seeds 0,1,2 \\
        --config configs/countdown_tiny.toml --run.max_environment_steps 50000 --out comparisons/countdown

The first algorithm is what the others are compared with. --section.key VALUE overrides the config file for all runs.
Without run.max_environment_steps and run.max_sampled_tokens, what the first algorithm's run of run.steps steps uses is
the budget of all. The same command goes on where it was interrupted, and adds algorithms and seeds to what is there.
docs/comparing.md says what the numbers mean.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve whatever runs beside them

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.table import Table

from scripts._display import Console, TrainingDisplay
from scripts._jobs import Job, run_jobs
from trainers.acting import make_env
from trainers.comparison import NUMBERS, Comparison, Estimate, finished, panel_of, read_curve, summarise
from trainers.files import replacing
from trainers.loop import check_device, open_environment, starting_policy, train
from trainers.run import Cost, Run, RunError
from trainers.settings import SettingsError, merge, read_overrides, read_toml

COLUMNS = {"success_rate": ("success", 100, "%"), "score": ("score", 1, ""), "turns": ("turns", 1, ""),
           "tokens_per_turn": ("tokens/turn", 1, "")}
"""Heading, factor and unit of each of NUMBERS."""
GRID = 100
"""Points of a drawn mean curve."""


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 a run failed or results cannot be read or written, 2 wrong arguments or settings, 130
    interrupted."""
    console = Console()
    try:
        return compare(*parse(argv), console)
    except (SettingsError, RunError) as error:
        console.error(error)
        return 2
    except KeyboardInterrupt:
        console.error("interrupted; the same command goes on")
        return 130


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="compare", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", required=True, metavar="ID[,ID]", help="environments")
    parser.add_argument("--algorithms", required=True, metavar="A,B", help="algorithms, the baseline first")
    parser.add_argument("--seeds", default="0,1,2", metavar="0,1,2")
    parser.add_argument("--config", metavar="CONFIG.toml", help="settings of all runs")
    parser.add_argument("--out", type=Path, default=Path("comparison"), metavar="DIR")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="runs at a time (default: one per core)")
    arguments, overrides = parser.parse_known_args(argv)
    for name in ("env", "algorithms", "seeds"):
        text = getattr(arguments, name)
        values = text.split(",")
        if name == "seeds":
            if not all(seed.isdecimal() for seed in values):
                parser.error(f"--seeds are whole numbers from 0 with commas between, got {text!r}")
            values = [int(seed) for seed in values]
        if len(set(values)) < len(values) or "" in values:
            parser.error(f"--{name} {text!r} names something twice, or nothing between two commas")
        setattr(arguments, name, values)
    if arguments.processes < 1:
        parser.error(f"--processes must be at least 1, got {arguments.processes}")
    return arguments, overrides


def compare(arguments: argparse.Namespace, overrides: list[str], console: Console) -> int:
    settings = merge(read_toml(arguments.config) if arguments.config else {}, read_overrides(overrides))
    comparisons = [Comparison(folder=arguments.out, environment=env, algorithms=arguments.algorithms,
                              seeds=arguments.seeds, settings=settings) for env in arguments.env]
    for comparison in comparisons:  # all that can be wrong with the settings is said before anything runs
        configs = [comparison.config(algorithm, comparison.seeds[0]) for algorithm in comparison.algorithms]
        check_device(configs[0])
        open_environment(configs[0])[0].close()
    failures: dict[str, str] = {}

    def ended(job: Job, failure: str) -> None:
        console.err.print(f"{job.name}: {failure or 'done'}", markup=False, soft_wrap=True)
        if failure:
            failures[job.name] = f"{failure} (see {job.output})"

    def run(jobs: list[Job]) -> None:
        run_jobs(jobs, arguments.processes, ended)

    run([Job(f"start of {c.environment} seed {seed}", make_start, start.folder)
         for c in comparisons for seed in c.seeds if (start := c.start(seed)) and not start.initial.exists()])
    run([job for c in comparisons if c.measured for job in jobs_of(c, c.algorithms[:1], c.seeds[:1], None)])
    budgets = {c.environment: c.budget() for c in comparisons}
    known = [c for c in comparisons if budgets[c.environment]]
    run([job for c in known for job in jobs_of(c, c.algorithms, c.seeds, budgets[c.environment])])
    results = {}
    for comparison in known:
        name = comparison.environment
        try:
            results[name] = result(comparison, budgets[name])
            show(name, results[name], arguments.algorithms[0], console)
        except (OSError, ValueError) as error:
            failures[name] = str(error)
    try:
        write(arguments, results, failures)
    except OSError as error:
        failures["writing the results"] = str(error)
    for name, failure in failures.items():
        console.error(f"{name} failed: {failure}")
    return 1 if failures else 0


def jobs_of(comparison: Comparison, algorithms: Sequence[str], seeds: Sequence[int], budget: Cost | None) -> list[Job]:
    """The runs that have not finished yet, seed by seed."""
    runs = [(f"{comparison.environment} {algorithm} seed {seed}", comparison.run(algorithm, seed, budget))
            for seed in seeds for algorithm in algorithms]
    return [Job(name, go_on, run.folder) for name, run in runs if not finished(run)]


def make_start(folder: Path) -> None:
    """Make the policy that runs start from."""
    run = Run.open(folder)
    torch.set_num_threads(run.config.run.threads)
    with TrainingDisplay(Console(), folder) as display, closing(make_env(run.config)) as env:
        starting_policy(run, env, display)


def go_on(folder: Path) -> None:
    """Train to the end of the budget."""
    with TrainingDisplay(Console(), folder) as display:
        train(Run.open(folder), display)


def result(comparison: Comparison, budget: Cost) -> dict[str, Any]:
    """What came out of the finished runs in one environment: panel, budget, curves, summary."""
    runs = {algorithm: {seed: comparison.run(algorithm, seed, budget) for seed in comparison.seeds}
            for algorithm in comparison.algorithms}
    curves = {algorithm: {seed: read_curve(run) for seed, run in by_seed.items() if finished(run)}
              for algorithm, by_seed in runs.items()}
    if not any(curves.values()):
        raise ValueError("no run has finished")
    return {"budget": budget._asdict(), "panel_sha256": panel_of(curves), "curves": curves,
            "summary": summarise(curves, comparison.algorithms[0])}


def show(environment: str, found: dict[str, Any], baseline: str, console: Console) -> None:
    """A table of the summary."""
    budget = " and ".join(f"{limit:,} {name.replace('_', ' ')}" for name, limit in found["budget"].items() if limit)
    console.out.print(f"\n{environment}: {budget} a run; mean ± half of Student's 95% interval over seeds, Δ: minus "
                      f"{baseline} of the same seed\npanel {found['panel_sha256']}", markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column("")
    for heading in ("seeds", *(heading for heading, _, _ in COLUMNS.values()), "environment steps", "tokens"):
        table.add_column(heading, justify="right")
    for name, row in found["summary"].items():
        table.add_row(name, str(len(row["seeds"])), *(_cell(row[number], number) for number in NUMBERS),
                      f"{row['environment_steps'].mean:,.0f}", f"{row['sampled_tokens'].mean:,.0f}")
        if row["differences"]:
            paired = len(row["differences"]["success_rate"].values)
            table.add_row("  Δ", str(paired), *(_cell(row["differences"][number], number, "+") for number in NUMBERS))
    console.out.print(table)


def _cell(found: Estimate, number: str, sign: str = "") -> str:
    _, factor, unit = COLUMNS[number]
    digits = f"{sign}.{1 if unit else 2}f"
    mean = f"{found.mean * factor:{digits}}{unit}"
    return mean if found.ci_high is None else f"{mean} ±{(found.ci_high - found.mean) * factor:{digits[-3:]}}"


def write(arguments: argparse.Namespace, results: dict[str, Any], failures: dict[str, str]) -> None:
    """`comparison.json` and `curves.png`."""
    report = {"algorithms": arguments.algorithms, "seeds": arguments.seeds, "environments": results,
              "failures": failures}
    with replacing(arguments.out / "comparison.json") as file:
        json.dump(report, file, indent=2, allow_nan=False, default=asdict)
    if results:
        draw(results).savefig(arguments.out / "curves.png", dpi=110, bbox_inches="tight")


def draw(results: dict[str, Any]) -> Figure:
    """A row for each environment: success on the panel by environment steps and by sampled tokens, the mean over seeds
    and, faint, each seed."""
    figure = Figure(figsize=(11, 3.6 * len(results)), layout="tight")
    rows = figure.subplots(len(results), 2, squeeze=False)
    for axes, (environment, found) in zip(rows, results.items()):
        for axis, cost in zip(axes, Cost._fields):
            for index, (name, by_seed) in enumerate(found["curves"].items()):
                lines = [([point[cost] for point in curve], [point["success_rate"] for point in curve])
                         for curve in by_seed.values()]
                for used, rates in lines:
                    axis.plot(used, rates, color=f"C{index}", alpha=0.25, linewidth=0.8)
                if lines:
                    grid = np.linspace(0, min(used[-1] for used, _ in lines), GRID)
                    mean = np.mean([np.interp(grid, used, rates) for used, rates in lines], axis=0)
                    axis.plot(grid, mean, color=f"C{index}", label=f"{name} ({len(lines)} seeds)")
            axis.set(xlabel=cost.replace("_", " "), ylabel="success rate", ylim=(0, 1), title=environment)
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.25)
        axes[0].legend(loc="upper left", frameon=False)
    return figure


if __name__ == "__main__":
    sys.exit(main())
