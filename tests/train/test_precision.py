"""Training whose products are bfloat16: gradients, where they go, and what keeps such a run apart from a float32 one."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels import native
from tilewright.kernels.bundles.training import MIXED
from tilewright.kernels.linear.cpu import BFLOAT16_ISAS
from tilewright.kernels.operations import Operations
from tilewright.kernels.select import PLAIN, training_operations
from tilewright.models import decoder
from tilewright.train.checkpoint import named_leaves
from tilewright.train.drafter import DFlashOptions, Frozen, drafter_loss
from tilewright.train.lm import next_token_loss, train_lm
from tilewright.train.step import cast_loss
from tilewright.train.text import TextOptions
from train.support import DRAFTER, TARGET, counting_stream, drafter_params, drawing, options, silent, target_params

needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
TIED = replace(TARGET, num_layers=1)
UNTIED = replace(TIED, tie_word_embeddings=False)
TOKENS = np.random.default_rng(0).integers(1, 12, (3, 9)).astype(np.int32)
"""Only the first half of the vocabulary."""
MATRICES = 4 * TIED.num_layers + 1
"""Queries, keys and values are one, gate and up another; with the head."""


def gradients(config: decoder.DecoderConfig, params: Any) -> tuple[Any, Any, str]:
    """By float32 products, and by bfloat16 ones; and the latter's program."""

    def loss_of(ops: Operations, params: Any) -> jax.Array:
        return next_token_loss(config, ops, params, jnp.asarray(TOKENS), jnp.ones(TOKENS.shape, bool))[0]

    plain = jax.jit(jax.grad(partial(loss_of, training_operations("float32"))))(params)
    lowered = jax.jit(jax.grad(partial(loss_of, training_operations("bfloat16")))).lower(params)
    return plain, lowered.compile()(params), lowered.as_text()


def assert_close(plain: Any, rounded: Any) -> None:
    """Each array within a few percent in norm: bfloat16 has 8 bits. Not the same, or nothing was rounded."""
    wanted = named_leaves(plain)
    found = named_leaves(rounded)
    assert wanted.keys() == found.keys()
    for name, leaf in wanted.items():
        error = float(jnp.linalg.norm(found[name] - leaf) / jnp.linalg.norm(leaf))
        assert found[name].dtype == jnp.float32
        assert 1e-5 < error < 0.05, f"{name}: {error}"


@needs_native
@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
def test_gradients_are_close_to_those_of_float32_products(config: decoder.DecoderConfig):
    plain, rounded, program = gradients(config, target_params(config))
    assert_close(plain, rounded)
    assert program.count("@tilewright_matmul(") == 3 * MATRICES, "forward and both backward products of every matrix"
    # Tokens that are not in the text reach the embedding through a tied head alone.
    absent = np.asarray(rounded.embed)[12:]
    assert (np.abs(absent).max(axis=1) > 0).all() if config.tie_word_embeddings else (absent == 0).all()


def test_an_accelerator_multiplies_in_bfloat16_so_too(monkeypatch: pytest.MonkeyPatch):
    params = target_params(TIED)

    def loss_of(ops: Operations, params: Any) -> jax.Array:
        return next_token_loss(TIED, ops, params, jnp.asarray(TOKENS), jnp.ones(TOKENS.shape, bool))[0]

    assert_close(*(jax.jit(jax.grad(partial(loss_of, ops)))(params) for ops in (PLAIN, MIXED)))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    bundles = [training_operations(products) for products in ("auto", "bfloat16", "float32")]
    assert [ops.linear for ops in bundles] == [MIXED.linear, MIXED.linear, PLAIN.linear]
    assert [ops.name for ops in bundles] == [*2 * ("gpu training, bfloat16 products",), "gpu training, one dtype"]


@needs_native
def test_a_drafter_and_its_frozen_target_are_multiplied_so_too():
    target = target_params()
    params = drafter_params()
    batch = (jnp.asarray(TOKENS), jnp.ones(TOKENS.shape, bool))
    key = jax.random.key(0)

    def loss_of(ops: Operations, params: Any) -> jax.Array:
        return drawing(drafter_loss)(TARGET, DRAFTER, DFlashOptions(anchors=2), ops, params, Frozen(target), batch, key)[0]

    plain, rounded = (jax.jit(jax.grad(partial(loss_of, training_operations(p))))(params) for p in ("float32", "bfloat16"))
    assert_close(plain, rounded)


@needs_native
def test_a_run_learns_and_is_not_resumed_with_other_products(tmp_path: Path):
    def run(products: str, out: Path, steps: int = 12) -> Any:
        chosen = options(matmul_dtype=products, steps=steps, save_every=6)
        return train_lm(TIED, counting_stream(), counting_stream(100), chosen, out, silent())

    rounded = run("bfloat16", tmp_path / "b")
    plain = run("float32", tmp_path / "f")
    assert rounded.last("held_out_loss") < np.log(24) - 0.3
    assert rounded.last("held_out_loss") == pytest.approx(plain.last("held_out_loss"), rel=0.05)
    assert {leaf.dtype for leaf in jax.tree.leaves(rounded.params)} == {jnp.dtype("float32")}
    with pytest.raises(ValueError, match="matmul_dtype: checkpoint 'bfloat16', now 'float32'"):
        run("float32", tmp_path / "b")


def test_a_loss_in_bfloat16_has_float32_gradients_close_to_its_own():
    target = target_params()
    params = drafter_params()
    batch = (jnp.asarray(TOKENS), jnp.ones(TOKENS.shape, bool))
    key = jax.random.key(0)
    rounded = options(compute_dtype="bfloat16")

    def loss(params: Any, frozen: Any, drawn: Any) -> tuple[jax.Array, jax.Array]:
        return drawing(drafter_loss)(TARGET, DRAFTER, DFlashOptions(anchors=2), rounded.ops, params, frozen, *drawn)

    def gradient(chosen: TextOptions) -> Any:
        return jax.jit(jax.grad(lambda p: cast_loss(chosen, loss)(p, Frozen(target), (batch, key))[0]))(params)

    plain = named_leaves(gradient(options()))
    found = named_leaves(gradient(rounded))
    for name, leaf in plain.items():
        assert found[name].dtype == jnp.float32
        error = float(jnp.linalg.norm(found[name] - leaf) / jnp.linalg.norm(leaf))
        assert 1e-5 < error < 0.1, f"{name}: {error}"


def test_the_compute_dtype_is_part_of_a_run():
    assert options().run_fingerprint()["compute_dtype"] == "float32"
    assert options(compute_dtype="bfloat16").run_fingerprint()["compute_dtype"] == "bfloat16"
    with pytest.raises(ValueError, match="expected the compute dtype float32 or bfloat16, found 'float16'"):
        options(compute_dtype="float16")


def test_without_kernels_a_run_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "kernels", lambda: native.Native(None, "there is no C++ compiler"))
    with pytest.raises(ValueError, match="expected the CPU kernels for matmuls in bfloat16, found none: there is no C"):
        TextOptions(matmul_dtype="bfloat16")
    assert TextOptions().matmul_dtype == "auto"
    assert TextOptions().ops == PLAIN


@needs_native
def test_the_default_multiplies_in_bfloat16_where_the_cpu_can():
    narrow = native.kernels().isa in BFLOAT16_ISAS
    assert training_operations("auto") == training_operations("bfloat16" if narrow else "float32")
    assert training_operations("auto").name == f"cpu training, {'bfloat16' if narrow else 'float32'}"


@needs_native
def test_float32_products_of_the_kernels_agree_with_plain_ones():
    def loss_of(ops: Operations, params: Any) -> jax.Array:
        return next_token_loss(UNTIED, ops, params, jnp.asarray(TOKENS), jnp.ones(TOKENS.shape, bool))[0]

    params = target_params(UNTIED)
    found, expected = (jax.jit(jax.grad(partial(loss_of, ops)))(params) for ops in (training_operations("float32"), PLAIN))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5 * float(jnp.abs(other).max()))


def test_other_products_are_refused():
    with pytest.raises(ValueError, match="expected products in auto, float32 or bfloat16, found 'float16'"):
        TextOptions(matmul_dtype="float16")
