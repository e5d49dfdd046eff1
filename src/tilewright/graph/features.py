"""Sparse features on the device: a bag of words is a graph too, from words to nodes."""

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
    """Features `[N, F]` as a table of their entries; it offers `models.gnn.SparseInput`.

    A product reads for each node the rows of the matrix that its entries name, and its gradient reads the same table turned
    round: it costs what the entries cost, not what N * F does.

    Attributes:
        table: nodes, whose neighbours are the columns of their entries.
        values: of the entries.
        columns: F.
    """

    table: NeighborTable
    values: Any
    columns: int = field(metadata={"static": True})

    @classmethod
    def of(cls, features: SparseRows, layout: str = "auto") -> "SparseFeatures":
        """Puts features onto the device; `layout` as of `NeighborTable`."""
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
        """Drops entries with probability `rate` and scales the others; a zero stays one either way."""
        kept = jax.random.bernoulli(key, 1 - rate, self.values.shape)
        return replace(self, values=jnp.where(kept, self.values / (1 - rate), 0))
