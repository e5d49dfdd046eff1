"""The collectives of fully sharded training: which there are, by what plan, and how each array travels.

`fully_sharded.py` puts them in their places. There is a data axis, which divides batches and holds the shards of weights, and
another one for tensor parallelism; both divide each matrix.

Legend: R rows that a group of the data axis has, M those of them that a device has, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import PartitionSpec
from jaxtyping import Float

from tilewright.parallel import rings, tokens

Tree = TypeVar("Tree")
Form = Literal["whole", "ring"]
"""One collective, or hops between neighbours, which are asynchronous also where a compiler keeps collectives synchronous."""

ACTIVATIONS = 0
WEIGHTS = 1
"""Streams."""


class Halves(NamedTuple):
    """Something of both halves of a layer, in their order."""

    attention: Any
    mlp: Any


NAMES = Halves("attention", "mlp")
ONE = Halves(1, 1)


@dataclass(frozen=True)
class FullyShardedPlan:
    """Layers and dtypes in which weights and gradients travel.

    Attributes:
        prefetch_distance: by how many layers a half's weights are gathered before its turn, in both passes; for each half. That
            many layers' weights are held besides its own. Backwards, attention's travel half a layer later, beside MLP halves.
        scatter_delay: by how many layers a half's gradient is scattered after its turn in the backward pass; for each half.
            That many layers' gradients are held whole.
        remat: the backward pass gathers weights again and computes again what it needs but the stream before each half.
            Otherwise everything is kept from the forward pass, whole weights too.
        scan: layers run in a loop, whose carry has the weights and gradients that are under way; the first and last layers, as
            many as the shifts, stand outside. It compiles faster, for a copy of the shards.
        weights, gradients, activations: how they travel.
        dtype: of weights on their way, products and the stream.
        reduce_dtype: in which gradients are summed between devices.
        threaded: by tokens. Otherwise a compiler chooses the order: for comparison.
    """

    prefetch_distance: Halves = ONE
    scatter_delay: Halves = ONE
    remat: bool = True
    scan: bool = False
    weights: Form = "whole"
    gradients: Form = "whole"
    activations: Form = "whole"
    dtype: Literal["float32", "bfloat16"] = "float32"
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    threaded: bool = True

    def check(self, layers: int, watched: bool = False) -> None:
        """Raises a `ValueError` where a shift is negative or larger than the number of layers, or where experts are to be
        balanced whose rows go in rings.

        Args:
            watched: layers note something of their rows; see `fully_sharded.Watch`.
        """
        if watched and self.activations == "ring":
            raise ValueError("experts are not balanced where activations go in rings: expected them whole, or no such loss")
        for name in ("prefetch_distance", "scatter_delay"):
            for half, shift in zip(NAMES, getattr(self, name), strict=True):
                if not 0 <= shift <= layers:
                    raise ValueError(
                        f"expected the {name.replace('_', ' ')} of {half} from 0 to the {layers} layers, found {shift}"
                    )


@dataclass(frozen=True)
class ArrayPlacement:
    """Placement of one array on a mesh with a data axis.

    Attributes:
        dim: that the data axis divides; None where none is.
        over: other axes, over which the devices hold the same part: the gradient is summed over them.
    """

    dim: int | None
    over: tuple[str, ...]


def array_placement(spec: PartitionSpec, axes: tuple[str, ...], data: str) -> ArrayPlacement:
    """Reads a partition of an array over a mesh with these axes."""
    of_dim = [() if of is None else (of,) if isinstance(of, str) else tuple(of) for of in spec]
    used = {axis for of in of_dim for axis in of}
    dim = next((at for at, of in enumerate(of_dim) if data in of), None)
    return ArrayPlacement(dim, tuple(axis for axis in axes if axis not in used and axis != data))


@dataclass(frozen=True)
class Exchange:
    """The collectives of a plan.

    Attributes:
        data: the axis that divides batches, and weights on their way.
        axis: of tensor parallelism.
    """

    plan: FullyShardedPlan
    data: str = "fsdp"
    axis: rings.Axis = "tp"

    def mark(self, values: Tree, token: Any) -> tuple[Tree, Any]:
        """The next collectives of the chain wait for these values, and those that read them for the chain."""
        return tokens.done(values, token) if self.plan.threaded else (jax.lax.optimization_barrier(values), token)

    def thread(self, token: Any, collective: Callable[..., Any], x: Any, kind: str, stream: int) -> tuple[Any, Any]:
        if self.plan.threaded:
            return tokens.thread(token, collective, x, kind=kind, stream=stream)
        with set_xla_metadata(collective_type=kind, stream_id=str(stream)):
            return collective(x), token

    def gather_rows(self, x: Float[Array, "M H"], token: Any) -> tuple[Float[Array, "R H"], Any]:
        """Rows of all devices of the tensor-parallel axis."""
        return self.thread(token, partial(jax.lax.all_gather, axis_name=self.axis, tiled=True), x, "tp_all_gather", ACTIVATIONS)

    def scatter_rows(self, x: Float[Array, "R H"], token: Any) -> tuple[Float[Array, "M H"], Any]:
        """The devices' partial sums added up, of a device's own rows."""
        collective = partial(jax.lax.psum_scatter, axis_name=self.axis, tiled=True)
        return self.thread(token, collective, x, "tp_reduce_scatter", ACTIVATIONS)

    def gather(self, shards: Tree, placements: Any, token: Any, name: str = "weights") -> tuple[Tree, Any]:
        """Whole weights, as far as the data axis divides them.

        Collectives are one after another in the chain. In rings all arrays go at once, hop beside hop: each hop needs a product
        beside it to be hidden, and a half has few products.
        """
        leaves, tree = jax.tree.flatten(shards)
        dims = {at: of.dim for at, of in enumerate(jax.tree.leaves(placements)) if of.dim is not None}
        with jax.named_scope(f"gather_{name}"):
            leaves = [shard.astype(self.plan.dtype) for shard in leaves]
            for turn in [list(dims)] if dims and self.plan.weights == "ring" else [[at] for at in dims]:

                def collective(given: list[Array], turn: list[int] = turn) -> list[Array]:
                    return [self._gathered(shard, dims[at]) for shard, at in zip(given, turn, strict=True)]

                made, token = self.thread(token, collective, [leaves[at] for at in turn], "fsdp_all_gather", WEIGHTS)
                for at, each in zip(turn, made, strict=True):
                    leaves[at] = each
        return tree.unflatten(leaves), token

    def scatter(self, cotangent: Tree, placements: Any, token: Any, name: str = "weights") -> tuple[Tree, Any]:
        """A device's part of gradients that every device has a summand of, float32; what no axis divides stays a summand."""
        leaves, tree = jax.tree.flatten(cotangent)
        with jax.named_scope(f"scatter_{name}"):
            for at, (each, of) in enumerate(zip(leaves, jax.tree.leaves(placements), strict=True)):
                if of.dim is not None:
                    collective = partial(self._scattered, dim=of.dim, over=of.over)
                    each, token = self.thread(
                        token, collective, each.astype(self.plan.reduce_dtype), "fsdp_reduce_scatter", WEIGHTS
                    )
                leaves[at] = each.astype(jnp.float32)
        return tree.unflatten(leaves), token

    def summed(self, cotangent: Tree, placements: Tree) -> Tree:
        """Gradients of what the data axis does not divide, such as norms: the sums of what `scatter` left as summands."""

        def of(each: Array, of: ArrayPlacement) -> Array:
            return each if of.dim is not None else jax.lax.psum(each, (self.data, *of.over))

        return jax.tree.map(of, cotangent, placements)

    def _gathered(self, shard: Array, dim: int) -> Array:
        if self.plan.weights == "whole":
            return jax.lax.all_gather(shard, self.data, axis=dim, tiled=True)
        return rings.all_gather(shard.swapaxes(0, dim), self.data).swapaxes(0, dim)

    def _scattered(self, cotangent: Array, dim: int, over: tuple[str, ...]) -> Array:
        if self.plan.gradients == "whole":
            mine = jax.lax.psum_scatter(cotangent, self.data, scatter_dimension=dim, tiled=True)
        else:
            mine = rings.reduce_scatter(cotangent.swapaxes(0, dim), self.data).swapaxes(0, dim)
        over = tuple(axis for axis in over if jax.lax.axis_size(axis) > 1)
        return jax.lax.psum(mine, over) if over else mine


def whole(exchange: Exchange, placements: Any, shards: Tree, name: str) -> Tree:
    """Weights outside the layers, gathered where they are read, and their gradient scattered where it is complete."""

    @jax.custom_vjp
    def run(shards: Tree) -> Tree:
        return exchange.gather(shards, placements, tokens.new_token(), name)[0]

    def backward(_: None, cotangent: Tree) -> tuple[Tree]:
        return (exchange.summed(exchange.scatter(cotangent, placements, tokens.new_token(), name)[0], placements),)

    run.defvjp(lambda shards: (run(shards), None), backward)
    return run(shards)
