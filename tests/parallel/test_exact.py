"""The same bits on any number of devices, and what they cost."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec

from models.sizes import decoder_config
from parallel.test_tensor_parallel import round_alone, round_over
from tilewright.compiled.hlo import read_module
from tilewright.kernels.select import PLAIN
from tilewright.models import decoder
from tilewright.models.decoder import DecoderParams
from tilewright.models.params import initialise
from tilewright.models.stack import SINGLE_DEVICE, Strategy
from tilewright.parallel.exact import Exact, head_by_head_operations, tree_sum
from tilewright.parallel.mesh import make_mesh
from tilewright.parallel.sharding import GROUPED, GROUPED_AXES, grouped_mesh, shardings
from tilewright.parallel.strategies import TensorParallel
from tilewright.runtime.cache import allocate
from tilewright.runtime.state import Span, cached_attend

# Columns of the head, the MLP and the heads for which XLA's products of a half or a quarter have other bits than the whole's.
CONFIGS = {
    "llama": decoder_config("llama", 256, 64, 256, 1, 16, 2, 16),
    "qwen3": decoder_config("qwen3", 256, 64, 256, 1, 8, 8, 16, tie_word_embeddings=True),
}
WHOLE = PartitionSpec()


@cache
def drawn(family: str) -> DecoderParams:
    params = jax.jit(partial(initialise, decoder.declare(CONFIGS[family])))(jax.random.key(0))
    return jax.tree.map(lambda w: 4 * w if w.ndim == 2 else w, params)


def answers(family: str, schedule: Strategy, params: DecoderParams, tokens: Array) -> Any:
    """Logits of a whole sequence, and of prefill and a step over caches; and the most likely tokens."""
    config = CONFIGS[family]
    rows = len(tokens)
    ran = decoder.forward_full(config, PLAIN, params, tokens, (), schedule)
    found = [decoder.logits(config, PLAIN, params, ran.hidden, schedule)]
    heads = params.layers[0].qkv.parts[1].shape[1] // config.head_dim
    caches = allocate(config.num_layers, rows, heads, 16, config.head_dim, jnp.float32)
    start = jnp.arange(rows, dtype=jnp.int32)
    for part in (tokens, tokens[:, :1]):
        span = Span(start, jnp.full(rows, part.shape[1], jnp.int32))
        places = start[:, None] + jnp.arange(part.shape[1])
        ran = decoder.forward(config, PLAIN, params, part, places, cached_attend, span, caches, schedule=schedule)
        caches = ran.caches
        start = start + part.shape[1]
        found.append(decoder.logits(config, PLAIN, params, ran.hidden, schedule))
    return found, decoder.most_likely(config, PLAIN, params, ran.hidden, schedule)


def over(family: str, schedule: Strategy, devices: int, batch: int = 3) -> Any:
    config = CONFIGS[family]
    tokens = jnp.arange(batch * 7).reshape(batch, 7) * 11 % 256
    mesh = grouped_mesh(make_mesh({"tp": devices}), "tp", heads=config.num_heads, kv_heads=config.num_kv_heads)
    params = jax.device_put(drawn(family), shardings(decoder.declare(config), mesh, GROUPED))
    specs = jax.tree.map(lambda x: x.sharding.spec, params)
    inside = partial(answers, family, schedule)
    return jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=(specs, WHOLE), out_specs=WHOLE, check_vma=False))(params, tokens)


def differing(one: Any, other: Any) -> int:
    """How many numbers are not the same bit for bit."""
    return sum(int((np.asarray(a) != np.asarray(b)).sum()) for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True))


QUICK = [("llama", 3)]


@pytest.mark.parametrize(
    "family, batch",
    [
        pytest.param(family, batch, marks=[] if (family, batch) in QUICK else pytest.mark.slow)
        for family in CONFIGS
        for batch in (1, 3, 4, 8)
    ],
)
def test_the_same_bits_on_any_number_of_devices(family: str, batch: int):
    tokens = jnp.arange(batch * 7).reshape(batch, 7) * 11 % 256
    alone = jax.jit(partial(answers, family, Exact()))(drawn(family), tokens)
    for devices in (1, 2, 4, 8):
        assert differing(over(family, Exact(GROUPED_AXES), devices, batch), alone) == 0, devices
    plain = jax.jit(partial(answers, family, SINGLE_DEVICE))(drawn(family), tokens)
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)
    assert differing(over(family, TensorParallel(GROUPED_AXES), 8, batch), plain) > 0, "nothing was there to be kept"


@cache
def hybrid_over(devices: int, batch: int) -> Any:
    return round_over("qwen3_next", Exact(GROUPED_AXES), devices, batch, ops=head_by_head_operations(PLAIN))


@pytest.mark.parametrize(("devices", "batch"), [(4, 1), *(pytest.param(n, 3, marks=pytest.mark.slow) for n in (2, 8))])
def test_linear_attention_and_a_shared_expert_have_the_same_bits(devices: int, batch: int):
    """Of prefill, of a block of which two positions stay, and of a step behind these: logits and states."""
    alone = hybrid_over(1, batch)
    plain = round_alone("qwen3_next", batch)
    assert differing(hybrid_over(devices, batch), alone) == 0
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)
    if devices == 8:
        assert differing(round_over("qwen3_next", TensorParallel(GROUPED_AXES), devices, batch), plain) > 0


@pytest.mark.parametrize("devices", [2, 8])
def test_a_sum_as_a_tree_sends_what_a_ring_does(devices: int):
    """Numbers whose sum depends on the order; pieces that need padding."""
    drawn = np.random.default_rng(0).normal(size=(devices, 3, 7)) * 10.0 ** np.arange(devices)[:, None, None]
    x = drawn.astype(np.float32)
    mesh = make_mesh({"tp": devices})
    spec = PartitionSpec("tp")
    run = jax.shard_map(lambda x: tree_sum(x, "tp"), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    program: Any = jax.jit(run).lower(x).compile()
    wanted = x
    while len(wanted) > 1:
        wanted = wanted[0::2] + wanted[1::2]
    np.testing.assert_array_equal(program(x), np.repeat(wanted, devices, axis=0))
    ops = [op for each in read_module(program.as_text()).computations.values() for op in each.ops]
    piece = -(-21 // devices)
    sent = [op.outputs[0].elements for op in ops if op.opcode == "collective-permute"]
    assert sorted(sent) == [piece * 2**n for n in range(len(sent))]
    assert sum(sent) == piece * (devices - 1)


def test_parts_that_do_not_fit():
    with pytest.raises(ValueError, match="expected a power of two as the number of parts, found 6"):
        Exact(parts=6)
    with pytest.raises(ValueError, match="expected devices that divide the 4 parts of an exact sum, found 8"):
        over("qwen3", Exact(GROUPED_AXES, 4), 8)
    with pytest.raises(ValueError, match=r"divides into 512 blocks along its dim 1, found one \[64, 256\]"):
        jax.eval_shape(partial(answers, "llama", Exact(parts=512)), drawn("llama"), jnp.zeros((1, 4), jnp.int32))
