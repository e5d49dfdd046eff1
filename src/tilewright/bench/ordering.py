"""Orders of a schedule's hops and products: by its own ties, by the compiler alone, or by JAX's program order.

`jax.experimental.overlap.program_order` (JAX 0.12) puts a barrier between each operation of a function and the next; jitted
functions inside it count as one. So products, norms and attention are jitted then: otherwise nothing in them could be fused.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import jax

from tilewright.kernels.operations import Operations
from tilewright.parallel.ordering import left_to_compiler

OWN = "own"
COMPILER = "compiler"
PROGRAM_ORDER = "program_order"
ORDERINGS = (OWN, COMPILER, PROGRAM_ORDER)
"""A schedule with its own ties, without any, and without any under JAX's program order."""

SEPARATOR = "@"
UNITS = ("linear", "gated_linear", "project", "heads", "rms_norm", "prefix_attention", "append", "append_attend")
"""Operations that program order takes as one each."""


def ordered_name(schedule: str, ordering: str) -> str:
    """A schedule with its ordering, as tables and files name it; that with its own ties by the schedule's name alone."""
    return schedule if ordering == OWN else f"{schedule}{SEPARATOR}{ordering}"


def read_name(name: str) -> tuple[str, str]:
    """The schedule and the ordering of an `ordered_name`."""
    schedule, _, ordering = name.partition(SEPARATOR)
    return schedule, ordering or OWN


def program_order() -> Callable[..., Any] | None:
    """JAX's `program_order`; None where the installed one lacks it."""
    try:
        return import_module("jax.experimental.overlap").program_order
    except ImportError:
        return None


def in_order(ordering: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """The function, to be traced in one of `ORDERINGS`.

    Raises:
        ValueError: program order is asked of a JAX without it.
    """
    hold = program_order() if ordering == PROGRAM_ORDER else None
    if ordering == PROGRAM_ORDER and hold is None:
        raise ValueError(f"expected JAX from 0.12 for {PROGRAM_ORDER}, found {jax.__version__}")

    def untied(*args: Any) -> Any:
        with left_to_compiler():
            return run(*args) if hold is None else hold(run, enforce=True)(*args)

    return run if ordering == OWN else untied


def in_units(ops: Operations) -> Operations:
    """The operations, those of `UNITS` jitted each."""
    return replace(ops, **{name: unit(getattr(ops, name)) for name in UNITS})


def unit(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function jitted; what it is given besides arrays is constant."""

    def run(*args: Any, **named: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, named))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

        def inner(*arrays: jax.Array) -> Any:
            whole = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
            args, named = tree.unflatten([whole[place] for place in range(len(leaves))])
            return function(*args, **named)

        return jax.jit(inner)(*(leaves[place] for place in places))

    return run
