"""Questions and answers from data files, checked once so that a run does not fail on row 7,000."""

import json
from dataclasses import dataclass
from pathlib import Path

from envs.data_splits import separate, split_named
from rewards.mathematics import gold_answer

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
QUESTION_COLUMNS = ("question", "problem", "query", "prompt", "input")
ANSWER_COLUMNS = ("answer", "final_answer", "solution", "gold", "target", "output", "response")
FAMILY_COLUMNS = ("subject", "type", "category", "family")


@dataclass(frozen=True)
class Row:
    """One problem of a data set."""

    question: str
    answer: str
    solution: str = ""
    """Worked reasoning, where the data has it."""
    family: str = ""


def read_splits(data: str, question_column: str | None, answer_column: str | None) -> dict[str, list[Row]]:
    """The rows of each split, every question once and in one split only.

    A file belongs to the split that its name says (`train`, `test`, `heldout`, `validation`, ...), else to `train`.
    Without a `heldout` split, a tenth of the training questions, chosen by hash, is held out. Raises FileNotFoundError,
    or ValueError that names the file, the row and the columns found.
    """
    splits: dict[str, dict[str, Row]] = {}
    for split, source, table in _tables(data):
        rows = _rows(table, source, question_column, answer_column)
        splits.setdefault(split, {}).update({row.question: row for row in rows})
    return separate(splits)


def _tables(data: str):
    """Yields (split, where it came from, `datasets.Dataset`)."""
    import datasets  # takes a second to import, and the generated problems do without it

    datasets.disable_progress_bars()
    path = Path(data).expanduser()
    if path.exists():
        files = sorted(f for f in path.iterdir() if f.suffix in FORMATS) if path.is_dir() else [path]
        if not files or files[0].suffix not in FORMATS:
            raise ValueError(f"{path}: no data file; readable are {', '.join(FORMATS)}")
        for file in files:
            yield split_named(file.stem), str(file), _read(file, datasets)
    elif path.suffix in FORMATS or path.is_absolute() or data.count("/") != 1:
        raise FileNotFoundError(f"no data file or folder {data!r} (looked in {Path.cwd()}); a data set of the Hugging "
                                "Face hub is named owner/name or owner/name:config")
    else:
        name, _, config = data.partition(":")
        for split, table in datasets.load_dataset(name, config or None).items():
            yield split_named(split), f"{data} [{split}]", table


def _read(file: Path, datasets):
    if file.stat().st_size == 0:
        raise ValueError(f"{file} is empty")
    try:
        table = datasets.load_dataset(FORMATS[file.suffix], data_files=str(file), split="train")
    except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read{_broken_line(file)}: {error.__cause__ or error}") from error
    if any(name.startswith("__index_level_") for name in table.column_names):  # what pandas makes of surplus cells
        raise ValueError(f"{file}: rows have more cells than the first line names columns; put texts that hold a comma "
                         "into quotes")
    return table


def _broken_line(file: Path) -> str:
    """Which line of a JSONL file is no JSON object; "" where that is not the fault."""
    if file.suffix != ".jsonl":
        return ""
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    return f", line {number} is no JSON object"
            except json.JSONDecodeError as error:
                return f", line {number} is no JSON ({error})"
    return ""


def _rows(table, source: str, question_column: str | None, answer_column: str | None) -> list[Row]:
    columns = table.column_names
    question_column = _column(question_column, QUESTION_COLUMNS, columns, source, "question_column")
    answer_column = _column(answer_column, ANSWER_COLUMNS, columns, source, "answer_column")
    solution_column = next((name for name in ("solution", answer_column) if name in columns), answer_column)
    family_column = next((name for name in FAMILY_COLUMNS if name in columns), None)
    rows = []
    for number, record in enumerate(table, start=1):
        question, answer = record[question_column], record[answer_column]
        if question is None or not str(question).strip():
            raise ValueError(f"{source}, row {number}: the column {question_column!r} is empty")
        try:
            bare = gold_answer("" if answer is None else str(answer))
        except ValueError as error:
            raise ValueError(f"{source}, row {number}, column {answer_column!r}: {error}") from error
        solution = str(record[solution_column] or "").strip()
        rows.append(Row(str(question), bare, "" if solution == bare else solution,
                        str(record[family_column]) if family_column else ""))
    if not rows:
        raise ValueError(f"{source} has no rows")
    return rows


def _column(wanted: str | None, usual: tuple[str, ...], columns: list[str], source: str, option: str) -> str:
    found = next((name for name in ((wanted,) if wanted else usual) if name in columns), None)
    if found is None:
        missing = f"no column {wanted!r}" if wanted else f"none of the columns {', '.join(usual)}"
        raise ValueError(f"{source}: {missing}; it has {', '.join(columns)}. Set {option} to one of these")
    return found
