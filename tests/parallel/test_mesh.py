"""The mesh, and what stands in the way of one."""

import jax
import pytest

from tilewright.parallel.mesh import initialise_processes, make_mesh


def test_a_mesh_has_the_devices_asked_for():
    assert make_mesh("nodes").shape == {"nodes": 8}
    assert list(make_mesh("nodes", 3).devices) == jax.devices()[:3]
    chosen = jax.devices()[4:6]
    assert list(make_mesh("nodes", chosen).devices) == chosen


@pytest.mark.parametrize("count", [0, -1, 9])
def test_devices_that_are_not_there(count: int):
    with pytest.raises(
        ValueError, match=rf"from 1 to 8 devices.*found {count}; XLA_FLAGS=--xla_force_host_platform_device_count"
    ):
        make_mesh("nodes", count)


def test_odd_devices_and_names():
    with pytest.raises(ValueError, match=r"one device or more, each once, found \['cpu:0', 'cpu:0'\]"):
        make_mesh("nodes", [jax.devices()[0]] * 2)
    with pytest.raises(ValueError, match="one device or more, each once, found \\[\\]"):
        make_mesh("nodes", [])
    with pytest.raises(ValueError, match="expected a name for the axis, such as 'nodes', found ''"):
        make_mesh("")


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
