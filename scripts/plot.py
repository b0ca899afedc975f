"""Learning curves of one or several runs of the same config, as a picture.

    python -m scripts.plot runs/seed0 runs/seed1 runs/seed2 --out docs/countdown.png
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from scripts._display import Console

SMOOTHING = 8
"""Training steps that a point of the training curve is the mean of."""


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
        runs = {str(folder): (read_rows(folder / "metrics.jsonl"), read_rows(folder / "evaluations.jsonl"))
                for folder in options.runs}
        draw(runs).savefig(options.out, dpi=110, bbox_inches="tight")
    except (OSError, ValueError) as error:
        Console().error(error)
        return 2
    return 0


def read_rows(path: Path) -> list[dict]:
    """The objects of a run's log. Raises OSError where there is none, and ValueError where it is empty or damaged."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not rows:
        raise ValueError(f"{path} holds nothing to draw yet")
    return rows


def draw(runs: dict[str, tuple[list[dict], list[dict]]]) -> plt.Figure:
    """Left: success while training and on the held-out panel. Right: pass@k before and after."""
    figure, (curve, bars) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2))
    for name, (metrics, evaluations) in runs.items():
        rates = np.array([row["success_rate"] for row in metrics])
        smooth = [rates[max(0, i - SMOOTHING + 1):i + 1].mean() for i in range(len(rates))]
        line, = curve.plot([row["step"] for row in metrics], smooth, alpha=0.35, linewidth=1)
        rate = np.array([row["success_rate"] for row in evaluations])
        reach = [rate - [row["ci_low"] for row in evaluations], [row["ci_high"] for row in evaluations] - rate]
        curve.errorbar([row["step"] for row in evaluations], rate, yerr=np.abs(reach), color=line.get_color(),
                       marker="o", markersize=4, capsize=2, label=name)
    curve.set(xlabel="training step", ylabel="success rate", ylim=(0, 1),
              title="held-out success, 95% interval (faint: while training)")
    curve.legend(loc="upper left", frameon=False)
    for place, (name, which) in enumerate((("before", 0), ("after", -1))):
        for index, (_, evaluations) in enumerate(runs.values()):
            rows = evaluations[which]["pass_at_k"]
            bars.plot([int(k) for k in rows], [row["success_rate"] for row in rows.values()], marker="o", markersize=4,
                      color=f"C{index}", linestyle="--" if place == 0 else "-",
                      label=f"{name} training" if index == 0 else None)
    bars.set(xlabel="k", ylabel="pass@k", ylim=(0, 1), xscale="log", title="pass@k on held-out problems")
    ticks = sorted({int(k) for _, evaluations in runs.values() for k in evaluations[-1]["pass_at_k"]})
    bars.set_xticks(ticks, [str(k) for k in ticks])
    bars.minorticks_off()
    bars.legend(loc="lower right", frameon=False)
    for axis in (curve, bars):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    sys.exit(main())
