"""`Auto`: what it chooses is what runs, and where nothing is known of the links it is plain sums."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from models.sizes import decoder_config
from tilewright.compiled.hlo import read_module
from tilewright.hardware.layers import sharded_layer
from tilewright.hardware.links import Fabric, Torus
from tilewright.hardware.tpu import CHIPS
from tilewright.kernels.select import PLAIN
from tilewright.models import decoder
from tilewright.models.params import initialise
from tilewright.models.stack import SINGLE_DEVICE, Strategy
from tilewright.parallel.auto import Auto, mesh_fabric
from tilewright.parallel.mesh import make_mesh
from tilewright.parallel.sharding import TENSOR_PARALLEL, shardings

CONFIG = decoder_config("llama", 64, 32, 64, 2, 4, 4, 8)
SLOW = sharded_layer(4096, 32, 8, head_dim=128, mlp=14336, devices=4)
FABRIC = Fabric(CHIPS["v5e"], Torus((4, 1), (False, False)), ((0, 0), (1, 0), (2, 0), (3, 0)))


def logits(schedule: Strategy, params: Any, tokens: Any) -> Any:
    ran = decoder.forward_full(CONFIG, PLAIN, params, tokens, (), schedule)
    return decoder.logits(CONFIG, PLAIN, params, ran.hidden, schedule)


def over_four(schedule: Strategy, rows: int) -> tuple[Any, set[str]]:
    """The logits of so many rows of eight positions, and the kinds of collectives that gave them."""
    mesh = make_mesh({"tp": 4})
    whole = PartitionSpec()
    params = jax.jit(partial(initialise, decoder.declare(CONFIG)))(jax.random.key(0))
    params = jax.device_put(params, shardings(decoder.declare(CONFIG), mesh, TENSOR_PARALLEL))
    specs = jax.tree.map(lambda x: x.sharding.spec, params)
    tokens = jnp.arange(rows * 8).reshape(rows, 8) % 64
    run = jax.jit(
        jax.shard_map(partial(logits, schedule), mesh=mesh, in_specs=(specs, whole), out_specs=whole, check_vma=False)
    )
    program: Any = run.lower(params, tokens).compile()
    ops = [op for each in read_module(program.as_text()).computations.values() for op in each.ops]
    kinds = {op.opcode.removesuffix("-start") for op in ops} & {"all-reduce", "reduce-scatter", "collective-permute"}
    np.testing.assert_allclose(program(params, tokens), jax.jit(partial(logits, SINGLE_DEVICE))(params, tokens), atol=1e-5)
    return program, kinds


@pytest.mark.parametrize(
    "wanted, kinds",
    [
        ("sync", {"all-reduce"}),
        ("ring", {"all-reduce", "collective-permute"}),
        ("domino", {"all-reduce", "collective-permute"}),
    ],
)
def test_what_is_chosen_runs(wanted: str, kinds: set[str], monkeypatch: pytest.MonkeyPatch):
    """The embedding's sum is always plain."""
    auto = Auto("tp", SLOW, FABRIC)
    calls = []

    def choice(self: Auto, rows: int, micro_batches: bool) -> Any:
        calls.append((rows, micro_batches))
        return real(auto, 8, False)._replace(name=wanted)

    real = Auto.choice
    monkeypatch.setattr(Auto, "choice", choice)
    assert over_four(auto, 2)[1] == kinds
    assert calls == [(16, True)]


def test_rows_choose():
    auto = Auto("tp", SLOW, FABRIC)
    assert auto.choice(8, False).name == "sync"
    many = auto.choice(16384, True)
    assert many.name in ("ring", "domino")
    assert many.estimates[many.name].total_s < many.estimates["sync"].total_s


def test_where_nothing_is_known_of_the_links():
    assert mesh_fabric(make_mesh({"tp": 4})) is None
    found = Auto("tp", SLOW, None).choice(4096, True)
    assert found.name == "sync"
    assert "the bandwidth of the links" in found.why
