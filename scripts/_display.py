"""What scripts show a person: a live progress bar in a terminal, a few plain lines elsewhere."""

from pathlib import Path
from typing import Any

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from trainers.config import TrainConfig
from trainers.evaluation import Evaluation
from trainers.run import config_toml
from trainers.settings import setting_names


class Console:
    """Results on standard output, progress and errors on standard error."""

    def __init__(self):
        self.out = rich.console.Console(highlight=False, emoji=False)
        if not self.out.is_terminal:
            self.out.width = 120  # a file has no edge, and a table's row is one line
        self.err = rich.console.Console(stderr=True, highlight=False, emoji=False)

    def error(self, message: object) -> None:
        self.err.print(f"error: {message}", style="bold red", markup=False, soft_wrap=True)


class TrainingDisplay:
    """The `Display` of a training run."""

    def __init__(self, console: Console, folder: Path):
        self._console, self._folder = console, folder
        self._progress: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> "TrainingDisplay":
        self._console.err.print(f"run: {self._folder}", markup=False, soft_wrap=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def phase(self, name: str, total: int, done: int = 0) -> None:
        self._stop()
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=True), TextColumn("{task.fields[note]}"),
            console=self._console.err, disable=not self._console.err.is_terminal)
        self._progress.start()
        self._task = self._progress.add_task(name, total=total, completed=done, note="")

    def advance(self, metrics: dict[str, float]) -> None:
        if "success_rate" in metrics:
            note = f"success {metrics['success_rate']:.1%}  {metrics['tokens_per_second']:,.0f} tokens/s"
        else:
            note = f"loss {metrics['loss']:.3f}"
        self._progress.update(self._task, advance=1, note=note)

    def evaluation(self, title: str, evaluation: Evaluation) -> None:
        if self._progress is not None:
            self._progress.stop()
        evaluation.print(self._console.out, title)
        if self._progress is not None:
            self._progress.start()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def print_plan(console: Console, config: TrainConfig, rows: list[tuple[str, str]]) -> None:
    """The resolved config as TOML and the plan as a table."""
    console.out.print(config_toml(config), markup=False, soft_wrap=True)
    table = Table(title="plan", show_header=False, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console.out.print(table)


def setting_help(config: type) -> str:
    """Every setting's name, one a line; of the algorithms' own settings, those that all have."""
    names = setting_names(config)
    names.insert(next(i for i, name in enumerate(names) if name.startswith("algorithm.")), "algorithm.name")
    return "settings:\n" + "\n".join(f"  --{name}" for name in names)
