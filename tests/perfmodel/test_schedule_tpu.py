"""Schedules of programs that the TPU compiler made. Skipped without it; what it estimates may change with its version."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tilewright.compiled.aot import compile_for, tpu_topology
from tilewright.hardware.links import Fabric, torus_of
from tilewright.hardware.tpu import chip_of
from tilewright.perfmodel.schedule import read_schedule
from tilewright.perfmodel.timeline import Timeline, simulate

ROWS = 1024
HIDDEN = 2048
DEVICES = 8
pytestmark = pytest.mark.tpu


def laid_out(chip: str, inside: Callable[..., Any], *shapes: tuple[int, ...]) -> Timeline:
    """A function over the devices of a slice of 4 x 2, each of which has its own part of every argument."""
    devices = tpu_topology(chip).devices
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,), devices=devices)
    each = PartitionSpec("x")
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, each)) for shape in shapes]
    program = jax.shard_map(inside, mesh=mesh, in_specs=each, out_specs=each, check_vma=False)
    spec = chip_of(chip)
    graph = read_schedule(compile_for(chip, program, *given).hlo, spec)
    return simulate(graph, Fabric(spec, torus_of(spec, (4, 2)), places(mesh)))


def places(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(device.coords[:2]) for device in mesh.devices.flat)


@pytest.mark.parametrize("chip, hidden", [("v5e:4x2", True), ("v6e:4x2", False)])
def test_fusions_of_a_v5e_hand_an_all_gather_on(chip: str, hidden: bool):
    def program(x: Array, w: Array, y: Array) -> tuple[Array, Array]:
        return jnp.einsum("drh,dhi->dri", x, w), jax.lax.all_gather(y, "x", tiled=True)

    timeline = laid_out(chip, program, (DEVICES, ROWS, HIDDEN), (DEVICES, HIDDEN, HIDDEN), (8 * DEVICES, HIDDEN))
    (gather,) = (node for node in timeline.graph.nodes if node.engine == "ici")
    assert gather.transfer is not None
    assert (gather.transfer.kind, gather.transfer.bytes) == ("all-gather", 8 * HIDDEN * 2)
    assert gather.transfer.groups == (tuple(range(DEVICES)),)
    assert gather.role == ("start" if hidden else "sync")
    whole = timeline.whole()
    assert (whole.hidden_s > 0) == hidden
    assert whole.communication_s == pytest.approx(whole.alone_s)


def test_a_loop_is_unrolled_with_the_permutes_in_it():
    trips = 5

    def program(x: Array, w: Array) -> Array:
        def step(x: Array, _: None) -> tuple[Array, Array]:
            ring = [(device, (device + 1) % DEVICES) for device in range(DEVICES)]
            return jax.lax.ppermute(x, "x", ring), jnp.einsum("drh,dhi->dri", x, w)

        return jax.lax.scan(step, x, length=trips)[1].sum(0)

    timeline = laid_out("v5e:4x2", program, (DEVICES, ROWS, HIDDEN), (DEVICES, HIDDEN, HIDDEN))
    assert timeline.graph.notes == ()
    sent = [node.transfer for node in timeline.graph.nodes if node.engine == "ici" and node.transfer is not None]
    # The compiler may leave out the last one, whose result nobody reads.
    assert len(sent) in (trips - 1, trips)
    assert {(each.kind, each.bytes, len(each.pairs)) for each in sent} == {("collective-permute", ROWS * HIDDEN * 2, DEVICES)}
    products = [node for node in timeline.graph.nodes if node.role == "run" and "dot_general" in node.op_name]
    assert len(products) >= trips
    whole = timeline.whole()
    assert whole.hidden_s > 0
    hop_s = ROWS * HIDDEN * 2 / 50e9 + 1e-6
    assert whole.alone_s == pytest.approx(len(sent) * hop_s)
