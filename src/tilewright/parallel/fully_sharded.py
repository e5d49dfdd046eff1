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


@dataclass(frozen=True)
class LoopedLayer:
    """Index of a layer in a loop, whose body is a period of layers (see `period_of`).

    Attributes:
        turn: of the loop.
        place: in the period of that turn; one outside of it is in that of another turn.
    """

    turn: Any
    place: int

    def __add__(self, layers: int) -> "LoopedLayer":
        return replace(self, place=self.place + layers)


Index = int | LoopedLayer
"""Which of all layers."""


def period_of(layers: tuple[Any, ...]) -> int:
    """The least number of layers after which the same kinds of layers come again; all of them where they don't.

    Layers are of one kind if their trees are equal, with whatever else than arrays these hold, and their arrays' shapes.
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
    """All layers of a stack, within `jax.shard_map`; differentiable by their shards, by `x` and by the tail's shards.

    Args:
        exchange: the plan and its axes.
        stack: whose layers are shards (see `models.stack.Stack`).
        split, join: a layer to its halves, of each of which the other's arrays are missing, and back.
        placements: each layer's `ArrayPlacement`s.
        x: this device's rows of the stream.
        rows: what the parts need to know of each row; not differentiated.
        shape: of the stream of all rows, `[B, T, H]`.
        tail: shards of what is read behind the layers, such as the head; gathered during the last layer.
        tail_placements: the tail's `ArrayPlacement`s.
        sums, watch: see `ResidualStream` and `Watch`.

    Returns:
        the stream after the last layer, and the whole tail.

    Raises:
        ValueError: layers that the plan cannot run; see `FullyShardedPlan.check`.
    """
    exchange.plan.check(len(stack.layers), watch is not None)
    parts = _Parts(exchange, stack, shape, Halves(*_columns(map(split, placements))), tail_placements, watch)

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

    @cached_property
    def period(self) -> int:
        """Layers of which a loop runs one after another in each turn."""
        return period_of(self.stack.layers)

    @property
    def loops(self) -> int:
        """Layers from the first on that are in the forward pass's loop: none where the backward pass's would have one turn."""
        layers = len(self.stack.layers)
        distance = max(self.plan.prefetch_distance)
        peeled = max(distance, *self.plan.scatter_delay, 0 if self.tail_placements is None else 1)
        loops = (layers - peeled) // self.period * self.period
        return loops if self.plan.scan and loops - self.least > self.period else 0

    @property
    def least(self) -> int:
        """The first layer in the backward pass's loop: before it there are others to gather."""
        return -(-max(self.plan.prefetch_distance) // self.period) * self.period

    def placement(self, half: int, n: Index) -> Any:
        """Placements of the arrays of a layer's half."""
        return self.placements[half][n if isinstance(n, int) else n.place % self.period]

    def layers_of(self, shards: Halves) -> Halves:
        """The shards of both halves, stacked where layers are in a loop."""
        period = self.period
        looped = self.loops > 0

        def of(layers: list[Any]) -> "_Layers":
            each = [jax.tree.map(lambda *of: jnp.stack(of), *layers[place::period]) for place in range(period if looped else 0)]
            return _Layers(each or layers, looped)

        return Halves(*map(of, shards))

    def half(self, which: int, rows: Any, w: Any, x: ResidualStream, token: Any) -> tuple[ResidualStream, Any]:
        """A half's partial sum over all rows, in rings its whole sum over own rows; the token is that of its first gather."""
        stack = self.stack
        axis = self.exchange.axis
        noted = []
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

    def summed(self, which: int, w: Any, y: Float[Array, "M H"]) -> Float[Array, "M H"]:
        """A half's whole sum as it is added to the stream: normed, say."""
        return self.stack.summed(self.stack.ops, w, NAMES[which], y)

    def changed(self, which: int, w: Any, y: ResidualStream) -> tuple[ResidualStream, Any]:
        """`summed` of a stream, and what its gradient needs: the sum, or the gradient itself. None where nothing changes it."""
        run = partial(self.summed, which)
        if not jax.make_jaxpr(partial(run, w))(y.rows).eqns:
            return y, None
        made, back = (run(w, y.rows), y.rows) if self.plan.remat else jax.vjp(run, w, y.rows)
        return y._replace(rows=made), back


@dataclass(frozen=True)
class _Layers:
    """A tree of each layer; or, where they are stacked, of each place in a period, with those of all turns."""

    trees: list[Any]
    stacked: bool

    def at(self, n: Index) -> Any:
        if not self.stacked:
            assert isinstance(n, int), "nothing is looped over"
            return self.trees[n]
        turn, place = (0, n) if isinstance(n, int) else (n.turn, n.place)
        return row(self.trees[place % len(self.trees)], turn + place // len(self.trees))


class _Forward:
    """The forward pass."""

    def __init__(self, parts: _Parts, shards: Halves, rows: Any, keep: bool):
        self.parts = parts
        self.exchange = parts.exchange
        self.rows = rows
        self.keep = keep
        self.count = len(shards.attention)
        self.loops = parts.loops
        self.shards = parts.layers_of(shards)

    def run(self, x: ResidualStream, tail: Any) -> tuple[tuple[ResidualStream, Any], Any]:
        """The stream and the tail after the last layer; what is kept of each layer, those in a loop first."""
        distance = self.parts.plan.prefetch_distance
        token = tokens.new_token()
        held = Halves((), ())
        for n in range(max(distance)):
            for half in range(2):
                if n < distance[half]:
                    w, token = self.gather(half, n, token)
                    held = with_half(held, half, (*held[half], w))
        state = (token, x, held)
        kept = []
        looped = []
        if self.loops:
            state, looped = jax.lax.scan(self.turn, state, jnp.arange(self.loops // self.parts.period))
        whole_tail = None
        for n in range(self.loops, self.count):
            last = tail if n == self.count - 1 else None
            state, each = self.layer(state, n, False, last)
            kept.append(each)
        token, x, held = state
        if tail is not None:
            whole_tail = held[1][-1]
        return (x, whole_tail), (looped, kept)

    def turn(self, state: Any, turn: Array) -> tuple[Any, list[Any]]:
        """One turn of the loop, and what is kept of its layers."""
        kept = []
        for place in range(self.parts.period):
            state, each = self.layer(state, LoopedLayer(turn, place), True)
            kept.append(each)
        return state, kept

    def gather(self, half: int, n: Any, token: Any) -> tuple[Any, Any]:
        name = f"{n if isinstance(n, int) else 'next'}_{NAMES[half]}"
        return self.exchange.gather(self.shards[half].at(n), self.parts.placement(half, n), token, name)

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
                ahead, token = self.gather(half, n + distance[half], token)
                held = with_half(held, half, (*held[half], ahead))
            if tail is not None and half == 1:
                behind, token = self.exchange.gather(tail, self.parts.tail_placements, token, "tail")
                held = with_half(held, 1, (*held[1], behind))
            if not self.parts.rings:
                own, token = self.exchange.scatter_rows(y.rows, token)
                y = y._replace(rows=own)
            y, of_sum = self.parts.changed(half, w, y)
            kept.append((x if self.parts.plan.remat else back, of_sum) if self.keep else None)
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
        self.parts = parts
        self.exchange = parts.exchange
        self.rows = rows
        (looped, self.kept), self.count, self.loops = kept, len(parts.stack.layers), parts.loops
        self.looped = _Layers(looped, True)
        self.shards = None if shards is None else parts.layers_of(shards)
        self.gradients: Halves = Halves([None] * self.count, [None] * self.count)

    @property
    def apart(self) -> bool:
        """Whether gradients have a chain of their own. Beside whole gathers they would take the links from them."""
        return self.parts.plan.weights == self.parts.plan.gradients == "ring"

    def run(self, x_cotangent: ResidualStream, tail_cotangent: Any) -> tuple[Halves, Any, ResidualStream]:
        """Gradients of each half's shards, of the tail's, and of the stream before the first layer."""
        plan = self.parts.plan
        last = self.count - 1
        distance = plan.prefetch_distance
        delay = plan.scatter_delay
        token = tokens.new_token()
        held = Halves((), ())
        pending = Halves((), ())
        x_cotangent, token = self.exchange.mark(x_cotangent, token)
        for n in range(max(distance) if self.parts.plan.remat else 0):
            for half in (1, 0):
                if n < distance[half] - (half == 0):  # attention's last weights travel beside the MLP half before
                    w, token = self.gather(half, last - n, token)
                    held = with_half(held, half, (*held[half], w))
        sent = Halves(token, token) if self.apart else Halves((), ())
        state = (token, sent, x_cotangent, held, pending)
        tail_gradient = None
        for n in range(last, self.loops - 1, -1):
            state, found, of_tail = self.layer(state, n, self.kept[n - self.loops], tail_cotangent if n == last else None)
            self.note(n, found)
            tail_gradient = of_tail if n == last else tail_gradient
        if self.loops:
            state = self.loop(state)
            for n in range(self.parts.least - 1, -1, -1):
                state, found, _ = self.layer(state, n, self.looped.at(n))
                self.note(n, found)
        token, sent, x_cotangent, held, pending = state
        token = tokens.joined(token, *sent)
        for half in (1, 0):
            for n, cotangent in zip(range(delay[half] - 1, -1, -1), pending[half], strict=True):
                self.gradients[half][n], token = self.scatter(half, n, cotangent, token)
        return self.all_summed(), tail_gradient, x_cotangent

    def loop(self, state: Any) -> Any:
        """Layers from the last in the forward pass's loop down to the first that has all others to gather before it."""
        period = self.parts.period

        def turn(state: Any, turn: Array) -> tuple[Any, list[Any]]:
            found = []
            for place in reversed(range(period)):
                n = LoopedLayer(turn, place)
                state, each, _ = self.layer(state, n, self.looped.at(n))
                found.insert(0, each)
            return state, found

        order = range(self.loops // period - 1, self.parts.least // period - 1, -1)
        state, found = jax.lax.scan(turn, state, jnp.asarray(list(order)))
        for step, n in enumerate(order):
            for place, each in enumerate(found):
                self.note(n * period + place, row(each, step))
        return state

    def note(self, n: int, found: tuple[Any, Any]) -> None:
        """Keeps what was scattered during a layer."""
        for half, gradient in enumerate(found):
            if gradient is not None:
                self.gradients[half][n + self.parts.plan.scatter_delay[half]] = gradient

    def all_summed(self) -> Halves:
        """Sums of what all layers left as summands, the same array of all layers that have it in one."""

        def of(half: int) -> list[Any]:
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
            return [jax.tree.unflatten(jax.tree.structure(one), of) for one, of in zip(each, leaves, strict=True)]

        return Halves(of(0), of(1))

    def gather(self, half: int, n: Any, token: Any) -> tuple[Any, Any]:
        assert self.shards is not None
        name = f"{n if isinstance(n, int) else 'next'}_{NAMES[half]}_again"
        return self.exchange.gather(self.shards[half].at(n), self.parts.placement(half, n), token, name)

    def scatter(self, half: int, n: Any, cotangent: Any, token: Any) -> tuple[Any, Any]:
        name = f"{n if isinstance(n, int) else 'last'}_{NAMES[half]}"
        return self.exchange.scatter(cotangent, self.parts.placement(half, n), token, name)

    def layer(self, state: Any, n: Any, kept: Any, tail_cotangent: Any = None) -> tuple[Any, tuple[Any, Any], Any]:
        """One layer: the state, for each half the gradient that was scattered meanwhile, and the tail's."""
        (token, sent, x_cotangent, held, pending), plan, found = state, self.parts.plan, [None, None]
        tail_gradient = w = None
        for half in (1, 0):
            x_cotangent, token = self.exchange.mark(x_cotangent, token)
            waiting, (before, of_sum) = pending[half], kept[half]
            if plan.remat and plan.prefetch_distance[half]:
                w, held = take_first(held, half)
            elif plan.remat:
                w, token = self.gather(half, n, token)
            with jax.named_scope(f"back_{n if isinstance(n, int) else 'looped'}/{NAMES[half]}"):
                cotangent, w_more, token = self.before_sum(half, w, of_sum, x_cotangent, token)
                back, token = self.again(half, w, before, token) if plan.remat else (before, token)
            out = token = tokens.joined(token, sent[half])
            for other in (0, 1) if half == 1 and plan.remat else ():
                of = n + (int(other == 0) - plan.prefetch_distance[other])
                if plan.prefetch_distance[other] and (not isinstance(n, int) or of >= 0):
                    ahead, token = self.gather(other, of, token)
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
        self, half: int, w: Any, of_sum: Any, cotangent: ResidualStream, token: Any
    ) -> tuple[ResidualStream, Any, Any]:
        """Cotangent of what `_Parts.half` gave; the gradient of weights behind its sum, if there are any; and the token."""
        w_more = None
        if of_sum is not None:
            back = jax.vjp(partial(self.parts.summed, half), w, of_sum)[1] if self.parts.plan.remat else of_sum
            w_more, rows = back(cotangent.rows)
            cotangent = cotangent._replace(rows=rows)
        if not self.parts.rings:
            rows, token = self.exchange.gather_rows(cotangent.rows, token)
            cotangent = cotangent._replace(rows=rows)
        return cotangent, w_more, token

    def again(self, half: int, w: Any, x: ResidualStream, token: Any) -> tuple[Any, Any]:
        """Computes a half once more, for its gradient."""
        if self.parts.rings or not self.parts.plan.threaded:  # else it waits for the rows that it gathers
            x, token = self.exchange.mark(x, token)
        (_, token), back = jax.vjp(partial(self.parts.half, half, self.rows), w, x, token)
        return back, token


def added(one: Any, other: Any) -> Any:
    return jax.tree.map(jnp.add, one, other)


def row(stacked: Any, n: Any) -> Any:
    """One of what is stacked along the first dim of each array."""
    return jax.tree.map(lambda of: jax.lax.dynamic_index_in_dim(of, n, keepdims=False), stacked)


def take_first(held: Halves, half: int) -> tuple[Any, Halves]:
    """The weights whose turn it is, and what is held after that."""
    return held[half][0], with_half(held, half, held[half][1:])


def with_half(halves: Halves, which: int, value: Any) -> Halves:
    return Halves(value, halves.mlp) if which == 0 else Halves(halves.attention, value)
