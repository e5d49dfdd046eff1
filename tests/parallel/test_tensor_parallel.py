"""Schedules over shards of the weights against the single device: logits, gradients, caches, and what is exchanged."""

from collections import Counter
from functools import cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec

from models.sizes import decoder_config
from tilewright.compiled.hlo import read_module
from tilewright.decode.cache import allocate
from tilewright.decode.state import Span, cached_attend
from tilewright.kernels.select import PLAIN
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.params import initialise
from tilewright.models.stack import SINGLE_DEVICE, Schedule
from tilewright.parallel.mesh import make_mesh
from tilewright.parallel.rings import Route
from tilewright.parallel.schedules import Ring, Sequence, TensorParallel
from tilewright.parallel.sharding import TENSOR_PARALLEL, shardings

CONFIGS = {
    "llama": decoder_config("llama", 64, 32, 48, 2, 16, 8, 8),  # grouped queries
    "qwen3": decoder_config("qwen3", 64, 32, 48, 2, 8, 8, 8, tie_word_embeddings=True),
}
SCHEDULES = {
    "sync": TensorParallel(),
    "sequence": Sequence(),
    "ring": Ring(),
    "ring, one way in a loop": Ring(route=Route(bidirectional=False, looped=True, chunk=2)),
}
WHOLE = PartitionSpec()


@cache
def drawn(family: str) -> DecoderParams:
    params = jax.jit(partial(initialise, decoder.declare(CONFIGS[family])))(jax.random.key(0))
    # Larger than they are drawn, so that every part of a layer shows.
    return jax.tree.map(lambda w: 4 * w if w.ndim == 2 else w, params)


def tokens(batch: int, length: int) -> Array:
    return jnp.arange(batch * length).reshape(batch, length) * 7 % 64


def close(found: Any, wanted: Any, config: DecoderConfig) -> None:
    """Within the rounding of the longest chain of sums: those of the products of all layers, one after another."""
    terms = config.num_layers * (2 * config.hidden_size + config.num_heads * config.head_dim + config.intermediate_size)
    share = 16 * terms**0.5 * float(jnp.finfo(jnp.float32).eps)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=share * float(jnp.max(jnp.abs(other))))


def loss(config: DecoderConfig, schedule: Schedule, params: DecoderParams, batch: Array) -> tuple[Array, Any]:
    """Something that all logits are part of; the logits, and the stream after a layer."""
    ran = decoder.forward_full(config, PLAIN, params, batch, (0,), schedule)
    logits = decoder.logits(config, PLAIN, params, ran.hidden, schedule)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 3]), (logits, ran.taps)


def divided(family: str, schedule: Schedule, devices: int) -> tuple[Any, DecoderParams]:
    """`loss` over so many devices, and parameters that lie there."""
    config, mesh = CONFIGS[family], make_mesh({"tp": devices})
    placed = jax.device_put(drawn(family), shardings(decoder.declare(config), mesh, TENSOR_PARALLEL))
    specs = jax.tree.map(lambda x: x.sharding.spec, placed)
    inside = partial(loss, config, schedule)
    return jax.shard_map(inside, mesh=mesh, in_specs=(specs, WHOLE), out_specs=WHOLE, check_vma=False), placed


@cache
def alone(family: str, batch: int, length: int) -> Any:
    run = jax.value_and_grad(partial(loss, CONFIGS[family], SINGLE_DEVICE), has_aux=True)
    return jax.jit(run)(drawn(family), tokens(batch, length))


QUICK = [("llama", "sync", 2), ("llama", "sequence", 4), ("llama", "ring", 2), ("llama", "ring", 4), ("qwen3", "ring", 2)]
"""Of the product of families, schedules and devices."""


@pytest.mark.parametrize(
    "family, schedule, devices",
    [
        pytest.param(*each, marks=[] if each in QUICK else pytest.mark.slow)
        for each in product(CONFIGS, SCHEDULES, (1, 2, 4, 8))
    ],
)
def test_prefill_and_gradient_equal_those_of_a_single_device(family: str, schedule: str, devices: int):
    run, placed = divided(family, SCHEDULES[schedule], devices)
    found = jax.jit(jax.value_and_grad(run, has_aux=True))(placed, tokens(2, 8))
    wanted = alone(family, 2, 8)
    close(found, wanted, CONFIGS[family])
    assert all(float(jnp.max(jnp.abs(leaf))) > 1e-4 for leaf in jax.tree.leaves(wanted[1]))


@pytest.mark.slow
@pytest.mark.parametrize("batch, length", [(1, 8), (4, 4), (8, 1)])
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("schedule", [Sequence(), Ring()], ids=["sequence", "ring"])
@pytest.mark.parametrize("family", CONFIGS)
def test_rows_are_divided_wherever_they_come_from(family: str, schedule: Schedule, devices: int, batch: int, length: int):
    """One long row, several, and a single position of many."""
    run, placed = divided(family, schedule, devices)
    close(jax.jit(run)(placed, tokens(batch, length)), alone(family, batch, length)[0], CONFIGS[family])


@pytest.mark.parametrize("schedule", [Sequence(), Ring()], ids=["sequence", "ring"])
def test_caches_are_divided_by_heads(schedule: Schedule):
    """A step of decoding, each row at its own place: hidden states, and all that the caches hold."""
    config, mesh, start = CONFIGS["llama"], make_mesh({"tp": 4}), jnp.array([0, 3, 5, 9], jnp.int32)
    empty = allocate(config.num_layers, 4, config.num_kv_heads, 16, config.head_dim, jnp.float32)
    rng = np.random.default_rng(0)
    caches = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), empty)

    def step(schedule: Schedule, params: DecoderParams, caches: Any) -> tuple[Array, Any]:
        span = Span(start, jnp.ones(4, jnp.int32))
        ran = decoder.forward(
            config, PLAIN, params, tokens(4, 1), start[:, None], cached_attend, span, caches, schedule=schedule
        )
        return ran.hidden, ran.kept

    placed = jax.device_put(drawn("llama"), shardings(decoder.declare(config), mesh, TENSOR_PARALLEL))
    heads = jax.tree.map(lambda _: PartitionSpec(None, "tp"), caches)
    specs = jax.tree.map(lambda x: x.sharding.spec, placed)
    run = partial(step, schedule)
    over = jax.shard_map(run, mesh=mesh, in_specs=(specs, heads), out_specs=(WHOLE, heads), check_vma=False)
    found, wanted = jax.jit(over)(placed, caches), jax.jit(partial(step, SINGLE_DEVICE))(drawn("llama"), caches)
    close(found, wanted, config)
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(*map(jax.tree.leaves, (found[1], caches)), strict=True))


def test_what_is_exchanged_is_what_the_schedule_says():
    """Collectives of a whole pass over four devices, the embedding's and the head's included."""

    def exchanged(schedule: Schedule) -> Counter[str]:
        run, placed = divided("llama", schedule, 4)
        text: Any = jax.jit(run).lower(placed, tokens(2, 8)).compile().as_text()
        ops = [op for each in read_module(text).computations.values() for op in each.ops]
        names = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute")
        return Counter(op.opcode.removesuffix("-start") for op in ops if op.opcode.removesuffix("-start") in names)

    layers, hops = CONFIGS["llama"].num_layers, 3
    assert exchanged(TensorParallel()) == {"all-reduce": 2 * layers + 1, "all-gather": 1}
    # The stream after the last layer and after the tapped one, and the logits.
    assert exchanged(Sequence()) == {"all-reduce": 1, "all-gather": 2 * layers + 3, "reduce-scatter": 2 * layers}
    # As many rings, two for the sum of the embedding, and the logits.
    assert exchanged(Ring()) == {"collective-permute": hops * (4 * layers + 2 + 2), "all-gather": 1}


@pytest.mark.parametrize("schedule", [Sequence(), Ring()], ids=["sequence", "ring"])
def test_rows_that_the_devices_do_not_divide_are_refused(schedule: Schedule):
    run, placed = divided("llama", schedule, 4)
    with pytest.raises(ValueError, match="expected rows that the 4 devices of 'tp' divide, found 6"):
        jax.jit(run)(placed, tokens(2, 3))
