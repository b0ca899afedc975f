"""Corpora and question sets from JSONL files, checked when they are read so that no run fails on line 7,000."""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from envs.data_splits import separate, split_named
from envs.search.documents import Document, read_document

ANSWER_KEYS = ("golden_answers", "possible_answers", "answers", "answer")
HOPS = re.compile(r"(\d)hop")


class Row(NamedTuple):
    """One question of a file."""

    question: str
    answers: list[str]
    family: str

    @property
    def key(self) -> str:
        return hashlib.sha256(self.question.encode()).hexdigest()[:20]


def read_corpus(path: str) -> list[Document]:
    """The documents of a JSONL file in Search-R1's form, one `{"id": ..., "contents": "Title\\ntext"}` a line.
    Raises FileNotFoundError, or ValueError that names the file and the line."""
    documents: dict[str, Document] = {}
    for where, record in _records(Path(path).expanduser()):
        try:
            document = read_document(record)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if document.id in documents:
            raise ValueError(f"{where}: the id {document.id!r} is an earlier document's")
        documents[document.id] = document
    if not documents:
        raise ValueError(f"{path} has no documents")
    return list(documents.values())


def read_questions(path: str) -> dict[str, list[Row]]:
    """The questions of each split, every question once and in one split only.

    `path` is a JSONL file or a folder of them. A file belongs to the split that its name says (`train`, `dev`, `test`,
    ...), else to `train`. Without a `heldout` split, a tenth of the training questions, chosen by hash, is held out.
    Raises FileNotFoundError, or ValueError that names the file and the line.
    """
    place = Path(path).expanduser()
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
    if not files:
        raise ValueError(f"{path}: no .jsonl file in this folder")
    splits: dict[str, dict[str, Row]] = {}
    for file in files:
        rows = [row for where, record in _records(file) if (row := _question(record, where, file.stem))]
        if not rows:
            raise ValueError(f"{file} has no questions")
        splits.setdefault(split_named(file.stem), {}).update({row.question: row for row in rows})
    return separate(splits)


def _records(file: Path) -> Iterator[tuple[str, Any]]:
    """Where each line stands and what it holds. Empty lines are skipped."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{file}, line {number}"
                try:
                    record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{where} is no JSON: {error}") from error
                if not isinstance(record, dict):
                    raise ValueError(f"{where} is no JSON object: {record!r:.100}")
                yield where, record


def _question(record: dict[str, Any], where: str, name: str) -> Row | None:
    """A line of NQ, TriviaQA, PopQA, HotpotQA, 2WikiMultihopQA, MuSiQue or Bamboogle, in their own form or in the
    common one (`question`, `golden_answers`). None for one that its set calls unanswerable."""
    fields = {key.lower(): value for key, value in record.items()}
    if fields.get("answerable") is False:
        return None
    question = fields.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where}: no text in `question`; it has {', '.join(map(repr, record))}")
    key = next((key for key in ANSWER_KEYS if fields.get(key) is not None), None)
    if key is None:
        raise ValueError(f"{where}: none of {', '.join(ANSWER_KEYS)}; it has {', '.join(map(repr, record))}")
    answers = [*_answers(fields[key], where), *_answers(fields.get("answer_aliases", []), where)]
    answers = list(dict.fromkeys(answer.strip() for answer in answers if answer.strip()))
    if not answers:
        raise ValueError(f"{where}: `{key}` holds no answer")
    return Row(question.strip(), answers, _family(fields) or name)


def _answers(value: Any, where: str) -> list[str]:
    """The texts in a text, a list, PopQA's list written as text, or TriviaQA's `{"value": ..., "aliases": [...]}`."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return [value]  # an answer that begins with a bracket
    if isinstance(value, dict):
        fields = {key.lower(): part for key, part in value.items()}
        return [*_answers(fields.get("value", []), where), *_answers(fields.get("aliases", []), where)]
    if isinstance(value, list):
        return [answer for part in value for answer in _answers(part, where)]
    if isinstance(value, str):
        return [value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [str(value)]
    raise ValueError(f"{where}: an answer is a text, got {value!r:.100}")


def _family(fields: dict[str, Any]) -> str:
    """The kind of question, where the line says it: `type` (HotpotQA, 2Wiki), the hops in MuSiQue's id."""
    metadata = fields.get("metadata")
    kind = fields.get("type") or (metadata.get("type") if isinstance(metadata, dict) else None)
    hops = HOPS.match(str(fields.get("id", "")))
    return kind if isinstance(kind, str) else f"{hops[1]} hops" if hops else ""
