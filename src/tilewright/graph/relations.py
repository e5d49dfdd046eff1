"""Graphs with several kinds of nodes and edges, as one neighbour table.

The sources of the table are blocks, one for each relation (a kind of edges), of the nodes that its edges come from; its nodes
are those of all kinds, one kind after the other. A model transforms each block with its relation's arrays, so that one
reduction, or one softmax, covers all relations, as in PyG's `HGTConv`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from tilewright.graph.aggregate import aggregate, propagate
from tilewright.graph.edges import from_edge_index
from tilewright.graph.table import NeighborTable

Relation = tuple[str, str, str]
"""Kind of edges: kind of the sources, name, kind of the destinations."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RelationTable:
    """Neighbour table of all relations; see the module.

    Attributes:
        table: the table.
        shares: 1 / the number of edges of the same relation and destination, of each edge.
        relations: the relations, in the order of their blocks of sources.
        kinds: kinds of nodes, in the order of the nodes.
        sizes: number of nodes of each kind.
    """

    table: NeighborTable
    shares: Any
    relations: tuple[Relation, ...] = field(metadata={"static": True})
    kinds: tuple[str, ...] = field(metadata={"static": True})
    sizes: tuple[int, ...] = field(metadata={"static": True})

    @classmethod
    def build(cls, edge_index: Mapping[Relation, Any], num_nodes: Mapping[str, int], **options: Any) -> "RelationTable":
        """Builds the table from PyG's `edge_index_dict`.

        Args:
            edge_index: edges `[2, E]` of each relation; ids count from 0 in each kind of nodes.
            num_nodes: number of nodes of each kind.
            options: options of `table.make_table`, except for `self_loops`.

        Raises:
            ValueError: there is no relation, a relation is between unknown kinds of nodes, or its edges are invalid.
        """
        if not edge_index:
            raise ValueError("expected edges of at least one relation, found none")
        if unknown := [r for r in edge_index if r[0] not in num_nodes or r[2] not in num_nodes]:
            raise ValueError(f"expected relations between the kinds {', '.join(num_nodes)}, found {unknown[0]}")
        starts = dict(zip(num_nodes, np.cumsum([0, *num_nodes.values()]), strict=False))
        before = 0
        ends, shares = [], []
        for relation, ids in edge_index.items():
            edges = from_edge_index(ids, num_nodes[relation[2]], num_nodes[relation[0]])
            ends.append(np.stack([edges.sources + before, edges.destinations + starts[relation[2]]]))
            shares.append(1 / np.bincount(edges.destinations, minlength=1)[edges.destinations])
            before += edges.num_sources
        nodes = sum(num_nodes.values())
        table = NeighborTable.from_edges(np.concatenate(ends, axis=1), nodes, num_sources=before, **options)
        each = np.concatenate(shares).astype(np.float32)
        padded = np.pad(each, (0, table.num_edges - each.size))
        return cls(table, jnp.asarray(padded), tuple(edge_index), tuple(num_nodes), tuple(num_nodes.values()))

    def mean_by_relation(self, sources: Float[Array, "M F"]) -> Float[Array, "N F"]:
        """Sums, over the relations, the means of the sources' features; with kernels."""
        return aggregate(self.table, sources, weights=self.shares)

    def propagate(self, x: Any, *arguments: Any, **values: Any) -> Float[Array, "N ..."]:
        """Computes and reduces messages over all relations together; see `aggregate.propagate`."""
        return propagate(x, self.table, *arguments, **values)

    def split(self, y: Float[Array, "N ..."]) -> dict[str, Float[Array, "_ ..."]]:
        """Splits values of the nodes by kind."""
        return dict(zip(self.kinds, jnp.split(y, np.cumsum(self.sizes)[:-1]), strict=True))
