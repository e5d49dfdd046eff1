"""Index of texts for drafting: finds where the last tokens of a row occurred, and the most frequent continuation.

The index has the information of a suffix automaton in arrays of fixed size. Positions of the texts are sorted by the tokens up
to them, read backwards. Positions whose last n tokens are equal are then neighbours, an *interval*, and the intervals are the
states of the automaton. A search finds the interval of the longest suffix of a row. What follows is stored for each interval:
the most frequent next token, then the most frequent one behind both, and so on, as in SuffixDecoding (arXiv 2411.04975). Such a
continuation stands in the texts, so that one position stores it.

`build` runs on the host, when a model is loaded. `find` runs on the device, `HostIndex` on the host; both return the same
drafts.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int, UInt8
from tokenizers import Tokenizer

from tilewright.models.records import RECORD_SUFFIXES, Record, read_jsonl, read_text, shortened
from tilewright.models.tokenizer import encode

DEPTH = 24
"""The longest suffix that is matched, in tokens. The default of vLLM's suffix decoding."""
SHORTEST = 2
"""The shortest suffix that is matched."""
MOST_DRAFTS = 32
"""The most tokens of a continuation."""
RAREST = 10
"""At least one in so many occurrences of a suffix continues with all drafts; a probability of 0.1, as in vLLM."""
FAN_OUT = 16
"""Parts into which a step of the search on the device divides the remaining positions."""
EIGHTHS = 8
"""Units of stored scores in a token."""
SEPARATOR = -1
"""Behind each text, in place of a token."""
OUTSIDE = -2
"""In place of tokens before a row's first one; equal to no token and to no separator."""
MOST_TOKENS = 1 << 22
"""The largest corpus, in tokens and separators."""
BYTES_PER_TOKEN = 15
ANSWERS = ("text", "completion", "response", "output", "answer")
"""Fields of a record with its text, in order of precedence, if it has no messages."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SuffixIndex:
    """Sorted positions of texts. All arrays have the same length, a power of two.

    Attributes:
        tokens: int32; `DEPTH` separators, then the texts, each followed by a separator, then separators.
        order: int32; positions in `tokens` with a next token, sorted by the tokens up to them, read backwards.
        shared: uint8; number of last tokens that a position has in common with the one before it in `order`, up to `DEPTH`.
        best: int32; for each interval of several positions, one of them that its most frequent continuation follows.
        drafts: uint8; number of tokens of this continuation.
        score: uint8; their expected number: the sum of the shares of the interval's positions that they follow, in eighths.
        size: int32 `[]`, number of entries of `order`.

    An interval `[low, high)` of `order` has its entries at `low`, unless the interval around it begins there, too; then at
    `high - 1`. No two intervals have the same place.
    """

    tokens: Any
    order: Any
    shared: Any
    best: Any
    drafts: Any
    score: Any
    size: Any


class Found(NamedTuple):
    """Drafts for each row.

    Attributes:
        drafts: int32 `[B, k]`, padded with zeros.
        number: int32 `[B]`, number of drafts, 0 if there are none.
        length: int32 `[B]`, number of last tokens that the drafts follow in a text; 0 without drafts.
    """

    drafts: Array
    number: Array
    length: Array


def documents_of(path: Path) -> list[str]:
    """Reads the texts of a corpus: a text file, or records with messages or a field of `ANSWERS`.

    Raises:
        ValueError: the file cannot be read, a record has no text, or there is no text at all.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    texts = [read_text(path)]
    if path.suffix.lower() in RECORD_SUFFIXES:
        records = enumerate(read_jsonl(path), 1)
        texts = [text for n, record in records for text in record_texts(record, f"{path}, record {n}")]
    if not any(text.strip() for text in texts):
        raise ValueError(f"expected text in {path}, found none")
    return texts


def record_texts(record: Record, where: str) -> list[str]:
    """Returns the texts of a record: the contents of its messages, or its answer."""
    messages = record.get("messages")
    if isinstance(messages, list):
        return [
            message["content"] for message in messages if isinstance(message, dict) and isinstance(message.get("content"), str)
        ]
    text = next((record[name] for name in ANSWERS if isinstance(record.get(name), str)), None)
    if text is None:
        found = shortened(", ".join(record) or "no field")
        raise ValueError(f"{where}: expected messages, or a text in {', '.join(ANSWERS)}, found {found}")
    return [text]


def read_corpus(path: Path, tokenizer: Tokenizer) -> SuffixIndex:
    """Reads a corpus and builds its index. Raises the `ValueError` of `documents_of`, or one for a corpus that is too large."""
    documents = [encode(tokenizer, text, add_special_tokens=False) for text in documents_of(path)]
    length = sum(len(document) + 1 for document in documents)
    if length > MOST_TOKENS:
        raise ValueError(f"{path}: expected at most {MOST_TOKENS:,} tokens, one added for each text, found {length:,}")
    return build(documents)


def build(documents: Sequence[Sequence[int]]) -> SuffixIndex:
    """Builds the index of some texts of at least one token. The arrays are NumPy's."""
    parts = [[SEPARATOR] * DEPTH, *([*document, SEPARATOR] for document in documents)]
    flat = np.concatenate([np.asarray(part, np.int32) for part in parts])
    capacity = max(64, 1 << math.ceil(math.log2(len(flat) + 1)))
    tokens = np.full(capacity, SEPARATOR, np.int32)
    tokens[: len(flat)] = flat
    order = sorted_positions(tokens)
    size = len(order)
    shared = np.zeros(capacity, np.uint8)
    equal = np.ones(max(size - 1, 0), bool)
    for back in range(DEPTH):
        equal = equal & (tokens[order[1:] - back] == tokens[order[:-1] - back])
        shared[1:size] += equal.astype(np.uint8)
    best, drafts, score = (np.zeros(capacity, dtype) for dtype in (np.int32, np.uint8, np.uint8))
    for depth in range(SHORTEST, DEPTH + 1):
        low, high = intervals(shared[: size + 1], depth)
        place = np.where(shared[low] >= shared[high], low, high - 1)
        best[place], drafts[place], score[place] = continuations(tokens, order, low, high)
    padded = np.zeros(capacity, np.int32)
    padded[:size] = order
    return SuffixIndex(tokens, padded, shared, best, drafts, score, np.int32(size))


def sorted_positions(tokens: Int[np.ndarray, " C"]) -> Int[np.ndarray, " N"]:
    """Returns the positions with a token and a next token, sorted by their last `DEPTH` tokens, read backwards.

    Ranks by twice as many tokens follow from pairs of ranks (prefix doubling).
    """
    ranks = {1: np.unique(tokens, return_inverse=True)[1].astype(np.int64)}

    def paired(first: int, second: int) -> np.ndarray:
        behind = np.pad(ranks[second], (first, 0))[: len(tokens)]
        return np.unique(ranks[first] * len(tokens) + behind, return_inverse=True)[1].astype(np.int64)

    for length in (1, 2, 4, 8):
        ranks[2 * length] = paired(length, length)
    rank = paired(16, DEPTH - 16)
    positions = np.flatnonzero((tokens[:-1] != SEPARATOR) & (tokens[1:] != SEPARATOR))
    return positions[np.argsort(rank[positions], kind="stable")].astype(np.int32)


def intervals(shared: UInt8[np.ndarray, " N1"], depth: int) -> tuple[Int[np.ndarray, " I"], Int[np.ndarray, " I"]]:
    """Returns the intervals `[low, high)` of several positions that have `depth` last tokens in common, and no more.

    Args:
        shared: see `SuffixIndex`, with a zero behind the last position.
    """
    inside = shared >= depth
    low = np.flatnonzero(inside[1:] & ~inside[:-1])
    high = np.flatnonzero(inside[:-1] & ~inside[1:]) + 1
    if not len(low):
        return low, high
    exact = np.minimum.reduceat(np.where(inside, shared, DEPTH), low + 1) == depth
    return low[exact], high[exact]


def continuations(
    tokens: Int[np.ndarray, " C"], order: Int[np.ndarray, " N"], low: Int[np.ndarray, " I"], high: Int[np.ndarray, " I"]
) -> tuple[Int[np.ndarray, " I"], Int[np.ndarray, " I"], Int[np.ndarray, " I"]]:
    """Follows the most frequent tokens behind each interval. Of several tokens the smallest counts.

    Returns:
        For each interval a position that the continuation follows, its number of tokens, and its score in eighths.
    """
    sizes = high - low
    group = np.repeat(np.arange(len(low)), sizes)
    position = order[np.arange(len(group)) + np.repeat(low - (np.cumsum(sizes) - sizes), sizes)]
    best = order[low]
    drafts = np.zeros(len(low), np.int64)
    score = np.zeros(len(low), np.int64)
    for step in range(1, MOST_DRAFTS + 1):
        token = tokens[np.minimum(position + step, len(tokens) - 1)]
        group, position, token = (each[token != SEPARATOR] for each in (group, position, token))
        if not len(group):
            break
        by_token = np.lexsort((token, group))
        group, position, token = (each[by_token] for each in (group, position, token))
        first = np.flatnonzero(np.r_[True, (group[1:] != group[:-1]) | (token[1:] != token[:-1])])
        counts = np.diff(np.r_[first, len(group)])
        # The run with the most positions comes first in its group; equal runs stay in the order of their tokens.
        by_count = np.lexsort((-counts, group[first]))
        owners = group[first][by_count]
        winners = by_count[np.r_[True, owners[1:] != owners[:-1]]]
        winners = winners[counts[winners] * RAREST >= sizes[group[first[winners]]]]
        owner = group[first[winners]]
        best[owner] = position[first[winners]]
        drafts[owner] = step
        score[owner] += counts[winners]
        stays = np.repeat(np.isin(np.arange(len(first)), winners), counts)
        group, position = group[stays], position[stays]
    return best, drafts, np.minimum(EIGHTHS * score // sizes, 255)


def find(
    index: SuffixIndex,
    tokens: Int[Array, "B L"],
    last_position: Int[Array, " B"],
    min_n: int,
    max_n: int,
    min_score: float,
    k: int,
) -> Found:
    """Finds the longest suffix of each row that occurs in the texts, and drafts its most frequent continuation.

    Two searches one after the other have six steps each for a million positions. A step compares the last `max_n` tokens of 15
    positions, or of twice as many.

    Args:
        tokens: entries beyond `last_position` are ignored.
        min_n, max_n: shortest and longest suffix, from 2 and up to `DEPTH`.
        min_score: least number of expected drafts, which is at most the length of the suffix; with fewer nothing is drafted.
        k: maximum number of drafts.
    """
    assert SHORTEST <= min_n <= max_n <= DEPTH
    place = last_position[:, None] - jnp.arange(max_n)[None]
    needle = jnp.where(place >= 0, jnp.take_along_axis(tokens, jnp.maximum(place, 0), axis=1), OUTSIDE)
    rows = needle.shape[0]
    size = jnp.asarray(index.size)
    arrays = [jnp.asarray(each) for each in (index.tokens, index.order, index.shared, index.best, index.drafts, index.score)]
    text, order, shared, best, drafts, score = arrays
    steps = math.ceil((int(order.shape[0]).bit_length() - 1) / (FAN_OUT.bit_length() - 1))
    back = jnp.arange(max_n)

    def suffix_at(entry: Array) -> Array:
        return text[order[jnp.clip(entry, 0, size - 1)][..., None] - back]

    def partition(needle: Array, length: Array, inclusive: Array) -> Array:
        """Returns the number of entries whose last `length` tokens are below the needle's, or equal if `inclusive`."""
        counted = jnp.zeros_like(length)
        needle = needle[:, None]
        for stride in (FAN_OUT**step for step in reversed(range(steps))):
            entry = counted[:, None] + stride * jnp.arange(1, FAN_OUT)[None] - 1
            suffix = suffix_at(entry)
            differs = (suffix != needle) & (back < length[:, None, None])
            # Nothing counts behind the first difference.
            first = differs & (jnp.cumsum(differs, axis=2, dtype=jnp.int32) == 1)
            below = jnp.any(first & (suffix < needle), axis=2)
            before = (below | (inclusive[:, None] & ~jnp.any(differs, axis=2))) & (entry < size)
            counted = counted + stride * jnp.sum(before, axis=1, dtype=jnp.int32)
        return counted

    def common(entry: Array) -> Array:
        same = suffix_at(entry) == needle
        return jnp.where((entry >= 0) & (entry < size), jnp.sum(jnp.cumprod(same, axis=1, dtype=jnp.int32), axis=1), 0)

    between = partition(needle, jnp.full(rows, max_n, jnp.int32), jnp.zeros(rows, bool))
    length = jnp.maximum(common(between - 1), common(between))
    ends = partition(jnp.concatenate([needle] * 2), jnp.concatenate([length] * 2), jnp.arange(2 * rows) >= rows)
    low, high = jnp.split(ends, 2)
    entry = jnp.where(shared[low] >= shared[high], low, high - 1)
    alone = high - low == 1
    source = jnp.where(alone, order[low], best[entry])
    offsets = jnp.arange(1, MOST_DRAFTS + 1)[None]
    followed = text[jnp.minimum(source[:, None] + offsets, text.shape[0] - 1)]
    available = jnp.sum(jnp.cumprod(followed != SEPARATOR, axis=1, dtype=jnp.int32), axis=1)
    count = jnp.where(alone, available, drafts[entry].astype(jnp.int32))
    expected = jnp.where(alone, EIGHTHS * available, score[entry].astype(jnp.int32))
    expected = jnp.minimum(expected, EIGHTHS * length)
    count = jnp.where((length >= min_n) & (expected >= in_eighths(min_score)), jnp.minimum(count, k), 0)
    slot = jnp.arange(k)[None]
    followed = jnp.pad(followed, ((0, 0), (0, max(k - MOST_DRAFTS, 0))))[:, :k]
    return Found(jnp.where(slot < count[:, None], followed, 0), count, jnp.where(count > 0, length, 0))


def in_eighths(score: float) -> int:
    """Returns the least stored score that is not below `score`."""
    return math.ceil(score * EIGHTHS)


class HostIndex:
    """Search of an index on the host, for one row at a time; see `find`."""

    def __init__(self, index: SuffixIndex):
        self.index = jax.tree.map(np.asarray, index)
        self.size = int(self.index.size)
        self.order = memoryview(self.index.order)
        self.last_tokens = memoryview(self.index.tokens[self.index.order[: self.size]])
        # Backwards and big-endian, so that comparisons of bytes are those of suffixes.
        self.backwards = (self.index.tokens[::-1] + 1).astype(">u4").tobytes()
        self.end = len(self.index.tokens) - 1

    def suffix(self, entry: int, length: int) -> bytes:
        begin = 4 * (self.end - self.order[entry])
        return self.backwards[begin : begin + 4 * length]

    def find(self, last: Sequence[int], min_n: int, min_score: float) -> tuple[int, list[int]]:
        """Returns the length of the longest suffix of `last` in the texts, and drafts; 0 and none without drafts.

        Args:
            last: the row's last tokens, as many as may be matched.
        """
        key = (np.asarray(last[::-1], np.int64) + 1).astype(">u4").tobytes()
        entries = range(self.size)
        begin = bisect_left(self.last_tokens, last[-1])
        end = bisect_right(self.last_tokens, last[-1], begin)
        between = bisect_left(entries, key, begin, end, key=lambda entry: self.suffix(entry, len(last)))
        beside = [entry for entry in (between - 1, between) if begin <= entry < end]
        length = max((self.common(key, self.suffix(entry, len(last))) for entry in beside), default=0)
        if length < min_n:
            return 0, []
        part = key[: 4 * length]
        low = bisect_left(entries, part, begin, between, key=lambda entry: self.suffix(entry, length))
        high = bisect_right(entries, part, between, end, key=lambda entry: self.suffix(entry, length))
        index = self.index
        alone = high - low == 1
        entry = low if index.shared[low] >= index.shared[high] else high - 1
        source = self.order[low] if alone else int(index.best[entry])
        followed = index.tokens[source + 1 : source + 1 + MOST_DRAFTS]
        available = int(np.argmax(np.r_[followed, SEPARATOR] == SEPARATOR))
        count = available if alone else int(index.drafts[entry])
        expected = EIGHTHS * available if alone else int(index.score[entry])
        if min(expected, EIGHTHS * length) < in_eighths(min_score) or not count:
            return 0, []
        return length, followed[:count].tolist()

    @staticmethod
    def common(first: bytes, second: bytes) -> int:
        """Returns the number of tokens that two keys begin with in common."""
        pairs = zip(range(0, len(first), 4), range(0, len(second), 4), strict=False)
        return next(
            (n for n, (a, b) in enumerate(pairs) if first[a : a + 4] != second[b : b + 4]), min(len(first), len(second)) // 4
        )
