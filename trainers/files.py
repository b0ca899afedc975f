"""Files that appear whole or not at all, and logs of one JSON object a line."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


@contextmanager
def replacing(path: str | Path) -> Iterator[TextIO]:
    """A text file to write; it takes the place of `path` when the block ends, and is removed where the block fails."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w", encoding="utf-8", newline="\n") as file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_rows(path: str | Path, kind: type[T]) -> list[T]:
    """The lines of a log, each a JSON object with the fields of the dataclass `kind`; other fields are left out.

    Raises OSError where the file cannot be read, and ValueError, which names file, line and field, for another line.
    """
    adapter, rows = TypeAdapter(kind), []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if line.strip():
            try:
                rows.append(adapter.validate_json(line))
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"]))
                raise ValueError(f"{path} line {number} is damaged: {where and where + ': '}{first['msg']}") from None
    return rows
