"""As `test_exactness.py`, for the pair that ships with the package: its drafters were trained."""

import json

import pytest

from llm.test_exactness import tokens_of
from tilewright.bench.exact_plain import next_logits, top_margin
from tilewright.bench.speculative_figures import first_difference
from tilewright.llm.language_model import load
from tilewright.models.hub import PACKAGED
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.speculation.drafters.load import DrafterOptions

DEMO_TABLE = ShapeTable(batches=(8,), capacities=(128,), chunks=(64,))
DEMO_REQUESTS = [Sampling(12, temperature=n % 2, top_p=0.9, seed=n) for n in range(100)]


@pytest.mark.slow(seconds=27)  # XLA's products of bfloat16 are slow on CPUs
@pytest.mark.parametrize("count", [8, 100])
def test_the_demo_pair_by_xla(count: int):
    """Here decoding one row at a time is a program that rounds differently."""
    target = load("demo", dtype="bfloat16", kernels="xla", table=DEMO_TABLE)
    lines = (PACKAGED["demo"].parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [target.encode(json.loads(line)["prompt"]) for line in lines]
    inputs = [texts[n % len(texts)][: 1 + n] for n in range(100)][:: 100 // count][:count]
    each = DEMO_REQUESTS[:count]
    assert len({len(prompt) for prompt in inputs}) == count
    wide = target.with_drafter(*target.load_drafter(None, DrafterOptions(block_size=16)))
    want, _ = tokens_of(wide, inputs, each)
    assert len({tuple(tokens) for tokens in want}) > 0.9 * count
    reached = []
    for drafter, size in (("demo-drafter", None), ("demo-eagle3", 8)):
        options = DrafterOptions(block_size=size)
        drafted, tau = tokens_of(target.with_drafter(*target.load_drafter(drafter, options)), inputs, each)
        if size is None:  # of the width of `wide`: a narrower program may round differently
            assert drafted == want
        reached.append(tau)
    assert max(reached) > 1.3
    one_row, _ = tokens_of(target, inputs, each)
    for prompt, tokens, expected in zip(inputs[::2], one_row[::2], want[::2], strict=True):
        at = first_difference(tokens, expected)
        # Tokens differ only where two tokens are almost equally likely: logits from 16 to 32 have steps of 1/8 in bfloat16.
        assert at is None or top_margin(next_logits(target, [*prompt, *expected[:at]])) <= 0.125
