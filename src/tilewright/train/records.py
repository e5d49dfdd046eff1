"""Records: tokenised prompts with answers, trained on from their beginning.

A window of a stream may start within an answer. A drafter reads the target's states of the whole context, so training on whole
records matches drafting.
"""

import io
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.train.checkpoint import fingerprint
from tilewright.train.data import TokenSource, TokenStream, choose_held_out, choose_some
from tilewright.train.text import HELD_OUT_BATCHES, Batches, TextOptions, Windows

SUFFIX = ".npz.xz"
"""Suffix of files of records: NumPy arrays with LZMA, half the size of NumPy's compression."""


@dataclass(frozen=True)
class Records:
    """Tokenised prompts and answers.

    Attributes:
        tokens: concatenated tokens of all records, int32 `[n]`.
        ends: end of each record in `tokens`, int64 `[R]`.
        prompts: length of each record's prompt, which is not in the loss, int32 `[R]`.
    """

    tokens: np.ndarray
    ends: np.ndarray
    prompts: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    @cached_property
    def starts(self) -> np.ndarray:
        return np.concatenate([[0], self.ends[:-1]]).astype(np.int64)

    @property
    def in_loss(self) -> np.ndarray:
        """Mask of the tokens of answers, bool `[n]`."""
        place = np.arange(len(self.tokens)) - np.repeat(self.starts, self.ends - self.starts)
        return place >= np.repeat(self.prompts, self.ends - self.starts)

    @property
    def fingerprint(self) -> str:
        """Digest of the records."""
        return fingerprint((self.tokens, self.ends, self.prompts))

    @staticmethod
    def from_pairs(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> "Records":
        """Builds records from pairs of prompt and answer."""
        sizes = [len(prompt) + len(answer) for prompt, answer in pairs]
        flat = [token for prompt, answer in pairs for token in (*prompt, *answer)]
        prompts = np.asarray([len(prompt) for prompt, _ in pairs], np.int32)
        return Records(np.asarray(flat, np.int32), np.cumsum(sizes, dtype=np.int64), prompts)

    def take(self, chosen: Sequence[int] | np.ndarray) -> "Records":
        """Returns the records with the given indices, in this order."""
        parts = [self.tokens[self.starts[n] : self.ends[n]] for n in chosen]
        sizes = [len(part) for part in parts]
        return Records(np.concatenate([*parts, np.zeros(0, np.int32)]), np.cumsum(sizes, dtype=np.int64), self.prompts[chosen])

    def split(self, held_out: float, seed: int) -> "tuple[Records, Records]":
        """Splits the records at random into training records and held-out records.

        Records with the same prompt stay together if there are enough prompts; otherwise at least one record is held out.

        Args:
            held_out: share of the held-out records.
            seed: seed of the choice.

        Raises:
            ValueError: there are fewer than two records.
        """
        prompts = [self.tokens[start : start + size].tobytes() for start, size in zip(self.starts, self.prompts, strict=True)]
        is_held_out = choose_held_out([prompts], held_out, seed)
        if is_held_out is None:
            is_held_out = choose_some(np.arange(len(self)), held_out, seed, "records")
        return self.take(np.flatnonzero(~is_held_out)), self.take(np.flatnonzero(is_held_out))

    def save(self, path: Path) -> None:
        """Writes a file of records, with 16-bit tokens if all ids fit."""
        small = self.tokens.max(initial=0) < 2**16
        sizes = np.diff(self.ends, prepend=0).astype(np.uint32)
        arrays = {"tokens": self.tokens.astype(np.uint16 if small else np.uint32), "sizes": sizes, "prompts": self.prompts}
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lzma.compress(buffer.getvalue(), preset=9))

    @staticmethod
    def load(path: Path) -> "Records":
        """Reads a file of records. Raises a `ValueError` for other files."""
        try:
            arrays = np.load(io.BytesIO(lzma.decompress(path.read_bytes())), allow_pickle=False)
            tokens, sizes, prompts = (arrays[name] for name in ("tokens", "sizes", "prompts"))
        except (OSError, EOFError, KeyError, ValueError, lzma.LZMAError) as error:
            raise ValueError(f"{path}: expected a file of records ({SUFFIX}): {error}") from error
        if sizes.sum() != len(tokens) or len(sizes) != len(prompts) or np.any(prompts > sizes):
            raise ValueError(f"{path}: expected records whose sizes add up to {len(tokens)} tokens, found {sizes.sum()}")
        return Records(tokens.astype(np.int32), np.cumsum(sizes, dtype=np.int64), prompts.astype(np.int32))


@dataclass(frozen=True)
class RecordRows:
    """Batches of whole records, one record per row. Short records use rows of half the length; long ones are truncated.

    A held-out batch may have padding rows without tokens in the loss.

    Attributes:
        records: training records.
        held_out: held-out records.
        options: options of the training loop; `sequence_length` is the length of the longer rows.
    """

    records: Records
    held_out: Records
    options: TextOptions

    def __post_init__(self) -> None:
        for records, use, least in ((self.records, "to train on", self.options.batch_size), (self.held_out, "held out", 1)):
            groups = [len(places) for places in self.group_by_length(records).values()]
            if max(groups) < least:
                found = f"{sum(groups)} of {len(records)} with an answer within {self.options.sequence_length} tokens"
                raise ValueError(f"expected at least {least} records {use} in rows of the same length, found {found}")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of short and long rows."""
        return self.options.sequence_length // 2, self.options.sequence_length

    def group_by_length(self, records: Records) -> dict[int, np.ndarray]:
        """Groups records by row length; leaves out records without an answer within the longest row."""
        short, long = self.lengths
        sizes = records.ends - records.starts
        room = records.prompts + 2 <= long
        return {short: np.flatnonzero(room & (sizes <= short)), long: np.flatnonzero(room & (sizes > short))}

    def chosen(self, records: Records, epoch: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yields row length and records of each full batch of an epoch, in an order by seed and epoch."""
        rng = np.random.default_rng((self.options.seed, epoch))
        size = self.options.batch_size
        batches = []
        for length, places in self.group_by_length(records).items():
            shuffled = rng.permutation(places)
            batches += [(length, shuffled[first : first + size]) for first in range(0, len(shuffled) - size + 1, size)]
        for n in rng.permutation(len(batches)):
            yield batches[n]

    def rows(self, records: Records, length: int, chosen: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns tokens and loss mask of records, `[batch, length]`; padding is not in the loss."""
        place = records.starts[chosen, None] + np.arange(length)
        inside = place < records.ends[chosen, None]
        answer = np.arange(length) >= records.prompts[chosen, None]
        return np.where(inside, records.tokens[np.minimum(place, len(records.tokens) - 1)], 0), inside & answer

    def batches(self, first: int) -> Iterator[tuple[np.ndarray, ...]]:
        """Yields training batches, epoch by epoch, from step `first` on."""
        batches = chain.from_iterable(self.chosen(self.records, epoch) for epoch in count())
        return (self.rows(self.records, *batch) for batch in islice(batches, first, None))

    def held_out_batches(self) -> list[tuple[np.ndarray, ...]]:
        """Returns the held-out batches, the same ones at every evaluation."""
        rng = np.random.default_rng((self.options.seed, 0))
        size = self.options.batch_size
        parts = []
        for length, places in self.group_by_length(self.held_out).items():
            shuffled = rng.permutation(places)
            parts += [(length, shuffled[first : first + size]) for first in range(0, len(shuffled), size)]
        batches = []
        for n in rng.permutation(len(parts))[:HELD_OUT_BATCHES]:
            length, chosen = parts[n]
            tokens, in_loss, *more = self.rows(self.held_out, length, np.resize(chosen, size))
            in_loss[len(chosen) :] = False
            batches.append((tokens, in_loss, *more))
        return batches

    @property
    def tokens_per_step(self) -> float:
        """Tokens of records per step, on average."""
        groups = self.group_by_length(self.records)
        sizes = np.minimum(self.records.ends - self.records.starts, self.options.sequence_length)
        batches = sum(len(places) // self.options.batch_size for places in groups.values())
        return float(sum(sizes[places].sum() for places in groups.values()) / max(1, batches))

    def run_fingerprint(self) -> dict[str, Any]:
        """Returns the fingerprint of the run, which a checkpoint must match."""
        return {**self.options.run_fingerprint(), "training_tokens": len(self.records.tokens), "text": self.records.fingerprint}


def make_batches(source: TokenSource, held_out: TokenSource, options: TextOptions) -> Batches:
    """Returns batches of whole records, or of windows of a stream."""
    if isinstance(source, Records) and isinstance(held_out, Records):
        return RecordRows(source, held_out, options)
    assert isinstance(source, TokenStream)
    assert isinstance(held_out, TokenStream)
    return Windows(source, held_out, options.sequence_length, options)
