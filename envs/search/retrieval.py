"""Finding documents: BM25 in this process, or a retrieval server that speaks Search-R1's protocol."""

import hashlib
import json
import re
import time
from collections.abc import Iterable
from typing import Any

import httpx
import tantivy
import tenacity

from envs.search.documents import Document, read_document, without_accents

WORD = re.compile(r"[^\W_]+")
QUERY_WORDS = 64
"""Words of a query that count, so that no query takes long."""
TITLE_BOOST = 2.0
WRITER_BYTES = 4_000_000_000
"""A limit, not what is taken: with less, a large corpus would come in several segments."""
ANSWER_BYTES = 10_000_000


class RetrievalError(RuntimeError):
    """The retrieval server is down, late or answers something else. An error of the environment, never a reward."""


class BM25:
    """An in-memory index of documents by tantivy: BM25 with k1 = 1.2, b = 0.75, a match in the title counts double.

    Case, accents and punctuation do not matter. Equal scores keep the documents' order.
    """

    def __init__(self, documents: Iterable[Document]):
        self.documents = list(documents)
        builder = tantivy.SchemaBuilder()
        builder.add_text_field("title", tokenizer_name="whitespace", index_option="freq")
        builder.add_text_field("text", tokenizer_name="whitespace", index_option="freq")
        builder.add_integer_field("number", fast=True)
        self._index = tantivy.Index(builder.build())
        # One thread and one segment, so that ties are broken alike everywhere.
        writer = self._index.writer(WRITER_BYTES, num_threads=1)
        for number, document in enumerate(self.documents):
            writer.add_document(tantivy.Document(title=_words(document.title), text=_words(document.text),
                                                 number=number))
        writer.commit()
        writer.wait_merging_threads()
        self._index.reload()

    def search(self, query: str, count: int) -> list[Document]:
        words = " ".join(dict.fromkeys(_words(query).split()[:QUERY_WORDS]))
        if not words:
            return []
        searcher = self._index.searcher()
        parsed = self._index.parse_query(words, ["title", "text"], field_boosts={"title": TITLE_BOOST})
        addresses = [address for _, address in searcher.search(parsed, count, count=False).hits]
        return [self.documents[number] for number in searcher.fast_field_values("number", addresses)]


def _words(text: str) -> str:
    """The words of `text`, lower case, without accents: no sign of tantivy's query language is left."""
    return " ".join(WORD.findall(without_accents(text).lower()))


class SearchServer:
    """A server with Search-R1's `POST /retrieve`. Its client keeps the connection; `close` ends it.

    The query is sent both as `queries` (Search-R1) and as `query` (SkyRL). A request that finds no server, an
    overloaded one or an error of the server's is tried `attempts` times; all together take at most `seconds`.
    """

    def __init__(self, url: str, *, seconds: float = 30.0, attempts: int = 3):
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError(f"server must be an address such as http://127.0.0.1:8000, got {url!r}")
        self.url = str(parsed.copy_with(path="/retrieve") if parsed.path in ("", "/") else parsed)
        self.seconds, self.attempts = seconds, attempts
        self._client: httpx.Client | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}  # an open connection cannot be copied

    def search(self, query: str, count: int) -> list[Document]:
        """Raises RetrievalError."""
        deadline = time.monotonic() + self.seconds
        stop = tenacity.stop_after_attempt(self.attempts) | tenacity.stop_before_delay(self.seconds)
        retry = tenacity.Retrying(retry=tenacity.retry_if_exception(_may_pass), stop=stop, reraise=True,
                                  wait=tenacity.wait_exponential(multiplier=0.2, max=2.0))
        body = {"queries": [query], "query": query, "topk": count, "return_scores": True}
        try:
            answer = retry(self._post, body, deadline)
        except httpx.HTTPStatusError as error:
            raise RetrievalError(f"{self.url} refuses the search with status {error.response.status_code}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RetrievalError(f"no answer from the retrieval server {self.url} ({type(error).__name__}: {error}): "
                                 "is it running?") from error
        except (ValueError, RecursionError) as error:
            raise RetrievalError(f"{self.url} answers no JSON: {error}") from error
        return read_answer(answer, self.url)[:count]

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _post(self, body: dict[str, Any], deadline: float) -> Any:
        if self._client is None:
            self._client = httpx.Client()
        left = max(deadline - time.monotonic(), 0.001)
        with self._client.stream("POST", self.url, json=body, timeout=left) as response:
            response.raise_for_status()
            content = bytearray()
            for part in response.iter_bytes():
                content += part
                if len(content) > ANSWER_BYTES:
                    raise ValueError(f"it is longer than {ANSWER_BYTES:,} bytes")
                if time.monotonic() > deadline:  # httpx limits the wait for each part only
                    raise httpx.ReadTimeout(f"not complete after {self.seconds} s")
        return json.loads(content)


def _may_pass(error: BaseException) -> bool:
    """Whether trying again may help."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, httpx.TransportError)


def read_answer(answer: Any, source: str) -> list[Document]:
    """The documents in `{"result": [[{"document": {...}, "score": 1.0}, ...]]}`, or with the bare documents inside;
    each has `contents`, or `title` and `text`, and an `id` or is named by a hash. Raises RetrievalError that says what
    is wrong where."""
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, list) or len(result) != 1 or not isinstance(result[0], list):
        raise RetrievalError(f'{source} must answer {{"result": [[...]]}} with one list for the one query, got '
                             f"{answer!r:.200}")
    documents = {}
    for place, item in enumerate(result[0], start=1):
        row = item.get("document", item) if isinstance(item, dict) else item
        if isinstance(row, dict) and row.get("id") is None:  # Search-R1's web search has no ids
            row = {**row, "id": hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:12]}
        try:
            document = read_document(row)
        except ValueError as error:
            raise RetrievalError(f"{source}, document {place} of the answer: {error}") from error
        documents.setdefault(document.id, document)
    return list(documents.values())
