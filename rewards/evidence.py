"""Which documents support which part of an answer, and which step brought them, verified against a reference.

A question's evidence graph is plain JSON. Its units are the entities and the relations; `documents` are those known to
support a unit, and may be left out:

    {"entities": [{"id": "E0", "aliases": ["Peru"], "documents": ["country/PE"]}, ...],
     "relations": [{"head": "E0", "relation": "capital", "tail": "E1", "cues": ["capital"], "documents": [...]}, ...]}
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import numpy as np

# A number with its separators is one word, so that 234 is not found in 1,234; scripts without spaces go by character.
WORD = re.compile(r"\d+(?:[.,]\d+)*|[\u3040-\u30ff\u3400-\u9fff]|(?:(?![\u3040-\u30ff\u3400-\u9fff])\w)+")
TRACKING = re.compile(r"utm_\w+|gclid|dclid|fbclid|msclkid|yclid|igshid|mc_[ce]id|_ga|ref_src", re.IGNORECASE)
PASSAGE = re.compile(r"\n\s*\n")
DEFAULT_PORTS = {"http": ":80", "https": ":443"}


@lru_cache(maxsize=65536)
def canonical_id(name: str) -> str:
    """One writing of a document's name: URLs with lower-case scheme and host, without fragment, tracking parameters,
    default port and trailing slash, their query sorted; any other name as it is, without blanks around it."""
    name = name.strip()
    try:
        url = urlsplit(name)
    except ValueError:  # a damaged URL is a name like any other
        return name
    if not (url.scheme and url.netloc):
        return name
    query = sorted(pair for pair in parse_qsl(url.query, keep_blank_values=True) if not TRACKING.fullmatch(pair[0]))
    host = url.netloc.lower().removesuffix(DEFAULT_PORTS.get(url.scheme, ":"))
    return urlunsplit((url.scheme, host, url.path.rstrip("/"), urlencode(query), ""))


def mentions(text: str, names: Iterable[str]) -> bool:
    """Whether the words of one of the names stand in a row in `text`, whatever their case, accents and punctuation;
    a name's leading "the" does not matter."""
    spoken = _spoken(text)
    return any(name in spoken for name in _names(names))


def supporting_documents(evidence: Mapping[str, Any], documents: Mapping[str, str]) -> list[set[str]]:
    """K_u of each unit, entities first: those of `documents` (canonical id to text, empty where unknown) that
    support it.

    An entity is supported where one of its aliases is mentioned; a relation where aliases of head and tail, and one of
    its cues if it has any, are mentioned in one passage (between blank lines). A document that the unit names as its
    own supports it whatever its text. Raises ValueError for a relation between entities that the graph lacks.
    """
    entities, relations = evidence.get("entities", ()), evidence.get("relations", ())
    aliases = {entity["id"]: entity["aliases"] for entity in entities}
    needed = [[entity["aliases"]] for entity in entities]
    for relation in relations:
        if unknown := {relation["head"], relation["tail"]} - aliases.keys():
            raise ValueError(f"relation {relation.get('relation')!r} of an evidence graph is between entities that the "
                             f"graph lacks: {sorted(unknown)}")
        names = [aliases[relation["head"]], aliases[relation["tail"]]]
        needed.append([*names, relation["cues"]] if relation.get("cues") else names)
    known = [{canonical_id(name) for name in unit.get("documents", ())} for unit in (*entities, *relations)]
    sought = [[_names(names) for names in together] for together in needed]
    passages = {name: [_spoken(passage) for passage in PASSAGE.split(text)] for name, text in documents.items()}
    return [{name for name, spoken in passages.items()
             if name in own or any(all(any(alias in passage for alias in names) for names in together)
                                   for passage in spoken)}
            for own, together in zip(known, sought)]


def document_credit(support: Iterable[set[str]], unit_credit: float) -> dict[str, float]:
    """Each unit's credit in equal parts to the documents that support it, summed per document."""
    credit: dict[str, float] = {}
    for documents in support:
        for name in documents:
            credit[name] = credit.get(name, 0.0) + unit_credit / len(documents)
    return credit


def first_exposures(exposed: Sequence[Iterable[str]]) -> dict[str, int]:
    """The step that first showed each document, from the canonical ids that each step showed."""
    first: dict[str, int] = {}
    for step, names in enumerate(exposed):
        for name in names:
            first.setdefault(name, step)
    return first


def shown_documents(exposed: Sequence[Iterable[str] | Mapping[str, str]]) -> list[dict[str, str]]:
    """What each step showed, ids alone or ids with texts, as canonical id to text."""
    return [{canonical_id(name): names[name] if isinstance(names, Mapping) else "" for name in names}
            for names in exposed]


def cited_support(evidence: Mapping[str, Any], shown: Sequence[Mapping[str, str]], cited: Iterable[str]
                  ) -> list[set[str]]:
    """K_u of each unit among the cited documents. One that no step showed is dropped. What several steps showed of a
    document counts together."""
    texts: dict[str, dict[str, None]] = {}  # the different ones of each document
    wanted = {canonical_id(name) for name in cited}
    for documents in shown:
        for name in documents.keys() & wanted:
            texts.setdefault(name, {})[documents[name]] = None
    return supporting_documents(evidence, {name: "\n\n".join(different) for name, different in texts.items()})


def step_credit(support: Sequence[set[str]], shown: Sequence[Iterable[str]], *, unit_credit: float,
                cap: float) -> np.ndarray:
    """c_t = min(cap, the credit of all documents that step t was the first to show). # float64 [steps]"""
    first, result = first_exposures(shown), np.zeros(len(shown))
    for name, credit in sorted(document_credit(support, unit_credit).items()):
        result[first[name]] += credit
    return np.minimum(result, cap)


def _names(names: Iterable[str]) -> list[str]:
    """Each name as it is looked for in what `_spoken` gives; those without a word are left out."""
    spoken = [_spoken(name) for name in names]
    return [" " + name.removeprefix(" the ") if name.startswith(" the ") and name != " the " else name
            for name in spoken if name.strip()]


def _spoken(text: str) -> str:
    """The words alone, in lower case and without accents, a blank before and after each."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))
    return f" {' '.join(word.replace(',', '') for word in WORD.findall(plain))} "
