"""Steps over weights in few bits that the TPU compiler made: HBM gives the few bits, and nothing widens a weight in memory."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from weight_traffic import FORMATS, arguments, greedy_step, matrix, step

from tilewright.kernels.linear import blocks, scaled
from tilewright.kernels.select import operations
from tilewright.models.published_configs import model_config


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


IN_MEMORY = {
    "bfloat16": "bf16",
    "int8": "i8",
    "fp8": "f8E4M3FN",
    "fp8 in blocks": "f8E4M3FN",
    "int4": "ui4",
    "int4 in groups": "i4",
}
"""The dtypes of matrices, in the words of StableHLO."""


@pytest.mark.parametrize("form", FORMATS)
def test_a_step_is_lowered_for_gpus(form: str):
    """For CUDA and ROCm in one module, without either: few bits go in, and there are operations of XLA's alone."""
    config = replace(model_config("qwen3-0.6b"), num_layers=1)
    run = greedy_step(config, operations("gpu", weights=FORMATS[form]))
    text = jax.jit(run).trace(*arguments(config, form, 8, 640)).lower(lowering_platforms=("cuda", "rocm")).as_text()
    main = next(line for line in text.splitlines() if "func.func public @main" in line)
    assert f"tensor<3072x1024x{IN_MEMORY[form]}>" in main
    assert "custom_call" not in text
