"""Sparse features on the device, stored as a neighbour table from columns to nodes."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from tilewright.graph.data import SparseRows
from tilewright.graph.table import NeighborTable


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SparseFeatures:
    """Sparse features `[N, F]`; implements `models.gnn.SparseInput`.

    A product gathers for each node the rows of the matrix at its non-zero columns; its gradient uses the transposed table. The
    cost is proportional to the non-zero entries, not to N * F.

    Attributes:
        table: neighbour table of nodes; the neighbours are the columns of non-zero entries.
        values: values of the entries.
        columns: number of columns F.
    """

    table: NeighborTable
    values: Any
    columns: int = field(metadata={"static": True})

    @classmethod
    def from_rows(cls, features: SparseRows, layout: str = "auto") -> "SparseFeatures":
        """Moves features to the device; for `layout` see `table.make_table`."""
        nodes = len(features.indptr) - 1
        owners = np.repeat(np.arange(nodes), np.diff(features.indptr))
        entries = np.stack([features.indices, owners])
        table = NeighborTable.from_edges(entries, nodes, num_sources=features.columns, layout=layout)
        return cls(table, jnp.asarray(features.data), features.columns)

    @property
    def shape(self) -> tuple[int, int]:
        return self.table.num_nodes, self.columns

    def __matmul__(self, weight: Float[Array, "F O"]) -> Float[Array, "N O"]:
        return self.table.unpermute(self.table.aggregate(self.table.permute(weight), weights=self.values))

    def dropped(self, rate: float, key: Array) -> "SparseFeatures":
        """Applies dropout with probability `rate` to the non-zero entries."""
        kept = jax.random.bernoulli(key, 1 - rate, self.values.shape)
        return replace(self, values=jnp.where(kept, self.values / (1 - rate), 0))
