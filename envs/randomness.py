"""Random choices that are the same on every machine and in every version of Python and numpy."""

import hashlib
import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Generator(Protocol):
    """`random.Random` and `numpy.random.Generator`: of both only `random()` is used, which never changes between
    versions."""

    def random(self) -> float: ...


def pick(rng: Generator, items: Sequence[T]) -> T:
    """One of `items`, each as likely as the others."""
    return items[int(rng.random() * len(items))]


def stable_generator(name: str) -> random.Random:
    """The same numbers for the same name."""
    return random.Random(int.from_bytes(hashlib.sha256(name.encode()).digest(), "big"))
