"""Layers whose weights are divided over one axis of a mesh and gathered for their turn, with every collective in its place.

Fully sharded training (Rajbhandari et al., "ZeRO", 2020, stage 3) beside tensor parallelism and a stream divided along its rows
(`schedules.Sequence`). A layer is two halves, attention and MLP. Each gathers its weights over the data axis some layers before
its turn, and hands out its weights' gradient some layers after it, both while other halves compute, in one chain of tokens
(`tokens.py`) that runs through the forward pass and one through the backward pass:

    gather rows | gather weights of a layer ahead, scatter the gradient of a layer behind; meanwhile: products | scatter rows

Forwards, a half's weights travel beside the same half of a layer before. Backwards all travel beside MLP halves, which have
three times the products that they have forwards, attention's beside the one before its turn. Where both go in rings, gradients
have a chain of their own, so that their hops go beside those of weights: each hop needs a product to be hidden, and there are
few. A layer later the other chain waits for them, so that they don't stay in memory.

Forward and backward pass are both written out, for autodiff would leave the place of its collectives to the compiler. After
"Weight Prefetch" in the AWS Neuron SDK's "Overlapping compute and communication". `exchanges.py` has the collectives.

Legend: R rows that a group of the data axis has, M those of them that a device has, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from tilewright.kernels.operations import Operations
from tilewright.parallel import rings, tokens
from tilewright.parallel.exchanges import NAMES, Exchange, FullyShardedPlan, Halves
from tilewright.parallel.schedules import CollectiveMatmul, Sequence


@dataclass(frozen=True)
class _Chained(Sequence):
    """Whose rows are gathered in a chain, and whose partial sums are left as they are."""

    exchange: Any = None
    chain: list[Any] = field(default_factory=list, hash=False)

    def gather(self, x: Array, w: Any, product: rings.Product) -> Any:
        rows, self.chain[0] = self.exchange.gather_rows(x, self.chain[0])
        return product(rows, w)

    def scatter(self, x: Array, w: Any, product: Callable[..., Any], dtype: Any) -> Array:
        return product(x, w, dtype)


class ResidualStream(NamedTuple):
    """The residual stream on its way through the layers.

    Attributes:
        rows: this device's, `[M, H]`.
        sums: of what layers note besides (see `Watch`), this device's summands; an empty tuple where they note nothing.
    """

    rows: Any
    sums: Any = ()


Watch = Callable[[Operations, Callable[[Any], None]], Operations]
"""`watch(ops, note)`: operations that hand `note` a tree like `ResidualStream.sums` whenever a half has something to add."""


def check_layers(plan: FullyShardedPlan, layers: tuple[Any, ...], watch: Watch | None) -> None:
    """Raises a `ValueError` for layers that a plan cannot run (`FullyShardedPlan.check`), or that are not all of one kind."""
    plan.check(len(layers), watch is not None)
    if len({jax.tree.structure(layer) for layer in layers}) > 1:
        raise ValueError("expected layers that are all of one kind, found several (rotations, say): train without a mesh")


def run_layers(
    exchange: Exchange, stack: Any, split: Callable[[Any], tuple[Any, Any]], join: Callable[[Any, Any], Any], placements: Any,
    x: Float[Array, "M H"], rows: Any, shape: tuple[int, ...], tail: Any = None, tail_placements: Any = None, sums: Any = (),
    watch: Watch | None = None,
) -> tuple[ResidualStream, Any]:  # fmt: skip
    """All layers of a stack, within `jax.shard_map`; differentiable by their shards, by `x` and by the tail's shards.

    Args:
        exchange: the plan and its axes.
        stack: whose layers are shards (see `models.stack.Stack`).
        split, join: a layer to its halves, of each of which the other's arrays are missing, and back.
        placements: a layer's `ArrayPlacement`s.
        x: this device's rows of the stream.
        rows: what the parts need to know of each row; not differentiated.
        shape: of the stream of all rows, `[B, T, H]`.
        tail: shards of what is read behind the layers, such as the head; gathered during the last layer.
        tail_placements: the tail's `ArrayPlacement`s.
        sums, watch: see `ResidualStream` and `Watch`.

    Returns:
        the stream after the last layer, and the whole tail.

    Raises:
        ValueError: see `check_layers`.
    """
    check_layers(exchange.plan, stack.layers, watch)
    parts = _Parts(exchange, stack, shape, Halves(*split(placements)), tail_placements, watch)

    @jax.custom_vjp
    def run(layers: Any, tail: Any, x: ResidualStream, rows: Any) -> tuple[ResidualStream, Any]:
        return _Forward(parts, Halves(*_columns(map(split, layers))), rows, keep=False).run(x, tail)[0]

    def forward(layers: Any, tail: Any, x: ResidualStream, rows: Any) -> tuple[tuple[ResidualStream, Any], Any]:
        shards = Halves(*_columns(map(split, layers)))
        made, kept = _Forward(parts, shards, rows, keep=True).run(x, tail)
        return made, (shards if exchange.plan.remat else None, kept, rows)

    def backward(saved: Any, cotangent: tuple[ResidualStream, Any]) -> tuple[Any, Any, ResidualStream, None]:
        shards, kept, rows = saved
        gradients, tail_cotangent, x_cotangent = _Backward(parts, shards, rows, kept).run(*cotangent)
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
    placements: Halves
    tail_placements: Any
    watch: Watch | None = None

    @property
    def plan(self) -> FullyShardedPlan:
        return self.exchange.plan

    @property
    def rings(self) -> bool:
        return self.plan.activations == "ring"

    @property
    def peeled(self) -> int:
        """Layers at the end that stand outside a loop: all of them where too few are left to loop over."""
        layers, distance = len(self.stack.layers), max(self.plan.prefetch_distance)
        peeled = max(distance, *self.plan.scatter_delay, 0 if self.tail_placements is None else 1)
        return peeled if self.plan.scan and layers - peeled - distance > 1 else layers

    def half(self, which: int, rows: Any, w: Any, x: ResidualStream, token: Any) -> tuple[ResidualStream, Any]:
        """A half's partial sum over all rows, in rings its whole sum over own rows; the token is that of its first gather."""
        stack, axis, noted = self.stack, self.exchange.axis, []
        chain = [token]
        schedule = CollectiveMatmul(axis) if self.rings else _Chained(axis, self.exchange, chain)
        ops = schedule.sharded_ops(stack.ops, self.shape)
        ops = ops if self.watch is None else self.watch(ops, noted.append)
        if which == 0:
            out, _ = stack.attend(stack.ops, w, stack.project(ops, w, x.rows[None]), rows, None)
            y = stack.output(ops, w, out)[0]
        else:
            y = stack.mlp(ops, w, x.rows[None])[0]
        return ResidualStream(y, reduce(added, noted, jax.tree.map(jnp.zeros_like, x.sums))), chain[0]


class _Forward:
    """The forward pass."""

    def __init__(self, parts: _Parts, shards: Halves, rows: Any, keep: bool):
        self.parts, self.exchange, self.rows, self.keep = parts, parts.exchange, rows, keep
        self.count = len(shards.attention)
        self.loops = self.count - parts.peeled
        self.shards = Halves(*map(stacked, shards)) if self.loops else shards

    def run(self, x: ResidualStream, tail: Any) -> tuple[tuple[ResidualStream, Any], Any]:
        """The stream and the tail after the last layer; what is kept of each layer, those in a loop first."""
        distance, token, held = self.parts.plan.prefetch_distance, tokens.new_token(), Halves((), ())
        for n in range(max(distance)):
            for half in range(2):
                if n < distance[half]:
                    w, token = self.gather(half, n, token)
                    held = with_half(held, half, (*held[half], w))
        state, kept, looped = (token, x, held), [], None
        if self.loops:
            state, looped = jax.lax.scan(lambda state, n: self.layer(state, n, True), state, jnp.arange(self.loops))
        whole_tail = None
        for n in range(self.loops, self.count):
            last = tail if n == self.count - 1 else None
            state, each = self.layer(state, n, False, last)
            kept.append(each)
        token, x, held = state
        if tail is not None:
            whole_tail = held[1][-1]
        return (x, whole_tail), (looped, kept)

    def gather(self, half: int, n: Any, token: Any) -> tuple[Any, Any]:
        name = f"{n if isinstance(n, int) else 'next'}_{NAMES[half]}"
        return self.exchange.gather(at(self.shards[half], n), self.parts.placements[half], token, name)

    def layer(self, state: Any, n: Any, steady: bool, tail: Any = None) -> tuple[Any, Any]:
        """One layer. In the steady state of a loop there is always a layer ahead; what is kept is its second result."""
        (token, x, held), distance, kept = state, self.parts.plan.prefetch_distance, []
        for half in range(2):
            x, token = self.exchange.mark(x, token)
            if distance[half]:
                w, held = take_first(held, half)
            else:
                w, token = self.gather(half, n, token)
            with jax.named_scope(f"layer_{n if isinstance(n, int) else 'looped'}/{NAMES[half]}"):
                y, back, token = self.computed(half, w, x, token)
            if distance[half] and (steady or n + distance[half] < self.count):
                w, token = self.gather(half, n + distance[half], token)
                held = with_half(held, half, (*held[half], w))
            if tail is not None and half == 1:
                w, token = self.exchange.gather(tail, self.parts.tail_placements, token, "tail")
                held = with_half(held, 1, (*held[1], w))
            if not self.parts.rings:
                own, token = self.exchange.scatter_rows(y.rows, token)
                y = y._replace(rows=own)
            kept.append((x if self.parts.plan.remat else back) if self.keep else None)
            x = added(x, y)
        return (token, x, held), tuple(kept)

    def computed(self, half: int, w: Any, x: ResidualStream, token: Any) -> tuple[ResidualStream, Any, Any]:
        """A half's sum, its gradient if that is to be kept, and the token."""
        run = partial(self.parts.half, half, self.rows)
        if self.parts.plan.remat or not self.keep:
            y, token = run(w, x, token)
            return y, None, token
        (y, token), back = jax.vjp(run, w, x, token)
        return y, back, token


class _Backward:
    """The backward pass."""

    def __init__(self, parts: _Parts, shards: Halves | None, rows: Any, kept: Any):
        self.parts, self.exchange, self.rows = parts, parts.exchange, rows
        (self.looped, self.kept), self.count = kept, len(parts.stack.layers)
        self.loops = self.count - parts.peeled
        self.shards = Halves(*map(stacked, shards)) if self.loops and shards is not None else shards
        self.gradients: Halves = Halves([None] * self.count, [None] * self.count)

    @property
    def apart(self) -> bool:
        """Whether gradients have a chain of their own. Beside whole gathers they would take the links from them."""
        return self.parts.plan.weights == self.parts.plan.gradients == "ring"

    def run(self, x_cotangent: ResidualStream, tail_cotangent: Any) -> tuple[Halves, Any, ResidualStream]:
        """Gradients of each half's shards, of the tail's, and of the stream before the first layer."""
        plan, last = self.parts.plan, self.count - 1
        distance, delay = plan.prefetch_distance, plan.scatter_delay
        token, held, pending = tokens.new_token(), Halves((), ()), Halves((), ())
        x_cotangent, token = self.exchange.mark(x_cotangent, token)
        for n in range(max(distance) if self.parts.plan.remat else 0):
            for half in (1, 0):
                if n < distance[half] - (half == 0):  # attention's last weights travel beside the MLP half before
                    w, token = self.gather(half, last - n, token)
                    held = with_half(held, half, (*held[half], w))
        sent = Halves(token, token) if self.apart else Halves((), ())
        state, tail_gradient = (token, sent, x_cotangent, held, pending), None
        for n in range(last, self.loops - 1, -1):
            state, found, of_tail = self.layer(state, n, self.kept[n - self.loops], tail_cotangent if n == last else None)
            self.note(n, found)
            tail_gradient = of_tail if n == last else tail_gradient
        if self.loops:
            state = self.loop(state, max(distance))
            for n in range(max(distance) - 1, -1, -1):
                state, found, _ = self.layer(state, n, at(self.looped, n))
                self.note(n, found)
        token, sent, x_cotangent, held, pending = state
        token = tokens.joined(token, *sent)
        for half in (1, 0):
            for n, cotangent in zip(range(delay[half] - 1, -1, -1), pending[half], strict=True):
                self.gradients[half][n], token = self.scatter(half, n, cotangent, token)
        return self.all_summed(), tail_gradient, x_cotangent

    def loop(self, state: Any, least: int) -> Any:
        """Layers from the last in the forward pass's loop down to `least`, before which there are none to gather."""

        def layer(state: Any, n: Array) -> tuple[Any, Any]:
            state, found, _ = self.layer(state, n, at(self.looped, n))
            return state, found

        order = range(self.loops - 1, least - 1, -1)
        state, found = jax.lax.scan(layer, state, jnp.asarray(list(order)))
        for step, n in enumerate(order):
            self.note(n, at(found, step))
        return state

    def note(self, n: int, found: tuple[Any, Any]) -> None:
        """Keeps what was scattered during a layer."""
        for half, gradient in enumerate(found):
            if gradient is not None:
                self.gradients[half][n + self.parts.plan.scatter_delay[half]] = gradient

    def all_summed(self) -> Halves:
        """Sums of what all layers left as summands, the same array of all layers in one."""

        def of(half: int) -> list[Any]:
            each = self.gradients[half]
            leaves = [jax.tree.leaves(one) for one in each]
            for place, placement in enumerate(jax.tree.leaves(self.parts.placements[half])):
                if placement.dim is None:
                    together = self.exchange.summed(jnp.stack([one[place] for one in leaves]), placement)
                    for n, one in enumerate(leaves):
                        one[place] = together[n]
            return [jax.tree.unflatten(jax.tree.structure(each[0]), one) for one in leaves]

        return Halves(of(0), of(1))

    def gather(self, half: int, n: Any, token: Any) -> tuple[Any, Any]:
        assert self.shards is not None
        name = f"{n if isinstance(n, int) else 'next'}_{NAMES[half]}_again"
        return self.exchange.gather(at(self.shards[half], n), self.parts.placements[half], token, name)

    def scatter(self, half: int, n: Any, cotangent: Any, token: Any) -> tuple[Any, Any]:
        name = f"{n if isinstance(n, int) else 'last'}_{NAMES[half]}"
        return self.exchange.scatter(cotangent, self.parts.placements[half], token, name)

    def layer(self, state: Any, n: Any, kept: Any, tail_cotangent: Any = None) -> tuple[Any, tuple[Any, Any], Any]:
        """One layer: the state, for each half the gradient that was scattered meanwhile, and the tail's."""
        (token, sent, x_cotangent, held, pending), plan, found = state, self.parts.plan, [None, None]
        tail_gradient = w = None
        for half in (1, 0):
            x_cotangent, token = self.exchange.mark(x_cotangent, token)
            waiting, cotangent = pending[half], x_cotangent
            if plan.remat and plan.prefetch_distance[half]:
                w, held = take_first(held, half)
            elif plan.remat:
                w, token = self.gather(half, n, token)
            with jax.named_scope(f"back_{n if isinstance(n, int) else 'looped'}/{NAMES[half]}"):
                if not self.parts.rings:
                    whole, token = self.exchange.gather_rows(x_cotangent.rows, token)
                    cotangent = x_cotangent._replace(rows=whole)
                back, token = self.again(half, w, kept[half], token) if plan.remat else (kept[half], token)
            out = token = tokens.joined(token, sent[half])
            for other in (0, 1) if half == 1 and plan.remat else ():
                of = n - plan.prefetch_distance[other] + int(other == 0)
                if plan.prefetch_distance[other] and (not isinstance(n, int) or of >= 0):
                    w, token = self.gather(other, of, token)
                    held = with_half(held, other, (*held[other], w))
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
            x_cotangent = added(x_cotangent, more)
            if plan.scatter_delay[half]:
                waiting = (*waiting, w_grad)
            else:
                found[half], token = self.scatter(half, n, w_grad, token)
            pending = with_half(pending, half, waiting)
        return (token, sent, x_cotangent, held, pending), (found[0], found[1]), tail_gradient

    def again(self, half: int, w: Any, x: ResidualStream, token: Any) -> tuple[Any, Any]:
        """Computes a half once more, for its gradient."""
        if self.parts.rings or not self.parts.plan.threaded:  # else it waits for the rows that it gathers
            x, token = self.exchange.mark(x, token)
        (_, token), back = jax.vjp(partial(self.parts.half, half, self.rows), w, x, token)
        return back, token


def added(one: Any, other: Any) -> Any:
    return jax.tree.map(jnp.add, one, other)


def stacked(layers: list[Any]) -> Any:
    """Trees of arrays as one, their layers the first dim."""
    return jax.tree.map(lambda *of: jnp.stack(of), *layers)


def at(layers: Any, n: Any) -> Any:
    """One layer of a list, or of a stack."""
    if isinstance(layers, list):
        return layers[n]
    return jax.tree.map(lambda of: jax.lax.dynamic_index_in_dim(of, n, keepdims=False), layers)


def take_first(held: Halves, half: int) -> tuple[Any, Halves]:
    """The weights whose turn it is, and what is held after that."""
    return held[half][0], with_half(held, half, held[half][1:])


def with_half(halves: Halves, which: int, value: Any) -> Halves:
    return Halves(value, halves.mlp) if which == 0 else Halves(halves.attention, value)
