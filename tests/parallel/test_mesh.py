"""The mesh, and what stands in the way of one."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from tilewright.compiled.aot import tpu_topology
from tilewright.parallel.mesh import in_rings, initialise_processes, make_mesh


def test_a_mesh_has_the_devices_asked_for():
    assert make_mesh({"nodes": None}).shape == {"nodes": 8}
    assert list(make_mesh({"nodes": 3}).devices) == jax.devices()[:3]
    chosen = jax.devices()[4:6]
    assert list(make_mesh({"nodes": None}, chosen).devices) == chosen


def test_several_axes():
    grid = make_mesh({"fsdp": 4, "tp": 2})
    assert (grid.axis_names, grid.devices.shape) == (("fsdp", "tp"), (4, 2))
    assert list(grid.devices.flat) == jax.devices()
    assert make_mesh({"fsdp": None, "tp": 2}) == grid
    assert make_mesh({"fsdp": 2, "tp": None}, jax.devices()[:6]).shape == {"fsdp": 2, "tp": 3}
    assert list(make_mesh({"a": 1, "b": 3, "c": 2}).devices.flat) == jax.devices()[:6]


@pytest.mark.tpu
@pytest.mark.parametrize("chip", ["v5e:4x2", "v6e:4x2", "v5p:2x2x2", "v5e:4x4"])
def test_devices_of_a_tpu_along_one_axis_are_a_ring_of_neighbours(chip: str):
    devices = tpu_topology(chip).devices
    for axes in ({"tp": None}, {"fsdp": 1, "tp": None}):
        mesh = make_mesh(axes, devices)
        assert mesh.axis_names == tuple(axes)
        places = [device.coords for device in mesh.devices.flat]
        assert len(set(map(tuple, places))) == len(devices)
        apart = [sum(abs(a - b) for a, b in zip(places[n - 1], place, strict=True)) for n, place in enumerate(places)]
        assert set(apart) == {1}


@pytest.mark.tpu
@pytest.mark.parametrize("chip", ["v5e:4x4", "v6e:4x4"])
def test_axes_may_split_the_sides_of_a_slice(chip: str):
    mesh = make_mesh({"fsdp": 8, "tp": 2}, tpu_topology(chip).devices)
    assert mesh.devices.shape == (8, 2)
    assert len(set(mesh.devices.flat)) == 16
    for one, other in mesh.devices:
        assert sum(abs(a - b) for a, b in zip(one.coords, other.coords, strict=True)) == 1


def chips(*sides: int) -> list[SimpleNamespace]:
    """What a TPU's devices say of themselves."""
    return [SimpleNamespace(coords=coords) for coords in product(*map(range, sides))]


def apart(one: Any, other: Any) -> int:
    return sum(abs(a - b) for a, b in zip(one.coords, other.coords, strict=True))


@pytest.mark.parametrize(
    ("sides", "shape"), [((2, 2, 4), (8, 2)), ((2, 2, 4), (2, 8)), ((4, 4, 4), (16, 4)), ((2, 2, 2), (1, 8)), ((4, 2, 1), (8,))]
)
def test_each_axis_takes_whole_sides_and_goes_round(sides: tuple[int, ...], shape: tuple[int, ...]):
    devices = chips(*sides)
    ordered = in_rings(devices, shape)
    assert ordered is not None
    assert ordered.shape == shape
    assert {device.coords for device in ordered.flat} == {device.coords for device in devices}
    for axis, size in enumerate(shape):
        neighbours = zip(ordered.flat, np.roll(ordered, -1, axis).flat, strict=True)
        worst = max(apart(*pair) for pair in neighbours)
        # A side of a box by itself is a ring where its ends are joined, which coordinates do not show.
        assert worst == (size - 1 if size in sides and size < max(shape) else min(1, size - 1))


@pytest.mark.parametrize(("sides", "shape"), [((4, 4), (8, 2)), ((4, 2), (4, 2)), ((2, 3), (3, 2))])
def test_axes_without_whole_sides_or_with_one_each_stay_in_jax_order(sides: tuple[int, ...], shape: tuple[int, ...]):
    assert in_rings(chips(*sides), shape) is None


def test_what_is_no_box_of_chips_stays_in_jax_order():
    assert in_rings(jax.devices(), (8,)) is None
    assert in_rings([chips(2, 2)[at] for at in (0, 1, 2)], (3,)) is None, "a corner"
    assert in_rings([*chips(1, 1), *chips(1, 1)], (2,)) is None, "two devices of a chip"
    assert in_rings([], (0,)) is None


@pytest.mark.parametrize("axes", [{"nodes": 9}, {"fsdp": 3, "tp": 3}])
def test_devices_that_are_not_there(axes: dict[str, int | None]):
    with pytest.raises(ValueError, match=r"from 1 to 8 devices.*found 9; XLA_FLAGS=--xla_force_host_platform_device_count"):
        make_mesh(axes)


@pytest.mark.parametrize(
    ("axes", "devices", "message"),
    [
        ({"nodes": 0}, None, r"a size of 1 or more for each axis, and None for one at most, found {'nodes': 0}"),
        ({"fsdp": -1, "tp": -2}, None, r"a size of 1 or more .* found {'fsdp': -1, 'tp': -2}"),
        ({"fsdp": None, "tp": None}, None, r"None for one at most, found {'fsdp': None, 'tp': None}"),
        ({"fsdp": None, "tp": 3}, None, r"a multiple of 3 devices for the axes {'fsdp': None, 'tp': 3}, found 8"),
        ({"fsdp": None, "tp": 9}, None, r"a multiple of 9 devices .* found 8"),
        ({"nodes": 2}, [0, 1, 2], r"expected 2 devices for the axes {'nodes': 2}, found 3"),
        ({"nodes": 2}, [0], r"expected 2 devices for the axes {'nodes': 2}, found 1"),
        ({"nodes": None}, [0, 0], r"one device or more, each once, found \['cpu:0', 'cpu:0'\]"),
        ({"nodes": None}, [], r"one device or more, each once, found \[\]"),
        ({"": None}, None, r"expected a name for each axis, such as 'nodes', found \[''\]"),
        ({}, None, r"expected a name for each axis, such as 'nodes', found \[\]"),
    ],
)
def test_axes_that_do_not_fit(axes: dict[str, int | None], devices: list[int] | None, message: str):
    with pytest.raises(ValueError, match=message):
        make_mesh(axes, None if devices is None else [jax.devices()[n] for n in devices])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("localhost:1", 2, None), "coordinator, processes and index together or none"),
        ((None, 2, 0), "coordinator, processes and index together or none"),
        (("localhost", 2, 0), "expected the coordinator as host:port, found 'localhost'"),
        (("localhost:1", 2, 2), "expected an index from 0 to below 2 processes, found 2"),
        (("localhost:1", 0, 0), "expected an index from 0 to below 0 processes, found 0"),
    ],
)
def test_processes_that_do_not_fit(given: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        initialise_processes(*given)
