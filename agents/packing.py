"""Sequences laid out in rows without padding, what several of them begin with stored and read once.

Example: the sequences P0 P1 A0, P0 P1 B0 B1 and C0 C1 in a row of 8, and what each token sees.

    ids        P0 P1 A0 B0 B1 C0 C1  .
    positions   0  1  2  2  3  0  1  0
    A0 sees     x  x  x
    B1 sees     x  x     x  x
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class Rows:
    """Sequences laid out in rows of one width."""

    token_ids: torch.Tensor
    """# int64 [rows, width]"""
    positions: torch.Tensor
    """Of each token in its sequence; 0 in the filler behind the last one. # int64 [rows, width]"""
    places: np.ndarray
    """Where token i of the concatenated sequences stands in the flattened rows. # int64 [tokens]"""
    visible: torch.Tensor | None = None
    """What each token sees, where sequences share tokens. None: its own sequence up to itself, which `positions`
    tell, since they restart at 0 at each. # bool [rows, queries, keys]"""


def pack_rows(sequences: Sequence[np.ndarray], width: int, *, share: bool) -> Rows:
    """Lay sequences into rows of at most `width` tokens (or the longest one), each where it fits tightest.

    `share`: those of a row that begin alike share these tokens.
    """
    limit = max(width, max(len(s) for s in sequences))
    chains = _chains(sequences, limit) if share else [[(i, 0)] for i in range(len(sequences))]
    sizes = np.array([sum(len(sequences[i]) - shared for i, shared in chain) for chain in chains])
    used: list[int] = []
    starts: list[tuple[int, int]] = [(0, 0)] * len(chains)
    for chain in np.argsort(-sizes, kind="stable"):
        fitting = [row for row, length in enumerate(used) if length + sizes[chain] <= limit]
        row = max(fitting, key=used.__getitem__, default=len(used))
        if row == len(used):
            used.append(0)
        starts[chain] = row, used[row]
        used[row] += int(sizes[chain])
    width = max(used)
    token_ids, positions = np.zeros((len(used), width), np.int64), np.zeros((len(used), width), np.int64)
    columns: list[np.ndarray] = [np.zeros(0, np.int64)] * len(sequences)
    row_of = np.zeros(len(sequences), np.int64)
    for chain, (row, column) in zip(chains, starts):
        before = np.zeros(0, np.int64)
        for i, shared in chain:
            new = len(sequences[i]) - shared
            row_of[i], columns[i] = row, np.concatenate([before[:shared], np.arange(column, column + new)])
            token_ids[row, columns[i]], positions[row, columns[i]] = sequences[i], np.arange(len(sequences[i]))
            before, column = columns[i], column + new
    places = np.concatenate([row * width + at for row, at in zip(row_of, columns)])
    visible = None
    if any(shared for chain in chains for _, shared in chain):
        visible = np.zeros((len(used), width, width), bool)
        visible[:, np.arange(width), np.arange(width)] = True  # filler sees itself: a softmax over nothing is NaN
        for row, at in zip(row_of, columns):
            visible[row, at[:, None], at] = np.tri(len(at), dtype=bool)
        visible = torch.from_numpy(visible)
    return Rows(torch.from_numpy(token_ids), torch.from_numpy(positions), places, visible)


def _chains(sequences: Sequence[np.ndarray], limit: int) -> list[list[tuple[int, int]]]:
    """Sequences in alphabetical order, cut where one shares nothing with that before it or `limit` tokens are full;
    each with the number of tokens that it shares with that before it, with no other of its chain more."""
    chains: list[list[tuple[int, int]]] = []
    before, size = np.zeros(0, np.int64), 0
    for i in sorted(range(len(sequences)), key=lambda i: sequences[i].astype(">i8").tobytes()):
        both = min(len(before), len(sequences[i]))
        differing = np.flatnonzero(before[:both] != sequences[i][:both])
        shared = int(differing[0]) if len(differing) else both
        before = sequences[i]
        if shared and size + len(before) - shared <= limit:
            chains[-1].append((i, shared))
            size += len(before) - shared
        else:
            chains.append([(i, 0)])
            size = len(before)
    return chains


def token_parts(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Consecutive indices in parts of at most `max_tokens` tokens (or of one item longer than that)."""
    part: list[int] = []
    total = 0
    for i, length in enumerate(lengths):
        if part and total + length > max_tokens:
            yield part
            part, total = [], 0
        part.append(i)
        total += length
    if part:
        yield part
