"""8-bit weights on the pair that ships with the package: speculative decoding stays exact, and quality costs little."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llm.support import check_same_as_autoregressive, tokens_of
from tilewright.kernels import native
from tilewright.kernels.linear.blocks import FORMS
from tilewright.kernels.linear.cpu import PackedMatrix
from tilewright.llm.language_model import LanguageModel, load
from tilewright.models import decoder
from tilewright.models.hub import PACKAGED
from tilewright.runtime.sampling import Sampling

pytestmark = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")

NEW = 24
WINDOW = 64
ROWS = 16


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Held-out code."""
    lines = (PACKAGED["demo"].parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:ROWS]]


@pytest.fixture(scope="module")
def demo() -> dict[str, LanguageModel]:
    """By the dtype of their activations."""
    return {
        dtype: load("demo", drafter="demo-drafter", block_size=16, dtype=dtype, weights="int8")
        for dtype in ("float32", "bfloat16")
    }


@pytest.mark.parametrize("dtype, batch", [pytest.param("bfloat16", 1, marks=pytest.mark.slow), ("float32", 8)])
def test_speculative_is_plain_decoding(demo: dict[str, LanguageModel], texts: list[str], dtype: str, batch: int):
    want = tokens_of(demo[dtype], texts, Sampling(NEW), speculative=False, batch=batch)
    lengths = check_same_as_autoregressive(demo[dtype], texts, Sampling(NEW), batch, want)
    assert np.mean(lengths) > 1.2


def log_probabilities(lm: LanguageModel, tokens: jax.Array) -> jax.Array:
    params = lm.model.models.target
    forward = decoder.forward_full(lm.target, lm.ops, params, tokens)
    return jax.nn.log_softmax(decoder.logits(lm.target, lm.ops, params, forward.hidden))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_distance_from_float32(demo: dict[str, LanguageModel], texts: list[str], dtype: str):
    """`benchmarks/int8_quality.py` finds 0.0006 nats on 9,000 tokens of such text; twice that is allowed here."""
    exact = load("demo", dtype="float32")
    tokens = jnp.asarray([exact.encode(text)[:WINDOW] for text in texts], jnp.int32)
    want = log_probabilities(exact, tokens)
    found = log_probabilities(demo[dtype], tokens)
    kl = float(jnp.mean(jnp.sum(jnp.exp(want) * (want - found), axis=-1)))
    assert 0 < kl < 0.0012


def test_every_matrix_has_8_bits(demo: dict[str, LanguageModel]):
    lm = demo["float32"]
    leaves = jax.tree.leaves(lm.model.models.target, is_leaf=lambda leaf: isinstance(leaf, PackedMatrix))
    packed = [leaf for leaf in leaves if isinstance(leaf, PackedMatrix)]
    assert len(packed) == 4 * lm.target.num_layers + 1  # q, k and v are one, gate and up too
    assert {leaf.panels.shape[2] for leaf in packed} == {FORMS["q8_0"].group_bytes}
