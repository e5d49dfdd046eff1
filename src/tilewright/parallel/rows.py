"""Some rows of a batch, out of whatever belongs to its rows: arrays whose first dim is the batch, and caches.

A cache that keeps its rows in another way, in pages for example, says itself what some of them are: it has methods `rows` and
`with_rows`, of the same meaning as the functions here.
"""

from typing import Any, TypeVar

import jax
from jax import Array

Tree = TypeVar("Tree")


def has_rows(part: Any) -> bool:
    return hasattr(part, "with_rows")


def rows_of(tree: Tree, first: int | Array, count: int) -> Tree:
    """The rows from `first` on, `count` of them."""

    def of(part: Any) -> Any:
        return part.rows(first, count) if has_rows(part) else jax.lax.dynamic_slice_in_dim(part, first, count)

    return jax.tree.map(of, tree, is_leaf=has_rows)


def with_rows(tree: Tree, first: int | Array, some: Tree) -> Tree:
    """The tree with the rows from `first` on replaced by `some`, as `rows_of` gave them."""

    def of(part: Any, rows: Any) -> Any:
        return part.with_rows(first, rows) if has_rows(part) else jax.lax.dynamic_update_slice_in_dim(part, rows, first, 0)

    return jax.tree.map(of, tree, some, is_leaf=has_rows)
