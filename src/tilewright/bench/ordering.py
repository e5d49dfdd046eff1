"""Orderings of a schedule's hops and matmuls: explicit dependencies, the compiler's choice, or JAX's program order.

`jax.experimental.overlap.program_order` (JAX 0.12) puts a barrier between successive operations of a function. A jitted
function counts as one operation. Under program order, matmuls, norms and attention are therefore jitted; otherwise XLA could
not fuse within them.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import jax

from tilewright.kernels.operations import Operations
from tilewright.parallel.ordering import without_ties

OWN = "own"
COMPILER = "compiler"
PROGRAM_ORDER = "program_order"
ORDERINGS = (OWN, COMPILER, PROGRAM_ORDER)
"""A schedule with its explicit dependencies, without them, and without them under JAX's program order."""

SEPARATOR = "@"
UNITS = ("linear", "gated_linear", "project", "heads", "rms_norm", "write", "attend", "attend_projected")
"""Operations that each count as one under program order."""


def ordered_name(schedule: str, ordering: str) -> str:
    """Returns the name of a schedule with an ordering, as in tables and files; the schedule's own name for `OWN`."""
    return schedule if ordering == OWN else f"{schedule}{SEPARATOR}{ordering}"


def read_name(name: str) -> tuple[str, str]:
    """Splits an `ordered_name` into schedule and ordering."""
    schedule, _, ordering = name.partition(SEPARATOR)
    return schedule, ordering or OWN


def program_order() -> Callable[..., Any] | None:
    """Returns JAX's `program_order`; None if the installed JAX lacks it."""
    try:
        return import_module("jax.experimental.overlap").program_order
    except ImportError:
        return None


def apply_ordering(ordering: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function wrapped for tracing in one of `ORDERINGS`.

    Raises:
        ValueError: The installed JAX has no program order.
    """
    hold = program_order() if ordering == PROGRAM_ORDER else None
    if ordering == PROGRAM_ORDER and hold is None:
        raise ValueError(f"expected JAX from 0.12 for {PROGRAM_ORDER}, found {jax.__version__}")

    def untied(*args: Any) -> Any:
        with without_ties():
            return run(*args) if hold is None else hold(run, enforce=True)(*args)

    return run if ordering == OWN else untied


def jit_units(ops: Operations) -> Operations:
    """Returns the operations with each of `UNITS` jitted."""
    return replace(ops, **{name: unit(getattr(ops, name)) for name in UNITS})


def unit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function jitted over its array arguments; all other arguments are constants."""

    def run(*args: Any, **named: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, named))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

        def inner(*arrays: jax.Array) -> Any:
            whole = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
            args, named = tree.unflatten([whole[place] for place in range(len(leaves))])
            return function(*args, **named)

        return jax.jit(inner)(*(leaves[place] for place in places))

    return run
