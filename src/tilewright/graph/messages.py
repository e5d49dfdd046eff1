"""Message passing with functions of one's own, in fixed shapes and in PyG's vocabulary.

`aggregate.propagate` gathers values at both ends of each edge, computes messages, and reduces them over each node. A function
names what it needs by its parameters:

| parameter | value of each edge |
|---|---|
| `x_j`, `NAME_j` | `x`, or the value NAME, of the edge's source |
| `x_i`, `NAME_i` | of its destination |
| `NAME` | the value NAME of the edge itself, such as `edge_attr` |
| `index` | the edges grouped by destination, for `softmax` |

All arrays of a function have one row per edge and, depending on the table's layout, rows of padding, which repeat an edge and
have no effect. No gradient scatters. Functions of many edges run in tiles, see `tiles`.

Legend: N nodes, M sources, E edges, S rows of edges with padding, F features, H heads.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Shaped

from tilewright.graph.tiles import Operand
from tilewright.kernels import select
from tilewright.kernels.select import Reduce

Function = Callable[..., Array]
REDUCTIONS = ("sum", "mean", "max", "min", "var", "std")
LEAST_VARIANCE = 1e-5
"""Variance below which a standard deviation is 0, as in PyG."""


@runtime_checkable
class Slots(Protocol):
    """Edges for which messages are computed, grouped by destination; see `gradients.SlotGraph`."""

    @property
    def num_edges(self) -> int: ...

    @property
    def num_slots(self) -> int: ...

    def gather(self, values: Array, end: Any) -> Array: ...

    def plan(self, function: Function, operands: Mapping[str, Any]) -> Any: ...

    def planned(self, plan: Any) -> Array: ...

    def planned_sums(self, plan: Any, sums: Any) -> dict[str, Array]: ...

    def divided(self, summed: Array) -> Array: ...

    def reduce(self, values: Array, reduce: Reduce) -> Array: ...

    def softmax(self, scores: Array) -> Array: ...

    def dropout(self, weights: Array, rate: float, key: Array | None) -> Array: ...

    def weighted_sum(self, x: Array, weights: Array) -> Array: ...


def softmax(src: Float[Array, "S *H"], index: Any) -> Float[Array, "S *H"]:
    """Computes the softmax of edge scores over the edges of each destination, within a message; `index` is its parameter."""
    return index.softmax(src)


def operands(function: Function, slots: Slots, values: Mapping[str, Any], sizes: tuple[int, int]) -> dict[str, Any]:
    """Returns the values that a function's parameters name.

    Args:
        function: the function.
        slots: the edges.
        values: values of nodes, one array or a pair for sources and destinations, and of edges; None for optional ones.
        sizes: numbers of sources and of destinations.

    Returns:
        By parameter, a `tiles.Operand`, None for an optional value, or "index".

    Raises:
        ValueError: a parameter names no value, a value is not used, or it has another number of rows.
    """
    found: dict[str, Any] = {}
    used = set()
    for name, parameter in inspect.signature(function).parameters.items():
        base, end = (name[:-2], name[-1]) if name.endswith(("_i", "_j")) else (name, "")
        used.add(base)
        value = values.get(base)
        if name == "index":
            found[name] = "index"
        elif value is None:
            if base not in values and parameter.default is parameter.empty:
                raise ValueError(f"expected the value {base!r} for the parameter {name!r} of a message, found {sorted(values)}")
            found[name] = None
        elif end:
            place = 0 if end == "j" else 1
            each = value[place] if isinstance(value, tuple | list) else value
            if each is None:
                raise ValueError(f"expected {base!r} of the {'sources' if end == 'j' else 'nodes'} for {name!r}, found None")
            rows = sizes[place if isinstance(value, tuple | list) else 0]
            if each.ndim == 0 or each.shape[0] != rows:
                raise ValueError(f"expected {rows} rows of {base!r} for {name!r}, found shape {list(each.shape)}")
            found[name] = Operand(each[: sizes[place]], "sources" if end == "j" else "rows")
        else:
            if value.ndim == 0 or value.shape[0] != slots.num_edges:
                shape = list(value.shape)
                raise ValueError(f"expected {slots.num_edges} rows of {base!r} for {name!r}, found shape {shape}")
            found[name] = Operand(value, "edges")
    if unused := sorted(name for name in values.keys() - used - {"x"} if values[name] is not None):
        raise ValueError(f"expected values that the message has a parameter for, found {', '.join(unused)}")
    return found


def evaluated(function: Function, slots: Slots, given: Mapping[str, Any]) -> Array:
    """Evaluates a function of the edges, whose parameters have these operands, for all slots."""
    plan = slots.plan(function, given)
    if plan is not None:
        return slots.planned(plan)
    return function(**{name: argument(slots, value) for name, value in given.items()})


def argument(slots: Slots, value: Any) -> Any:
    """Returns the argument for an operand: its values of all slots."""
    if isinstance(value, Operand):
        return slots.gather(value.value, value.place)
    return slots if value == "index" else None


def source(x_j: Array) -> Array:
    """Message that is the source's features."""
    return x_j


def given_weight(edge_weight: Array) -> Array:
    """Weight that is a given value of the edge."""
    return edge_weight


def weighted_source(x_j: Array, edge_weight: Array) -> Array:
    """Message that is the source's features times the edge's weight."""
    return x_j * edge_weight.reshape(-1, *[1] * (x_j.ndim - 1))


def node_values(functions: Sequence[Any]) -> set[str]:
    """Returns the names of the values that functions gather from nodes."""
    parameters = {name for each in functions if callable(each) for name in inspect.signature(each).parameters}
    return {"x"} | {name[:-2] for name in parameters if name.endswith(("_i", "_j"))}


def reduced(slots: Slots, messages: Float[Array, "S *F"], reduce: str) -> Float[Array, "N *F"]:
    """Reduces messages. A variance is that of the whole set; a standard deviation below `LEAST_VARIANCE ** 0.5` is 0."""
    if reduce not in ("var", "std"):
        return slots.reduce(messages, reduce)  # pyright: ignore[reportArgumentType]
    mean = slots.reduce(messages, "mean")
    variance = slots.reduce(messages * messages, "mean") - mean * mean
    return variance if reduce == "var" else deviation(variance)


def planned_reductions(slots: Slots, plan: Any, names: Sequence[str]) -> list[Float[Array, "N ..."]]:
    """Computes `reduced` for sums, means, variances and standard deviations of planned messages, which are not stored."""
    dtype = plan.stages[-1].shape.dtype
    squares = any(name in ("var", "std") for name in names)
    sums = slots.planned_sums(plan, ("sum", "squares") if squares else ("sum",))
    found: dict[str, Array] = {"sum": sums["sum"].astype(dtype)}
    if any(name != "sum" for name in names):
        found["mean"] = slots.divided(sums["sum"]).astype(dtype)
    if squares:
        found["var"] = slots.divided(sums["squares"]).astype(dtype) - found["mean"] * found["mean"]
        found["std"] = deviation(found["var"])
    return [found[name] for name in names]


def deviation(variance: Float[Array, "N *F"]) -> Float[Array, "N *F"]:
    """Computes standard deviations; 0 for a variance of at most `LEAST_VARIANCE`."""
    fits = variance > LEAST_VARIANCE
    return jnp.where(fits, jnp.sqrt(jnp.where(fits, variance, 1)), 0)


def reductions(reduce: str | Sequence[str]) -> list[str]:
    """Returns the reductions as a list. Raises a `ValueError` for an unknown one, or none."""
    names = [reduce] if isinstance(reduce, str) else list(reduce)
    if not names or any(name not in REDUCTIONS for name in names):
        raise ValueError(f"expected to reduce by one or several of {', '.join(REDUCTIONS)}, found {reduce!r}")
    return names


def pass_messages(
    slots: Slots,
    x: Any,
    message: Function | None,
    reduce: str | Sequence[str],
    weight: Function | Array | None,
    values: Mapping[str, Any],
    sizes: tuple[int, int],
) -> Array:
    """Computes `propagate` for values in the order of a table or sample."""
    if message is not None and weight is not None:
        raise ValueError("expected a message or a weight, found both")
    given = {"x": x, **values}
    names = reductions(reduce)
    if weight is None:
        message = message or source
        found = operands(message, slots, given, sizes)
        if all(name in ("sum", "mean", "var", "std") for name in names) and (plan := slots.plan(message, found)) is not None:
            each = planned_reductions(slots, plan, names)
            return each[0] if len(each) == 1 else jnp.concatenate(each, axis=-1)
        messages = evaluated(message, slots, found)
        if messages.ndim < 1 or messages.dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(f"expected messages in float32 or bfloat16, found {messages.dtype} {list(messages.shape)}")
        if messages.shape[0] != slots.num_slots:
            raise ValueError(f"expected a message for each of {slots.num_slots} rows, found shape {list(messages.shape)}")
        each = [reduced(slots, messages, name) for name in names]
        return each[0] if len(each) == 1 else jnp.concatenate(each, axis=-1)
    if any(select.refuses_message_reduce(False, True, name) for name in names) or len(names) > 1:
        raise ValueError(f"expected reduce='sum' with weight, found {reduce!r}; a message may multiply by the weight instead")
    if not callable(weight):
        given["edge_weight"] = weight
        weight = given_weight
    weights = evaluated(weight, slots, operands(weight, slots, given, sizes))
    features = x[0] if isinstance(x, tuple | list) else x
    if features.ndim < 2 or features.shape[0] != sizes[0]:
        raise ValueError(f"expected features of shape [{sizes[0]}, F] or [{sizes[0]}, H, D], found {list(features.shape)}")
    flat = features.reshape(features.shape[0], math.prod(features.shape[1:]))
    by_head = weights[:, None] if weights.ndim == 1 else weights
    heads = by_head.shape[1]
    if by_head.ndim != 2 or flat.shape[1] % max(heads, 1) or (features.ndim == 3 and heads not in (1, features.shape[1])):
        found = f"{list(weights.shape)} for features {list(features.shape)}"
        raise ValueError(f"expected weights [edges] or [edges, H] that divide the features, found {found}")
    return slots.weighted_sum(flat, by_head).reshape(-1, *features.shape[1:])


class MessagePassing:
    """Base of layers in PyG's form: a subclass overrides `message`, and calls `propagate`.

    A layer is a frozen dataclass of arrays, registered as a pytree, such as

        @jax.tree_util.register_dataclass
        @dataclass(frozen=True)
        class EdgeConv(MessagePassing):
            weight: Array
            aggr = "max"

            def __call__(self, x, edges):
                return self.propagate(edges, x=x)

            def message(self, x_i, x_j):
                return jnp.concatenate([x_i, x_j - x_i], axis=-1) @ self.weight

    Attributes:
        aggr: the reduction, or several; see `aggregate.propagate`.
    """

    aggr = "sum"

    def message(self, x_j: Array) -> Shaped[Array, "S ..."]:
        """Returns the messages; its parameters name their values as in `aggregate.propagate`."""
        return x_j

    def propagate(self, edges: Any, *, x: Any, **values: Any) -> Float[Array, "N ..."]:
        """Computes the messages of the edges of a table or sample, whose order `x` and the result have, and reduces them."""
        overridden = type(self).message is not MessagePassing.message
        return edges.propagate(x, self.message if overridden else None, self.aggr, **values)
