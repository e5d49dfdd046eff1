"""Groups of a batch that take turns in a stack of layers, so that what one waits for may run under another's compute."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from tilewright.parallel.rows import rows_of, with_rows


@dataclass(frozen=True)
class Cut:
    """Division of a batch into groups: by its rows, or by the positions of all rows.

    Of positions, a group sees those before it through what the layer keeps, so that it comes after them within a layer.

    Attributes:
        count: of the groups.
        size: rows or positions of each.
        by_rows: else by positions.
    """

    count: int
    size: int
    by_rows: bool

    def streams(self, x: Float[Array, "B T H"]) -> list[Array]:
        return jnp.split(x, self.count, axis=0 if self.by_rows else 1)

    def joined(self, streams: Any) -> Array:
        return jnp.concatenate(streams, axis=0 if self.by_rows else 1)

    def rows(self, rows: Any, n: int) -> Any:
        """Metadata of group n, of those of all rows."""
        return rows_of(rows, n * self.size, self.size) if self.by_rows else rows.positions(n * self.size, self.size)

    def kept(self, whole: Any, n: int) -> Any:
        """The part of a layer's cache that group n attends to."""
        return rows_of(whole, n * self.size, self.size) if self.by_rows else whole

    def with_group(self, whole: Any, n: int, part: Any) -> Any:
        """A layer's cache, with that of group n replaced."""
        return with_rows(whole, n * self.size, part) if self.by_rows else part


def cut(x: Float[Array, "B T H"], rows: Any, kept: tuple[Any, ...], count: int) -> Cut:
    """Divides a batch into so many groups: of rows where these can be divided, else of positions.

    Raises:
        ValueError: neither rows nor positions can be divided, the latter also because layers keep nothing or because what is
            seen of a row cannot be cut.
    """
    batch, length = x.shape[:2]
    if batch % count == 0:
        return Cut(count, batch // count, True)
    if length % count:
        why = f"and {length} positions, which they do not divide either"
    elif any(own is None for own in kept):
        why = f"whose {length} positions cannot be divided: no cache shows the first of them to the others"
    elif not (hasattr(rows, "positions") and rows.divisible):
        why = f"whose {length} positions cannot be divided: they are not in the order in which a cache is filled"
    else:
        return Cut(count, length // count, False)
    raise ValueError(f"expected a batch that {count} micro-batches divide, found {batch} rows {why}")


def take_turns(
    count: int, stack: Any, x: Float[Array, "B T H"], rows: Any, kept: tuple[Any, ...], taps: tuple[int, ...]
) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
    """A schedule's `run` (see `models.stack.Schedule`) on one device, half a layer of one group after half a layer of another.

    Groups are kept apart from the first layer to the last.

    Args:
        count: of the groups.

    Raises:
        ValueError: see `cut`.
    """
    division = cut(x, rows, kept, count)
    ops = stack.ops
    streams = division.streams(x)
    around = [division.rows(rows, n) for n in range(count)]
    after = []
    left = []
    for layer, whole in zip(stack.layers, kept, strict=True):
        for n in range(count):
            out, own = stack.attend(ops, layer, stack.project(ops, layer, streams[n]), around[n], division.kept(whole, n))
            whole = division.with_group(whole, n, own)
            streams[n] = stack.output(ops, layer, out, streams[n])
        for n in range(count):
            streams[n] = stack.mlp(ops, layer, streams[n], streams[n])
        after.append(list(streams))
        left.append(whole)
    return division.joined(streams), tuple(division.joined(after[tap]) for tap in taps), tuple(left)
