"""What the tests of decoding share: small models on disk and in memory, prompts, and the equality that they check."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reference.dflash_numpy import Pair, as_folders
from tilewright.decode.language_model import LanguageModel, load
from tilewright.decode.request import Piece
from tilewright.decode.sampling import Sampling
from tilewright.decode.session import Session
from tilewright.decode.shapes import ShapeTable

TABLE = ShapeTable(batches=(1, 4, 8), capacities=(64, 128), chunks=(8, 32))


def build(folder: Path, pair: Pair, **settings: Any) -> LanguageModel:
    """The pair as a language model, read back from `folder`. `settings` are those of `load`; blocks are the drafter's own."""
    target, drafter = as_folders(folder, pair)
    return load(target, drafter, **{"table": TABLE, "block_size": pair.drafter_config["block_size"], **settings})


def prompts(seed: int, lengths: Sequence[int], vocab: int = 40) -> list[list[int]]:
    """Random tokens."""
    rng = np.random.default_rng(seed)
    return [[int(token) for token in rng.integers(0, vocab, length)] for length in lengths]


def run(session: Session, steps: int = 64) -> list[Piece]:
    """Decodes to the end, `steps` steps a dispatch; returns all pieces."""
    pieces = []
    while not session.finished:
        pieces += session.advance(steps)
    return pieces


def tokens_of(lm: LanguageModel, asked: Sequence[Any], sampling: Any, speculative: bool, batch: int = 8) -> list[list[int]]:
    """The tokens that each prompt gives, `batch` prompts at a time."""
    each = lm.each_sampling(asked, sampling)
    groups = [slice(i, i + batch) for i in range(0, len(asked), batch)]
    return [result.tokens for g in groups for result in lm.generate(asked[g], each[g], speculative)]


def check_same_as_autoregressive(
    lm: LanguageModel, asked: Sequence[Any], sampling: Sampling | Sequence[Sampling], batch: int, want: list[list[int]]
) -> list[int]:
    """Checks that speculative decoding gives the tokens `want` of autoregressive decoding. Returns all acceptance lengths."""
    each = lm.each_sampling(asked, sampling)
    lengths: list[int] = []
    for i in range(0, len(asked), batch):
        for n, result in enumerate(lm.generate(asked[i : i + batch], each[i : i + batch], speculative=True), i):
            assert result.tokens == want[n], f"prompt {n} of {result.prompt_tokens} tokens"
            assert sum(result.acceptance_lengths) == len(result.tokens)
            rounds = list(zip(result.acceptance_lengths, result.drafted, result.accepted, strict=True))
            assert all(added == accepted + 1 for added, _, accepted in rounds[:-1]), "only an end cuts a round"
            assert all(added - 1 <= accepted <= drafted for added, drafted, accepted in rounds)
            lengths += result.acceptance_lengths
    return lengths
