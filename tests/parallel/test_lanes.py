"""Collectives that queue for the directions of a ring: results, and the order of hops."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec

from tilewright.parallel.lanes import Lanes, Rows, farthest_first, gather, scatter
from tilewright.parallel.mesh import make_mesh

SPEC = PartitionSpec("ring")


def over(devices: int, inside: Callable[[Array], Array], x: np.ndarray) -> np.ndarray:
    """What `inside` makes of each device's rows, one device after another."""
    run = jax.shard_map(inside, mesh=make_mesh({"ring": devices}), in_specs=SPEC, out_specs=SPEC, check_vma=False)
    return np.asarray(jax.jit(run)(x))


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(-8, 8, shape).astype(np.float32)


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_collectives_in_a_queue_give_what_they_give_alone(devices: int, bidirectional: bool):
    """A sum and a gathering at the same time, each device seeing rows by how many places their device is ahead."""
    x = numbers(devices * devices, 4)

    def inside(rows_here: Array) -> Array:
        lanes = Lanes("ring", bidirectional)
        received = {0: rows_here[:1]}
        sums = []
        place = jax.lax.axis_index("ring")

        def part(at: int, *received: Array) -> Array:
            return sum(received, jax.lax.dynamic_slice_in_dim(rows_here, (place + at) % devices, 1))

        gather(lanes, received, deadline=1)
        scatter(lanes, lanes.hop_counts(), part, deadline=0, on_complete=sums.append)
        lanes.wait(lambda: len(received) == devices and bool(sums))
        assert all(lane.hops == 0 and not lane.queue for lane in lanes.lanes.values())
        return jnp.concatenate([*(received[at] for at in range(devices)), *sums])

    found = over(devices, inside, x).reshape(devices, devices + 1, 4)
    first = x.reshape(devices, devices, 4)[:, 0]
    parts = x.reshape(devices, devices, 4)
    for device in range(devices):
        np.testing.assert_array_equal(found[device, :devices], np.roll(first, -device, 0))
        np.testing.assert_array_equal(found[device, devices], parts[:, device].sum(0))


def traced(inside: Callable[[Lanes, Array], None], devices: int = 8, intensity: float = 0.0) -> None:
    def run(rows_here: Array) -> Array:
        inside(Lanes("ring", True, intensity), rows_here)
        return rows_here

    over(devices, run, numbers(devices, 4))


def test_the_longer_way_is_the_one_with_less_queued():
    def inside(lanes: Lanes, rows_here: Array) -> None:
        counts = []
        for _ in range(3):
            counts.append(lanes.hop_counts())
            gather(lanes, {0: rows_here}, deadline=0)
        assert counts == [{1: 4, -1: 3}, {-1: 4, 1: 3}, {1: 4, -1: 3}]
        assert {step: lane.hops for step, lane in lanes.lanes.items()} == {1: 11, -1: 10}

    traced(inside)


def test_two_hops_of_different_collectives_are_on_a_lane():
    """One gathering alone has one on each: what it sends next is what arrives."""

    def inside(lanes: Lanes, rows_here: Array) -> None:
        received: list[Rows] = [{0: rows_here}, {0: rows_here}]
        for rows, under in zip(received, (1, 2), strict=True):
            gather(lanes, rows, deadline=0)
            assert {len(lane.in_flight) for lane in lanes.lanes.values()} == {under}
        seen = []
        while any(len(rows) < 8 for rows in received):
            lanes.count_compute(10.0 * rows_here.nbytes)
            lanes.overlap(())
            seen.append(tuple(map(len, received)))
        assert seen == [(3, 1), (3, 3), (5, 3), (5, 5), (7, 5), (7, 7), (8, 8)]

    traced(inside, intensity=10.0)


def test_the_hop_with_the_earliest_deadline_departs_first():
    """Between two hops of another collective, too."""

    def inside(lanes: Lanes, rows_here: Array) -> None:
        received: list[Rows] = [{0: rows_here} for _ in range(3)]
        for rows, deadline in zip(received, (5, 3, 2), strict=True):
            gather(lanes, rows, deadline)
        seen = []
        while len(received[0]) < 8:
            lanes.count_compute(10.0 * rows_here.nbytes)
            lanes.overlap(())
            seen.append(tuple(map(len, received)))
        assert seen[:7] == [(3, 1, 1), (3, 3, 1), (3, 3, 3), (3, 5, 3), (3, 5, 5), (3, 7, 5), (3, 7, 7)]
        assert seen[7:] == [(4, 8, 7), (5, 8, 8), (7, 8, 8), (8, 8, 8)]

    traced(inside, intensity=10.0)


def test_a_hop_is_tied_to_as_much_compute_as_it_takes():
    def inside(lanes: Lanes, rows_here: Array) -> None:
        received: Rows = {0: rows_here}
        gather(lanes, received, deadline=0)
        hop = 10.0 * rows_here.nbytes
        lanes.count_compute(hop / 4)
        lanes.overlap(())
        assert len(received) == 1, "a quarter of what it takes is too little"
        lanes.count_compute(hop / 4)
        lanes.overlap((), following=hop)
        assert len(received) == 3, "one more tile would overshoot the time of the hop"
        assert {lane.in_flight[0].until for lane in lanes.lanes.values()} == {2 * hop}, "the link is free after this hop"

    traced(inside, intensity=10.0)


def test_all_hops_in_flight_arrive_beside_a_long_operation():
    """What departs when they have arrived has not had it beside itself."""

    def inside(lanes: Lanes, rows_here: Array) -> None:
        received: list[Rows] = [{0: rows_here}, {0: rows_here}]
        for rows in received:
            gather(lanes, rows, deadline=0)
        lanes.count_compute(10 * 10.0 * rows_here.nbytes)
        lanes.overlap(())
        assert [len(rows) for rows in received] == [3, 3]
        lanes.overlap(())
        assert [len(rows) for rows in received] == [3, 3]

    traced(inside, intensity=10.0)


def test_products_count_with_the_loading_of_their_weights():
    def inside(rows_here: Array) -> Array:
        lanes = Lanes("ring", True, loading=16)
        weights = {"matrix": jnp.zeros((8, 4)), "bias": jnp.zeros(4), "other": jnp.zeros((8, 2))}
        assert lanes.matmul_operations(weights, 32) == 2 * (32 + 16) * 8 * (4 + 2)
        return rows_here

    over(2, inside, numbers(2, 4))


@pytest.mark.parametrize(
    "size, bidirectional, order", [(8, True, [4, 3, 5, 2, 6, 1, 7, 0]), (3, False, [1, 2, 0]), (1, True, [0])]
)
def test_parts_are_computed_from_the_farthest_device_on(size: int, bidirectional: bool, order: list[int]):
    called: list[int] = []

    def inside(rows_here: Array) -> Array:
        lanes = Lanes("ring", bidirectional)

        def part(at: int, *received: Array) -> Array:
            called.append(at)
            return sum(received, rows_here)

        counts = lanes.hop_counts()
        assert farthest_first(counts, size) == order
        scatter(lanes, counts, part, deadline=0, on_complete=lambda total: None)
        lanes.wait(lambda: len(called) == size)
        return rows_here

    over(size, inside, numbers(size, 4))
    assert called == order


def test_waiting_moves_the_clock_to_the_arrival():
    """So that what departs then is tied to what is computed from then on."""

    def inside(lanes: Lanes, rows_here: Array) -> None:
        received: Rows = {0: rows_here}
        gather(lanes, received, deadline=0)
        hop = 10.0 * rows_here.nbytes
        lanes.wait(lambda: len(received) == 3)
        assert lanes.clock == hop
        lanes.count_compute(hop)
        lanes.overlap(())
        assert len(received) == 5

    traced(inside, intensity=10.0)


def test_what_was_computed_comes_before_the_next_arrival():
    held: dict[int, Array] = {}

    def inside(rows_here: Array) -> Array:
        lanes = Lanes("ring", True)
        received = {0: rows_here}
        gather(lanes, received, deadline=0)
        before = held[0] = rows_here + 1
        lanes.untied.append((held, 0))
        lanes.wait(lambda: len(received) == 3)
        assert held[0] is not before
        assert not lanes.untied
        return held[0]

    mesh = make_mesh({"ring": 8})
    run = jax.shard_map(inside, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=False)
    barriers = [line for line in str(jax.make_jaxpr(run)(jnp.zeros((8, 4)))).splitlines() if "optimization_barrier" in line]
    assert len(barriers) == 1
    assert len(barriers[0].split("=")[1].split("optimization_barrier")[1].split()) == 3, "two hops and what was computed"
    np.testing.assert_array_equal(over(8, inside, numbers(8, 4)), numbers(8, 4) + 1)


def test_passes_through_memory_count():
    def inside(rows_here: Array) -> Array:
        lanes = Lanes("ring", True, moving=5.0)
        lanes.count_traffic({"x": rows_here, "y": rows_here}, 3)
        assert lanes.clock == 5.0 * 3 * 2 * rows_here.nbytes
        return rows_here

    over(2, inside, numbers(2, 4))
