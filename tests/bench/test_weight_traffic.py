"""Steps over weights in few bits that the TPU compiler made: HBM gives the few bits, and nothing widens a weight in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.bench.model_configs import model_config
from tilewright.bench.weight_traffic import matrix, step
from tilewright.kernels.linear import blocks, scaled


@pytest.mark.tpu
@pytest.mark.parametrize("form", ["int8", "fp8", "fp8 in blocks", "int4", "int4 in groups"])
@pytest.mark.parametrize("chip", ["v5e:1x1", pytest.param("v6e:1x1", marks=pytest.mark.slow)])
def test_a_step_reads_the_few_bits(chip: str, form: str):
    found = step(model_config("qwen3-0.6b"), form, 8, 640, chip, 1)
    assert found.widened == ()
    # The kernels that append and attend read the caches once each, and the former is counted as if it wrote all of them.
    little = 0.01 * found.held
    assert found.held <= found.read <= found.held + 2 * found.caches + little
    assert found.written <= found.caches + little
    assert found.program.temp_bytes <= little


@pytest.mark.parametrize("form", ["int8", "fp8", "int4"])
def test_the_abstract_matrix_is_the_prepared_one(form: scaled.ScaledFormat):
    made = scaled.prepared(jnp.asarray(np.random.default_rng(0).standard_normal((64, 32)), jnp.float32), form, "w")
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(lambda x: (x.shape, x.dtype), matrix(64, 32, form))
    assert blocks.BLOCK == 32
