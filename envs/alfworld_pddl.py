"""The part of PDDL that ALFWorld's games are written in: facts, and a goal that holds or not."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count

Fact = tuple[str, ...]
"""The arguments of a predicate."""
Facts = Mapping[str, frozenset[Fact]]
"""Predicate -> what it holds for. All names are in lower case, as PDDL does not tell cases apart."""


@dataclass(frozen=True)
class Conjunction:
    """There are values of its variables (names with `?`) for which all atoms hold and all pairs differ."""

    atoms: tuple[Fact, ...]
    """Each with its predicate in front."""
    unequal: tuple[tuple[str, str], ...]

    def holds(self, lookup: Callable[[str], frozenset[Fact]]) -> bool:
        """`lookup` gives what is true of a predicate."""
        return (all(lookup(atom[0]) for atom in self.atoms)
                and _solvable(list(self.atoms), self.unequal, lookup, {}))


def read_problem(text: str) -> tuple[Facts, tuple[Conjunction, ...]]:
    """The facts at the start, and the conjunctions that are the goal.

    Raises ValueError for text that is no PDDL problem or whose goal uses more than and, exists, = and not.
    """
    facts: dict[str, set[Fact]] = {}
    goal = None
    for section in parse(text)[1:]:
        if section[0] == ":init":
            for fact in section[1:]:
                if fact[0] != "=":  # distances and costs
                    facts.setdefault(fact[0], set()).add(tuple(fact[1:]))
        elif section[0] == ":goal":
            goal = read_goal(section[1])
    if not facts or goal is None:
        raise ValueError("no (:init ...) or no (:goal ...)")
    return {name: frozenset(rows) for name, rows in facts.items()}, goal


def read_goal(expression: list) -> tuple[Conjunction, ...]:
    """A goal as `parse` gives it: `(and part ...)` or one part, each without free variables. Raises ValueError."""
    parts = expression[1:] if expression[0] == "and" else [expression]
    conjunctions = []
    for part in parts:
        atoms, unequal = [], []
        _flatten(part, {}, count(), atoms, unequal)
        conjunctions.append(Conjunction(tuple(atoms), tuple(unequal)))
    return tuple(conjunctions)


def parse(text: str) -> list:
    """The first expression of the text, comments left out, as nested lists of words in lower case.

    Raises ValueError where parentheses do not match.
    """
    tokens = re.finditer(r"[()]|[^\s()]+", re.sub(r";.*", "", text.lower()))
    stack: list[list] = [[]]
    for token in tokens:
        if token[0] == "(":
            stack.append([])
        elif token[0] == ")":
            if len(stack) < 2:
                raise ValueError("a ')' without its '('")
            closed = stack.pop()
            stack[-1].append(closed)
            if len(stack) == 1:
                return closed
        else:
            stack[-1].append(token[0])
    raise ValueError("no expression, or a '(' without its ')'")


def _flatten(part: list, names: dict[str, str], fresh: Iterator[int], atoms: list, unequal: list) -> None:
    """Add a part's atoms and inequalities; quantified variables get names of their own, so that scopes may nest."""
    def rename(words: list[str]) -> tuple[str, ...]:
        return tuple(names.get(word, word) for word in words)

    if part[0] == "and":
        for inner in part[1:]:
            _flatten(inner, names, fresh, atoms, unequal)
    elif part[0] == "exists":
        variables = [word for word in part[1] if word.startswith("?")]
        _flatten(part[2], names | {name: f"{name}{next(fresh)}" for name in variables}, fresh, atoms, unequal)
    elif part[0] == "not" and part[1][0] == "=":
        unequal.append(rename(part[1][1:]))
    elif part[0] in ("not", "or", "forall", "imply", "when", "="):
        raise ValueError(f"the goal holds ({part[0]} ...): only and, exists and (not (= ...)) are read here")
    else:
        atoms.append((part[0], *rename(part[1:])))


def _solvable(atoms: list[Fact], unequal: tuple, lookup: Callable, bound: dict[str, str]) -> bool:
    if not atoms:
        return all(bound.get(one, one) != bound.get(other, other) for one, other in unequal)

    def cost(atom: Fact) -> tuple[int, int]:
        return sum(word[0] == "?" and word not in bound for word in atom), len(lookup(atom[0]))
    first = min(atoms, key=cost)
    rest = [atom for atom in atoms if atom is not first]
    known = [(place, bound.get(word, word)) for place, word in enumerate(first[1:])
             if word[0] != "?" or word in bound]
    for fact in lookup(first[0]):
        if all(fact[place] == value for place, value in known):
            values = bound | {word: value for word, value in zip(first[1:], fact) if word[0] == "?"}
            if _solvable(rest, unequal, lookup, values):
                return True
    return False
