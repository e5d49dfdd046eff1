"""Schedules over shards of the weights against the single device: logits, gradients, caches, and what is exchanged."""

from collections import Counter
from functools import cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from models.sizes import decoder_config
from products import cases
from tilewright.compiled.hlo import read_module
from tilewright.kernels.operations import Operations
from tilewright.kernels.select import PLAIN
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.delta import DeltaSizes, DeltaState
from tilewright.models.experts import Mixture
from tilewright.models.params import initialise
from tilewright.models.stack import SINGLE_DEVICE, Strategy
from tilewright.parallel.domino import Column, Domino
from tilewright.parallel.exact import Exact
from tilewright.parallel.experts import with_local_experts
from tilewright.parallel.mesh import make_mesh
from tilewright.parallel.rings import Route
from tilewright.parallel.sharding import GROUPED, GROUPED_AXES, grouped_mesh, shardings
from tilewright.parallel.strategies import CollectiveMatmul, Sequence, TensorParallel
from tilewright.runtime.cache import allocate
from tilewright.runtime.state import Span, cached_attend

CONFIGS = {
    "llama": decoder_config("llama", 64, 32, 48, 2, 16, 2, 8),  # groups of queries, of which 4 and 8 devices have parts
    "qwen3": decoder_config("qwen3", 64, 32, 48, 2, 8, 8, 8, tie_word_embeddings=True),
}
OTHERS = {
    "gemma2": decoder_config(
        "gemma2",
        64,
        32,
        48,
        2,
        16,
        2,
        8,
        tie_word_embeddings=True,
        sliding_window=5,
        sliding_layers=(0,),
        attention_scale=0.3,
        score_softcap=5.0,
        logit_softcap=9.0,
        embedding_scale=3.0,
    ),
    "qwen3_next": decoder_config(
        "qwen3_next",
        64,
        64,
        48,
        2,
        16,
        2,
        8,
        partial_rotary_factor=0.5,
        delta=DeltaSizes(8, 16, 4, 6, 4),
        delta_layers=(0,),
        mixture=Mixture(8, 2, 16, shared=16),
        dense_layers=(1,),
    ),
}
"""Families whose halves begin with more than one operation, are normed behind their sums, or keep states."""
SCHEDULES = {
    "sync": TensorParallel(GROUPED_AXES),
    "sequence": Sequence(GROUPED_AXES),
    "ring": CollectiveMatmul(GROUPED_AXES),
    "ring, one way in a loop": CollectiveMatmul(GROUPED_AXES, route=Route(bidirectional=False, looped=True, chunk=2)),
    "domino": Domino(GROUPED_AXES, least=1),
    "domino, four in one way": Domino(GROUPED_AXES, 4, Route(bidirectional=False), least=1),
    "column": Column(GROUPED_AXES, least=1),
}
MORE_SCHEDULES = {"exact": Exact(GROUPED_AXES), "sequence, to experts": Sequence(GROUPED_AXES, capacity=2)}
"""`test_exact.py` and `test_experts.py` test them besides; rows that go to a shared expert, too, are gathered all the same."""
WHOLE = PartitionSpec()


def config_of(family: str) -> DecoderConfig:
    return {**CONFIGS, **OTHERS}[family]


@cache
def drawn(family: str) -> DecoderParams:
    params = jax.jit(partial(initialise, decoder.declare(config_of(family))))(jax.random.key(0))
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


def loss(config: DecoderConfig, schedule: Strategy, params: DecoderParams, batch: Array) -> tuple[Array, Any]:
    """Something that all logits are part of; the logits, and the stream after a layer."""
    ran = decoder.forward_full(config, PLAIN, params, batch, (0,), schedule)
    logits = decoder.logits(config, PLAIN, params, ran.hidden, schedule)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 3]), (logits, ran.taps)


def placed(family: str, devices: int) -> tuple[Mesh, DecoderParams]:
    """Parameters over so many devices."""
    config = config_of(family)
    mesh = grouped_mesh(make_mesh({"tp": devices}), "tp", heads=config.num_heads, kv_heads=config.num_kv_heads)
    return mesh, jax.device_put(drawn(family), shardings(decoder.declare(config), mesh, GROUPED))


def divided(family: str, schedule: Strategy, devices: int) -> tuple[Any, DecoderParams]:
    """`loss` over so many devices, and parameters that lie there."""
    mesh, params = placed(family, devices)
    specs = jax.tree.map(lambda x: x.sharding.spec, params)
    inside = partial(loss, CONFIGS[family], schedule)
    return jax.shard_map(inside, mesh=mesh, in_specs=(specs, WHOLE), out_specs=WHOLE, check_vma=False), params


@cache
def alone(family: str, batch: int, length: int) -> Any:
    run = jax.value_and_grad(partial(loss, CONFIGS[family], SINGLE_DEVICE), has_aux=True)
    return jax.jit(run)(drawn(family), tokens(batch, length))


QUICK = [
    ("llama", "sync", 4, 4),
    ("llama", "sequence", 2, 4),
    ("qwen3", "ring", 2, 4),
    ("llama", "domino", 4, 4),
    ("llama", "column", 2, 4),
]
"""Of the product of families, schedules, devices and rows."""


def divides(family: str, schedule: str, devices: int, batch: int) -> bool:
    """See `test_one_row_without_a_cache_cannot_be_divided`."""
    return batch > 1 or "domino" not in schedule


@pytest.mark.parametrize(
    "family, schedule, devices, batch", list(cases(QUICK, CONFIGS, SCHEDULES, (1, 2, 4, 8), (1, 4, 8), fits=divides))
)
def test_prefill_and_gradient_equal_those_of_a_single_device(family: str, schedule: str, devices: int, batch: int):
    run, params = divided(family, SCHEDULES[schedule], devices)
    found = jax.jit(jax.value_and_grad(run, has_aux=True))(params, tokens(batch, 8))
    wanted = alone(family, batch, 8)
    close(found, wanted, CONFIGS[family])
    assert all(float(jnp.max(jnp.abs(leaf))) > 1e-4 for leaf in jax.tree.leaves(wanted[1]))


def over_caches(config: DecoderConfig, schedule: Strategy, params: DecoderParams, batch: Array, steps: int) -> Any:
    """Prefill from each row's place on, of which five are kept, and a step of decoding: logits, and what the caches hold."""
    rows = len(batch)
    start = jnp.arange(rows, dtype=jnp.int32) % 3
    heads = params.layers[0].qkv.parts[1].shape[1] // config.head_dim
    caches = allocate(config.num_layers, rows, heads, 16, config.head_dim, jnp.float32)
    found = []
    for n in range(1 + steps):
        count = min(batch.shape[1], 5)
        span = Span(start, jnp.full(rows, count, jnp.int32))
        places = start[:, None] + jnp.arange(batch.shape[1])
        ran = decoder.forward(config, PLAIN, params, batch, places, cached_attend, span, caches, schedule=schedule)
        caches = ran.caches
        start = start + count
        found.append(decoder.logits(config, PLAIN, params, ran.hidden, schedule))
        batch = batch[:, :1] + n
    return found, caches


@cache
def cached_alone(family: str, batch: int) -> Any:
    run = partial(over_caches, CONFIGS[family], SINGLE_DEVICE, steps=1)
    return jax.jit(run)(drawn(family), tokens(batch, 8))


QUICK_CACHED = [("llama", "domino", 4, 1), ("llama", "ring", 8, 1), ("qwen3", "domino", 2, 4)]


@pytest.mark.parametrize(
    "family, schedule, devices, batch", list(cases(QUICK_CACHED, CONFIGS, SCHEDULES, (1, 2, 4, 8), (1, 3, 4, 8)))
)
def test_prefill_and_decoding_over_caches(family: str, schedule: str, devices: int, batch: int):
    """Rows at their own places; each device's caches hold the heads that its queries read, and nothing else."""
    config = CONFIGS[family]
    strategy = SCHEDULES[schedule]
    count = strategy.count or 2 if isinstance(strategy, Domino) else 1
    mesh, params = placed(family, devices)
    specs = jax.tree.map(lambda x: x.sharding.spec, params)
    heads = PartitionSpec(None, "kv")
    steps = 1 if batch % count == 0 else 0  # a single position cannot be divided

    run = jax.shard_map(
        partial(over_caches, config, strategy, steps=steps),
        mesh=mesh,
        in_specs=(specs, WHOLE),
        out_specs=(WHOLE, heads),
        check_vma=False,
    )
    found = jax.jit(run)(params, tokens(batch, 8))
    wanted = cached_alone(family, batch)
    close(found[0], wanted[0][: 1 + steps], config)
    if steps:
        close(found[1], wanted[1], config)
    held = found[1][0].k.addressable_shards[0].data.shape
    assert held == (batch, max(1, config.num_kv_heads // devices), 16, config.head_dim)


def through_a_round(
    config: DecoderConfig, schedule: Strategy, step: bool, params: DecoderParams, batch: Array, ops: Operations = PLAIN
) -> Any:
    """Logits of a prefill, of a block of which two positions stay, and of a step behind these; what layers keep."""
    rows = len(batch)
    start = jnp.zeros(len(batch), jnp.int32)
    found = []

    def empty(layer: decoder.Layer) -> Any:
        if layer.kind.delta is not None:
            return DeltaState.empty(layer.kind.delta.part(layer.delta.beta.shape[1]), rows, jnp.float32)
        heads = layer.qkv.parts[1].shape[1] // config.head_dim
        return allocate(1, rows, heads, 16, config.head_dim, jnp.float32)[0]

    caches = tuple(map(empty, params.layers))
    for length, count, stay, uncommitted in ((8, 6, 6, False), (4, 4, 2, True), (1, 1, 1, False))[: 3 if step else 2]:
        span = Span(start, jnp.full(rows, count, jnp.int32), uncommitted)
        places = start[:, None] + jnp.arange(length)
        now = (batch[:, :length] + len(found)) % config.vocab_size
        ran = decoder.forward(config, ops, params, now, places, cached_attend, span, caches, schedule=schedule)
        stays = jnp.full(rows, stay)
        caches = tuple(each.commit(ops, stays) if isinstance(each, DeltaState) else each for each in ran.caches)
        start += stay
        found.append(decoder.logits(config, ops, params, ran.hidden, schedule)[:, :count])
    return found, tuple(each.state for each in caches if isinstance(each, DeltaState))


@cache
def round_alone(family: str, batch: int) -> Any:
    return jax.jit(partial(through_a_round, config_of(family), SINGLE_DEVICE, True))(drawn(family), tokens(batch, 8))


def round_over(
    family: str, schedule: Strategy, devices: int, batch: int, step: bool = True, ops: Operations = PLAIN
) -> tuple[list[Array], tuple[Array, ...]]:
    """`through_a_round` of so many devices."""
    mesh, params = placed(family, devices)
    specs = jax.tree.map(lambda x: x.sharding.spec, params)
    run = jax.shard_map(
        partial(through_a_round, config_of(family), schedule, step, ops=with_local_experts(ops)),
        mesh=mesh,
        in_specs=(specs, WHOLE),
        out_specs=(WHOLE, PartitionSpec(None, GROUPED_AXES)),
        check_vma=False,
    )
    return jax.jit(run)(params, tokens(batch, 8))


SLOW_ROUNDS = [
    ("qwen3_next", "ring", 8, 2),
    ("qwen3_next", "sequence, to experts", 2, 1),
    ("qwen3_next", "column", 8, 1),
    ("gemma2", "domino", 8, 2),
    ("gemma2", "exact", 2, 1),
]


@pytest.mark.parametrize(
    "family, schedule, devices, batch",
    [("qwen3_next", "domino", 2, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW_ROUNDS)],
)
def test_a_prefill_a_round_and_a_step_of_other_families(family: str, schedule: str, devices: int, batch: int):
    """Micro-batches are rows of two, and positions of one, whose second half sees the first one's states."""
    config = config_of(family)
    strategy = {**SCHEDULES, **MORE_SCHEDULES}[schedule]
    step = batch > 1 or schedule != "domino"  # a single position cannot be divided
    (logits, states), (wanted, wanted_states) = round_over(family, strategy, devices, batch, step), round_alone(family, batch)
    close(logits, wanted[: len(logits)], config)
    assert len(logits) == 2 + step
    assert len(states) == len(config.delta_layers)
    if step:
        close(states, wanted_states, config)


@pytest.mark.parametrize("devices", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_tiles_of_several_devices_rows(devices: int):
    """Of two at a time, and of three, of which the last tile has two."""
    run, params = divided("llama", Domino(GROUPED_AXES, least=6), devices)
    found = jax.jit(jax.value_and_grad(run, has_aux=True))(params, tokens(4, 8))
    close(found, alone("llama", 4, 8), CONFIGS["llama"])


def test_one_row_without_a_cache_cannot_be_divided():
    run, params = divided("llama", Domino(GROUPED_AXES), 2)
    with pytest.raises(ValueError, match="found 1 rows whose 8 positions cannot be divided: later positions need a cache"):
        jax.eval_shape(run, params, tokens(1, 8))
    with pytest.raises(ValueError, match="found 3 rows and 7 positions, which they do not divide either"):
        jax.eval_shape(run, params, tokens(3, 7))
    with pytest.raises(ValueError, match="at least 2 micro-batches, and tiles of at least 1 row, found 1 and 256"):
        Domino(count=1)


def test_columns_that_cannot_be_cut():
    run, params = divided("llama", Column(GROUPED_AXES, parts=3), 2)
    with pytest.raises(ValueError, match="expected a matrix whose columns 3 parts divide, found one of 32 columns"):
        jax.eval_shape(run, params, tokens(1, 8))
    with pytest.raises(ValueError, match="at least 2 parts, and tiles of at least 1 row, found 2 and 0"):
        Column(least=0)


def test_what_is_exchanged_is_what_the_schedule_says():
    """Collectives of a whole pass over four devices, the embedding's and the head's included."""

    def exchanged(schedule: Strategy) -> Counter[str]:
        run, params = divided("llama", schedule, 4)
        text: Any = jax.jit(run).lower(params, tokens(2, 8)).compile().as_text()
        ops = [op for each in read_module(text).computations.values() for op in each.ops]
        names = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute")
        return Counter(op.opcode.removesuffix("-start") for op in ops if op.opcode.removesuffix("-start") in names)

    layers = CONFIGS["llama"].num_layers
    hops = 3
    axis = GROUPED_AXES
    assert exchanged(TensorParallel(axis)) == {"all-reduce": 2 * layers + 1, "all-gather": 1}
    # The stream after the last layer and after the tapped one, and the logits.
    assert exchanged(Sequence(axis)) == {"all-reduce": 1, "all-gather": 2 * layers + 3, "reduce-scatter": 2 * layers}
    # As many rings, two for the sum of the embedding, and the logits.
    assert exchanged(CollectiveMatmul(axis)) == {"collective-permute": hops * (4 * layers + 2 + 2), "all-gather": 1}
    # Two rings for every sum: of both micro-batches, of both parts of the columns, and of the embedding; one more of each
    # micro-batch for the tapped layer.
    assert exchanged(Domino(axis)) == {"collective-permute": 2 * hops * (4 * layers + 1) + 2 * hops, "all-gather": 1}
    assert exchanged(Column(axis)) == {"all-reduce": 1, "collective-permute": 2 * hops * 4 * layers, "all-gather": 1}


def test_a_sum_by_hops_sends_no_more_than_its_numbers_however_few_its_rows():
    """Two micro-batches of three rows, and one of one number that needs padding, over four devices."""
    mesh = make_mesh({"tp": 4})

    def sent(shape: tuple[int, ...]) -> int:
        run = jax.shard_map(Domino().reduce, mesh=mesh, in_specs=WHOLE, out_specs=WHOLE, check_vma=False)
        x = jnp.arange(prod(shape), dtype=jnp.float32).reshape(shape)
        program: Any = jax.jit(run).lower(x).compile()
        np.testing.assert_array_equal(program(x), 4 * x)
        ops = [op for each in read_module(program.as_text()).computations.values() for op in each.ops]
        return sum(op.outputs[0].elements for op in ops if op.opcode in ("collective-permute", "collective-permute-start"))

    assert sent((3, 1, 32)) == 2 * 3 * (3 * 32) // 4
    assert sent((4, 1, 32)) == 2 * 3 * (4 * 32) // 4
    assert sent((1, 1, 1)) == 2 * 3


@pytest.mark.parametrize("schedule", [Sequence(GROUPED_AXES), CollectiveMatmul(GROUPED_AXES)], ids=["sequence", "ring"])
def test_rows_that_the_devices_do_not_divide_are_summed_as_they_are(schedule: Strategy):
    """Six rows over four devices: no bytes but theirs, in one sum after each half."""
    run, params = divided("llama", schedule, 4)
    program: Any = jax.jit(run).lower(params, tokens(2, 3)).compile()
    close(program(params, tokens(2, 3)), alone("llama", 2, 3)[0], CONFIGS["llama"])
    ops = [op for each in read_module(program.as_text()).computations.values() for op in each.ops]
    sums = [op.outputs for op in ops if op.opcode == "all-reduce" and op.outputs[0].elements == 6 * 32]
    assert len(sums) == 2 * CONFIGS["llama"].num_layers + isinstance(schedule, Sequence) - isinstance(
        schedule, CollectiveMatmul
    )
