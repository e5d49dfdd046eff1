"""The reported implementation is the one that runs, as both follow one list."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kernels.test_attention import needs_native
from tilewright.kernels import native, registry, select
from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.operations import KeyValuePages, KeyValueRows, Operations, PagedCache

IMPORTED = """
import sys
names = ("cpu", "pallas_tpu", "nki")
def imported():
    yield from (name for name in sys.modules if "pallas" in name and not name.startswith("jaxlib"))
    yield from (name for name in sys.modules if name.startswith("tilewright.kernels.") and name.split(".")[-1] in names)
import tilewright.kernels.select
print(sorted(imported()))
from tilewright import load
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.programs import ProgramKey
lm = load("demo")
lm.generate(["def f(x):"])
lm.engine(EngineOptions(pages=16)).decoding.programs.get(ProgramKey("prefill", 1, chunk=16))
print([name for name in imported() if "pallas" in name or "nki" in name])
"""


def sizes(head_dim: int) -> Any:
    return SimpleNamespace(vocab_size=512, hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=head_dim)


def choices(head_dim: int, dtype: Any, **more: Any) -> dict[str, select.Selection]:
    return {choice.operation: choice for choice in select.implementations(sizes(head_dim), dtype, **more)}


def test_implementations_are_listed_from_those_of_a_chip_to_one_that_takes_anything():
    folder = Path(registry.__file__).parent
    for operation, listed in registry.IMPLEMENTATIONS.items():
        *kernels, last = listed
        assert all(each.chip for each in kernels), operation
        assert last.chip is None, operation
        assert last.refusal(operation) is None, operation
        assert all((folder / f"{each.path.replace('.', '/')}.py").is_file() for each in listed), operation
        for each in listed:
            assert operation not in Operations.__dataclass_fields__ or callable(getattr(each.module, operation)), each


def test_bundles_are_what_the_registry_returns():
    chips: list[tuple[registry.Chip | None, Operations]] = [(None, select.PLAIN), ("tpu", select.operations("tpu"))]
    if native.kernels().isa is not None:
        chips.append(("cpu", select.operations()))
    for chip, ops in chips:
        for name, function in registry.operations_for(chip).items():
            assert getattr(ops, name) is function, name


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_an_implementation_says_whether_it_takes_operands(dtype: Any):
    for shown, operands in registry.typical_operands(sizes(20), dtype, "tpu", "auto", dtype).items():
        operation = registry.SHOWN[shown]
        reasons = {(each.name, each.chip): each.refuses(operation, *operands) for each in registry.IMPLEMENTATIONS[operation]}
        assert reasons["XLA", None] == ""
        assert all(isinstance(reason, str) for reason in reasons.values())
        if dtype == jnp.float16 and shown != "messages":  # which no kernel of a TPU takes; forms of messages have no dtype
            assert all(reason for (name, _), reason in reasons.items() if "Pallas" in name)


def test_every_operation_has_an_implementation_for_any_chip():
    for shown in registry.SHOWN:
        for chip in ("cpu", "gpu", "tpu"):
            (said,) = select.implementations(sizes(12), jnp.float16, chip, "xla", (shown,))
            assert said.runs == "XLA"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_tpus_pages_are_laid_out_for_what_is_said_to_run(dtype: Any):
    for head_dim in (64, 128):
        said = choices(head_dim, dtype, chip="tpu")["paged attention"]
        pool = jax.eval_shape(lambda d=head_dim: select.operations("tpu").pages(2, 2, 16, d, dtype))
        assert isinstance(pool, KeyValuePages) == (said.runs == "XLA")
        assert said.runs == ("XLA" if dtype == jnp.float32 else "ragged Pallas")


@needs_native
@pytest.mark.parametrize("head_dim", [12, 48])
def test_the_cpu_kernels_run_where_it_is_said(head_dim: int):
    ops = select.operations()
    said = choices(head_dim, jnp.float32)
    q = jnp.zeros((1, 1, 2, head_dim))
    cache = jnp.zeros((1, 1, 32, head_dim))
    paged = PagedCache(KeyValuePages(cache, cache), jnp.zeros((1, 1), jnp.int32))
    mask = AttentionMask(jnp.ones((1, 1), jnp.int32))
    for name, run, operands in (
        ("attention", ops.attend, (q, KeyValueRows(cache, cache), mask)),
        ("paged attention", ops.attend, (q, paged, mask)),
    ):
        native_call = "ffi_call" in str(jax.make_jaxpr(run)(*operands))
        assert said[name].runs == ("C++" if native_call else "XLA")
        assert native_call == (head_dim == 48)


def test_what_does_not_run_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch):
    def line(*given: Any, **more: Any) -> str:
        return select.fallbacks(select.implementations(sizes(given[0]), given[1], operations=select.DECODING, **more))

    assert line(128, jnp.bfloat16, chip="tpu") == ""
    assert line(128, jnp.float32, chip="tpu") == (
        "computed by XLA because a faster kernel does not run: "
        "paged attention (ragged Pallas: multiplies in bfloat16, while keys and values are float32)"
    )
    assert "paged attention" not in line(64, jnp.bfloat16, chip="tpu")
    assert line(64, jnp.bfloat16, chip="gpu") == "", "a GPU has no kernels of its own"
    monkeypatch.setattr(native, "kernels", lambda: native.Native(None, "there is no C++ compiler"))
    alone = line(128, jnp.float32, chip="cpu")
    assert alone.endswith(
        "attention, paged attention, cache writes, head's argmax, head's top-k (C++: there is no C++ compiler)"
    )
    assert line(128, jnp.float32, chip="cpu", kernels="xla") == "", "kernels that are switched off need no remark"


def test_implementations_are_imported_when_they_are_asked_for():
    """`select` imports only XLA's implementations; on a CPU, generating and serving import none for accelerators."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ran = subprocess.run([sys.executable, "-c", IMPORTED], env=environment, capture_output=True, text=True, check=False)
    assert ran.stdout.strip().splitlines() == ["[]", "[]"], ran.stderr
