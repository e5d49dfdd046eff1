"""KV caches in decode steps compiled for TPUs. Skipped without the TPU compiler."""

from dataclasses import replace
from math import prod

import pytest

from tilewright.bench.overlap import OverlapSetup, Phase, program
from tilewright.compiled.aot import compile_for
from tilewright.compiled.hlo import read_module
from tilewright.kernels.select import operations
from tilewright.models.published_configs import model_config
from tilewright.parallel.sharding import GROUPED_AXES
from tilewright.parallel.strategies import TensorParallel

LAYERS = 3
POSITIONS = 1024
MOVES = ("copy", "transpose", "fusion")
"""Operations that copy a cache if a whole cache is their result; an append writes some entries in place."""

pytestmark = pytest.mark.tpu


def copied(hlo: str, cache_bytes: int) -> list[str]:
    """Returns the operations that write a bfloat16 array as large as a cache."""
    return [
        f"{op.opcode} {op.name} {output.dims}"
        for computation in read_module(hlo).computations.values()
        for op in computation.ops
        for output in op.outputs
        if op.opcode in MOVES and output.dtype == "bf16" and 2 * prod(output.dims) == cache_bytes
    ]


@pytest.mark.parametrize("batch", [8, 1])
@pytest.mark.parametrize("chip", ["v5e:4x2", "v5p:2x2x2", "v6e:4x2", "v5e:2x2", "v5e:1x1"])
def test_a_step_copies_no_cache(chip: str, batch: int):
    """Tests one, two and all key/value heads per chip."""
    config = model_config("llama3-8b")
    setup = OverlapSetup(chip, "llama3-8b", config, LAYERS)
    phase = Phase("decode", batch, POSITIONS)
    config = replace(config, num_layers=LAYERS)
    ops = operations("tpu", kernels=setup.kernels)
    function, arguments = program(config, setup.mesh, ops, phase, TensorParallel(GROUPED_AXES))
    made = compile_for(chip, function, *arguments, donate=1)
    cache_bytes = 2 * batch * config.num_kv_heads // setup.devices * POSITIONS * config.head_dim
    assert made.alias_bytes >= 2 * LAYERS * cache_bytes
    assert copied(made.hlo, cache_bytes) == []
