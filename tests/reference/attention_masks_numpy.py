"""Attention under masks, query by query and key by key in float64, from the words of `AttentionMask` alone."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Mask:
    """An attention mask in NumPy arrays: `context_lengths` `[B, T]`, and a block as a word, bits or None."""

    context_lengths: Any
    block: Any = None
    segment_ids: Any = None
    counts: Any = None
    window: int | None = None
    shared_window: bool = False

    def bit(self, row: int, query: int, position: int) -> bool:
        return bool(int(self.block[row, query, position // 32]) >> (position % 32) & 1)

    def depth(self, row: int, query: int, size: int) -> int:
        """Position of a query, or of the block's key with its number, behind the context."""
        if self.block is None:
            return -1
        if isinstance(self.block, str):
            return query
        return sum(self.bit(row, query, position) for position in range(size)) - 1


def seen_keys(mask: Mask, row: int, query: int, queries: int, own: int | None) -> tuple[list[int], list[int]]:
    """Entries of the cache, and positions of a block of `own` keys of its own, that a query sees."""
    if mask.counts is not None and query >= mask.counts[row]:
        return [], []
    context = int(mask.context_lengths[row, query])
    size = queries if own is None else own
    words = 0 if mask.block is None or isinstance(mask.block, str) else 32 * mask.block.shape[2]
    here = 0 if mask.shared_window else mask.depth(row, query, words)

    def near(depth: int) -> bool:
        return mask.window is None or depth > here - mask.window

    cached = [entry for entry in range(context) if near(entry - context)]
    block = []
    for position in range(size):
        if mask.block is None:
            break
        if isinstance(mask.block, str):
            limit = query + 1 if mask.block == "causal" else size
            if own is None and mask.block == "full" and mask.counts is not None:
                limit = int(mask.counts[row])
            sees = position < limit
        else:
            sees = mask.bit(row, query, position)
        if mask.segment_ids is not None:
            sees = sees and mask.segment_ids[row, query] == mask.segment_ids[row, position]
        if sees and mask.window is not None and not mask.shared_window:
            sees = near(mask.depth(row, position, words))
        if sees:
            block.append(position)
    return (cached, block) if own is not None else (cached + [context + position for position in block], [])


def attend(q: Any, cache: Any, mask: Mask, own: Any = None) -> np.ndarray:
    """Attention `[B, T, N, D]` over a cache `[A, K, S, D]` of keys and values, which may be None, and over own keys."""
    rows, queries, heads, size = q.shape
    out = np.zeros(q.shape)
    for row, query, head in np.ndindex(rows, queries, heads):
        keys: list[Any] = []
        values: list[Any] = []
        cached, block = seen_keys(mask, row, query, queries, None if own is None else own[0].shape[2])
        for (k, v), at, number in (
            *([] if cache is None else [(cache, cached, row * cache[0].shape[0] // rows)]),
            *([] if own is None else [(own, block, row)]),
        ):
            group = heads // k.shape[1]
            keys += [k[number, head // group, place] for place in at]
            values += [v[number, head // group, place] for place in at]
        if keys:
            scores = np.asarray(keys, np.float64) @ np.asarray(q[row, query, head], np.float64) / np.sqrt(size)
            weights = np.exp(scores - scores.max())
            out[row, query, head] = weights @ np.asarray(values, np.float64) / weights.sum()
    return out
