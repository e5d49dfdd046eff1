"""Fully sharded training with explicit prefetching of weights and delayed reduce-scatters of gradients.

Fully sharded training (Rajbhandari et al., "ZeRO", 2020, stage 3) combined with tensor and sequence parallelism
(`strategies.Sequence`). A layer has two halves, attention and MLP. Each half gathers its weights over the data axis some layers
before its compute, and reduce-scatters its weight gradients some layers after it. Both run under the compute of other halves,
in one chain of tokens (`tokens.py`) for the forward pass and one for the backward pass:

    gather rows | gather weights of a layer ahead, scatter gradients of a layer behind; meanwhile: matmuls | scatter rows

In the forward pass, a half's weights travel beside the same half of an earlier layer. In the backward pass, all weights travel
beside MLP halves, which have three times the matmuls of the forward pass; attention's weights travel beside the MLP half right
before their use. Where weights and gradients travel in rings, gradients have a separate chain, so that their hops run beside
those of weights: each hop needs a matmul to hide it, and matmuls are few. The main chain waits for the gradients a layer later,
so that they leave memory.

Forward and backward pass are both explicit, because autodiff would leave the order of its collectives to the compiler. After
"Weight Prefetch" in the AWS Neuron SDK's "Overlapping compute and communication". `exchanges.py` has the collectives.

Legend: R rows of a group of the data axis, M rows of a device, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from operator import eq
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from tilewright.kernels.operations import Operations
from tilewright.parallel import rings, tokens
from tilewright.parallel.exchanges import NAMES, Exchange, FullyShardedPlan, Sublayers
from tilewright.parallel.strategies import CollectiveMatmul, Sequence


@dataclass(frozen=True)
class _Chained(Sequence):
    """A strategy that gathers activations in a chain of tokens and leaves partial sums unreduced."""

    exchange: Any = None
    chain: list[Any] = field(default_factory=list, hash=False)

    def gather(self, x: Array, w: Any, product: rings.Product) -> Any:
        rows, self.chain[0] = self.exchange.gather_rows(x, self.chain[0])
        return product(rows, w)

    def scatter(self, x: Array, w: Any, product: Callable[..., Any], dtype: Any) -> Array:
        return product(x, w, dtype)


class ResidualStream(NamedTuple):
    """Residual stream between layers, with sums that layers record.

    Attributes:
        rows: this device's rows, `[M, H]`.
        sums: this device's partial sums of recorded statistics (see `Watch`); an empty tuple for none.
    """

    rows: Any
    sums: Any = ()


Watch = Callable[[Operations, Callable[[Any], None]], Operations]
"""`watch(ops, note)`: returns operations that call `note` with a tree like `ResidualStream.sums`, to be added."""


@dataclass(frozen=True)
class LoopedLayer:
    """Index of a layer in a loop with a period of layers as its body (see `period_of`).

    Attributes:
        iteration: iteration of the loop.
        place: place in the period; a place outside of the period belongs to another iteration.
    """

    iteration: Any
    place: int

    def __add__(self, layers: int) -> "LoopedLayer":
        return replace(self, place=self.place + layers)


Index = int | LoopedLayer
"""Index of a layer."""


def period_of(layers: tuple[Any, ...]) -> int:
    """Returns the least number of layers after which the kinds of layers repeat; the number of all layers if they do not.

    Layers are of one kind if their trees, their static values and the shapes of their arrays are equal.
    """
    kinds = [(jax.tree.structure(layer), [leaf.shape for leaf in jax.tree.leaves(layer)]) for layer in layers]
    return next(n for n in range(1, len(kinds) + 1) if all(map(eq, kinds[n:], kinds)))


def run_layers(
    exchange: Exchange,
    stack: Any,
    split: Callable[[Any], tuple[Any, Any]],
    join: Callable[[Any, Any], Any],
    placements: tuple[Any, ...],
    x: Float[Array, "M H"],
    rows: Any,
    shape: tuple[int, ...],
    tail: Any = None,
    tail_placements: Any = None,
    sums: Any = (),
    watch: Watch | None = None,
) -> tuple[ResidualStream, Any]:
    """Runs all layers of a stack, within `jax.shard_map`; differentiable by the layers' shards, `x` and the tail's shards.

    Args:
        exchange: plan and axes.
        stack: stack of sharded layers (see `models.stack.Stack`).
        split: function of a layer to its two halves; each half lacks the arrays of the other.
        join: inverse of `split`.
        placements: `ArrayPlacement`s of each layer.
        x: this device's rows of the residual stream.
        rows: metadata of rows; not differentiated.
        shape: shape of the residual stream of all rows, `[B, T, H]`.
        tail: shards of weights read after the layers, such as the head; gathered during the last layer.
        tail_placements: `ArrayPlacement`s of the tail.
        sums, watch: see `ResidualStream` and `Watch`.

    Returns:
        the residual stream after the last layer, and the whole tail.

    Raises:
        ValueError: the plan cannot run the layers; see `FullyShardedPlan.check`.
    """
    exchange.plan.check(len(stack.layers), watch is not None)
    parts = _Parts(exchange, stack, shape, Sublayers(*_columns(map(split, placements))), tail_placements, watch)

    @jax.custom_vjp
    def run(layers: Any, tail: Any, x: ResidualStream, rows: Any) -> tuple[ResidualStream, Any]:
        return _Forward(parts, Sublayers(*_columns(map(split, layers))), rows, keep=False).run(x, tail)[0]

    def forward(layers: Any, tail: Any, x: ResidualStream, rows: Any) -> tuple[tuple[ResidualStream, Any], Any]:
        shards = Sublayers(*_columns(map(split, layers)))
        outputs, residuals = _Forward(parts, shards, rows, keep=True).run(x, tail)
        return outputs, (shards if exchange.plan.remat else None, residuals, rows)

    def backward(saved: Any, cotangent: tuple[ResidualStream, Any]) -> tuple[Any, Any, ResidualStream, None]:
        shards, residuals, rows = saved
        gradients, tail_cotangent, x_cotangent = _Backward(parts, shards, rows, residuals).run(*cotangent)
        return tuple(map(join, *gradients)), tail_cotangent, x_cotangent, None

    run.defvjp(forward, backward)
    return run(stack.layers, tail, ResidualStream(x, sums), rows)


def _columns(pairs: Any) -> tuple[list[Any], list[Any]]:
    first, second = zip(*pairs, strict=True)
    return list(first), list(second)


@dataclass(frozen=True)
class _Parts:
    """Inputs that both passes share."""

    exchange: Exchange
    stack: Any
    shape: tuple[int, ...]
    placements: Sublayers
    tail_placements: Any
    watch: Watch | None = None

    @property
    def plan(self) -> FullyShardedPlan:
        return self.exchange.plan

    @property
    def rings(self) -> bool:
        return self.plan.activations == "ring"

    @cached_property
    def period(self) -> int:
        """Number of layers per iteration of the loop."""
        return period_of(self.stack.layers)

    @property
    def loops(self) -> int:
        """Number of first layers in the loop of the forward pass; 0 if the loop of the backward pass had a single iteration."""
        layers = len(self.stack.layers)
        distance = max(self.plan.prefetch_distance)
        peeled = max(distance, *self.plan.scatter_delay, 0 if self.tail_placements is None else 1)
        loops = (layers - peeled) // self.period * self.period
        return loops if self.plan.scan and loops - self.least > self.period else 0

    @property
    def least(self) -> int:
        """First layer in the loop of the backward pass, which always gathers weights of earlier layers."""
        return -(-max(self.plan.prefetch_distance) // self.period) * self.period

    def placement(self, half: int, n: Index) -> Any:
        """Placements of the arrays of a layer's half."""
        return self.placements[half][n if isinstance(n, int) else n.place % self.period]

    def layers_of(self, shards: Sublayers) -> Sublayers:
        """Returns the shards of both halves, stacked for layers in a loop."""
        period = self.period
        looped = self.loops > 0

        def stacked(layers: list[Any]) -> "_Layers":
            places = range(period if looped else 0)
            each = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers[place::period]) for place in places]
            return _Layers(each or layers, looped)

        return Sublayers(*map(stacked, shards))

    def half(self, sublayer: int, rows: Any, w: Any, x: ResidualStream, token: Any) -> tuple[ResidualStream, Any]:
        """Computes a half: its partial sum over all rows, or in ring form its whole sum over own rows.

        Returns:
            the sum, and the token of the half's first gather.
        """
        stack = self.stack
        axis = self.exchange.axis
        noted = []
        chain = [token]
        schedule = CollectiveMatmul(axis) if self.rings else _Chained(axis, self.exchange, chain)
        ops = schedule.sharded_ops(stack.ops, self.shape)
        ops = ops if self.watch is None else self.watch(ops, noted.append)
        if sublayer == 0:
            out, _ = stack.attend(stack.ops, w, stack.project(ops, w, x.rows[None]), rows, None)
            y = stack.output(ops, w, out)[0]
        else:
            y = stack.mlp(ops, w, x.rows[None])[0]
        return ResidualStream(y, reduce(added, noted, jax.tree.map(jnp.zeros_like, x.sums))), chain[0]

    def post_reduce(self, sublayer: int, w: Any, y: Float[Array, "M H"]) -> Float[Array, "M H"]:
        """Applies `Stack.post_reduce`, such as a norm, to a half's whole sum."""
        return self.stack.post_reduce(self.stack.ops, w, NAMES[sublayer], y)

    def changed(self, sublayer: int, w: Any, y: ResidualStream) -> tuple[ResidualStream, Any]:
        """Applies `post_reduce` to a stream.

        Returns:
            the stream, and residuals for the gradient: the sum under remat, else the vjp function; None if `post_reduce` is the
            identity.
        """
        run = partial(self.post_reduce, sublayer)
        if not jax.make_jaxpr(partial(run, w))(y.rows).eqns:
            return y, None
        rows, residuals = (run(w, y.rows), y.rows) if self.plan.remat else jax.vjp(run, w, y.rows)
        return y._replace(rows=rows), residuals


@dataclass(frozen=True)
class _Layers:
    """Trees of layers: one per layer, or stacked over iterations, one per place in a period."""

    trees: list[Any]
    stacked: bool

    def at(self, n: Index) -> Any:
        if not self.stacked:
            assert isinstance(n, int), "unstacked layers are in no loop"
            return self.trees[n]
        iteration, place = (0, n) if isinstance(n, int) else (n.iteration, n.place)
        return row(self.trees[place % len(self.trees)], iteration + place // len(self.trees))


class _Forward:
    """The forward pass."""

    def __init__(self, parts: _Parts, shards: Sublayers, rows: Any, keep: bool):
        self.parts = parts
        self.exchange = parts.exchange
        self.rows = rows
        self.keep = keep
        self.count = len(shards.attention)
        self.loops = parts.loops
        self.shards = parts.layers_of(shards)

    def run(self, x: ResidualStream, tail: Any) -> tuple[tuple[ResidualStream, Any], Any]:
        """Returns the stream and the tail after the last layer, and the residuals of each layer, layers in a loop first."""
        distance = self.parts.plan.prefetch_distance
        token = tokens.new_token()
        held = Sublayers((), ())
        for n in range(max(distance)):
            for half in range(2):
                if n < distance[half]:
                    w, token = self.gather(half, n, token)
                    held = with_half(held, half, (*held[half], w))
        state = (token, x, held)
        residuals = []
        looped = []
        if self.loops:
            state, looped = jax.lax.scan(self.iterate, state, jnp.arange(self.loops // self.parts.period))
        whole_tail = None
        for n in range(self.loops, self.count):
            last = tail if n == self.count - 1 else None
            state, each = self.layer(state, n, False, last)
            residuals.append(each)
        token, x, held = state
        if tail is not None:
            whole_tail = held[1][-1]
        return (x, whole_tail), (looped, residuals)

    def iterate(self, state: Any, iteration: Array) -> tuple[Any, list[Any]]:
        """Runs one iteration of the loop; returns the state and the residuals of its layers."""
        residuals = []
        for place in range(self.parts.period):
            state, each = self.layer(state, LoopedLayer(iteration, place), True)
            residuals.append(each)
        return state, residuals

    def gather(self, half: int, n: Any, token: Any) -> tuple[Any, Any]:
        name = f"{n if isinstance(n, int) else 'next'}_{NAMES[half]}"
        return self.exchange.gather(self.shards[half].at(n), self.parts.placement(half, n), token, name)

    def layer(self, state: Any, n: Any, steady: bool, tail: Any = None) -> tuple[Any, Any]:
        """Runs one layer; returns the state and the layer's residuals.

        Args:
            steady: in a loop, which always has a layer ahead to gather.
        """
        (token, x, held), distance, residuals = state, self.parts.plan.prefetch_distance, []
        for half in range(2):
            x, token = self.exchange.mark(x, token)
            if distance[half]:
                w, held = take_first(held, half)
            else:
                w, token = self.gather(half, n, token)
            with jax.named_scope(f"layer_{n if isinstance(n, int) else 'looped'}/{NAMES[half]}"):
                y, back, token = self.computed(half, w, x, token)
            if distance[half] and (steady or n + distance[half] < self.count):
                ahead, token = self.gather(half, n + distance[half], token)
                held = with_half(held, half, (*held[half], ahead))
            if tail is not None and half == 1:
                behind, token = self.exchange.gather(tail, self.parts.tail_placements, token, "tail")
                held = with_half(held, 1, (*held[1], behind))
            if not self.parts.rings:
                rows, token = self.exchange.scatter_rows(y.rows, token)
                y = y._replace(rows=rows)
            y, sum_residuals = self.parts.changed(half, w, y)
            residuals.append((x if self.parts.plan.remat else back, sum_residuals) if self.keep else None)
            x = added(x, y)
        return (token, x, held), tuple(residuals)

    def computed(self, half: int, w: Any, x: ResidualStream, token: Any) -> tuple[ResidualStream, Any, Any]:
        """Returns a half's sum, its vjp function (None under remat or where nothing is kept), and the token."""
        run = partial(self.parts.half, half, self.rows)
        if self.parts.plan.remat or not self.keep:
            y, token = run(w, x, token)
            return y, None, token
        (y, token), back = jax.vjp(run, w, x, token)
        return y, back, token


class _Backward:
    """The backward pass."""

    def __init__(self, parts: _Parts, shards: Sublayers | None, rows: Any, residuals: Any):
        self.parts = parts
        self.exchange = parts.exchange
        self.rows = rows
        (looped, self.residuals), self.count, self.loops = residuals, len(parts.stack.layers), parts.loops
        self.looped = _Layers(looped, True)
        self.shards = None if shards is None else parts.layers_of(shards)
        self.gradients: Sublayers = Sublayers([None] * self.count, [None] * self.count)

    @property
    def apart(self) -> bool:
        """True if gradients have a separate chain, in ring form only: beside whole gathers they would contend for links."""
        return self.parts.plan.weights == self.parts.plan.gradients == "ring"

    def run(self, x_cotangent: ResidualStream, tail_cotangent: Any) -> tuple[Sublayers, Any, ResidualStream]:
        """Returns the gradients of each half's shards, of the tail's shards, and of the stream before the first layer."""
        plan = self.parts.plan
        last = self.count - 1
        distance = plan.prefetch_distance
        delay = plan.scatter_delay
        token = tokens.new_token()
        held = Sublayers((), ())
        pending = Sublayers((), ())
        x_cotangent, token = self.exchange.mark(x_cotangent, token)
        for n in range(max(distance) if self.parts.plan.remat else 0):
            for half in (1, 0):
                if n < distance[half] - (half == 0):  # attention's last weights travel beside the MLP half that runs first
                    w, token = self.gather(half, last - n, token)
                    held = with_half(held, half, (*held[half], w))
        sent = Sublayers(token, token) if self.apart else Sublayers((), ())
        state = (token, sent, x_cotangent, held, pending)
        tail_gradient = None
        for n in range(last, self.loops - 1, -1):
            state, found, of_tail = self.layer(state, n, self.residuals[n - self.loops], tail_cotangent if n == last else None)
            self.record(n, found)
            tail_gradient = of_tail if n == last else tail_gradient
        if self.loops:
            state = self.loop(state)
            for n in range(self.parts.least - 1, -1, -1):
                state, found, _ = self.layer(state, n, self.looped.at(n))
                self.record(n, found)
        token, sent, x_cotangent, held, pending = state
        token = tokens.joined(token, *sent)
        for half in (1, 0):
            for n, cotangent in zip(range(delay[half] - 1, -1, -1), pending[half], strict=True):
                self.gradients[half][n], token = self.scatter(half, n, cotangent, token)
        return self.all_summed(), tail_gradient, x_cotangent

    def loop(self, state: Any) -> Any:
        """Runs layers in a loop, from the last layer of the forward pass's loop down to layer `least`."""
        period = self.parts.period

        def iterate(state: Any, iteration: Array) -> tuple[Any, list[Any]]:
            found = []
            for place in reversed(range(period)):
                n = LoopedLayer(iteration, place)
                state, each, _ = self.layer(state, n, self.looped.at(n))
                found.insert(0, each)
            return state, found

        order = range(self.loops // period - 1, self.parts.least // period - 1, -1)
        state, found = jax.lax.scan(iterate, state, jnp.asarray(list(order)))
        for step, n in enumerate(order):
            for place, each in enumerate(found):
                self.record(n * period + place, row(each, step))
        return state

    def record(self, n: int, found: tuple[Any, Any]) -> None:
        """Stores the gradients that were scattered during layer `n`."""
        for half, gradient in enumerate(found):
            if gradient is not None:
                self.gradients[half][n + self.parts.plan.scatter_delay[half]] = gradient

    def all_summed(self) -> Sublayers:
        """All-reduces the gradients that `scatter` left partial, with one collective per array over all layers."""

        def of_half(half: int) -> list[Any]:
            each = self.gradients[half]
            same = dict[Any, list[tuple[int, int]]]()
            leaves = [jax.tree.leaves(one) for one in each]
            for n, gradient in enumerate(each):
                paths = jax.tree.leaves_with_path(gradient)
                placements = jax.tree.leaves(self.parts.placement(half, n))
                for place, ((path, x), placement) in enumerate(zip(paths, placements, strict=True)):
                    if placement.dim is None:
                        same.setdefault((path, x.shape, placement), []).append((n, place))
            for (_, _, placement), found in same.items():
                together = self.exchange.summed(jnp.stack([leaves[n][place] for n, place in found]), placement)
                for at, (n, place) in enumerate(found):
                    leaves[n][place] = together[at]
            return [jax.tree.unflatten(jax.tree.structure(one), new) for one, new in zip(each, leaves, strict=True)]

        return Sublayers(of_half(0), of_half(1))

    def gather(self, half: int, n: Any, token: Any) -> tuple[Any, Any]:
        assert self.shards is not None
        name = f"{n if isinstance(n, int) else 'next'}_{NAMES[half]}_again"
        return self.exchange.gather(self.shards[half].at(n), self.parts.placement(half, n), token, name)

    def scatter(self, half: int, n: Any, cotangent: Any, token: Any) -> tuple[Any, Any]:
        name = f"{n if isinstance(n, int) else 'last'}_{NAMES[half]}"
        return self.exchange.scatter(cotangent, self.parts.placement(half, n), token, name)

    def layer(self, state: Any, n: Any, residuals: Any, tail_cotangent: Any = None) -> tuple[Any, tuple[Any, Any], Any]:
        """Runs one layer; returns the state, the gradients scattered during each half, and the tail's gradient."""
        (token, sent, x_cotangent, held, pending), plan, found = state, self.parts.plan, [None, None]
        tail_gradient = w = None
        for half in (1, 0):
            x_cotangent, token = self.exchange.mark(x_cotangent, token)
            waiting, (before, sum_residuals) = pending[half], residuals[half]
            if plan.remat and plan.prefetch_distance[half]:
                w, held = take_first(held, half)
            elif plan.remat:
                w, token = self.gather(half, n, token)
            with jax.named_scope(f"back_{n if isinstance(n, int) else 'looped'}/{NAMES[half]}"):
                cotangent, w_more, token = self.before_sum(half, w, sum_residuals, x_cotangent, token)
                back, token = self.again(half, w, before, token) if plan.remat else (before, token)
            out = token = tokens.joined(token, sent[half])
            for other in (0, 1) if half == 1 and plan.remat else ():
                earlier = n + (int(other == 0) - plan.prefetch_distance[other])
                if plan.prefetch_distance[other] and (not isinstance(n, int) or earlier >= 0):
                    ahead, token = self.gather(other, earlier, token)
                    held = with_half(held, other, (*held[other], ahead))
            if not self.apart:
                out = token
            if tail_cotangent is not None and half == 1:
                tail_gradient, out = self.exchange.scatter(tail_cotangent, self.parts.tail_placements, out, "tail")
            if plan.scatter_delay[half] and len(waiting) == plan.scatter_delay[half]:
                found[half], out = self.scatter(half, n + plan.scatter_delay[half], waiting[0], out)
                waiting = waiting[1:]
            if self.apart:
                sent = with_half(sent, half, out)
            else:
                token = out
            with jax.named_scope(f"back_{n if isinstance(n, int) else 'looped'}/{NAMES[half]}"):
                w_grad, more, token = back((cotangent, token))
                w_grad = w_grad if w_more is None else added(w_grad, w_more)
            x_cotangent = added(x_cotangent, more)
            if plan.scatter_delay[half]:
                waiting = (*waiting, w_grad)
            else:
                found[half], token = self.scatter(half, n, w_grad, token)
            pending = with_half(pending, half, waiting)
        return (token, sent, x_cotangent, held, pending), (found[0], found[1]), tail_gradient

    def before_sum(
        self, half: int, w: Any, sum_residuals: Any, cotangent: ResidualStream, token: Any
    ) -> tuple[ResidualStream, Any, Any]:
        """Returns the cotangent of `_Parts.half`, the gradient of weights used after its sum (or None), and the token."""
        w_more = None
        if sum_residuals is not None:
            remat = self.parts.plan.remat
            back = jax.vjp(partial(self.parts.post_reduce, half), w, sum_residuals)[1] if remat else sum_residuals
            w_more, rows = back(cotangent.rows)
            cotangent = cotangent._replace(rows=rows)
        if not self.parts.rings:
            rows, token = self.exchange.gather_rows(cotangent.rows, token)
            cotangent = cotangent._replace(rows=rows)
        return cotangent, w_more, token

    def again(self, half: int, w: Any, x: ResidualStream, token: Any) -> tuple[Any, Any]:
        """Recomputes a half for its gradient."""
        if self.parts.rings or not self.parts.plan.threaded:  # otherwise the half waits for the rows that it gathers
            x, token = self.exchange.mark(x, token)
        (_, token), back = jax.vjp(partial(self.parts.half, half, self.rows), w, x, token)
        return back, token


def added(one: Any, other: Any) -> Any:
    return jax.tree.map(jnp.add, one, other)


def row(stacked: Any, n: Any) -> Any:
    """Returns entry `n` along the first dim of each array."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, n, keepdims=False), stacked)


def take_first(held: Sublayers, half: int) -> tuple[Any, Sublayers]:
    """Takes the next weights of a half; returns them and the remaining weights."""
    return held[half][0], with_half(held, half, held[half][1:])


def with_half(sublayers: Sublayers, sublayer: int, value: Any) -> Sublayers:
    return Sublayers(value, sublayers.mlp) if sublayer == 0 else Sublayers(sublayers.attention, value)
