"""A progress bar in a terminal, nothing elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(console: Console, title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Yields what to call after each unit, with the text to show."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(title, total=total)
        yield lambda text: progress.update(bar, advance=1, description=text)


def quiet_transformers(console: Console) -> None:
    """Switch transformers' own bars off where nobody watches."""
    if not console.is_terminal:
        transformers.utils.logging.disable_progress_bar()
