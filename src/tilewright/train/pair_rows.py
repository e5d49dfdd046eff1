"""Rows of a stream for diffusion language models: each is a prompt with its response, or an arithmetic problem."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from threading import Lock
from typing import Any

import grain
import numpy as np
from grain.experimental import FlatMapIterDataset
from tokenizers import Tokenizer

from tilewright.train.arithmetic import problems
from tilewright.train.data import Document
from tilewright.train.diffusion import (
    HELD_OUT_BATCHES,
    Batch,
    Pairs,
    arithmetic_fingerprint,
    check_arithmetic,
    draw_bounds,
    encode_problem,
)
from tilewright.train.stream import EachGroup, NumberedRow, Row
from tilewright.train.text import TextOptions


@dataclass(frozen=True)
class PairRows:
    """Rows of prompts with responses; see `stream.RowForm`. Nothing is packed, since a row's tokens all see each other.

    Each pair is in a batch once per epoch. What is random in a row depends on the seed, the step and the row's number only.

    Attributes:
        tokenizer: tokenizer of the model.
        encode: tokenises documents.
        arithmetic: share of rows with problems of `arithmetic.py`, which take no pair of the stream.
        end: end-of-text token, which pads rows.
        options: options of the training loop.
    """

    tokenizer: Tokenizer
    encode: Callable[[Sequence[Document]], Pairs]
    arithmetic: float
    end: int
    options: TextOptions
    lock: Any = field(default_factory=Lock, repr=False)  # encoding switches the special tokens of the one tokenizer

    def __post_init__(self) -> None:
        if self.arithmetic == 1:
            raise ValueError("expected a share of arithmetic below 1 for a stream, found 1, which reads no data")
        check_arithmetic(self.tokenizer, self.arithmetic, self.options)

    @property
    def length(self) -> int:
        return self.options.sequence_length

    @property
    def held_out_batches(self) -> int:
        return HELD_OUT_BATCHES

    def rows(self, documents: grain.IterDataset[list[Document]]) -> grain.IterDataset[Row]:
        def rows(group: list[Document]) -> list[Row]:
            # `Pairs.encode` puts texts behind prompts; runs of one kind keep the order of the documents.
            runs = groupby(group, lambda document: bool(document.prompt) or document.chat is not None)
            with self.lock:
                found = [self.encode(list(run)) for _, run in runs]
            pairs = [each[n] for each in found for n in range(len(each.starts))]
            return [dict(zip(("tokens", "first"), pair, strict=True)) for pair in pairs]

        return FlatMapIterDataset(documents, EachGroup(rows))

    def generator(self, step: int, row: int, held_out: bool) -> np.random.Generator:
        """Returns the random generator of a row, whose first number decides if it is a problem."""
        return np.random.default_rng((self.options.seed, int(held_out), step, row))

    def takes(self, step: int, row: int, held_out: bool) -> bool:
        return self.generator(step, row, held_out).random() >= self.arithmetic

    def batch(self, step: int, rows: Sequence[NumberedRow], held_out: bool) -> Batch:
        tokens = np.full((len(rows), self.length), self.end, np.int32)
        bounds = np.full((3, len(rows)), self.length, np.int32)  # a row of padding has no response, hence no loss
        for n, (number, row) in enumerate(rows):
            rng = self.generator(step, number, held_out)
            solved = rng.random() < self.arithmetic
            if solved:
                with self.lock:
                    pair = encode_problem(self.tokenizer, next(problems(rng, held_out)))
            elif row is None:
                continue
            else:
                pair = row["tokens"], row["first"]
            tokens[n, : len(pair[0])] = pair[0]
            bounds[:, n] = draw_bounds(rng, *pair, self.length)
        return Batch(tokens, *bounds)

    def filled(self, row: Row) -> int:
        return len(row["tokens"])

    def learns(self, row: Row) -> bool:
        return len(row["tokens"]) > row["first"]

    def run_fingerprint(self) -> dict[str, Any]:
        return {"rows": "pairs", **arithmetic_fingerprint(self.tokenizer, self.arithmetic)}
