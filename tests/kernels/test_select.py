"""Which implementation runs, as it is said and as it is: both by one list."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kernels.test_attention import needs_native
from tilewright.kernels import native, select
from tilewright.kernels.operations import Pages

IN_PAGES = """
import sys
from tilewright import load
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.programs import ProgramKey
lm = load("demo")
lm.generate(["def f(x):"])
lm.engine(EngineOptions(pages=16)).programs.get(ProgramKey("prefill", 1, chunk=16))
print([name for name in sys.modules if "pallas.ops.tpu" in name])
"""


def sizes(head_dim: int) -> Any:
    return SimpleNamespace(vocab_size=512, hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=head_dim)


def choices(head_dim: int, dtype: Any, **more: Any) -> dict[str, select.Choice]:
    return {choice.operation: choice for choice in select.implementations(sizes(head_dim), dtype, **more)}


def test_every_operation_has_a_candidate_for_any_chip():
    for operation in select.CANDIDATES:
        for chip in ("cpu", "gpu", "tpu"):
            assert choices(12, jnp.float16, chip=chip, kernels="xla")[operation].runs == "XLA"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_tpus_pages_are_laid_out_for_what_is_said_to_run(dtype: Any):
    for head_dim in (64, 128):
        said = choices(head_dim, dtype, chip="tpu")["paged attention"]
        pool = jax.eval_shape(lambda d=head_dim: select.TPU.pages(2, 2, 16, d, dtype))
        assert isinstance(pool, Pages) == (said.runs == "XLA")
        assert said.runs == ("XLA" if dtype == jnp.float32 else "ragged Pallas")


@needs_native
@pytest.mark.parametrize("head_dim", [12, 48])
def test_the_cpu_kernels_run_where_it_is_said(head_dim: int):
    ops, said = select.operations(), choices(head_dim, jnp.float32)
    q, cache = jnp.zeros((1, 1, 2, head_dim)), jnp.zeros((1, 1, 32, head_dim))
    pool, table, lengths = Pages(cache, cache), jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), jnp.int32)
    for name, run, operands in (
        ("attention", ops.prefix_attention, (q, cache, cache, lengths)),
        ("paged attention", ops.paged_attention, (q, pool, table, lengths)),
    ):
        own = "ffi_call" in str(jax.make_jaxpr(run)(*operands))
        assert said[name].runs == ("C++" if own else "XLA")
        assert own == (head_dim == 48)


def test_what_does_not_run_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch):
    def line(*given: Any, **more: Any) -> str:
        return select.fallbacks(select.implementations(sizes(given[0]), given[1], of=select.DECODING, **more))

    assert line(128, jnp.bfloat16, chip="tpu") == ""
    assert line(128, jnp.float32, chip="tpu") == (
        "computed by XLA, for a faster kernel does not run: "
        "paged attention (ragged Pallas: it multiplies in bfloat16, and keys and values are float32)"
    )
    assert "paged attention" not in line(64, jnp.bfloat16, chip="tpu")
    assert line(64, jnp.bfloat16, chip="gpu") == "", "a GPU has no kernels of its own"
    monkeypatch.setattr(native, "kernels", lambda: native.Native(None, "there is no C++ compiler"))
    alone = line(128, jnp.float32, chip="cpu")
    assert alone.endswith("attention, paged attention, appending, head's argmax, head's top-k (C++: there is no C++ compiler)")
    assert line(128, jnp.float32, chip="cpu", kernels="xla") == "", "who switches them off knows"


def test_a_tpus_experimental_kernel_is_not_imported_on_a_cpu():
    """Neither to generate nor to serve."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ran = subprocess.run([sys.executable, "-c", IN_PAGES], env=environment, capture_output=True, text=True, check=False)
    assert ran.stdout.strip().splitlines()[-1:] == ["[]"], ran.stderr
