"""Ties between what arrives and what is computed meanwhile, by which a schedule keeps the order of its program.

They are barriers for the compiler, and cost nothing at run time. `left_to_compiler` leaves them out, to see what the compiler
makes of the same program without them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import jax

Tree = TypeVar("Tree")

_tied = ContextVar("tied", default=True)


def tied(values: Tree) -> Tree:
    """The values, none of which the compiler may use before all of them are there."""
    return jax.lax.optimization_barrier(values) if _tied.get() else values


@contextmanager
def left_to_compiler() -> Iterator[None]:
    """What is traced inside has no ties: the compiler alone orders hops and products."""
    token = _tied.set(False)
    try:
        yield
    finally:
        _tied.reset(token)
