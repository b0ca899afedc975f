"""Countdown's problems: expressions over given numbers, and a generator whose item i is the same for everybody."""

import hashlib
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from envs.randomness import Generator, pick, stable_generator

MAX_DRAWS = 50_000
"""Draws without a new problem after which the limits are taken to hold no other."""


class Expression(NamedTuple):
    """A value and one way to write it."""

    value: Fraction
    text: str
    binding: int
    """How tightly its outermost operator binds: 0 a sum or difference, 1 a product or quotient, 2 a number."""


def number(n: int) -> Expression:
    """A number by itself."""
    return Expression(Fraction(n), str(n), 2)


def combine(left: Expression, sign: str, right: Expression) -> Expression | None:
    """`left sign right`, with no parentheses beyond the needed ones. None for a division by zero."""
    if sign == "+":
        value, binding = left.value + right.value, 0
    elif sign == "-":
        value, binding = left.value - right.value, 0
    elif sign == "*":
        value, binding = left.value * right.value, 1
    elif right.value:
        value, binding = left.value / right.value, 1
    else:
        return None
    left_text = f"({left.text})" if left.binding < binding else left.text
    bare = right.binding > binding or (right.binding == binding and sign in "+*")
    return Expression(value, f"{left_text}{sign}{right.text if bare else f'({right.text})'}", binding)


def random_expression(rng: Generator, numbers: Sequence[int]) -> Expression:
    """An expression that uses every number once."""
    parts = [number(n) for n in numbers]
    while len(parts) > 1:
        left = parts.pop(int(rng.random() * len(parts)))
        right = parts.pop(int(rng.random() * len(parts)))
        parts.append(combine(left, pick(rng, "+-*/"), right) or combine(left, "+", right))
    return parts[0]


@dataclass(frozen=True)
class Problem:
    """Reach `target` with all of `numbers`, which are sorted."""

    numbers: tuple[int, ...]
    target: int

    @property
    def key(self) -> str:
        """Its stable name: the target and the sorted numbers."""
        return f"{self.target}:{','.join(map(str, self.numbers))}"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the problems may hold. Every bound is included."""

    min_numbers: int = 3
    max_numbers: int = 4
    """At most 6."""
    largest_number: int = 99
    smallest_target: int = 10
    largest_target: int = 99

    def __post_init__(self):
        if not 2 <= self.min_numbers <= self.max_numbers <= 6:
            raise ValueError("2 <= min_numbers <= max_numbers <= 6 must hold, got "
                             f"min_numbers={self.min_numbers}, max_numbers={self.max_numbers}")
        if self.largest_number < 1:
            raise ValueError(f"largest_number must be at least 1, got {self.largest_number}")
        if self.smallest_target > self.largest_target:
            raise ValueError("smallest_target must not be above largest_target, got "
                             f"{self.smallest_target} and {self.largest_target}")

    def allow(self, value: Fraction) -> bool:
        """Whether `value` can be a target."""
        return value.denominator == 1 and self.smallest_target <= value <= self.largest_target


def split_of(problem: Problem) -> str:
    """The split that a problem belongs to, whatever the limits: half of all are `train`, one of sixteen `test`."""
    sixteenth = hashlib.sha256(problem.key.encode()).digest()[0] % 16
    return "train" if sixteenth < 8 else "test" if sixteenth == 8 else "heldout"


def new_problem(rng: random.Random, limits: Limits, split: str, taken: Collection[Problem] = ()) -> Problem:
    """The next solvable problem of `rng` that belongs to `split` and is not among `taken`."""
    for _ in range(MAX_DRAWS):
        count = limits.min_numbers + int(rng.random() * (limits.max_numbers - limits.min_numbers + 1))
        numbers = [1 + int(rng.random() * limits.largest_number) for _ in range(count)]
        value = random_expression(rng, numbers).value
        if limits.allow(value):
            problem = Problem(tuple(sorted(numbers)), int(value))
            if problem not in taken and split_of(problem) == split:
                return problem
    raise ValueError(f"no problem of split {split!r} left beside {len(taken)} others within {limits}: raise "
                     "largest_number or max_numbers, or widen the targets")


@lru_cache(maxsize=8)
def reserved_problems(limits: Limits, split: str, size: int) -> tuple[Problem, ...]:
    """The first `size` problems of `heldout` or `test`, in order."""
    rng = stable_generator(split)
    problems: dict[Problem, None] = {}
    for _ in range(size):
        problems[new_problem(rng, limits, split, problems.keys())] = None
    return tuple(problems)


def training_problem(limits: Limits, index: int) -> Problem:
    """Training problem `index`, whatever the order in which they are asked for."""
    return new_problem(stable_generator(f"train {index}"), limits, "train")
