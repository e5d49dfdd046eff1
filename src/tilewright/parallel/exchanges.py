"""Collectives of fully sharded training, and the plan that configures them.

`fully_sharded.py` schedules the collectives. The mesh has a data axis, which shards batches and weights, and an axis of tensor
parallelism; each matrix is sharded over both.

Legend: R rows of a group of the data axis, M rows of a device, H hidden size.
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
"""Form of a collective: one operation (`whole`), or hops between neighbours (`ring`).

Hops are asynchronous even where a compiler keeps collectives synchronous.
"""

ACTIVATIONS = 0
WEIGHTS = 1
"""Streams of collectives."""


class Sublayers(NamedTuple):
    """A pair of values for the attention and MLP sublayers of a layer, in order."""

    attention: Any
    mlp: Any


NAMES = Sublayers("attention", "mlp")
ONE = Sublayers(1, 1)


@dataclass(frozen=True)
class FullyShardedPlan:
    """Prefetching, delays, forms and dtypes of the collectives of a training step.

    Attributes:
        prefetch_distance: layers by which weights are gathered before their use, in both passes, for each half. Memory holds
            the weights of this many further layers. In the backward pass, attention's weights are gathered half a layer later,
            beside MLP halves.
        scatter_delay: layers by which gradients are reduce-scattered after they are computed, for each half. Memory holds the
            whole gradients of this many layers.
        remat: the backward pass gathers weights again and recomputes activations from the residual stream before each half.
            Otherwise activations and whole weights are kept from the forward pass.
        scan: layers run in a loop, with the weights and gradients in flight in its carry. As many first and last layers as the
            distances need run outside. Compiles faster, at the cost of a copy of the shards.
        weights, gradients, activations: form of their collectives.
        dtype: dtype of gathered weights, matmuls and the residual stream.
        reduce_dtype: dtype of gradient sums over devices.
        threaded: tokens fix the order of collectives. Otherwise the compiler chooses the order, for comparison.
    """

    prefetch_distance: Sublayers = ONE
    scatter_delay: Sublayers = ONE
    remat: bool = True
    scan: bool = False
    weights: Form = "whole"
    gradients: Form = "whole"
    activations: Form = "whole"
    dtype: Literal["float32", "bfloat16"] = "float32"
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    threaded: bool = True

    def check(self, layers: int, watched: bool = False) -> None:
        """Checks the plan for a number of layers.

        Args:
            watched: layers record statistics of their rows; see `fully_sharded.Watch`.

        Raises:
            ValueError: a distance or delay is negative or above the number of layers; or rows are recorded while activations
                travel in rings.
        """
        if watched and self.activations == "ring":
            raise ValueError("expected activations in whole form where experts have a balance loss, found rings")
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
        dim: dim that the data axis shards; None for an array that the data axis replicates.
        over: other axes that replicate the array, such as replicas of all weights; its gradient is summed over them.
    """

    dim: int | None
    over: tuple[str, ...]


def array_placement(spec: PartitionSpec, axes: tuple[str, ...], data: str) -> ArrayPlacement:
    """Returns the placement of an array from its partition spec over a mesh with these axes."""
    dim_axes = [() if part is None else (part,) if isinstance(part, str) else tuple(part) for part in spec]
    used = {axis for part in dim_axes for axis in part}
    dim = next((at for at, part in enumerate(dim_axes) if data in part), None)
    return ArrayPlacement(dim, tuple(axis for axis in axes if axis not in used and axis != data))


@dataclass(frozen=True)
class Exchange:
    """Collectives of a plan.

    Attributes:
        data: axis that shards batches and weights.
        axis: axis of tensor parallelism.
    """

    plan: FullyShardedPlan
    data: str = "fsdp"
    axis: rings.Axis = "tp"

    def mark(self, values: Tree, token: Any) -> tuple[Tree, Any]:
        """Ties values to the chain: later collectives wait for the values, and readers of the values wait for the chain."""
        return tokens.done(values, token) if self.plan.threaded else (jax.lax.optimization_barrier(values), token)

    def thread(self, token: Any, collective: Callable[..., Any], x: Any, kind: str, stream: int) -> tuple[Any, Any]:
        """Runs a collective as the next one of the chain."""
        if self.plan.threaded:
            return tokens.thread(token, collective, x, kind=kind, stream=stream)
        with set_xla_metadata(collective_type=kind, stream_id=str(stream)):
            return collective(x), token

    def gather_rows(self, x: Float[Array, "M H"], token: Any) -> tuple[Float[Array, "R H"], Any]:
        """All-gathers rows over the tensor-parallel axis."""
        return self.thread(token, partial(jax.lax.all_gather, axis_name=self.axis, tiled=True), x, "tp_all_gather", ACTIVATIONS)

    def scatter_rows(self, x: Float[Array, "R H"], token: Any) -> tuple[Float[Array, "M H"], Any]:
        """Reduce-scatters partial sums over the tensor-parallel axis."""
        collective = partial(jax.lax.psum_scatter, axis_name=self.axis, tiled=True)
        return self.thread(token, collective, x, "tp_reduce_scatter", ACTIVATIONS)

    def gather(self, shards: Tree, placements: Any, token: Any, name: str = "weights") -> tuple[Tree, Any]:
        """All-gathers weights over the data axis.

        Collectives follow one another in the chain. In ring form all arrays travel together, hop beside hop: each hop needs a
        matmul beside it to be hidden, and a half has few matmuls.
        """
        leaves, tree = jax.tree.flatten(shards)
        dims = {at: one.dim for at, one in enumerate(jax.tree.leaves(placements)) if one.dim is not None}
        with jax.named_scope(f"gather_{name}"):
            leaves = [shard.astype(self.plan.dtype) for shard in leaves]
            for together in [list(dims)] if dims and self.plan.weights == "ring" else [[at] for at in dims]:

                def collective(shards: list[Array], together: list[int] = together) -> list[Array]:
                    return [self._gathered(shard, dims[at]) for shard, at in zip(shards, together, strict=True)]

                inputs = [leaves[at] for at in together]
                gathered, token = self.thread(token, collective, inputs, "fsdp_all_gather", WEIGHTS)
                for at, each in zip(together, gathered, strict=True):
                    leaves[at] = each
        return tree.unflatten(leaves), token

    def scatter(self, cotangent: Tree, placements: Any, token: Any, name: str = "weights") -> tuple[Tree, Any]:
        """Reduce-scatters gradients over the data axis, to float32; gradients of replicated arrays stay partial sums."""
        leaves, tree = jax.tree.flatten(cotangent)
        with jax.named_scope(f"scatter_{name}"):
            for at, (each, placement) in enumerate(zip(leaves, jax.tree.leaves(placements), strict=True)):
                if placement.dim is not None:
                    collective = partial(self._scattered, dim=placement.dim, over=placement.over)
                    each, token = self.thread(
                        token, collective, each.astype(self.plan.reduce_dtype), "fsdp_reduce_scatter", WEIGHTS
                    )
                leaves[at] = each.astype(jnp.float32)
        return tree.unflatten(leaves), token

    def summed(self, cotangent: Tree, placements: Tree) -> Tree:
        """All-reduces the gradients of arrays that the data axis replicates, such as norms, which `scatter` leaves partial."""

        def one(each: Array, placement: ArrayPlacement) -> Array:
            return each if placement.dim is not None else jax.lax.psum(each, (self.data, *placement.over))

        return jax.tree.map(one, cotangent, placements)

    def _gathered(self, shard: Array, dim: int) -> Array:
        if self.plan.weights == "whole":
            return jax.lax.all_gather(shard, self.data, axis=dim, tiled=True)
        return rings.all_gather(shard.swapaxes(0, dim), self.data).swapaxes(0, dim)

    def _scattered(self, cotangent: Array, dim: int, over: tuple[str, ...]) -> Array:
        if self.plan.gradients == "whole":
            shard = jax.lax.psum_scatter(cotangent, self.data, scatter_dimension=dim, tiled=True)
        else:
            shard = rings.reduce_scatter(cotangent.swapaxes(0, dim), self.data).swapaxes(0, dim)
        over = tuple(axis for axis in over if jax.lax.axis_size(axis) > 1)
        return jax.lax.psum(shard, over) if over else shard


def gathered_weights(exchange: Exchange, placements: Any, shards: Tree, name: str) -> Tree:
    """All-gathers weights outside the layers where they are read, and reduce-scatters their gradient where it is complete."""

    @jax.custom_vjp
    def run(shards: Tree) -> Tree:
        return exchange.gather(shards, placements, tokens.new_token(), name)[0]

    def backward(_: None, cotangent: Tree) -> tuple[Tree]:
        return (exchange.summed(exchange.scatter(cotangent, placements, tokens.new_token(), name)[0], placements),)

    run.defvjp(lambda shards: (run(shards), None), backward)
    return run(shards)
