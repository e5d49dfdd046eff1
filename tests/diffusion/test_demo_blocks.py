"""The packaged model that decodes token by token and denoises blocks: it solves held-out problems in each way."""

from itertools import islice

import numpy as np

from tilewright.diffusion.blocks import BlockDenoising
from tilewright.llm.language_model import load
from tilewright.models.hub import PACKAGED
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.train.arithmetic import is_right, problems

MOST_BYTES = 10_000_000
TABLE = ShapeTable(batches=(12,), capacities=(256,), chunks=(32,))
ASKED = list(islice(problems(np.random.default_rng(1), held_out=True), 12))
PROMPTS = [problem.prompt for problem in ASKED]


def test_it_is_small_and_has_a_card():
    folder = PACKAGED["demo-blocks"]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES
    assert "task: arithmetic" in (folder / "MODEL_CARD.md").read_text().splitlines()


def test_blocks_solve_most_problems_with_many_tokens_per_pass():
    lm = load("demo-blocks", table=TABLE, dtype="float32", decoding="blocks")
    with lm.start(PROMPTS, Sampling(160), denoising=BlockDenoising(threshold=0.9)) as stream:
        while not stream.finished:
            stream.advance()
    results = stream.results()
    assert sum(is_right(problem, one.text) for problem, one in zip(ASKED, results, strict=True)) >= 9
    passes = sum(sequence.handle.steps for sequence in stream.sequences)
    assert sum(len(one.tokens) for one in results) > 4 * passes


def test_its_own_drafts_give_the_tokens_of_decoding():
    plain = load("demo-blocks", table=TABLE, dtype="float32").generate(PROMPTS, Sampling(160))
    drafted = load("demo-blocks", "self", block_size=16, table=TABLE, dtype="float32").generate(PROMPTS, Sampling(160))
    assert sum(is_right(problem, one.text) for problem, one in zip(ASKED, plain, strict=True)) >= 9
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert np.mean(np.concatenate([one.acceptance_lengths for one in drafted])) > 8
