"""A key-value cache of rows ("slots") that grow independently: each holds one episode, at its own length.

Transformers' own caches give every row the same length, so finished sequences pad the batch and a new turn prefills its
whole history again. Here a forward pass names a contiguous block of rows and a position for every token, and rows are
swapped to keep the running ones together, so that attention reads a view and copies nothing.
"""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH = 64
"""Lengths are multiples of this, so that growing is rare."""


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer. # [slots, heads, length, head_dim]"""

    def __init__(self, owner: "SlotCache"):
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        def empty(states):
            return states.new_zeros(self.owner.slots, states.shape[1], self.owner.capacity, states.shape[3])
        self.keys, self.values, self.is_initialized = empty(key_states), empty(value_states), True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Write the block's new states at their positions; return the block's keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.shape[2] < self.owner.capacity:
            self.keys, self.values = (_lengthened(x, self.owner.capacity) for x in (self.keys, self.values))
        first, rows, length = self.owner.first, key_states.shape[0], self.owner.length
        index = torch.arange(rows, device=key_states.device)[:, None], self.owner.positions
        result = []
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            block = store[first:first + rows]
            block.transpose(1, 2)[index] = states.transpose(1, 2)
            result.append(block[:, :, :length])
        return tuple(result)

    def swap(self, a: int, b: int, length: int) -> None:
        if self.is_initialized:
            for store in (self.keys, self.values):
                one, other = store[a, :, :length], store[b, :, :length]
                kept = one.clone()  # copying slices is several times faster here than indexing both rows at once
                one.copy_(other)
                other.copy_(kept)

    def copy(self, source: int, target: int, length: int) -> None:
        for store in (self.keys, self.values):
            store[target, :, :length] = store[source, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """The cache of all layers. Before each forward pass `place` says which rows and positions it is about."""

    def __init__(self, layers: int, slots: int):
        self.slots, self.capacity = slots, 0
        self.first, self.length = 0, 0
        self.positions: torch.Tensor | None = None
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])

    def place(self, first: int, positions: torch.Tensor, length: int) -> None:
        """The next forward pass writes rows `first`, `first + 1`, ... at `positions`, all below `length`.
        # int64 [rows, tokens]"""
        self.first, self.positions, self.length = first, positions, length
        if self.length > self.capacity:
            self.capacity = max(-(-self.length // GROWTH) * GROWTH, min(2 * self.capacity, self.capacity + 512))

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange the first `length` positions of two rows."""
        if a != b and length:
            for layer in self.layers:
                layer.swap(a, b, length)

    def copy(self, source: int, target: int, length: int) -> None:
        """Give row `target` the first `length` positions of row `source`."""
        for layer in self.layers:
            layer.copy(source, target, length)

    def attention_mask(self, window: int | None = None) -> torch.Tensor:
        """Each query sees its row's positions up to its own, the last `window` of them if given.
        # bool [rows, 1, tokens, length]"""
        keys = torch.arange(self.length, device=self.positions.device)
        queries = self.positions[:, None, :, None]
        visible = keys <= queries
        return visible & (keys > queries - window) if window else visible


def _lengthened(store: torch.Tensor, length: int) -> torch.Tensor:
    longer = store.new_zeros(*store.shape[:2], length, store.shape[3])
    longer[:, :, :store.shape[2]] = store
    return longer
