"""Compiling for absent TPUs. The compiler itself is needed by some tests only; they are skipped where it is not installed."""

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from tilewright.compiled import aot
from tilewright.compiled.aot import compile_for, estimated_cycles, read_compiled

TEXTS = Path(__file__).parent / "hlo"


def tpu(name: str) -> str:
    return (TEXTS / f"{name}.txt").read_text(encoding="utf-8")


def shaped(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def double(x: Array) -> Array:
    return x * 2


def update(cache: Array, row: Array) -> Array:
    return jax.lax.dynamic_update_slice(cache, row, (0, 0))


@pytest.mark.parametrize("chip", ["v5e", "v5e:", "v9:2x2", "v5e:2x2x1", "v5p:2x2", "v5e:0x2", "v5e:2x2_", "v5e:32x32", "cpu"])
def test_an_unknown_chip_is_refused_with_the_known_ones(chip: str):
    with pytest.raises(ValueError, match=r"expected a TPU as v4:AxBxC, v5e:AxB, .*up to 16.*found '" + chip):
        compile_for(chip, double, shaped(8))


def test_a_missing_compiler_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"v5e:2x2 needs the TPU compiler: pip install 'tilewright\[tpu\]'"):
        compile_for("v5e:2x2", double, shaped(8))


def test_donation_belongs_to_the_jit():
    with pytest.raises(ValueError, match=r"not jitted; give 0 to jax.jit\(donate_argnums\)"):
        compile_for("v5e:2x2", jax.jit(double), shaped(8), donate=0)


def test_cycles_multiply_loops_and_name_what_has_none():
    assert estimated_cycles(tpu("elementwise")) == (29986, (), ())
    scanned, without, notes = estimated_cycles(tpu("scan"))
    assert (without, notes) == (("copy.9 (copy)",), ())
    assert scanned > 8 * 100_000  # eight layers of 100,352 cycles each, and a little more
    _, without, _ = estimated_cycles(tpu("pallas"))
    assert without == ("kernel.1 (tpu_custom_call)",)
    _, without, notes = estimated_cycles(tpu("while"))
    assert notes == ("while: trip count unknown, counted as one iteration",)


def test_memory_adds_up():
    memory = SimpleNamespace(argument_size_in_bytes=100, output_size_in_bytes=60, alias_size_in_bytes=40, temp_size_in_bytes=7)
    compiled = read_compiled("v5e:2x2", tpu("reduce"), memory, {"flops": 3.0})
    assert (compiled.argument_bytes, compiled.output_bytes, compiled.alias_bytes, compiled.temp_bytes) == (100, 60, 40, 7)
    assert compiled.peak_bytes == 127
    assert compiled.cycles == 76772
    assert compiled.traffic().total == 16 * 2**20 + 4096
    assert compiled.cost["flops"] == 3.0


@pytest.mark.tpu
@pytest.mark.parametrize("chip", ["v5e:1x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_every_chip_of_the_benchmarks_compiles(chip: str):
    compiled = compile_for(chip, double, shaped(1024, 1024))
    assert (compiled.chip, compiled.argument_bytes, compiled.output_bytes) == (chip, 4 * 2**20, 4 * 2**20)
    assert compiled.cycles > 0
    assert compiled.traffic().total == 8 * 2**20


@pytest.mark.tpu
def test_jitted_functions_pytrees_arrays_and_donation():
    plain = compile_for("v5e:1x1", update, np.zeros((4096, 256), np.float32), shaped(8, 256))
    given = compile_for("v5e:1x1", update, shaped(4096, 256), shaped(8, 256), donate=0)
    jitted = compile_for("v5e:1x1", jax.jit(update, donate_argnums=0), shaped(4096, 256), shaped(8, 256))
    assert (given.traffic(), given.cycles) == (jitted.traffic(), jitted.cycles)
    assert (plain.alias_bytes, given.alias_bytes) == (0, 4 * 2**20)
    assert plain.traffic().total > 8 * 2**20 > 2**17 > given.traffic().total
    tree = compile_for("v5e:1x1", lambda p: p["x"] + p["y"], {"x": shaped(256), "y": shaped(256)})
    assert tree.traffic().read == 2 * 1024
    static = compile_for("v5e:1x1", jax.jit(lambda n, x: x * float(n), static_argnums=0), 3, shaped(256))
    assert static.traffic().total == 2 * 1024


@pytest.mark.tpu
def test_options_reach_the_compiler():
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        compile_for("v5e:1x1", double, shaped(8), options={"xla_tpu_no_such_option": True})


@pytest.mark.tpu
def test_the_texts_of_these_tests_are_what_the_compiler_says():
    """Compares bytes, since the text changes with the compiler's version."""
    fresh = compile_for("v5e:2x2", lambda x, y: jnp.tanh(x) * y, shaped(1024, 1024), shaped(1024, 1024))
    assert fresh.traffic().total == aot.memory_traffic(tpu("elementwise")).total
