"""The CPU kernels over packed parts of every matrix, against one device that holds them whole."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from models.sizes import decoder_config
from tilewright.kernels import native
from tilewright.kernels.linear import blocks
from tilewright.kernels.linear.cpu import PackedMatrix
from tilewright.kernels.operations import Operations
from tilewright.kernels.select import Weights, operations
from tilewright.models import decoder
from tilewright.models.params import initialise
from tilewright.models.stack import SINGLE_DEVICE, Strategy
from tilewright.parallel.domino import Column, Domino
from tilewright.parallel.exact import Exact
from tilewright.parallel.mesh import make_mesh
from tilewright.parallel.packing import preparing_shards
from tilewright.parallel.sharding import GROUPED, GROUPED_AXES, grouped_mesh, shardings
from tilewright.parallel.strategies import CollectiveMatmul, TensorParallel
from tilewright.runtime.cache import allocate
from tilewright.runtime.state import Span, cached_attend

CONFIG = decoder_config("llama", 96, 64, 128, 2, 8, 2, 16)
SPECS = decoder.declare(CONFIG)
TOKENS = jnp.arange(24).reshape(4, 6) * 7 % 96
pytestmark = pytest.mark.skipif(native.kernels().isa is None, reason="needs the CPU kernels")


def drawn() -> Any:
    return jax.tree.map(lambda w: 4 * w if w.ndim == 2 else w, initialise(SPECS, jax.random.key(0)))


def answers(ops: Operations, schedule: Strategy, params: Any) -> Any:
    """Of prefill: logits, the most likely tokens, and the hidden states."""
    heads = CONFIG.num_kv_heads if isinstance(schedule, type(SINGLE_DEVICE)) else params.layers[0].qkv.parts[1] // 16
    kept = allocate(2, 4, heads, 16, 16, jnp.float32)
    span = Span(jnp.zeros(4, jnp.int32), jnp.full(4, 6, jnp.int32))
    places = jnp.broadcast_to(jnp.arange(6), (4, 6))
    ran = decoder.forward(CONFIG, ops, params, TOKENS, places, cached_attend, span, kept, schedule=schedule)
    logits = decoder.logits(CONFIG, ops, params, ran.hidden, schedule)
    return logits, decoder.most_likely(CONFIG, ops, params, ran.hidden, schedule), ran.hidden


def over(weights: Weights, schedule: Strategy, devices: int) -> tuple[Any, Any]:
    """The answers, and the prepared parameters."""
    mesh = grouped_mesh(make_mesh({"tp": devices}), "tp", heads=CONFIG.num_heads, kv_heads=CONFIG.num_kv_heads)
    ops = preparing_shards(operations(weights=weights), mesh)
    params = decoder.prepare(CONFIG, ops, jax.device_put(drawn(), shardings(SPECS, mesh, GROUPED)))
    specs = jax.tree.map(lambda x: x.sharding.spec, params)
    inside = partial(answers, ops, schedule)
    whole = PartitionSpec()
    run = jax.shard_map(inside, mesh=mesh, in_specs=(specs,), out_specs=whole, check_vma=False)
    return jax.jit(run)(params), params


def alone(weights: Weights) -> tuple[Any, Any]:
    ops = operations(weights=weights)
    params = decoder.prepare(CONFIG, ops, drawn())
    return jax.jit(partial(answers, ops, SINGLE_DEVICE))(params), params


SCHEDULES = {
    "sync": TensorParallel(GROUPED_AXES),
    "ring": CollectiveMatmul(GROUPED_AXES),
    "domino": Domino(GROUPED_AXES, least=1),
}
QUICK = [("sync", 4)]


@pytest.mark.parametrize(
    "schedule, devices",
    [pytest.param(name, n, marks=[] if (name, n) in QUICK else pytest.mark.slow) for name in SCHEDULES for n in (1, 2, 4, 8)],
)
def test_packed_parts_give_what_the_whole_does(schedule: str, devices: int):
    (found, _), (wanted, _) = over("auto", SCHEDULES[schedule], devices), alone("auto")
    np.testing.assert_array_equal(found[1], wanted[1])
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


def weights_of(packed: PackedMatrix, shards: int, dim: int) -> np.ndarray:
    """The matrix that 8-bit parts of so many devices stand for."""
    panels = np.asarray(packed.panels).reshape(shards, -1, *packed.panels.shape[1:])
    return np.concatenate([blocks.dequantise(blocks.blocks_of(part, packed.outputs)) for part in panels], axis=dim)


@pytest.mark.parametrize("devices", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_8_bit_weights_are_the_same_numbers_on_any_number_of_devices(devices: int):
    """The columns of the output head, and the rows of a down projection."""
    (found, params), (wanted, whole) = over("int8", TensorParallel(GROUPED_AXES), devices), alone("int8")
    np.testing.assert_array_equal(weights_of(params.head, devices, 1), weights_of(whole.head, 1, 1))
    for part, one in zip(params.layers, whole.layers, strict=True):
        size = CONFIG.intermediate_size // devices
        down = weights_of(part.down, devices, 0).reshape(devices, -1, CONFIG.hidden_size)[:, :size]
        np.testing.assert_array_equal(down.reshape(-1, CONFIG.hidden_size), weights_of(one.down, 1, 0)[: size * devices])
    # What they multiply is rounded to 8 bits device by device: half a percent of its largest number.
    np.testing.assert_allclose(found[0], wanted[0], rtol=0, atol=0.02 * float(jnp.max(jnp.abs(wanted[0]))))


def test_packed_columns_cannot_be_cut():
    with pytest.raises(ValueError, match="expected a matrix whose columns 2 parts divide, found a PackedMatrix"):
        over("auto", Column(GROUPED_AXES), 1)
    with pytest.raises(ValueError, match="expected operations on matrices as they are, kernels 'xla', found 'cpu "):
        over("auto", Exact(GROUPED_AXES), 1)
