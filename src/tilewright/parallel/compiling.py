"""What a TPU's compiler is told of programs whose collectives are to be hidden."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from tilewright.chips.tpu import KINDS
from tilewright.parallel.lanes import AT_ONCE

log = logging.getLogger("tilewright.parallel")

Made = TypeVar("Made")

PRODUCTS_COUNT = {"v5e": 0.35, "v5p": 0.25, "v6e": 0.25}
"""What part of a product's time libtpu's scheduler is to count, by kind of chip.

It begins a transfer as early as what it takes the operations beside it to last, and was seen to take links to carry twice what
they do and more, so that hops began when much of their time was over. With products that count for less they begin earlier.
"""


def hiding(kind: str) -> dict[str, Any]:
    """The compiler options for a kind of chip; nothing that is computed changes."""
    return {
        "xla_lhs_output_fusion_latency_multiplier": PRODUCTS_COUNT[kind],
        "xla_max_concurrent_async_collective_permutes": 2 * AT_ONCE,  # both ways round a ring
    }


def compile_hiding(kind: str, compile: Callable[[dict[str, Any] | None], Made]) -> Made:
    """What `compile` makes with the options for a kind of chip.

    A compiler that does not know them compiles without any; a line of the log says so.
    """
    try:
        return compile(hiding(kind))
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        log.warning("collectives of this program may be exposed: %s", error)
        return compile(None)


def compile_over(mesh: Mesh | None, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a lowered program, as `compile_hiding` does where it runs over several TPUs of a known kind."""
    kind = None if mesh is None or mesh.size == 1 else KINDS.get(mesh.devices.flat[0].device_kind)
    return lowered.compile() if kind is None else compile_hiding(kind, lowered.compile)
