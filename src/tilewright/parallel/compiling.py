"""Compiler options for TPUs that start transfers between devices earlier.

The options were tuned on the model of `perfmodel/timeline.py`. No TPU has run a program compiled with them, so they are off by
default.
"""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from tilewright.hardware.tpu import KINDS
from tilewright.parallel.lanes import HOPS_IN_FLIGHT

log = logging.getLogger("tilewright.parallel")

Program = TypeVar("Program")

MATMUL_TIME_FACTOR = {"v5e": 0.35, "v5p": 0.25, "v6e": 0.25}
"""Factor on the time of a matmul in libtpu's latency-hiding scheduler, by kind of chip.

The scheduler starts a transfer just early enough to be hidden by its estimate of the operations in between. It was observed to
assume at least twice the real bandwidth of the links, so that hops started too late. Shorter matmuls make them start earlier.
"""


def hiding(kind: str) -> dict[str, Any]:
    """Returns the compiler options for a kind of chip. The options do not change results."""
    return {
        "xla_lhs_output_fusion_latency_multiplier": MATMUL_TIME_FACTOR[kind],
        "xla_max_concurrent_async_collective_permutes": 2 * HOPS_IN_FLIGHT,  # both directions of a ring
    }


def compile_hiding(kind: str | None, compile: Callable[[dict[str, Any] | None], Program]) -> Program:
    """Calls `compile` with the options for a kind of chip, or with None where `kind` is None.

    A compiler without these options compiles without them and logs a warning.
    """
    if kind is None:
        return compile(None)
    try:
        return compile(hiding(kind))
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        log.warning("this compiler lacks the options that overlap collectives with compute, compiling without them: %s", error)
        return compile(None)


def compile_over(mesh: Mesh | None, lowered: jax.stages.Lowered, compiler_options: bool) -> jax.stages.Compiled:
    """Compiles a lowered program, with the options of its chips where requested and where it runs on several known TPUs."""
    kind = None
    if compiler_options and mesh is not None and mesh.size > 1:
        kind = KINDS.get(mesh.devices.flat[0].device_kind)
    return compile_hiding(kind, lowered.compile)
