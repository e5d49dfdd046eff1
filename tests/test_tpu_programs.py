"""What is kept of programs for TPUs is taken for the same program alone."""

import base64
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import tpu_programs
from tilewright.compiled.aot import Compiled, read_compiled
from tpu_programs import digest, kept

HLO = (Path(__file__).parent / "compiled" / "hlo" / "matmul.txt").read_text(encoding="utf-8")
MEMORY = SimpleNamespace(argument_size_in_bytes=1, output_size_in_bytes=2, alias_size_in_bytes=3, temp_size_in_bytes=4)
MADE = read_compiled("v5e:1x1", HLO, MEMORY, {"flops": 8.0})
SHAPE = jax.ShapeDtypeStruct((8, 128), jnp.float32)


def lowered(by: float = 2.0, scope: str = "scaled") -> Any:
    def kernel(x: Any, y: Any) -> None:
        y[...] = x[...] * by

    def scale(x: jax.Array) -> jax.Array:
        with jax.named_scope(scope):
            return pl.pallas_call(kernel, out_shape=x)(x)

    return jax.jit(scale).trace(SHAPE).lower(lowering_platforms=("tpu",))


def test_a_digest_tells_what_is_computed_its_names_the_chip_and_the_options():
    same = digest("v5e:1x1", lowered(), {})

    def kernel(x: Any, y: Any) -> None:  # on other lines of source, but the same program
        y[...] = x[...] * 2.0

    def scale(x: jax.Array) -> jax.Array:
        with jax.named_scope("scaled"):
            return pl.pallas_call(kernel, out_shape=x)(x)

    assert digest("v5e:1x1", jax.jit(scale).trace(SHAPE).lower(lowering_platforms=("tpu",)), {}) == same
    others = [
        digest("v5e:1x1", lowered(by=3.0), {}),
        digest("v5e:1x1", lowered(scope="other"), {}),
        digest("v6e:1x1", lowered(), {}),
        digest("v5e:1x1", lowered(), {"xla_tpu_some_option": True}),
    ]
    assert len({same, *others}) == 5


def test_what_is_kept_is_read_and_anything_else_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tpu_programs, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(tpu_programs, "LONG_SECONDS", 0.0)
    compiled = []

    def compile_live(chip: str, *_: Any) -> Compiled:
        compiled.append(chip)
        return MADE

    assert kept(compile_live, write=True)("v5e:1x1", lowered(), {}) is MADE
    read = kept(compile_live, write=False)
    assert read("v5e:1x1", lowered(), {}) == MADE
    assert MADE.cycles > 0
    assert len(compiled) == 1
    assert read("v5e:1x1", lowered(by=3.0), {}) is MADE
    assert len(compiled) == 2


def test_what_is_compiled_soon_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tpu_programs, "KEPT", tmp_path)
    kept(lambda *_: MADE, write=True)("v5e:1x1", lowered(), {})
    assert not list(tmp_path.iterdir())


def test_what_is_kept_names_no_file():
    """What libtpu made would otherwise depend on where a checkout lies."""
    for path in tpu_programs.KEPT.iterdir():
        hlo = tpu_programs.read("v5e:1x1", path).hlo
        assert ".py" not in hlo
        for body in re.findall(r'"body":"([^"]*)"', hlo):
            assert b".py" not in base64.b64decode(body)
