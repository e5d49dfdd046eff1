"""Models and requests of tests of diffusion decoding, and the comparison of two generations."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from reference.diffusion_model_numpy import Model, random_model
from reference.diffusion_numpy import Dense, Generation, Mode, Request, SparseMode, generate, seeded_noise, seeded_uniform

MASK = 39
PROMPT = [3, 17, 8, 25, 11]
LLADA = random_model(5, "llada")
DREAM = random_model(6, "dream")
MODELS = pytest.mark.parametrize("model", [LLADA, DREAM], ids=["llada", "dream"])
EXACT = SparseMode(tau=2, num_full_steps=1, every=1, first_layer_full=True)


def request(**changes: Any) -> Request:
    fields: dict[str, Any] = {"mask": MASK, "gen_length": 12, "block_length": 4, "steps": 12}
    return Request(**fields | changes)


def run(model: Model, asked: Request, mode: Mode = Dense, prompt: Sequence[int] = PROMPT) -> Generation:
    return generate(model, prompt, asked, mode, seeded_noise(1), seeded_uniform(2))


def one_layer(model: Model) -> Model:
    """Keeps one layer, whose keys and values depend only on the tokens at their positions."""
    return replace(model, layers=model.layers[:1])


def assert_same(a: Generation, b: Generation, atol: float = 1e-9) -> None:
    assert (a.tokens, a.output, len(a.steps)) == (b.tokens, b.output, len(b.steps))
    for left, right in zip(a.steps, b.steps, strict=True):
        np.testing.assert_array_equal(left.candidates, right.candidates)
        np.testing.assert_allclose(left.logits, right.logits, atol=atol, rtol=0)


def distance(a: Generation, b: Generation) -> float:
    """The largest difference of logits over the steps that both begin with the same tokens."""
    far = 0.0
    for left, right in zip(a.steps, b.steps, strict=False):
        far = max(far, float(np.abs(left.logits - right.logits).max()))
        if not np.array_equal(left.committed, right.committed):
            break
    return far
