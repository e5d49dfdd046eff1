"""The pair that ships with the package: both ways of decoding give the same tokens, and a drafter is worth having."""

import json

import numpy as np
import pytest

from llm.support import check_same_as_autoregressive, tokens_of
from tilewright.cli.common import PACKAGED_DRAFTERS
from tilewright.llm.language_model import LanguageModel, load
from tilewright.models.hub import PACKAGED
from tilewright.runtime.sampling import Sampling

NEW = 32


WORTH = {"dflash": 1.2, "dflash2": 1.8, "eagle3": 2.0}
"""The mean acceptance length that each must exceed. DFlash is weak: one layer, trained for two minutes (see the model card)."""


@pytest.fixture(
    scope="module", params=["dflash2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dflash", "eagle3"))]
)
def demo(request: pytest.FixtureRequest) -> LanguageModel:
    block_size = 8 if request.param == "eagle3" else 16
    return load("demo", drafter=PACKAGED_DRAFTERS["demo"][request.param], block_size=block_size, dtype="float32")


@pytest.fixture(scope="module")
def inputs(demo: LanguageModel) -> list[list[int]]:
    """100 beginnings, of different lengths, of the held-out code that ships with the pair."""
    lines = (PACKAGED["demo"].parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [demo.encode(json.loads(line)["prompt"]) for line in lines]
    cut = [texts[n % len(texts)][: 1 + n] for n in range(100)]
    assert len({len(tokens) for tokens in cut}) == 100
    return cut


@pytest.mark.parametrize(("batch", "every"), [(1, 10), *(pytest.param(batch, 1, marks=pytest.mark.slow) for batch in (1, 8))])
def test_greedy(demo: LanguageModel, inputs: list[list[int]], batch: int, every: int):
    """Every so many of the prompts."""
    sampling = Sampling(max_new_tokens=NEW)
    some = inputs[::every]
    want = tokens_of(demo, some, sampling, speculative=False, batch=batch)
    lengths = check_same_as_autoregressive(demo, some, sampling, batch, want)
    assert demo.drafter is not None
    assert np.mean(lengths) > WORTH[demo.drafter.name]


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, 24])
def test_sampled(demo: LanguageModel, inputs: list[list[int]], count: int):
    each = [Sampling(NEW, temperature=1.0, top_p=0.9, seed=n) for n in range(count)]
    want = tokens_of(demo, inputs[:count], each, speculative=False)
    check_same_as_autoregressive(demo, inputs[:count], each, 8, want)
