"""What scripts show a person: a live progress bar in a terminal, a few plain lines elsewhere."""

from pathlib import Path

import rich.console
import transformers
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


def quiet_transformers(console: Console) -> None:
    """Switch transformers' own bars off where nobody watches."""
    if not console.err.is_terminal:
        transformers.utils.logging.disable_progress_bar()


class Bar(Progress):
    """One progress bar, shown in a terminal only, with a note behind it."""

    def __init__(self, console: Console, title: str, total: int, done: int = 0):
        super().__init__(
            TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=True), TextColumn("{task.fields[note]}"),
            console=console.err, disable=not console.err.is_terminal)
        self.add_task(title, total=total, completed=done, note="")

    def step(self, note: str = "") -> None:
        """One unit is done."""
        self.update(self.task_ids[0], advance=1, note=note)


class TrainingDisplay:
    """The `Display` of a training run."""

    def __init__(self, console: Console, folder: Path):
        self._console, self._folder = console, folder
        self._bar: Bar | None = None

    def __enter__(self) -> "TrainingDisplay":
        self._console.err.print(f"run: {self._folder}", markup=False, soft_wrap=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def phase(self, name: str, total: int, done: int = 0) -> None:
        self._stop()
        self._bar = Bar(self._console, name, total, done)
        self._bar.start()

    def advance(self, metrics: dict[str, float]) -> None:
        if "success_rate" in metrics:
            self._bar.step(f"success {metrics['success_rate']:.1%}  {metrics['tokens_per_second']:,.0f} tokens/s")
        else:
            self._bar.step(f"loss {metrics['loss']:.3f}")

    def evaluation(self, title: str, evaluation: Evaluation) -> None:
        if self._bar is not None:
            self._bar.stop()
        evaluation.print(self._console.out, title)
        if self._bar is not None:
            self._bar.start()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class SilentDisplay:
    """A `Display` that shows nothing."""

    def __enter__(self) -> "SilentDisplay":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def phase(self, name: str, total: int, done: int = 0) -> None:
        pass

    def advance(self, metrics: dict[str, float]) -> None:
        pass

    def evaluation(self, title: str, evaluation: Evaluation) -> None:
        pass


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
