"""Tensor parallelism against a single device: outputs, taps, logits and the best tokens."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from models.sizes import decoder_config
from tilewright.kernels.select import PLAIN
from tilewright.models import decoder
from tilewright.models.decoder import DecoderParams
from tilewright.models.params import initialise
from tilewright.models.stack import SINGLE_DEVICE, Strategy
from tilewright.parallel.mesh import make_mesh
from tilewright.parallel.sharding import TENSOR_PARALLEL, shardings
from tilewright.parallel.strategies import TensorParallel

TOKENS = jnp.arange(24).reshape(4, 6) * 7 % 50


HEADS = {"a head of its own": False, "the embedding": True}


@pytest.mark.parametrize("tied", HEADS.values(), ids=HEADS)
def test_shards_of_every_layer_give_what_one_device_does(tied: bool):
    """Over two devices: the stream, taps, logits, and the best tokens with their values, of which some are equal."""
    config = decoder_config("qwen3", 50, 32, 48, 3, 4, 2, 16, tie_word_embeddings=tied)
    specs = decoder.declare(config)
    mesh = make_mesh({"tp": 2})
    params = jax.tree.map(lambda w: 4 * w if w.ndim == 2 else w, jax.jit(partial(initialise, specs))(jax.random.key(0)))
    placed = jax.device_put(params, shardings(specs, mesh, TENSOR_PARALLEL))

    def run(schedule: Strategy, params: DecoderParams) -> Any:
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
