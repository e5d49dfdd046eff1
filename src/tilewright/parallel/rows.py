"""Slices of a batch by rows: of arrays with the batch as first dim, and of caches.

A cache with another layout, such as pages, slices itself: it has methods `rows` and `with_rows`, equivalent to the functions
here.
"""

from typing import Any, TypeVar

import jax
from jax import Array

Tree = TypeVar("Tree")


def has_rows(part: Any) -> bool:
    return hasattr(part, "with_rows")


def rows_of(tree: Tree, first: int | Array, count: int) -> Tree:
    """Returns `count` rows of each leaf, from `first` on."""

    def slice_rows(part: Any) -> Any:
        return part.rows(first, count) if has_rows(part) else jax.lax.dynamic_slice_in_dim(part, first, count)

    return jax.tree.map(slice_rows, tree, is_leaf=has_rows)


def with_rows(tree: Tree, first: int | Array, some: Tree) -> Tree:
    """Returns the tree with the rows from `first` on replaced by `some`, a result of `rows_of`."""

    def update_rows(part: Any, rows: Any) -> Any:
        return part.with_rows(first, rows) if has_rows(part) else jax.lax.dynamic_update_slice_in_dim(part, rows, first, 0)

    return jax.tree.map(update_rows, tree, some, is_leaf=has_rows)
