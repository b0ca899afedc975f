"""Questions that are answered by searching a corpus: search, open, answer with citations."""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from envs.core import ActionSpan, LazyTasks, Outcome, Task, TextEnv, check_choice, clean_text
from envs.randomness import pick
from envs.search.documents import Document, Retriever, without_markup
from envs.search.facts import facts
from envs.search.files import Row, read_corpus, read_questions
from envs.search.questions import FAMILIES, PANEL_SIZES, TRAINING_SIZE, Question, panel, training_question
from envs.search.retrieval import BM25, SearchServer
from rewards.tags import hide_thinking, last_block
from rewards.text import contains_match, exact_match, f1_score

ID = r"""\s*id\s*=\s*(?:"([^"<>]*)"|'([^'<>]*)'|([^\s"'<>]+?))\s*"""
OPEN = re.compile(rf"<open\s{ID}/?>")
CITE = re.compile(rf"<cite\s{ID}/?>")
CITE_MARKUP = re.compile(r"</?cite\b[^<>]*>")
RULES = ("Answer the question with the documents of a search engine. Reply <search>query</search> to search; you get "
         'the beginnings of the best documents. Reply <open id="ID"/> to read all of a document that was found. Finish '
         "with <answer>a short answer</answer>")
WITH_CITATIONS = 'and cite the documents that show it: <answer>a short answer <cite id="ID"/></answer>'
QUERY_CHARACTERS = 1_000
"""Of a longer query the rest is left out."""
HELP = 'Reply <search>query</search>, <open id="ID"/> or <answer>a short answer</answer>.'


class Action(NamedTuple):
    """What a response asks for."""

    name: str
    """`search`, `open` or `answer`."""
    content: str
    """The query, the document's id, or what stands between the answer's tags."""
    start: int
    end: int
    """Where the whole tag stands in the response."""


@functools.lru_cache(maxsize=4)
def _index(corpus: str | None, model: str | None, prefixes: tuple[str, str]) -> Retriever:
    """The index of a corpus file, or of the facts; made once in a process and shared by its environments."""
    if corpus is not None:
        documents = read_corpus(corpus)
    else:
        documents = [entity.document() for entity in facts().entities.values()]
    if model is None:
        return BM25(documents)
    from envs.search.dense import Dense  # here, since most environments never need what it imports

    return Dense(documents, model, prefixes)


class Search(TextEnv):
    """Each response searches, opens a document or answers; of several actions in it the last one counts.

    Reward 1 when the answer, without its citations, is a gold answer after SQuAD's normalisation, else 0. `info` holds
    `exposed`, the ids of the documents that the turn showed, and at the answer `exact_match`, `contains_match`, `f1`
    and `cited`, the ids in its `<cite id=.../>`.
    """

    action_tags = ("search", "open", "answer")
    stop = ("</search>", "</answer>")
    max_turns = 10

    def __init__(self, *, questions: str | None = None, corpus: str | None = None, server: str | None = None,
                 families: Sequence[str] = FAMILIES, citations: bool = True, top_k: int = 3,
                 passage_characters: int = 240, max_turns: int | None = None, server_seconds: float = 30.0,
                 retriever: str = "bm25", dense_prefixes: Sequence[str] = ("query: ", "passage: ")):
        """`questions`: a JSONL file or a folder of them; None for the questions about the built-in facts. `corpus`: a
        JSONL file in Search-R1's form; None for the facts. `server`: the address of a retrieval server instead.
        `families`: which of the built-in questions are asked. `retriever`: `bm25`, or `dense:FOLDER` for the embedding
        model in that folder, which reads `dense_prefixes` before queries and before passages. A search shows `top_k`
        documents, `passage_characters` of each. See docs/search.md. Raises FileNotFoundError and ValueError for files
        that cannot be used."""
        super().__init__(max_turns=max_turns)
        if corpus is not None and server is not None:
            raise ValueError("corpus and server are two ways to find documents: set one of them")
        if corpus is not None and questions is None:
            raise ValueError("the built-in questions are about the built-in facts: set questions as well as corpus")
        if questions is not None and corpus is None and server is None:
            raise ValueError("the built-in facts do not answer other questions: set corpus or server as well")
        check_choice("families", families, FAMILIES)
        if questions is not None and tuple(families) != FAMILIES:
            raise ValueError("families chooses among the built-in questions: leave it out where questions is set")
        for name, value in (("top_k", top_k), ("passage_characters", passage_characters),
                            ("server_seconds", server_seconds)):
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        kind, _, model = retriever.partition(":")
        if retriever != "bm25" and (kind != "dense" or not model):
            raise ValueError(f"retriever is 'bm25' or 'dense:FOLDER', got {retriever!r}")
        if model and server is not None:
            raise ValueError("a server finds documents in its own way: set server or retriever")
        if [type(prefix) for prefix in dense_prefixes] != [str, str] or isinstance(dense_prefixes, str):
            raise ValueError(f"dense_prefixes are two texts, of queries and of passages, got {dense_prefixes!r}")
        self.families = tuple(families)
        self.top_k, self.passage_characters, self.citations = top_k, passage_characters, citations
        self.system_prompt = f"{RULES} {WITH_CITATIONS}" if citations else f"{RULES}."
        self._rows = read_questions(questions) if questions is not None else None
        self._sources = (_resolved(corpus), _resolved(model or None), tuple(dense_prefixes))
        self._server = SearchServer(server, seconds=server_seconds) if server is not None else None
        self.blocking = server is not None or bool(model)
        if self._server is None:
            _index(*self._sources)

    @property
    def retriever(self) -> Retriever:
        return self._server or _index(*self._sources)

    def tasks(self, split: str) -> Sequence[Task]:
        if self._rows is not None:
            if split not in self._rows:
                raise ValueError(f"Search has no split {split!r} here; there are: {', '.join(self._rows)}")
            rows = self._rows[split]
            return LazyTasks(len(rows), lambda index: self._row_task(rows[index], split))
        if split == "train":
            return LazyTasks(TRAINING_SIZE, lambda index: self._task(training_question(index, self.families), split))
        if split not in PANEL_SIZES:
            raise ValueError(f"Search has no split {split!r}; it has 'train', {', '.join(map(repr, PANEL_SIZES))}")
        questions = [question for question in panel(split) if question.family in self.families]
        return LazyTasks(len(questions), lambda index: self._task(questions[index], split))

    def _task(self, question: Question, split: str) -> Task:
        return Task(key=question.key, split=split, env_id=self.env_id, family=question.family,
                    data={"question": question.text, "answers": question.answers, "evidence": question.evidence})

    def _row_task(self, row: Row, split: str) -> Task:
        return Task(key=row.key, split=split, env_id=self.env_id, family=row.family,
                    data={"question": row.question, "answers": row.answers})

    def _reset(self, task: Task, rng: np.random.Generator) -> str:
        self._found: dict[str, Document] = {}
        self._opened: set[str] = set()
        return f"Question: {task.data['question']}"

    def parse(self, response: str) -> ActionSpan:
        action = read_action(response)
        if action is None:
            return ActionSpan("", 0, 0)
        return ActionSpan(response[action.start:action.end], action.start, action.end)

    def _step(self, action: str) -> Outcome:
        asked = read_action(action)
        if asked is None:
            return Outcome(observation=HELP, valid=False, info={"exposed": []})
        return {"search": self._search, "open": self._open, "answer": self._answer}[asked.name](asked.content)

    def _search(self, query: str) -> Outcome:
        query = clean_text(query[:QUERY_CHARACTERS]).strip()
        if not query:
            return Outcome(observation="The query is empty.", valid=False, info={"exposed": []})
        documents = self.retriever.search(query, self.top_k)
        self._found |= {document.id: document for document in documents}
        lines = [f"[{place}] {_headed(document, self._passage(document))}"
                 for place, document in enumerate(documents, start=1)]
        return Outcome(observation=_information("\n".join(lines) or "No document found."),
                       info={"exposed": [document.id for document in documents]})

    def _open(self, name: str) -> Outcome:
        document = self._found.get(name)
        if document is None:
            return Outcome(observation="No search found a document with this id.", valid=False, info={"exposed": []})
        self._opened.add(name)
        return Outcome(observation=_information(_headed(document, document.text)), info={"exposed": [name]})

    def _answer(self, content: str) -> Outcome:
        golds, answer = self.task.data["answers"], CITE_MARKUP.sub(" ", content)
        cited = list(dict.fromkeys(_id(match) for match in CITE.finditer(content)))
        right = exact_match(golds, answer)
        info = {"exposed": [], "cited": cited, "exact_match": right, "contains_match": contains_match(golds, answer),
                "f1": f1_score(golds, answer)}
        return Outcome(observation="Right." if right else "Wrong.", reward=right, terminated=True, success=right == 1.0,
                       info=info)

    def _passage(self, document: Document) -> str:
        """The beginning of a document, of whole words."""
        cut = document.text[:self.passage_characters]
        return cut if cut == document.text else f"{cut.rsplit(None, 1)[0]} ..."

    def state_key(self) -> str:
        return "|".join([self.task.key, *sorted(self._found), "opened", *sorted(self._opened)])

    def copy_state(self) -> tuple[dict[str, Document], set[str]]:
        return dict(self._found), set(self._opened)

    def load_state(self, state: tuple[dict[str, Document], set[str]]) -> None:
        found, opened = state
        self._found, self._opened = dict(found), set(opened)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        super().close()

    def gold(self, rng: np.random.Generator) -> list[str]:
        """Finds the documents of the evidence one after the other, opens those whose beginning does not say what is
        needed, and answers. Without an evidence graph it searches for the question. `rng` varies the queries."""
        evidence = self.task.data.get("evidence")
        responses, shown = self._follow(evidence, rng) if evidence else self._look_up()
        cites = "".join(f' <cite id="{name}"/>' for name in shown) if self.citations else ""
        responses.append(f"<answer>{self.task.data['answers'][0]}{cites}</answer>")
        if len(responses) > self.max_turns:
            raise LookupError(f"the solution takes {len(responses)} turns, max_turns is {self.max_turns}")
        return responses

    def _look_up(self) -> tuple[list[str], list[str]]:
        query, answers = without_markup(self.task.data["question"][:QUERY_CHARACTERS]), self.task.data["answers"]
        documents = self.retriever.search(query, self.top_k)
        return [f"<search>{query}</search>"], [d.id for d in documents if contains_match(answers, d.text)]

    def _follow(self, evidence: dict[str, Any], rng: np.random.Generator) -> tuple[list[str], list[str]]:
        names = {entity["id"]: entity["aliases"] for entity in evidence["entities"]}
        found: dict[str, Document] = {}
        responses, opened = [], set()
        for relation in evidence["relations"]:
            wanted = relation["documents"][0]
            if wanted not in found:
                query, documents = self._find(wanted, _queries(evidence, names, relation, rng))
                responses.append(f"<search>{query}</search>")
                found |= {document.id: document for document in documents}
            told = contains_match(names[relation["tail"]], self._passage(found[wanted]))
            if not told and wanted not in opened:
                responses.append(f'<open id="{wanted}"/>')
                opened.add(wanted)
        return responses, list(dict.fromkeys(relation["documents"][0] for relation in evidence["relations"]))

    def _find(self, wanted: str, queries: Sequence[str]) -> tuple[str, list[Document]]:
        """The first of the queries that finds a document, and what it finds."""
        for query in queries:
            documents = self.retriever.search(query, self.top_k)
            if any(document.id == wanted for document in documents):
                return query, documents
        raise LookupError(f"none of the queries {', '.join(queries)} finds the document {wanted!r}")

    def random_action(self, rng: np.random.Generator) -> str:
        words = self.task.data["question"].split()
        name = pick(rng, ["search", "open", "answer"] if self._found else ["search", "answer"])
        if name == "open":
            return f'<open id="{pick(rng, sorted(self._found))}"/>'
        return f"<{name}>{without_markup(f'{pick(rng, words)} {pick(rng, words)}')}</{name}>"


def _resolved(path: str | None) -> str | None:
    """One name for one place, so that it is indexed once."""
    return str(Path(path).expanduser().resolve()) if path is not None else None


def _queries(evidence: dict[str, Any], names: dict[str, list[str]], wanted: dict[str, Any],
             rng: np.random.Generator) -> list[str]:
    """What to search for when the fact `wanted` is next: the name of its head, perhaps with what is asked, in any
    order; then, since other things may have that name, the head with what it is related to."""
    head = wanted["head"]
    name = names[head][0]
    related = [f"{name} {relation['relation']} {names[relation['head' if relation['tail'] == head else 'tail']][0]}"
               for relation in evidence["relations"] if head in (relation["head"], relation["tail"])]
    queries = [name, f"{name} {wanted['relation']}"]
    return [*rng.permutation(queries).tolist(), *related]


def read_action(response: str) -> Action | None:
    """The last action of a response outside its thinking; None without one. An `<open .../>` inside another action is
    part of that one's text."""
    visible = hide_thinking(response)
    block = last_block(visible, ("search", "answer"))
    *_, last = [None, *OPEN.finditer(visible, block.end() if block else 0)]
    if last is not None:
        return Action("open", _id(last), *last.span())
    return Action(block[1], block[2], *block.span()) if block else None


def _id(match: re.Match) -> str:
    """The id in a match of OPEN or CITE, however it is quoted."""
    return next(group for group in match.groups() if group is not None)


def _headed(document: Document, text: str) -> str:
    return f'id="{document.id}" {without_markup(document.title)}: {without_markup(text)}'


def _information(text: str) -> str:
    return f"<information>\n{text}\n</information>"
