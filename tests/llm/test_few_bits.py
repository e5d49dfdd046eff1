"""Weights in few bits through XLA: speculation stays exact, files keep their bits, and a mesh gives what one device does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from llm.support import check_same_as_autoregressive, tokens_of
from models.test_gguf import CONFIGS, make
from products import cases
from tilewright.kernels import native
from tilewright.kernels.linear.scaled import ScaledMatrix
from tilewright.kernels.select import Weights
from tilewright.llm.language_model import Kernels, LanguageModel, load
from tilewright.models.checkpoint import load_decoder, native_formats
from tilewright.models.decoder import declare
from tilewright.parallel.auto import STRATEGIES
from tilewright.parallel.mesh import make_mesh
from tilewright.runtime.memory import held_bytes, step_bytes, weight_bytes
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable

FEW: tuple[Weights, ...] = ("int8", "fp8", "int4")
ONE_QUICK = [pytest.param(each, marks=[] if each == "int4" else pytest.mark.slow) for each in FEW]
NEW = 12
TABLE = ShapeTable(batches=(1, 8), capacities=(128,), chunks=(16,))
PROMPTS = ["he he he he", "abcabcabc", "x", "hello hello", "he", "aaaa", "lo lo lo", "b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random model as a GGUF file in Q4_0 and as a folder; the parts of two devices end where blocks of 32 inputs do."""
    return make(tmp_path_factory.mktemp("few"), replace(CONFIGS["qwen3"], intermediate_size=128), Kind.Q4_0)


def loaded(path: Path, weights: Weights, kernels: Kernels = "xla", **options: Any) -> LanguageModel:
    return load(path, dtype="float32", weights=weights, kernels=kernels, table=TABLE, **options)


@pytest.mark.parametrize("weights", ONE_QUICK)
def test_speculative_is_plain_decoding(folder: tuple[Path, Path], weights: Weights):
    lm = loaded(folder[1], weights, drafter="ngram", block_size=6)
    want = tokens_of(lm, PROMPTS, Sampling(NEW), speculative=False, batch=8)
    for batch in (1, 8):
        check_same_as_autoregressive(lm, PROMPTS, Sampling(NEW), batch, want)


def scaled_leaves(lm: LanguageModel) -> list[Any]:
    held = jax.tree.leaves(lm.model.models.target, is_leaf=lambda leaf: isinstance(leaf, ScaledMatrix))
    return [leaf for leaf in held if isinstance(leaf, ScaledMatrix)]


def test_a_files_bits_are_kept(folder: tuple[Path, Path]):
    """Every matrix of the layers has the weights that llama.cpp's library reads, in 4 bits, two of which share a byte.

    The embedding, which is the head, too, has 8.
    """
    _, want = load_decoder(folder[0], jnp.float32)
    lm = loaded(folder[0], "int4")
    found = lm.model.models.target
    table = found.embed.rows(jnp.arange(len(want.embed)))
    assert float(jnp.max(jnp.abs(table - want.embed))) <= float(jnp.max(jnp.abs(want.embed))) / 127
    for got, layer in zip(found.layers, want.layers, strict=True):
        for one, other in zip((got.o, got.down, *got.qkv.parts), (layer.o, layer.down, *layer.qkv.parts), strict=True):
            np.testing.assert_array_equal(one.dequantised(jnp.float32), other)
    of_layers = [leaf for leaf in scaled_leaves(lm) if leaf.in_blocks and leaf is not found.embed]
    assert {str(leaf.values.dtype) for leaf in of_layers} == {"int4"}
    count = sum(leaf.values.size for leaf in of_layers)
    assert held_bytes(of_layers) <= count * (4.5 + 16 / 32) / 8  # scales in half precision, or in single
    assert step_bytes(found) <= held_bytes(found)


@pytest.mark.parametrize("weights", FEW)
def test_bytes_are_known_before_weights_are_read(folder: tuple[Path, Path], weights: Weights):
    """By each format, of a file in few bits and of another: no less than the arrays take, and hardly more."""
    for path in folder:
        lm = loaded(path, weights)
        said = weight_bytes(declare(lm.target, lm.ops.separate_head), None, 4, lm.ops, native_formats(path))
        held = held_bytes(lm.model.models.target)
        assert held <= said < 1.1 * held


def fits(weights: Weights, schedule: str, kernels: Kernels) -> bool:
    """The CPU kernels have no sums that are exact, and no columns of packed matrices to cut."""
    return kernels == "xla" or (schedule not in ("column", "exact") and native.kernels().isa is not None)


QUICK = [("int4", "sync", "xla"), ("int8", "sequence", "xla")]
MESHES = [
    *cases(QUICK, ("int8", "int4"), STRATEGIES, ("xla", "auto"), fits=fits),
    pytest.param("fp8", "sync", "xla", marks=pytest.mark.slow),  # to a mesh the same as 8-bit integers
]


@pytest.mark.parametrize("weights, schedule, kernels", MESHES)
def test_a_mesh_drafts_the_tokens_of_one_device(folder: tuple[Path, Path], weights: Weights, schedule: str, kernels: Kernels):
    """In float32. The CPU kernels round activations to 8 bits, which makes more of the last bits of sums in another order, and
    of what of a row a device has: there a mesh is held against itself, and one prompt against one device below."""
    settings: dict[str, Any] = {"weights": weights, "kernels": kernels}
    over = loaded(folder[1], **settings, drafter="ngram", block_size=4, mesh=make_mesh({"tp": 2}), schedule=schedule)
    one = over if kernels == "auto" else loaded(folder[1], **settings)
    want = tokens_of(one, PROMPTS, Sampling(NEW), speculative=False, batch=8)
    check_same_as_autoregressive(over, PROMPTS, Sampling(NEW), 8, want)


def test_a_file_over_a_mesh_keeps_its_bits_where_blocks_allow(folder: tuple[Path, Path]):
    over = loaded(folder[0], "int4", mesh=make_mesh({"tp": 2}))
    of_layers = jax.tree.leaves(over.model.models.target.layers, is_leaf=lambda leaf: isinstance(leaf, ScaledMatrix))
    held = [leaf.values.astype(jnp.int32) for leaf in of_layers if isinstance(leaf, ScaledMatrix)]
    assert max(int(jnp.max(jnp.abs(values))) for values in held) <= 8
    alone = loaded(folder[0], "int4")
    assert over.generate(PROMPTS[:1], Sampling(NEW))[0].tokens == alone.generate(PROMPTS[:1], Sampling(NEW))[0].tokens


@pytest.mark.skipif(native.kernels().isa is None, reason="needs the CPU kernels")
def test_the_cpu_kernels_divide_4_bits(folder: tuple[Path, Path]):
    found = [
        load(folder[0], dtype="float32", weights="int4", table=TABLE, mesh=mesh).generate(PROMPTS[:1], Sampling(NEW))[0].tokens
        for mesh in (None, make_mesh({"tp": 2}))
    ]
    assert found[0] == found[1]
    with pytest.raises(ValueError, match=r"^FP8 weights need XLA: expected kernels 'xla'"):
        load(folder[1], weights="fp8")
