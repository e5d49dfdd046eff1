"""Division of a batch into micro-batches: by rows, or by positions over caches."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from tilewright.parallel.rows import rows_of, with_rows


@dataclass(frozen=True)
class MicroBatchSplit:
    """Division of a batch into equal micro-batches, by rows or by the positions of all rows.

    Split by positions, a micro-batch sees earlier positions through the layer's cache, so the micro-batches of a layer must
    run in order.

    Attributes:
        count: number of micro-batches.
        size: rows or positions of each micro-batch.
        by_rows: True for a split by rows, False for one by positions.
    """

    count: int
    size: int
    by_rows: bool

    def split(self, x: Float[Array, "B T H"]) -> list[Array]:
        return jnp.split(x, self.count, axis=0 if self.by_rows else 1)

    def join(self, parts: Any) -> Array:
        return jnp.concatenate(parts, axis=0 if self.by_rows else 1)

    def rows(self, rows: Any, n: int) -> Any:
        """Returns the row metadata of micro-batch `n`."""
        return rows_of(rows, n * self.size, self.size) if self.by_rows else rows.positions(n * self.size, self.size)

    def cache(self, whole: Any, n: int) -> Any:
        """Returns the part of a layer's cache that micro-batch `n` attends to."""
        return rows_of(whole, n * self.size, self.size) if self.by_rows else whole

    def with_cache(self, whole: Any, n: int, part: Any) -> Any:
        """Returns a layer's cache with the part of micro-batch `n` replaced."""
        return with_rows(whole, n * self.size, part) if self.by_rows else part


def split_batch(x: Float[Array, "B T H"], rows: Any, caches: tuple[Any, ...], count: int) -> MicroBatchSplit:
    """Divides a batch into `count` micro-batches: by rows where `count` divides them, else by positions.

    Raises:
        ValueError: `count` divides neither rows nor positions; or positions cannot be divided, because layers have no cache or
            the positions are not in the order in which a cache is filled.
    """
    batch, length = x.shape[:2]
    if batch % count == 0:
        return MicroBatchSplit(count, batch // count, True)
    if length % count:
        why = f"and {length} positions, which they do not divide either"
    elif any(cache is None for cache in caches):
        why = f"whose {length} positions cannot be divided: later positions need a cache to see earlier ones"
    elif not (hasattr(rows, "positions") and rows.divisible):
        why = f"whose {length} positions cannot be divided: they are not in the order in which a cache is filled"
    else:
        return MicroBatchSplit(count, length // count, False)
    raise ValueError(f"expected a batch that {count} micro-batches divide, found {batch} rows {why}")
