"""Orders of hops and products: what each leaves of a schedule's ties, and that none changes what is computed."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec

from tilewright.bench import ordering
from tilewright.bench.ordering import COMPILER, ORDERINGS, OWN, PROGRAM_ORDER, apply_ordering, ordered_name, read_name
from tilewright.kernels.operations import Norm
from tilewright.kernels.select import PLAIN
from tilewright.parallel import rings
from tilewright.parallel.mesh import make_mesh

BARRIER = "optimization_barrier"


def traced(order: str, run: Callable[..., Array]) -> str:
    """The program of a ring of four devices."""
    mesh = make_mesh({"tp": 4})
    whole = PartitionSpec()
    rows = PartitionSpec("tp")
    inside = jax.shard_map(apply_ordering(order, run), mesh=mesh, in_specs=(rows, whole), out_specs=whole, check_vma=False)
    return str(jax.make_jaxpr(inside)(jnp.ones((8, 4)), jnp.ones((4, 4))))


def ring(x: Array, w: Array) -> Array:
    return rings.all_gather_matmul(x, w, "tp")


def test_names_of_orders():
    for order in ORDERINGS:
        assert read_name(ordered_name("ring", order)) == ("ring", order)
    assert ordered_name("ring", OWN) == "ring"


def test_the_compiler_alone_has_no_ties():
    """And what is traced after it has them again."""
    untied = traced(OWN, ring)
    alone = traced(COMPILER, ring)
    assert BARRIER in untied
    assert BARRIER not in alone
    assert untied.count("ppermute") == alone.count("ppermute") > 0
    assert traced(OWN, ring) == untied


def test_program_order_comes_with_jax_0_12(monkeypatch: pytest.MonkeyPatch):
    def add_and_multiply(x: Array, y: Array) -> Array:
        return (x + y) * y

    if ordering.program_order() is not None:
        run = apply_ordering(PROGRAM_ORDER, add_and_multiply)
        assert BARRIER in jax.jit(run).lower(1.0, 2.0).as_text()
        assert run(1.0, 2.0) == 6
    monkeypatch.setattr(ordering, "program_order", lambda: None)
    with pytest.raises(ValueError, match="for program_order, found"):
        apply_ordering(PROGRAM_ORDER, add_and_multiply)


def test_an_operation_is_a_unit():
    """One call in the program, whatever is in it; constants besides arrays stay what they are."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4)), jnp.float32)
    w = jnp.ones((4, 4))
    ops = ordering.jit_units(PLAIN)
    norm = Norm(jnp.ones(4), 1e-5)
    program = jax.make_jaxpr(lambda x, w: ops.linear(x, w, jnp.float32, norm))(x, w)
    assert len(program.eqns) == 1
    np.testing.assert_allclose(ops.linear(x, w, None, norm), PLAIN.linear(x, w, None, norm), rtol=1e-6)
