"""A page that shows trajectories: what was said, and which tokens were trained. One HTML file, no network.

    python -m scripts.view runs/first                      # writes runs/first/view.html
    python -m scripts.view played.jsonl --tokenizer models/countdown --out page.html
"""

import argparse
import base64
import io
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from agents.models import find_model
from agents.trajectory import Trajectory
from scripts._display import Console
from trainers.files import read_rows, replacing
from trainers.transcripts import messages, read_trajectories, rows

LONGEST_CHARACTER = 4
"""Bytes, hence tokens, that one character may take."""


@dataclass
class Step:
    """What is drawn of a run's step, where it has it."""

    step: int
    success_rate: float | None = None
    reward: float | None = None
    entropy: float | None = None


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 the page is written, 2 there is nothing to show or nowhere to write."""
    parser = argparse.ArgumentParser(prog="view", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="RUN_DIR_or_JSONL")
    parser.add_argument("--out", type=Path, metavar="F.html", help="default: view.html beside the trajectories")
    parser.add_argument("--tokenizer", metavar="DIR", help="to show tokens (default: the run's own)")
    parser.add_argument("--limit", type=int, default=200, help="trajectories shown, the newest ones (default 200)")
    arguments, console = parser.parse_args(argv), Console()
    if arguments.limit < 1:
        parser.error(f"--limit must be at least 1, got {arguments.limit}")
    folder = arguments.source if arguments.source.is_dir() else arguments.source.parent
    source = folder / "trajectories.jsonl" if arguments.source.is_dir() else arguments.source
    out = arguments.out or folder / "view.html"
    try:
        trajectories = read_trajectories(source)
        tokenizer = find_tokenizer(arguments.tokenizer, arguments.source)
        page = render(str(arguments.source), trajectories, arguments.limit, tokenizer, read_charts(arguments.source))
        with replacing(out) as file:
            file.write(page)
    except (OSError, ValueError) as error:
        console.error(error)
        return 2
    console.out.print(f"{out}", markup=False, soft_wrap=True)
    return 0


def find_tokenizer(path: str | None, source: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer asked for, or that of the run's first policy or newest checkpoint; None where there is none."""
    found = sorted(source.glob("initial/tokenizer.json")) + sorted(source.glob("checkpoints/*/tokenizer.json"))
    path = path or (str(found[-1].parent) if found else None)
    if not path:
        return None
    name, options = find_model(path)
    return AutoTokenizer.from_pretrained(name, **options)


def render(title: str, trajectories: list[Trajectory], limit: int, tokenizer: PreTrainedTokenizerBase | None,
           charts: list[dict[str, str]]) -> str:
    """The page of the last `limit` trajectories, those of a task together. All text is escaped."""
    shown = [describe(trajectory, tokenizer) for trajectory in trajectories[-limit:]]
    by_task = sorted(shown, key=lambda t: t["key"])
    groups = {key: list(members) for key, members in groupby(by_task, key=lambda t: t["key"])}
    filters = {name: sorted({t[name] for t in shown}) for name in ("success", "family", "status")}
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True,
                                     undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.get_template("view_page.html").render(
        title=title, trajectories=shown, total=len(trajectories), groups=groups, filters=filters, charts=charts)


def describe(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """What the page says of one trajectory."""
    notes = iter([f" · {'' if turn.valid else 'invalid · '}reward {turn.reward:g}"
                  + (" · cut off" if turn.finish_reason == "length" else "") for turn in trajectory.turns])
    said = [{**message, "note": next(notes) if message["role"] == "assistant" else ""}
            for message in messages(trajectory)]
    sequences = rows(trajectory)[0] if tokenizer else []
    return {
        "key": trajectory.task.key, "family": trajectory.task.family, "status": trajectory.status.value,
        "succeeded": trajectory.success, "success": "yes" if trajectory.success else "no",
        "reward": "none" if trajectory.reward is None else f"{trajectory.reward:g}", "score": f"{trajectory.score:g}",
        "turns": len(trajectory.turns), "tokens": trajectory.response_length, "messages": said,
        "rows": [list(pieces(tokenizer, **sequence)) for sequence in sequences if sequence["ids"]]}


def pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int], mask: list[int],
           logprobs: list[float]) -> Iterator[dict[str, Any]]:
    """The row's text token by token; tokens that are parts of one character stay together."""
    start = 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[start:end])
        whole = end == len(ids) or mask[end] != mask[start] or end - start == LONGEST_CHARACTER
        if text.endswith("\ufffd") and not whole:
            continue
        logprob = sum(logprobs[start:end])
        yield {"text": text, "trained": bool(mask[start]), "logprob": f"{logprob:.3f}",
               "colour": f"rgba(224,120,20,{0.12 + 0.6 * (1 - math.exp(min(logprob, 0))):.2f})"}
        start = end


def read_charts(source: Path) -> list[dict[str, str]]:
    """Charts of a run's metrics, as pictures, in which nothing can run. Raises ValueError where a row is damaged."""
    path = source / "metrics.jsonl"
    if not path.is_file():
        return []
    steps, charts = read_rows(path, Step), []
    for name in ("success_rate", "reward", "entropy"):
        points = [(step.step, getattr(step, name)) for step in steps if getattr(step, name) is not None]
        if points:
            figure = Figure(figsize=(4, 2.4), layout="constrained")
            axes = figure.subplots()
            axes.plot(*zip(*points))
            axes.set(title=name.replace("_", " "), xlabel="step")
            svg = io.BytesIO()
            figure.savefig(svg, format="svg")
            charts.append({"name": name, "svg": base64.b64encode(svg.getvalue()).decode()})
    return charts


if __name__ == "__main__":
    sys.exit(main())
