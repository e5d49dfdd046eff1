"""Compiler options of programs over several TPUs: given to who asks for them, and to nobody else."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.hardware.tpu import CHIPS, KINDS
from tilewright.parallel.compiling import compile_over, hiding
from tilewright.parallel.mesh import make_mesh

OPTION = "xla_lhs_output_fusion_latency_multiplier"


class Recorded(jax.stages.Lowered):
    """Keeps the options that it is compiled with."""

    def __init__(self, refuses: str = ""):
        self.refuses = refuses
        self.options = "never compiled"

    def compile(self, compiler_options: Any = None, **_: Any) -> Any:
        if self.refuses:
            raise jax.errors.JaxRuntimeError(self.refuses)
        self.options = compiler_options
        return jax.jit(lambda x: x).lower(0).compile()


def options(devices: int | None, enabled: bool = True) -> Any:
    """Options that a program over so many devices is compiled with."""
    lowered = Recorded()
    compile_over(None if devices is None else make_mesh({"tp": devices}), lowered, enabled)
    return lowered.options


@pytest.fixture(params=sorted(CHIPS))
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One for which this machine's devices are taken."""
    monkeypatch.setitem(KINDS, jax.devices()[0].device_kind, request.param)
    return request.param


def test_without_asking_there_are_none(kind: str):
    assert options(2, enabled=False) is None


def test_programs_over_tpus_get_the_options_of_their_chip(kind: str):
    assert options(2) == hiding(kind)
    assert 0 < hiding(kind)[OPTION] < 1, "matmuls count for less, so that hops start earlier"


def test_those_of_one_device_get_none(kind: str):
    assert options(1) is None
    assert options(None) is None


def test_a_compiler_that_does_not_know_them_compiles_without(kind: str, caplog: pytest.LogCaptureFixture):
    """That of this machine does not."""
    lowered = jax.jit(lambda x: x + 1).lower(jnp.zeros(4))
    with caplog.at_level(logging.WARNING, "tilewright.parallel"):
        run = compile_over(make_mesh({"tp": 2}), lowered, True)
    np.testing.assert_array_equal(run(jnp.zeros(4)), np.ones(4))
    assert "compiling without them" in caplog.text
    assert "xla_" in caplog.text


def test_what_else_a_compiler_refuses_is_raised(kind: str):
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_over(make_mesh({"tp": 2}), Recorded("RESOURCE_EXHAUSTED: HBM"), True)


def test_programs_of_this_machine_compile_as_they_do_by_themselves(caplog: pytest.LogCaptureFixture):
    run = compile_over(make_mesh({"tp": 2}), jax.jit(lambda x: x + 1).lower(jnp.zeros(4)), True)
    np.testing.assert_array_equal(run(jnp.zeros(4)), np.ones(4))
    assert not caplog.records
