"""The mesh, and what stands in the way of one."""

import jax
import pytest

from tilewright.parallel.mesh import initialise_processes, make_mesh


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
