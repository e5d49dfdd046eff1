"""Ties between arriving data and concurrent compute, which fix the order of a program.

A tie is a barrier for the compiler and costs nothing at run time. `without_ties` omits ties, to show the compiler's own
order of the same program.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import jax

Tree = TypeVar("Tree")

_tied = ContextVar("tied", default=True)


def tied(values: Tree) -> Tree:
    """Ties values: the compiler may use none of them before all are available."""
    return jax.lax.optimization_barrier(values) if _tied.get() else values


@contextmanager
def without_ties() -> Iterator[None]:
    """Traces without ties inside the context: the compiler alone orders hops and matmuls."""
    token = _tied.set(False)
    try:
        yield
    finally:
        _tied.reset(token)
