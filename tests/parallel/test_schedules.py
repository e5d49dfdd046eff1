"""Schedules against the single device: results, gradients, and caches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec

from models.sizes import decoder_config
from tilewright.kernels.operations import Operations
from tilewright.kernels.select import PLAIN, operations
from tilewright.models import decoder
from tilewright.models.decoder import DecoderParams
from tilewright.models.params import initialise
from tilewright.models.stack import SINGLE_DEVICE, Schedule
from tilewright.parallel.mesh import make_mesh
from tilewright.parallel.schedules import MicroBatches, TensorParallel
from tilewright.parallel.sharding import TENSOR_PARALLEL, shardings
from tilewright.runtime.cache import allocate
from tilewright.runtime.state import Span, cached_attend

CONFIG = decoder_config("qwen3", 50, 32, 48, 3, 4, 2, 16, tie_word_embeddings=True)
TOKENS = jnp.arange(24).reshape(4, 6) * 7 % 50
BUNDLES: dict[str, Callable[[], Operations]] = {"plain": lambda: PLAIN, "chosen here": operations}


@pytest.fixture(scope="module")
def params() -> DecoderParams:
    drawn = jax.jit(partial(initialise, decoder.declare(CONFIG)))(jax.random.key(0))
    return jax.tree.map(lambda w: 4 * w if w.ndim == 2 else w, drawn)


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_forward_and_gradient_equal_those_of_a_single_device(params: DecoderParams, count: int):
    def loss(schedule: Schedule, params: DecoderParams) -> tuple[Array, Any]:
        ran = decoder.forward_full(CONFIG, PLAIN, params, TOKENS, (2, 0), schedule)
        logits = decoder.logits(CONFIG, PLAIN, params, ran.hidden, schedule)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 3]), (ran.hidden, ran.taps)

    run = jax.jit(jax.value_and_grad(loss, argnums=1, has_aux=True), static_argnums=0)
    want = run(SINGLE_DEVICE, params)
    found = run(MicroBatches(count), params)
    for one, other in zip(jax.tree.leaves(want), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * max(1.0, float(jnp.max(jnp.abs(one)))))
    assert all(float(jnp.max(jnp.abs(leaf))) > 1e-4 for leaf in jax.tree.leaves(want[1]))


@pytest.mark.parametrize("bundle", list(BUNDLES))
def test_caches_are_divided_and_put_back(params: DecoderParams, bundle: str):
    """Rows at different places; the tokens that they decode next, and all that the caches hold."""
    ops = BUNDLES[bundle]()
    prepared = decoder.prepare(CONFIG, ops, params)
    start = jnp.array([0, 3, 5, 9], jnp.int32)
    count = jnp.array([6, 2, 0, 4], jnp.int32)
    rng = np.random.default_rng(0)
    empty = allocate(CONFIG.num_layers, 4, CONFIG.num_kv_heads, 16, CONFIG.head_dim, jnp.float32)
    caches = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), empty)

    @partial(jax.jit, static_argnums=0)
    def run(schedule: Schedule, params: DecoderParams, caches: Any) -> tuple[Array, Array, Any]:
        positions = start[:, None] + jnp.arange(6)
        span = Span(start, count)
        ran = decoder.forward(CONFIG, ops, params, TOKENS, positions, cached_attend, span, caches, schedule=schedule)
        return ran.hidden, decoder.most_likely(CONFIG, ops, params, ran.hidden, schedule), ran.kept

    want = run(SINGLE_DEVICE, prepared, caches)
    found = run(MicroBatches(), prepared, caches)
    inside = np.arange(6) < np.asarray(count)[:, None]
    np.testing.assert_allclose(np.asarray(want[0])[inside], np.asarray(found[0])[inside], atol=2e-5)
    np.testing.assert_array_equal(np.asarray(want[1])[inside], np.asarray(found[1])[inside])
    for one, other, before in zip(jax.tree.leaves(want[2]), jax.tree.leaves(found[2]), jax.tree.leaves(caches), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
        np.testing.assert_array_equal(other[2], before[2])
        assert (np.asarray(other[0, :, :6]) != np.asarray(before[0, :, :6])).all()


def test_groups_of_a_size_that_does_not_divide_the_batch_are_refused(params: DecoderParams):
    with pytest.raises(ValueError, match="expected a batch that 3 micro-batches divide, found 4 rows"):
        decoder.forward_full(CONFIG, PLAIN, params, TOKENS, (), MicroBatches(3))
    with pytest.raises(ValueError, match="expected at least 1 micro-batch, found 0"):
        MicroBatches(0)


HEADS = {"a head of its own": False, "the embedding": True}


@pytest.mark.parametrize("tied", HEADS.values(), ids=HEADS)
def test_shards_of_every_layer_give_what_one_device_does(tied: bool):
    """Over two devices: the stream, taps, logits, and the best tokens with their values, of which some are equal."""
    config = decoder_config("qwen3", 50, 32, 48, 3, 4, 2, 16, tie_word_embeddings=tied)
    specs = decoder.declare(config)
    mesh = make_mesh({"tp": 2})
    params = jax.tree.map(lambda w: 4 * w if w.ndim == 2 else w, jax.jit(partial(initialise, specs))(jax.random.key(0)))
    placed = jax.device_put(params, shardings(specs, mesh, TENSOR_PARALLEL))

    def run(schedule: Schedule, params: DecoderParams) -> Any:
        ran = decoder.forward_full(config, PLAIN, params, TOKENS, (2, 0), schedule)
        normed = PLAIN.rms_norm(ran.hidden, params.norm, config.rms_norm_eps)
        head = decoder.output_head(params)
        coarse = jnp.round(normed)  # many logits are equal then, in both shards
        best = [schedule.head_top_k(PLAIN, each, jax.tree.map(jnp.round, head), 7) for each in (coarse, jnp.zeros_like(coarse))]
        logits = decoder.logits(config, PLAIN, params, ran.hidden, schedule)
        return ran.hidden, ran.taps, logits, decoder.most_likely(config, PLAIN, params, ran.hidden, schedule), best

    parts = jax.tree.map(lambda x: x.sharding.spec, placed)
    whole = PartitionSpec()
    divided = jax.shard_map(partial(run, TensorParallel()), mesh=mesh, in_specs=(parts,), out_specs=whole, check_vma=False)
    want = jax.jit(partial(run, SINGLE_DEVICE))(params)
    found = jax.jit(divided)(placed)
    assert found[2].shape == (*TOKENS.shape, 50)
    for one, other in zip(jax.tree.leaves(want), jax.tree.leaves(found), strict=True):
        if one.dtype == jnp.int32:
            np.testing.assert_array_equal(one, other)
        else:
            np.testing.assert_allclose(one, other, atol=2e-5 * max(1.0, float(jnp.max(jnp.abs(one)))), rtol=0)
    assert len(np.unique(want[3])) > 3, "the best tokens lie all over the vocabulary"
