"""In bfloat16, programs of different shape may round differently: what equals what, token for token, and what need not.

Speculative decoding equals plain decoding through a program of its own width. On the CPU kernels, whose rows do not depend on
how many there are, it equals decoding one row at a time as well.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llm.support import prompts
from reference.dflash2_numpy import as_dflash2
from reference.dflash_numpy import Target, as_folders, random_pair
from reference.eagle3_numpy import as_folder, random_eagle3
from tilewright.bench.exact import ExactRequest, Plain
from tilewright.bench.exact_paths import AlonePath
from tilewright.bench.exact_plain import next_logits, top_margin
from tilewright.kernels.select import Weights
from tilewright.llm.language_model import Kernels, LanguageModel, load
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.speculation.drafters.load import DrafterOptions
from tilewright.speculation.drafters.ngram import NGram
from tilewright.speculation.team import Team

SMALL = random_pair(0, vocab_size=32, hidden_size=64, target_layers=2, drafter_layers=1, taps=[0])
SMALL_TABLE = ShapeTable(batches=(8,), capacities=(128,), chunks=(32,))
SMALL_PROMPTS = prompts(0, [*range(1, 51)] * 2, vocab=32)
SMALL_REQUESTS = [Sampling(24, temperature=n % 2, seed=n) for n in range(100)]
BLOCK = 6


def tokens_of(lm: LanguageModel, inputs: Sequence[list[int]], each: Sequence[Sampling]) -> tuple[list[list[int]], float]:
    """Each prompt's tokens, and the mean acceptance length."""
    results = list(lm.generate(inputs, each))
    return [r.tokens for r in results], float(np.mean([n for r in results for n in r.acceptance_lengths]))


@pytest.mark.parametrize(
    ("kernels", "weights", "count"),
    [
        pytest.param("auto", "auto", 24, id="auto-24"),
        pytest.param("auto", "auto", 100, id="auto-100", marks=pytest.mark.slow),
        pytest.param("auto", "int4", 24, id="auto-int4-24", marks=pytest.mark.slow(seconds=25)),
        pytest.param("xla", "auto", 100, id="xla-100", marks=pytest.mark.slow(seconds=40)),
    ],
)
def test_every_drafter_equals_the_block_wide_program(tmp_path: Path, kernels: Kernels, weights: Weights, count: int):
    """So many prompts, greedy and sampled by turns in the same batches."""
    inputs = SMALL_PROMPTS[-count:]
    each = SMALL_REQUESTS[:count]
    folder, dflash = as_folders(tmp_path, SMALL)
    _, dflash2 = as_folders(tmp_path / "2", as_dflash2(SMALL, top_k=16))
    eagle3 = as_folder(tmp_path / "eagle3", *random_eagle3(0, SMALL.target_config, taps=[0, 1], draft_vocab_size=20))
    target = load(folder, dtype="bfloat16", kernels=kernels, weights=weights, table=SMALL_TABLE)
    options = DrafterOptions(block_size=BLOCK)
    wide = target.with_drafter(*target.load_drafter(None, options))
    want, tau = tokens_of(wide, inputs, each)
    assert tau == 1
    for lm in (
        target.with_drafter(*target.load_drafter(str(dflash), options)),
        target.with_drafter(*target.load_drafter(str(dflash2), replace(options, walk="sampled"))),
        target.with_drafter(*target.load_drafter(str(eagle3), replace(options, draft_window=4))),
        target.with_drafter(NGram(BLOCK, may_be_idle=False)),  # a round of one row would be another program
    ):
        got, tau = tokens_of(lm, inputs, each)
        assert got == want
        assert tau > 1
    if target.kernels != "xla":
        assert tokens_of(target, inputs, each)[0] == want


@pytest.mark.slow(seconds=40)
def test_any_widths_by_the_cpu_kernels(tmp_path: Path):
    """Rounds with randomly chosen drafters and widths equal decoding one row at a time."""
    folder, dflash = as_folders(tmp_path, SMALL)
    eagle3 = as_folder(tmp_path / "eagle3", *random_eagle3(0, SMALL.target_config, taps=[0, 1], draft_vocab_size=20))
    table = replace(SMALL_TABLE, widths=(2,))
    lm = load(folder, ["ngram", dflash, eagle3], dtype="bfloat16", table=table, block_size="auto")
    if lm.kernels == "xla":
        pytest.skip("no CPU kernels here")
    assert isinstance(lm.drafter, Team)
    assert not lm.drafter.masked
    requests = [ExactRequest(n, tuple(SMALL_PROMPTS[20 + n]), SMALL_REQUESTS[n]) for n in range(16)]
    ran = AlonePath(lm, 8, 0)(requests)
    assert not ran.lacking
    assert not [found for found in map(Plain(lm).difference, ran.answers) if found is not None]


def test_the_margin_of_the_next_token(tmp_path: Path):
    lm = load(as_folders(tmp_path, SMALL)[0], table=SMALL_TABLE)
    prompt = [3, 1, 4]
    text = [1, 5, 9, 2, 6]
    logits = np.sort(Target(SMALL.target_config, SMALL.target_tensors).run([*prompt, *text])[0], axis=1)
    for at in range(5):
        margin = top_margin(next_logits(lm, [*prompt, *text[:at]]))
        assert margin == pytest.approx(logits[2 + at, -1] - logits[2 + at, -2], rel=1e-4, abs=1e-4)
