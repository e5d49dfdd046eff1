"""Options for a TPU's compiler by which it begins transfers between devices earlier.

They were tuned on the model of time in `perfmodel/timeline.py`, and no TPU has run a program that was compiled with them:
nobody gets them without asking.
"""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from tilewright.hardware.tpu import KINDS
from tilewright.parallel.lanes import AT_ONCE

log = logging.getLogger("tilewright.parallel")

Made = TypeVar("Made")

PRODUCTS_COUNT = {"v5e": 0.35, "v5p": 0.25, "v6e": 0.25}
"""Part of a product's time that libtpu's scheduler is to count, by kind of chip.

It begins a transfer as early as what it takes the operations beside it to last, and was seen to take links to carry twice what
they do and more, so that hops began when much of their time was over. With products that count for less they begin earlier.
"""


def hiding(kind: str) -> dict[str, Any]:
    """The compiler options for a kind of chip; nothing that is computed changes."""
    return {
        "xla_lhs_output_fusion_latency_multiplier": PRODUCTS_COUNT[kind],
        "xla_max_concurrent_async_collective_permutes": 2 * AT_ONCE,  # both ways round a ring
    }


def compile_hiding(kind: str | None, compile: Callable[[dict[str, Any] | None], Made]) -> Made:
    """Result of `compile` with the options for a kind of chip, or for None without any.

    A compiler that does not know them compiles without any; a line of the log says so.
    """
    if kind is None:
        return compile(None)
    try:
        return compile(hiding(kind))
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        log.warning("collectives of this program may be exposed: %s", error)
        return compile(None)


def compile_over(mesh: Mesh | None, lowered: jax.stages.Lowered, compiler_options: bool) -> jax.stages.Compiled:
    """Compiles a lowered program: with the options of its chips, if asked and if it runs over several TPUs of a known kind."""
    kind = None
    if compiler_options and mesh is not None and mesh.size > 1:
        kind = KINDS.get(mesh.devices.flat[0].device_kind)
    return compile_hiding(kind, lowered.compile)
