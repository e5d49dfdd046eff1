"""Experts over devices: every schedule against the single device, rows that are exchanged, and what that is to take."""

from collections import Counter
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from models.sizes import decoder_config
from parallel.test_tensor_parallel import close, tokens
from tilewright.compiled.hlo import read_module
from tilewright.hardware.layers import (
    ESTIMATES,
    MatmulShape,
    StrategyCosts,
    expert_capacity,
    expert_exchange,
    sharded_layer,
    visited_share,
)
from tilewright.hardware.links import Fabric, ring_of, torus_of
from tilewright.hardware.tpu import CHIPS
from tilewright.kernels.operations import Operations
from tilewright.kernels.select import PLAIN
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.experts import ClampedGate, Mixture, SigmoidRouting
from tilewright.models.stack import SINGLE_DEVICE, Strategy
from tilewright.parallel.domino import Column, Domino
from tilewright.parallel.exact import Exact
from tilewright.parallel.experts import with_local_experts
from tilewright.parallel.mesh import make_mesh
from tilewright.parallel.sharding import GROUPED, GROUPED_AXES, grouped_mesh, shardings
from tilewright.parallel.strategies import CollectiveMatmul, Sequence, TensorParallel
from tilewright.runtime.placement import exchange_of

CONFIGS = {
    "qwen3_moe": decoder_config("qwen3_moe", 64, 32, 48, 2, 8, 2, 8, mixture=Mixture(16, 3, 24)),
    "gpt_oss": decoder_config(
        "gpt_oss",
        64,
        32,
        24,
        2,
        8,
        2,
        8,
        mixture=Mixture(16, 3, 24, clamped=ClampedGate(1.702, 7.0)),
        sliding_window=4,
        sliding_layers=(0,),
    ),
    "llada2_moe": decoder_config(
        "llada2_moe",
        64,
        32,
        48,
        2,
        8,
        2,
        8,
        mixture=Mixture(16, 3, 24, sigmoid=SigmoidRouting(4, 2, 2.5)),
        dense_layers=(0,),
    ),
    "llada2_moe, shared": decoder_config(
        "llada2_moe", 64, 32, 48, 2, 8, 2, 8, mixture=Mixture(16, 3, 24, shared=24, sigmoid=SigmoidRouting(4, 2, 2.5))
    ),
}
SCHEDULES: dict[str, Strategy] = {
    "sync": TensorParallel(GROUPED_AXES),
    "sequence": Sequence(GROUPED_AXES),
    "sequence, exchanged": Sequence(GROUPED_AXES, capacity=3),
    "ring": CollectiveMatmul(GROUPED_AXES),
    "domino": Domino(GROUPED_AXES, least=1),
    "column": Column(GROUPED_AXES, least=1),
    "exact": Exact(GROUPED_AXES),
}
WHOLE = PartitionSpec()


@cache
def drawn(family: str) -> DecoderParams:
    """By NumPy, which compiles nothing; large enough for every part of a layer to show, biases among them."""
    rng = np.random.default_rng(0)

    def draw(spec: Any) -> Array:
        values = np.ones(spec.shape) if spec.init == "ones" else 4 * spec.scale * rng.normal(size=spec.shape)
        return jnp.asarray(values.astype(np.float32))

    return jax.tree.map(draw, decoder.declare(CONFIGS[family]))


def loss(config: DecoderConfig, ops: Operations, schedule: Strategy, params: DecoderParams, batch: Array) -> Any:
    """Something that all logits are part of; the logits."""
    ran = decoder.forward_full(config, ops, params, batch, (0,), schedule)
    logits = decoder.logits(config, ops, params, ran.hidden, schedule)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 3]), (logits, ran.taps)


def mesh_of(config: DecoderConfig, devices: int) -> Mesh:
    return grouped_mesh(make_mesh({"tp": devices}), "tp", heads=config.num_heads, kv_heads=config.num_kv_heads)


def divided(family: str, schedule: Strategy, devices: int) -> tuple[Any, DecoderParams]:
    """`loss` over so many devices, and parameters that lie there."""
    config = CONFIGS[family]
    mesh = mesh_of(config, devices)
    params = jax.device_put(drawn(family), shardings(decoder.declare(config), mesh, GROUPED))
    specs = jax.tree.map(lambda x: x.sharding.spec, params)
    inside = partial(loss, config, with_local_experts(PLAIN), schedule)
    return jax.shard_map(inside, mesh=mesh, in_specs=(specs, WHOLE), out_specs=WHOLE, check_vma=False), params


@cache
def alone(family: str) -> Any:
    """Loss, logits and gradient on one device."""
    run = jax.value_and_grad(partial(loss, CONFIGS[family], PLAIN, SINGLE_DEVICE), has_aux=True)
    return jax.jit(run)(drawn(family), tokens(4, 8))


QUICK = [("qwen3_moe", "sequence, exchanged", 8), ("gpt_oss", "ring", 4)]
SLOW = [
    ("qwen3_moe", "sequence", 4),
    ("qwen3_moe", "ring", 8),
    ("qwen3_moe", "domino", 2),
    ("qwen3_moe", "column", 4),
    ("gpt_oss", "sync", 8),
    ("gpt_oss", "column", 2),
    ("gpt_oss", "domino", 4),
    ("gpt_oss", "sequence, exchanged", 4),
    ("llada2_moe", "sequence, exchanged", 4),
    ("llada2_moe, shared", "ring", 2),
    ("llada2_moe, shared", "exact", 8),
]


@pytest.mark.parametrize("family, schedule, devices", [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)])
def test_every_schedule_gives_what_one_device_does(family: str, schedule: str, devices: int):
    """Logits and a stream between layers."""
    run, params = divided(family, SCHEDULES[schedule], devices)
    found = jax.jit(run)(params, tokens(4, 8))
    wanted = alone(family)[0]
    close(found, wanted, CONFIGS[family])
    assert float(jnp.std(wanted[1][0])) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("family, schedule, devices", [("qwen3_moe", "ring", 4), ("gpt_oss", "sequence", 4)])
def test_gradients_are_those_of_one_device(family: str, schedule: str, devices: int):
    run, params = divided(family, SCHEDULES[schedule], devices)
    found = jax.jit(jax.value_and_grad(run, has_aux=True))(params, tokens(4, 8))
    close(found, alone(family), CONFIGS[family])


@pytest.mark.parametrize(("family", "devices"), [pytest.param("qwen3_moe", 2, marks=pytest.mark.slow), ("gpt_oss", 8)])
def test_exact_has_the_same_bits_on_any_number_of_devices(family: str, devices: int):
    config = CONFIGS[family]
    batch = tokens(3, 7)
    single = jax.jit(partial(loss, config, PLAIN, Exact()))(drawn(family), batch)
    run, params = divided(family, SCHEDULES["exact"], devices)
    for one, other in zip(jax.tree.leaves(jax.jit(run)(params, batch)[1]), jax.tree.leaves(single[1]), strict=True):
        np.testing.assert_array_equal(one, other)
    close(single, jax.jit(partial(loss, config, PLAIN, SINGLE_DEVICE))(drawn(family), batch), config)


DEVICES = 4
ROWS = 6


@cache
def exchanged(capacity: int | None) -> Any:
    """A layer's experts for rows `[devices * M, H]` that lie over devices; exchanged, or where they are on one device."""
    config = CONFIGS["qwen3_moe"]
    layer = drawn("qwen3_moe").layers[0]
    mlp = partial(decoder.mlp, config)
    if capacity is None:
        return jax.jit(lambda x: mlp(PLAIN, layer, x[None])[0])
    mesh = mesh_of(config, DEVICES)
    specs = shardings(decoder.declare(config), mesh, GROUPED).layers[0]
    placed = jax.device_put(layer, specs)

    def inside(layer: Any, x: Array) -> Array:
        schedule = Sequence(GROUPED_AXES, capacity=capacity)
        ops = schedule.sharded_ops(with_local_experts(PLAIN), (1, DEVICES * ROWS, config.hidden_size))
        return mlp(ops, layer, x[None])[0]

    over = PartitionSpec(GROUPED_AXES)
    spec = jax.tree.map(lambda x: x.spec, specs)
    run = jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=(spec, over), out_specs=over, check_vma=False))
    return partial(run, placed)


@settings(max_examples=12)
@given(st.integers(0, 2**31 - 1), st.sampled_from([1, 4, ROWS]), st.booleans())
def test_no_row_is_lost_whatever_the_capacity(seed: int, capacity: int, alike: bool):
    """Rows that all go the same way need the most rounds. The bits do not depend on the rounds, nor on the other rows."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((DEVICES * ROWS, 32)).astype(np.float32)
    x = np.where(alike, x[:1], x)
    found = np.asarray(exchanged(capacity)(x))
    np.testing.assert_allclose(found, exchanged(None)(x), rtol=0, atol=2e-5)
    np.testing.assert_array_equal(found, exchanged(ROWS)(x))
    order = rng.permutation(DEVICES * ROWS)
    np.testing.assert_array_equal(exchanged(capacity)(x[order]), found[order])


def test_collectives_of_an_exchange():
    """Choices and rows go, sums come back, and the devices agree on the number of rounds: once in the program for a layer."""
    config = replace(CONFIGS["qwen3_moe"], num_layers=1)
    params = drawn("qwen3_moe")
    mesh = mesh_of(config, 8)
    one = replace(params, layers=params.layers[:1])
    specs = jax.tree.map(lambda x: x.spec, shardings(decoder.declare(config), mesh, GROUPED))

    def inside(params: DecoderParams, batch: Array) -> Array:
        return decoder.forward_full(
            config, with_local_experts(PLAIN), params, batch, (), SCHEDULES["sequence, exchanged"]
        ).hidden

    run = jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=(specs, WHOLE), out_specs=WHOLE, check_vma=False))
    program: Any = run.lower(one, tokens(4, 8)).compile()
    ops = [op for each in read_module(program.as_text()).computations.values() for op in each.ops]
    kinds = Counter(op.opcode.removesuffix("-start") for op in ops)
    assert kinds["all-to-all"] == 3
    assert kinds["all-reduce"] == 2  # of the embedding, and of the rounds
    assert (kinds["all-gather"], kinds["reduce-scatter"]) == (2, 1)  # of attention's rows, and of the stream behind the layers


def test_what_cannot_be_exchanged():
    with pytest.raises(ValueError, match=r"expected a capacity of at least 1 row.*found 0 for 16 experts on 4"):
        run, params = divided("qwen3_moe", Sequence(GROUPED_AXES, capacity=0), 4)
        jax.eval_shape(run, params, tokens(4, 8))


def costs(*sizes: int) -> StrategyCosts:
    places = ring_of(np.ndindex(*sizes))
    return StrategyCosts(Fabric(CHIPS["v5e"], torus_of(CHIPS["v5e"], sizes), tuple(places)))


@pytest.mark.parametrize("experts, chosen, devices", [(8, 1, 4), (8, 3, 2), (8, 3, 8), (12, 2, 3)])
def test_shares_and_capacities(experts: int, chosen: int, devices: int):
    """Shares by counting, and room for more than is expected, of no more than all rows."""
    drawn = list(combinations(range(experts), chosen))
    share = visited_share(experts, chosen, devices)
    assert share == pytest.approx(sum(any(n < experts // devices for n in each) for each in drawn) / len(drawn))
    for rows in (1, 7, 100, 4096):
        assert min(rows, rows * share) <= expert_capacity(rows, share) <= rows
    assert 8 * 4096 * share < 8 * expert_capacity(4096, share) < 10 * 4096 * share


def test_rows_are_gathered_where_that_is_cheaper():
    """Over few devices a row goes to most of them; over many, to few. The estimate says both, and a schedule takes it."""
    few = expert_exchange(costs(4, 2), 4096, 2048, 128, 8)
    many = expert_exchange(costs(8, 8), 65536, 2048, 128, 8)
    assert few.capacity is None
    assert few.seconds["gather"] < few.seconds["all-to-all"]
    assert many.capacity is not None
    assert many.seconds["all-to-all"] < many.seconds["gather"]
    assert expert_exchange(costs(4, 2), 4096, 2048, 8, 2).capacity == 160, "of 512 rows a quarter, with room for more"
    assert "rows to experts by gather, for 4,096 rows on 8 v5e" in few.why
    assert f"all-to-all, {many.capacity:,} rows for each pair of devices" in many.why
    schedule = Sequence(GROUPED_AXES, fabric=costs(8, 8).fabric)
    assert schedule.way_to_experts(65536, 2048, 128, 8) == many
    assert schedule.way_to_experts(65535, 2048, 128, 8) is None
    assert replace(schedule, capacity=5).way_to_experts(65536, 2048, 128, 8) is None


def test_a_layer_with_experts_reads_more_of_them_for_more_rows():
    layer = sharded_layer(2048, 32, 4, 128, 8 * 768, 8, 128, 8)
    begins, ends = layer.sublayers[1]
    assert (layer.experts, layer.chosen, begins.columns, ends.inputs) == (128, 8, 2 * 768, 768)
    assert [begins.weight_reads(rows) for rows in (1, 10**6)] == [pytest.approx(1), pytest.approx(16)]
    assert MatmulShape(2048, 1536).weight_reads(77) == pytest.approx(1)
    layer_costs = costs(4, 2)
    assert layer_costs.product_s(8, begins) > 6 * layer_costs.product_s(1, begins), "a step's time is that of reading"
    assert layer_costs.product_s(1, MatmulShape(*begins[:2])) == pytest.approx(layer_costs.product_s(1, begins))
    layers = (sharded_layer(2048, 32, 4, 128, 2 * 768, 8, *experts) for experts in ((), (8, 2)))
    plain, cheaper = (ESTIMATES["sequence"](layer_costs, 4096, layer) for layer in layers)
    assert cheaper.exposed_s < 0.8 * plain.exposed_s, "rows are sent where they are needed"
    beside = replace(sharded_layer(2048, 32, 4, 128, 2 * 768, 8, 8, 2), shared=True)
    assert ESTIMATES["sequence"](layer_costs, 4096, beside).exposed_s == plain.exposed_s, "and gathered for a shared expert"
    assert exchange_of(Sequence(GROUPED_AXES, fabric=layer_costs.fabric), beside, 4096) is None
    assert layer_costs.product_s(512, begins, 8) > 4 * layer_costs.product_s(512, begins), "tiles read experts again"
