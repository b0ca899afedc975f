"""An exact solver for Countdown: the sets of a few numbers are tabulated, larger ones searched back from the target."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import combinations

from envs.countdown_problems import Expression, combine, number

TABULATED = 3
"""Largest set of numbers of which all values are tabulated."""

Numbers = tuple[int, ...]


def solve(numbers: Sequence[int], target: int) -> str | None:
    """An expression of all the numbers, each used once, that equals the target; None where there is none.

    Exact and deterministic; another order of the same numbers may give another solution. Made for up to 6 numbers.
    """
    if not numbers:
        raise ValueError("there are no numbers to solve with")

    @cache
    def table(numbers: Numbers) -> dict[Fraction, Expression]:
        if len(numbers) == 1:
            return {Fraction(numbers[0]): number(numbers[0])}
        values: dict[Fraction, Expression] = {}
        for some, others in _splits(numbers):
            for a in table(some).values():
                for b in table(others).values():
                    made = [combine(a, "+", b), combine(a, "*", b), combine(a, "-", b), combine(b, "-", a),
                            combine(a, "/", b), combine(b, "/", a)]
                    for expression in filter(None, made):
                        values.setdefault(expression.value, expression)
        return values

    @cache
    def reach(numbers: Numbers, goal: Fraction) -> Expression | None:
        if len(numbers) <= TABULATED:
            return table(numbers).get(goal)
        for some, others in _splits(numbers):
            for a in table(some).values():
                for sign, a_is_left, wanted in _partners(a.value, goal):
                    b = reach(others, wanted)
                    if b is not None:
                        return combine(a, sign, b) if a_is_left else combine(b, sign, a)
        return None

    found = reach(tuple(numbers), Fraction(target))
    if found is not None:
        return found.text
    # Differences give both signs of a value, but -3-8 from 3 and 8 needs the unary minus.
    opposite = reach(tuple(numbers), Fraction(-target)) if target < 0 else None
    return f"-({opposite.text})" if opposite is not None else None


def _splits(numbers: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """Every way to part the numbers in two, the smaller part first; equal parts once."""
    seen = set()
    for size in range(1, len(numbers) // 2 + 1):
        for chosen in combinations(range(len(numbers)), size):
            some = tuple(numbers[i] for i in chosen)
            others = tuple(n for i, n in enumerate(numbers) if i not in chosen)
            if (some, others) not in seen:
                seen |= {(some, others), (others, some)}
                yield some, others


def _partners(a: Fraction, goal: Fraction) -> list[tuple[str, bool, Fraction]]:
    """Sign, whether `a` is on the left, and the value that makes the goal together with `a`."""
    partners = [("+", True, goal - a), ("-", True, a - goal), ("-", False, goal + a)]
    if a:
        partners += [("*", True, goal / a), ("/", False, goal * a)]
        if goal:
            partners.append(("/", True, a / goal))
    return partners
