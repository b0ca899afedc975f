"""Splits of problems that come from files: which one a file belongs to, and every problem in one only."""

import hashlib
import re
from collections.abc import Mapping
from typing import TypeVar

NAMES = {"train": "train", "test": "test", "heldout": "heldout", "validation": "heldout", "valid": "heldout",
         "val": "heldout", "dev": "heldout"}
HELDOUT_SHARE = 10
"""One problem in this many is held out where the data has no such split."""

Row = TypeVar("Row")


def split_named(name: str) -> str:
    """The split that the name of a file (or of a hub's split) says, else `train`."""
    return next((NAMES[word] for word in re.split(r"[^a-z]+", name.lower()) if word in NAMES), "train")


def separate(splits: Mapping[str, Mapping[str, Row]]) -> dict[str, list[Row]]:
    """The rows of each split, each in one only: what is in `test` is in no other, what is in `heldout` not in `train`.

    A row's key is what names it. Without a `heldout` split, a tenth of the training rows, chosen by the hash of their
    keys, is held out.
    """
    separated: dict[str, list[Row]] = {}
    seen: set[str] = set()
    for split in sorted(splits, key=["test", "heldout", "train"].index):
        fresh = {key: row for key, row in splits[split].items() if key not in seen}
        if split == "train" and "heldout" not in splits:
            separated["heldout"] = [row for key, row in fresh.items() if _held_out(key)]
            fresh = {key: row for key, row in fresh.items() if not _held_out(key)}
        separated[split] = list(fresh.values())
        seen.update(fresh)
    return separated


def _held_out(key: str) -> bool:
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % HELDOUT_SHARE == 0
