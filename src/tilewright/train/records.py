"""Records: prompts with their answers as tokens, each of which is trained on from its own beginning.

A window of a stream may begin anywhere, and show an answer without its prompt. A drafter reads what its target makes of all
that came before, so that it is trained on whole records, which are what it will see when it drafts.
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
"""Of a file of records: NumPy's arrays under LZMA, which makes half of what its own compression does."""


@dataclass(frozen=True)
class Records:
    """Prompts and answers as tokens.

    Attributes:
        tokens: of all records, end to end, int32 `[n]`.
        ends: where each record ends in `tokens`, int64 `[R]`.
        prompts: tokens of each record's prompt, which are not in the loss, int32 `[R]`.
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
        """Mask of the tokens that are of answers, bool `[n]`."""
        place = np.arange(len(self.tokens)) - np.repeat(self.starts, self.ends - self.starts)
        return place >= np.repeat(self.prompts, self.ends - self.starts)

    @property
    def fingerprint(self) -> str:
        """Digest of the records."""
        return fingerprint((self.tokens, self.ends, self.prompts))

    @staticmethod
    def of(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> "Records":
        """Records of prompts and answers."""
        sizes = [len(prompt) + len(answer) for prompt, answer in pairs]
        flat = [token for prompt, answer in pairs for token in (*prompt, *answer)]
        prompts = np.asarray([len(prompt) for prompt, _ in pairs], np.int32)
        return Records(np.asarray(flat, np.int32), np.cumsum(sizes, dtype=np.int64), prompts)

    def take(self, chosen: Sequence[int] | np.ndarray) -> "Records":
        """Some of the records, in this order."""
        parts = [self.tokens[self.starts[n] : self.ends[n]] for n in chosen]
        sizes = [len(part) for part in parts]
        return Records(np.concatenate([*parts, np.zeros(0, np.int32)]), np.cumsum(sizes, dtype=np.int64), self.prompts[chosen])

    def split(self, held_out: float, seed: int) -> "tuple[Records, Records]":
        """Records to train on, and a share that is held out, by a shuffle that depends on `seed` alone.

        Records that begin with the same prompt stay together where there are prompts enough; otherwise at least one record is
        held out.

        Raises:
            ValueError: there are fewer than two records.
        """
        prompts = [self.tokens[start : start + size].tobytes() for start, size in zip(self.starts, self.prompts, strict=True)]
        held = choose_held_out([prompts], held_out, seed)
        if held is None:
            held = choose_some(np.arange(len(self)), held_out, seed, "records")
        return self.take(np.flatnonzero(~held)), self.take(np.flatnonzero(held))

    def save(self, path: Path) -> None:
        """Writes a file of records; tokens take 16 bits where they can."""
        small = self.tokens.max(initial=0) < 2**16
        sizes = np.diff(self.ends, prepend=0).astype(np.uint32)
        arrays = {"tokens": self.tokens.astype(np.uint16 if small else np.uint32), "sizes": sizes, "prompts": self.prompts}
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lzma.compress(buffer.getvalue(), preset=9))

    @staticmethod
    def load(path: Path) -> "Records":
        """Reads a file of records. Raises a `ValueError` for any other file."""
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
    """Batches of whole records, one to a row: short ones in rows of half the length. Longer ones lose their ends.

    A held-out batch may have rows without a token in the loss, in the place of records that are missing.

    Attributes:
        records, held_out: what is trained on, and what is held out.
        options: how to train; `sequence_length` is that of the longer rows.
    """

    records: Records
    held_out: Records
    options: TextOptions

    def __post_init__(self) -> None:
        for records, what, least in ((self.records, "to train on", self.options.batch_size), (self.held_out, "held out", 1)):
            groups = [len(places) for places in self.by_length(records).values()]
            if max(groups) < least:
                found = f"{sum(groups)} of {len(records)} with an answer within {self.options.sequence_length} tokens"
                raise ValueError(f"expected at least {least} records {what} of about one length, found {found}")

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of rows."""
        return self.options.sequence_length // 2, self.options.sequence_length

    def by_length(self, records: Records) -> dict[int, np.ndarray]:
        """For each length of rows the records in them; those with no answer within the longest row are left out."""
        short, long = self.lengths
        sizes = records.ends - records.starts
        room = records.prompts + 2 <= long
        return {short: np.flatnonzero(room & (sizes <= short)), long: np.flatnonzero(room & (sizes > short))}

    def chosen(self, records: Records, epoch: int) -> Iterator[tuple[int, np.ndarray]]:
        """The rows' length and the records of all whole batches of an epoch, in an order that its number and the seed set."""
        rng = np.random.default_rng((self.options.seed, epoch))
        size = self.options.batch_size
        batches = []
        for length, places in self.by_length(records).items():
            shuffled = rng.permutation(places)
            batches += [(length, shuffled[first : first + size]) for first in range(0, len(shuffled) - size + 1, size)]
        for n in rng.permutation(len(batches)):
            yield batches[n]

    def rows(self, records: Records, length: int, chosen: np.ndarray) -> tuple[np.ndarray, ...]:
        """Tokens and loss flags of some records, `[batch, length]`; nothing is in the loss behind a record's end."""
        place = records.starts[chosen, None] + np.arange(length)
        inside = place < records.ends[chosen, None]
        answer = np.arange(length) >= records.prompts[chosen, None]
        return np.where(inside, records.tokens[np.minimum(place, len(records.tokens) - 1)], 0), inside & answer

    def batches(self, first: int) -> Iterator[tuple[np.ndarray, ...]]:
        """Training batches, epoch by epoch, from step `first` on."""
        every = chain.from_iterable(self.chosen(self.records, epoch) for epoch in count())
        return (self.rows(self.records, *each) for each in islice(every, first, None))

    def held_out_batches(self) -> list[tuple[np.ndarray, ...]]:
        """Batches of the held-out records, the same at every evaluation."""
        rng = np.random.default_rng((self.options.seed, 0))
        size = self.options.batch_size
        parts = []
        for length, places in self.by_length(self.held_out).items():
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
        """Tokens of records that a step computes, on average."""
        groups = self.by_length(self.records)
        sizes = np.minimum(self.records.ends - self.records.starts, self.options.sequence_length)
        batches = sum(len(places) // self.options.batch_size for places in groups.values())
        return float(sum(sizes[places].sum() for places in groups.values()) / max(1, batches))

    def run_fingerprint(self) -> dict[str, Any]:
        """Fingerprint of the run: what a checkpoint must agree with."""
        return {**self.options.run_fingerprint(), "training_tokens": len(self.records.tokens), "text": self.records.fingerprint}


def batches_of(source: TokenSource, held_out: TokenSource, options: TextOptions) -> Batches:
    """Batches of whole records, or of windows of a stream."""
    if isinstance(source, Records) and isinstance(held_out, Records):
        return RecordRows(source, held_out, options)
    assert isinstance(source, TokenStream)
    assert isinstance(held_out, TokenStream)
    return Windows(source, held_out, options.sequence_length, options)
