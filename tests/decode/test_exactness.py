"""In bfloat16, programs of different shape may round differently: what equals what, token for token, and what need not.

Speculative decoding equals plain decoding through a program of its own width. On the CPU kernels, whose rows do not depend on
how many there are, it equals decoding one row at a time as well.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from decode.support import prompts
from reference.dflash_numpy import Target, as_folders, random_pair
from reference.eagle3_numpy import as_folder, random_eagle3
from tilewright.bench.replay import difference
from tilewright.decode.drafters.load import DrafterOptions
from tilewright.decode.drafters.ngram import NGram
from tilewright.decode.language_model import Kernels, LanguageModel, load
from tilewright.decode.sampling import Sampling
from tilewright.decode.shapes import ShapeTable
from tilewright.models.hub import PACKAGED

NEW = 24
KERNELS: tuple[Kernels, ...] = ("xla", "auto")
DEMO_TABLE = ShapeTable(batches=(8,), capacities=(256,), chunks=(64,))
SMALL_TABLE = ShapeTable(batches=(8,), capacities=(128,), chunks=(32,))
SMALL = random_pair(0, vocab_size=32, hidden_size=64, target_layers=3, drafter_layers=1, taps=[0, 2])
SMALL_BLOCK = 6
SMALL_ASKED = prompts(0, [*range(1, 51)] * 2, vocab=32)
SMALL_REQUESTS = [Sampling(NEW, temperature=n % 2, top_p=0.9, seed=n) for n in range(100)]


@pytest.fixture(scope="module")
def demo_asked() -> list[list[int]]:
    """100 beginnings, of different lengths, of the held-out code that ships with the demo pair."""
    demo = load("demo", table=DEMO_TABLE)
    lines = (PACKAGED["demo"].parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [demo.encode(json.loads(line)["prompt"]) for line in lines]
    return [texts[n % len(texts)][: 1 + n] for n in range(100)]


def tokens_of(lm: LanguageModel, asked: Sequence[list[int]], each: Sequence[Sampling]) -> tuple[list[list[int]], float]:
    """Each prompt's tokens, and the mean acceptance length."""
    results = list(lm.generate(asked, each))
    return [r.tokens for r in results], float(np.mean([n for r in results for n in r.acceptance_lengths]))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("small")
    target, drafter = as_folders(folder, SMALL)
    eagle3 = random_eagle3(0, SMALL.target_config, taps=[0, 1, 2], draft_vocab_size=20)
    return {"target": target, "dflash": drafter, "eagle3": as_folder(folder / "eagle3", *eagle3)}


@pytest.mark.parametrize("kernels", KERNELS)
def test_every_drafter_equals_the_block_wide_program(small: dict[str, Path], kernels: Kernels):
    """100 prompts, greedy and sampled by turns in the same batches."""
    target = load(small["target"], dtype="bfloat16", kernels=kernels, table=SMALL_TABLE)
    options = DrafterOptions(block_size=SMALL_BLOCK)
    wide = target.with_drafter(*target.load_drafter(None, options))
    want, tau = tokens_of(wide, SMALL_ASKED, SMALL_REQUESTS)
    assert tau == 1
    windowed = replace(options, draft_window=4)
    for lm in (
        target.with_drafter(*target.load_drafter(str(small["dflash"]), options)),
        target.with_drafter(*target.load_drafter(str(small["eagle3"]), windowed)),
        target.with_drafter(NGram(SMALL_BLOCK, may_be_idle=False)),  # a round of one row would be another program
    ):
        got, tau = tokens_of(lm, SMALL_ASKED, SMALL_REQUESTS)
        assert got == want
        assert tau > 1
    one_row, _ = tokens_of(target, SMALL_ASKED, SMALL_REQUESTS)
    if target.kernels != "xla":
        assert one_row == want
    greedy = [case for case in zip(SMALL_ASKED, one_row, want, SMALL_REQUESTS, strict=True) if case[3].temperature == 0]
    parted = [difference(target, prompt, a, b) for prompt, a, b, _ in greedy]
    # Where another program puts another token, the two were all but equally likely: logits up to 32 have steps of 1/8.
    assert all(found.margin <= 0.5 for found in parted if found is not None)


def test_the_demo_pair_on_the_cpu_kernels(demo_asked: list[list[int]]):
    """100 prompts, greedy. Here a block and a single row round alike, so that all ways of decoding agree."""
    target = load("demo", dtype="bfloat16", table=DEMO_TABLE)
    if target.kernels == "xla":
        pytest.skip("the CPU kernels do not run here")
    greedy = [Sampling(NEW)] * len(demo_asked)
    want, _ = tokens_of(target, demo_asked, greedy)
    assert len({tuple(tokens) for tokens in want}) > 90
    for source, block_size in (("demo-drafter", None), ("ngram", 16), (None, 16)):
        lm = target.with_drafter(*target.load_drafter(source, DrafterOptions(block_size=block_size)))
        got, tau = tokens_of(lm, demo_asked, greedy)
        assert got == want
        assert tau == 1 if source is None else tau > 1.1


def test_where_two_texts_part_and_the_margin_there(tmp_path: Path):
    lm = load(as_folders(tmp_path, SMALL)[0], table=SMALL_TABLE)
    prompt, text = [3, 1, 4], [1, 5, 9, 2, 6]
    logits = np.sort(Target(SMALL.target_config, SMALL.target_tensors).run([*prompt, *text])[0], axis=1)
    for at in range(5):
        found = difference(lm, prompt, text, [*text[:at], 30, 30])
        assert found is not None
        assert found.at == at
        assert found.margin == pytest.approx(logits[2 + at, -1] - logits[2 + at, -2], rel=1e-4)
    assert difference(lm, prompt, text, text) is None
    cut_short = difference(lm, prompt, text[:2], text)
    assert cut_short is not None
    assert cut_short.at == 2
