"""Building the CPU kernels, and every instruction set that this machine has."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tilewright.kernels import native

CHECK = """
import sys
import jax, jax.numpy as jnp, numpy as np
from tilewright.kernels import native
from tilewright.kernels.attention import cpu as attention, reference as plain_attention
from tilewright.kernels.linear import cpu as linear

found = native.kernels()
assert found.isa == sys.argv[1], found
rng = np.random.default_rng(0)
for dtype in (jnp.float32, jnp.bfloat16):
    x, w = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((19, 70), (70, 100)))
    actual = np.asarray(jax.jit(lambda x, w: linear.linear(x, w, jnp.float32))(x, linear.pack(w)))
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    assert (np.asarray(jax.jit(lambda x, w: linear.linear(x, w, jnp.float32))(x[:1], linear.pack(w))) == actual[:1]).all()
    q, k, v = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((2, 5, 4, 32), (2, 2, 40, 32), (2, 2, 40, 32)))
    lengths = jnp.asarray(rng.integers(1, 41, (2, 5)), jnp.int32)
    close = np.asarray(jax.jit(attention.prefix_attention)(q, k, v, lengths).astype(jnp.float32))
    np.testing.assert_allclose(close, plain_attention.prefix_attention(q, k, v, lengths).astype(jnp.float32), atol=0.02)
print("fine")
"""


def test_build_is_kept_and_named_by_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler = native.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "kept"))
    first = native.build("attention", compiler)
    assert first.parent == tmp_path / "kept"
    stamp = first.stat().st_mtime_ns
    assert native.build("attention", compiler) == first
    assert first.stat().st_mtime_ns == stamp
    assert [path.name for path in first.parent.iterdir()] == [first.name], "nothing half-built is left"


def test_a_compiler_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'cpu.cc:1: error: no such standard' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "kept"))
    with pytest.raises(RuntimeError, match="error: no such standard"):
        native.build("linear", str(broken))


def test_without_a_compiler_xla_serves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "find_compiler", lambda: None)
    found = native.kernels.__wrapped__()
    assert found.isa is None
    assert "no C++ compiler" in found.reason


@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512", "avx512bf16"])
def test_every_instruction_set_gives_the_product(isa: str):
    here = native.kernels().isa
    order = ["plain", "avx2", "avx512", "avx512bf16"]
    if here is None or order.index(isa) > order.index(here):
        pytest.skip(f"this machine has {here}")
    env = {**os.environ, "TILEWRIGHT_CPU_ISA": isa, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    env["PYTHONPATH"] = str(Path(native.__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", CHECK, isa], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "fine"


def test_another_backend_keeps_to_xla(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert native.kernels.__wrapped__().isa is None
