"""Questions over the facts: chains of one to four relations and comparisons, each with its evidence graph.

Question i of a split is the same for everybody. Who a question begins with decides its split, by hash, so that no
airport, city, element, ... that a held-out or test question names begins or is compared in a training question.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envs.randomness import pick, stable_generator
from envs.search.facts import RELATIONS, Entity, facts
from rewards.text import contains_match

TRAINING_SIZE = 100_000
PANEL_SIZES = {"heldout": 1_024, "test": 256}
SPLIT_OF_TENTH = ("test", "heldout", *["train"] * 8)
FAMILIES = ("1 hop", "2 hops", "3 hops", "4 hops", "comparison", "bridge comparison")
KINDS = ("airport",) * 8 + ("city",) * 6 + ("subdivision",) * 3 + ("country",) * 3 + ("element",) * 2 + (
    "currency", "language")
"""What a chain begins with, as often as it stands here."""
COMPARISONS = {
    ("airport", "elevation"): ("lies higher", "lies highest", "lies lower", "lies lowest"),
    ("city", "population"): ("has more inhabitants", "has the most inhabitants", "has fewer inhabitants",
                             "has the fewest inhabitants"),
    ("country", "population"): ("has more inhabitants", "has the most inhabitants", "has fewer inhabitants",
                                "has the fewest inhabitants"),
    ("country", "area"): ("is larger by area", "is the largest by area", "is smaller by area",
                          "is the smallest by area"),
    ("element", "density"): ("is denser", "is the densest", "is less dense", "is the least dense"),
}
BRIDGE_KINDS = ("airport", "city", "subdivision")
BRIDGES = {
    "population": ("has more inhabitants", "has fewer inhabitants"),
    "area": ("is larger by area", "is smaller by area"),
}
GAP = 1.1
"""The answer of a comparison differs from the next one by this factor, whatever the year of the figures."""
FORMS = ("What is {}?", "Tell me {}.", "Please find out: what is {}?", "I need to know {}.")
TRIES = 1_000


@dataclass(frozen=True)
class Question:
    """One question with a unique answer."""

    key: str
    """The entities and relations; it alone decides the rest."""
    family: str
    text: str
    answers: list[str]
    """The answer and other ways to write it."""
    evidence: dict[str, Any]
    """Plain JSON: see `_evidence`."""


class _Graph:
    """Collects an evidence graph: entity units E0, E1, ... and relation units U1, U2, ..."""

    def __init__(self):
        self.entities: dict[tuple, dict[str, Any]] = {}
        self.relations: list[dict[str, Any]] = []

    def add(self, head: Entity, relation: str) -> Entity | tuple[str, ...]:
        """Note the fact and return its tail, an entity or the ways to write a value."""
        linked = relation in head.links
        tail = facts().entities[head.links[relation]] if linked else head.values[relation]
        own = [tail.id] if linked else []
        documents = [head.id, *(own if RELATIONS[relation].stated_by_tail else [])]
        units = [self._unit((head.id,), _writings(head), documents),
                 self._unit((tail.id,) if linked else (head.id, relation), _writings(tail), own + documents)]
        self.relations.append({"id": f"U{len(self.relations) + 1}", "head": units[0]["id"], "relation": relation,
                               "tail": units[1]["id"], "cues": list(RELATIONS[relation].cues),
                               "documents": documents})
        return tail

    def _unit(self, key: tuple, aliases: list[str], documents: list[str]) -> dict[str, Any]:
        new = {"id": f"E{len(self.entities)}", "aliases": aliases, "documents": []}
        unit = self.entities.setdefault(key, new)
        unit["documents"] = list(dict.fromkeys([*unit["documents"], *documents]))
        return unit

    def evidence(self) -> dict[str, Any]:
        """`entities`: `id`, `aliases` (the first is the usual name), `documents` that name it. `relations`, in the
        order in which they are needed: `id`, `head` and `tail` (entity ids), `relation`, `cues` (words of which a
        supporting document holds one), `documents` that state it; the first of them is the head's own."""
        return {"entities": list(self.entities.values()), "relations": self.relations}


def _writings(thing: Entity | tuple[str, ...]) -> list[str]:
    return [thing.name, *thing.aliases] if isinstance(thing, Entity) else list(thing)


@functools.lru_cache(maxsize=1)
def _beginnings() -> dict[tuple[str, str], list[Entity]]:
    """(split, kind) -> entities that a question may name: those whose name is theirs alone."""
    found: dict[tuple[str, str], list[Entity]] = {}
    for entity in facts().entities.values():
        if entity.id in facts().unique and (entity.links or entity.values):
            tenth = hashlib.sha256(entity.id.encode()).digest()[0] * 10 // 256
            found.setdefault((SPLIT_OF_TENTH[tenth], entity.kind), []).append(entity)
    return found


def draw(split: str, index: int, families: Sequence[str] = FAMILIES) -> Question:
    """Question `index` of the endless row of a split's questions of these families."""
    rng = stable_generator(f"{split} {index}")
    family = pick(rng, families)
    for _ in range(TRIES):
        if family == "comparison":
            question = _comparison(rng, split)
        elif family == "bridge comparison":
            question = _bridge(rng, split)
        else:
            question = _chain(rng, split, int(family[0]))
        if question is not None:
            return question
    raise RuntimeError(f"no question of {family} in {TRIES} draws for {split} {index}")


def training_question(index: int, families: Sequence[str] = FAMILIES) -> Question:
    """Question `index` of the training set of these families."""
    return draw("train", index, families)


@functools.lru_cache(maxsize=2)
def panel(split: str) -> list[Question]:
    """The questions of `heldout` or `test`, all different."""
    questions: dict[str, Question] = {}
    index = 0
    while len(questions) < PANEL_SIZES[split]:
        question = draw(split, index)
        questions.setdefault(question.key, question)
        index += 1
    return list(questions.values())


def _chain(rng, split: str, hops: int) -> Question | None:
    """A walk from a named entity over `hops` relations; None where it ends too soon or its answer is given away."""
    entity = pick(rng, _beginnings()[split, pick(rng, KINDS)])
    path, phrase, graph, seen = [entity.id], entity.mention, _Graph(), {entity.id}
    for hop in range(hops):
        relations = [relation for relation, tail in entity.links.items() if tail not in seen]
        if hop == hops - 1:
            relations += entity.values
        if not relations:
            return None
        relation = pick(rng, relations)
        tail = graph.add(entity, relation)
        path.append(relation)
        phrase = RELATIONS[relation].phrase.format(phrase)
        if hop < hops - 1:
            entity = tail
            seen.add(entity.id)
    text = pick(stable_generator(" > ".join(path)), FORMS).format(phrase)
    return _checked(" > ".join(path), f"{hops} hop{'s' * (hops > 1)}", text, _writings(tail), graph)


def _comparison(rng, split: str) -> Question | None:
    """Which of two to four things has the most (or least) of something."""
    kind, relation = pick(rng, list(COMPARISONS))
    things = _several(rng, [e for e in _beginnings()[split, kind] if relation in e.numbers], 2 + int(rng.random() * 3))
    place = 2 * int(rng.random() * 2) + (len(things) > 2)
    best = _best([(thing.numbers[relation], thing) for thing in things], most=place < 2)
    graph = _Graph()
    for thing in things:
        graph.add(thing, relation)
    asked = COMPARISONS[kind, relation][place]
    return best and _choice(f"which {kind} {asked}", "comparison", f"Which {kind} {asked}:", things, best, graph)


def _bridge(rng, split: str) -> Question | None:
    """Which of two things lies in the country that has more (or less) of something."""
    kind, relation = pick(rng, BRIDGE_KINDS), pick(rng, list(BRIDGES))
    things = _several(rng, _beginnings()[split, kind], 2)
    place = int(rng.random() * 2)
    countries = [facts().entities[thing.links["country"]] for thing in things]
    if countries[0] is countries[1] or any(relation not in country.numbers for country in countries):
        return None
    best = _best([(country.numbers[relation], thing) for country, thing in zip(countries, things)], most=place == 0)
    graph = _Graph()
    for thing in things:
        graph.add(graph.add(thing, "country"), relation)
    asked = f"which {kind} lies in the country that {BRIDGES[relation][place]}"
    return best and _choice(asked, "bridge comparison", f"{asked.capitalize()}:", things, best, graph)


def _several(rng, things: Sequence[Entity], count: int) -> list[Entity]:
    """Different things in the order of their ids, so that one choice has one key."""
    chosen: dict[str, Entity] = {}
    while len(chosen) < count:
        thing = pick(rng, things)
        chosen[thing.id] = thing
    return [chosen[name] for name in sorted(chosen)]


def _best(things: list[tuple[float, Entity]], most: bool) -> Entity | None:
    """The thing with the largest (or smallest) number; None where the next one is too close."""
    (first, best), (second, _) = sorted(things, key=lambda pair: pair[0], reverse=most)[:2]
    return best if max(first, second) >= GAP * min(first, second) else None


def _choice(asked: str, family: str, beginning: str, things: list[Entity], best: Entity, graph: _Graph) -> Question:
    key = f"{asked}: {', '.join(thing.id for thing in things)}"
    rng = stable_generator(key)
    *most, last = (thing.name for thing in sorted(things, key=lambda _: rng.random()))
    return Question(key, family, f"{beginning} {', '.join(most)} or {last}?", _writings(best), graph.evidence())


def _checked(key: str, family: str, text: str, answers: list[str], graph: _Graph) -> Question | None:
    """The question, unless its own text holds the answer."""
    return None if contains_match(answers, text) else Question(key, family, text, answers, graph.evidence())
