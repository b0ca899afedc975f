"""Learning curves of one or several runs of the same config, as a picture.

    python -m scripts.plot runs/seed0 runs/seed1 runs/seed2 --out docs/countdown.png
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from scripts._display import Console
from trainers.files import read_rows

SMOOTHING = 8
"""Training steps that a point of the training curve is the mean of."""


@dataclass
class Rate:
    """A success rate of an evaluation."""

    success_rate: float


@dataclass
class Step:
    """What is drawn of a training step."""

    step: int
    success_rate: float


@dataclass
class Point(Step):
    """What is drawn of an evaluation."""

    ci_low: float
    ci_high: float
    pass_at_k: dict[int, Rate]


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 2 a folder holds no run that can be drawn, or the picture cannot be written."""
    parser = argparse.ArgumentParser(prog="plot", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--out", type=Path, required=True, help="picture to write (.png, .svg, .pdf)")
    options = parser.parse_args(argv)
    if not options.out.suffix:
        parser.error(f"--out {options.out} says no kind of picture: end it in .png, .svg or .pdf")
    try:
        figure = draw({str(folder): read_run(folder) for folder in options.runs})
        figure.savefig(options.out, dpi=110, bbox_inches="tight")
    except (OSError, ValueError) as error:
        Console().error(error)
        return 2
    return 0


def read_run(folder: Path) -> tuple[list[Step], list[Point]]:
    """A run's steps and evaluations. Raises OSError where there are none, and ValueError for an empty or damaged log.
    """
    steps, points = read_rows(folder / "metrics.jsonl", Step), read_rows(folder / "evaluations.jsonl", Point)
    if not steps or not points:
        raise ValueError(f"{folder} holds nothing to draw yet: a run needs one step and one evaluation")
    return steps, points


def draw(runs: dict[str, tuple[list[Step], list[Point]]]) -> Figure:
    """Left: success while training and on the held-out panel. Right: pass@k before and after."""
    figure = Figure(figsize=(11, 4), layout="tight")
    curve, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    for name, (steps, points) in runs.items():
        rates = np.array([step.success_rate for step in steps])
        smooth = [rates[max(0, i - SMOOTHING + 1):i + 1].mean() for i in range(len(rates))]
        line, = curve.plot([step.step for step in steps], smooth, alpha=0.35, linewidth=1)
        rate = np.array([point.success_rate for point in points])
        reach = [rate - [point.ci_low for point in points], [point.ci_high for point in points] - rate]
        curve.errorbar([point.step for point in points], rate, yerr=np.abs(reach), color=line.get_color(),
                       marker="o", markersize=4, capsize=2, label=name)
    curve.set(xlabel="training step", ylabel="success rate", ylim=(0, 1),
              title="held-out success, 95% interval (faint: while training)")
    curve.legend(loc="upper left", frameon=False)
    for place, (name, which) in enumerate((("before", 0), ("after", -1))):
        for index, (_, points) in enumerate(runs.values()):
            rates = points[which].pass_at_k
            bars.plot(list(rates), [rate.success_rate for rate in rates.values()], marker="o", markersize=4,
                      color=f"C{index}", linestyle="--" if place == 0 else "-",
                      label=f"{name} training" if index == 0 else None)
    bars.set(xlabel="k", ylabel="pass@k", ylim=(0, 1), xscale="log", title="pass@k on held-out problems")
    ticks = sorted({k for _, points in runs.values() for k in points[-1].pass_at_k})
    bars.set_xticks(ticks, [str(k) for k in ticks])
    bars.minorticks_off()
    bars.legend(loc="lower right", frameon=False)
    for axis in (curve, bars):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure


if __name__ == "__main__":
    sys.exit(main())
