"""Documents and what a corpus does with them."""

import re
import unicodedata
from typing import Any, NamedTuple, Protocol

MARKUP = re.compile(r"<(?=[/|!?a-zA-Z])")
BAD_ID = re.compile(r"[\"'<>\s]")


class Document(NamedTuple):
    """One entry of a corpus."""

    id: str
    """Without blanks, quotes and angle brackets, so that `<open id="..."/>` can name it."""
    title: str
    text: str


class Retriever(Protocol):
    """Anything that finds documents."""

    def search(self, query: str, count: int) -> list[Document]:
        """At most `count` different documents, best first."""


def without_markup(text: str) -> str:
    """`text` in which no tag can begin: what a document says is never an action, an answer or a turn's end."""
    return MARKUP.sub("‹", text)


def without_accents(text: str) -> str:
    """`text` with every letter in its plain form."""
    if text.isascii():  # most texts are, and this is much faster
        return text
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))


def read_document(row: Any) -> Document:
    """A document from a line of a corpus or a server's answer: `id` and Search-R1's `contents` (the title, perhaps in
    quotes, a new line, the text; one line is a text without a title), or `id`, `title` and `text`. Raises
    ValueError."""
    if not isinstance(row, dict):
        raise ValueError(f"a document is a JSON object, got {row!r:.100}")
    name = row.get("id")
    if isinstance(name, bool) or not isinstance(name, str | int) or str(name) == "":
        raise ValueError(f"a document needs an id, text or a whole number, got {name!r}")
    if BAD_ID.search(str(name)):
        raise ValueError(f"the id {name!r:.100} holds a blank, a quote or an angle bracket, which no tag can hold")
    texts = {key: row[key] for key in ("title", "text", "contents") if row.get(key) is not None}
    wrong = [key for key, value in texts.items() if not isinstance(value, str)]
    if wrong or not ({"text", "contents"} & texts.keys()):
        raise ValueError(f"document {name!r} needs a text in `contents`, or in `text` (and `title`); it has "
                         f"{', '.join(map(repr, row))}")
    if "text" in texts:
        title, text = texts.get("title", ""), texts["text"]
    else:
        title, _, text = texts["contents"].strip().partition("\n")
        title = title.strip().strip('"')
        if not text or title != texts.get("title", title).strip():  # the first line is no title
            title, text = texts.get("title", ""), texts["contents"]
    return Document(str(name), title.strip(), text.strip())
