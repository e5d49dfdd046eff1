"""What is kept of programs for TPUs is taken for the same program alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tpu_programs
from tpu_programs import MEMORY, digest, kept

HLO = """HloModule m

FileNames
1 "/somewhere/test.py"


ENTRY e {
  ROOT x = f32[8] add(a, b), metadata={op_name="x" stack_frame_id=3}
}
"""
HLO_KEPT = """HloModule m

ENTRY e {
  ROOT x = f32[8] add(a, b), metadata={op_name="x"}
}
"""
SHAPE = jax.ShapeDtypeStruct((8,), jnp.float32)


def lowered(by: float = 2.0, scope: str = "scaled") -> Any:
    def scale(x: jax.Array) -> jax.Array:
        with jax.named_scope(scope):
            return x * by

    return jax.jit(scale).lower(SHAPE)


def test_a_digest_tells_what_is_computed_its_names_the_chip_and_the_options():
    same = digest("v5e:1x1", lowered(), {})

    def scale(x: jax.Array) -> jax.Array:  # on other lines of source, but the same program
        with jax.named_scope("scaled"):
            return x * 2.0

    assert digest("v5e:1x1", jax.jit(scale).lower(SHAPE), {}) == same
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
    compiled, memory = [], SimpleNamespace(**{name: place for place, name in enumerate(MEMORY)})

    def compile_live(chip: str, *_: Any) -> tuple[str, Any, dict[str, float]]:
        compiled.append(chip)
        return HLO, memory, {"flops": 8.0}

    assert kept(compile_live, write=True)("v5e:1x1", lowered(), {})[0] == HLO
    read = kept(compile_live, write=False)
    assert read("v5e:1x1", lowered(), {}) == (HLO_KEPT, memory, {"flops": 8.0})
    assert len(compiled) == 1
    assert read("v5e:1x1", lowered(by=3.0), {})[0] == HLO
    assert len(compiled) == 2


def test_what_is_compiled_soon_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tpu_programs, "KEPT", tmp_path)
    kept(lambda *_: (HLO, None, {}), write=True)("v5e:1x1", lowered(), {})
    assert not list(tmp_path.iterdir())
