"""Proof that a traced function treats each edge by itself, so that its slots may be evaluated in tiles.

The function is traced for two numbers of slots, and both programs are walked side by side. Each array either has one dim that
counts slots, or does not depend on slots. A primitive without a rule, a primitive that mixes slots, and a constant or parameter
that depends on the number of slots end the proof. Then the function is evaluated for all slots at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend import core

ELEMENTWISE = frozenset(
    (
        "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp convert_element_type "
        "copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac integer_pow is_finite "
        "le lgamma log log1p logistic lt max min mul ne neg nextafter not or polygamma pow reduce_precision "
        "regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin "
        "sinh sqrt square stop_gradient sub tan tanh xor"
    ).split()
)
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
}
"""Primitives that call a program, and the parameter that has it. A `custom_vjp` is none: its gradient may mix slots."""
CUMULATIVE = frozenset(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])


class Joint(Exception):
    """End of a proof: the program may treat slots jointly."""


Dim = int | None
"""Dim of an array that counts slots; None for an array without one."""


def slotwise(one: Any, other: Any) -> bool:
    """Returns True if a function maps each slot by itself.

    Args:
        one: the function's `ClosedJaxpr`. The first dim of each operand and of the first result counts slots; other results do
            not depend on slots.
        other: the same for one slot more.
    """
    try:
        dims = walk(one, other, [0] * len(one.jaxpr.invars))
    except Joint:
        return False
    return dims == [0] + [None] * (len(dims) - 1)


def walk(first: Any, second: Any, given: Sequence[Dim]) -> list[Dim]:
    """Returns the dims of a program's results, for those of its operands."""
    one, other = (getattr(program, "jaxpr", program) for program in (first, second))
    known: dict[Any, Dim] = dict.fromkeys(one.constvars)
    known.update(zip(one.invars, given, strict=True))
    need(len(one.eqns) == len(other.eqns))
    constants = [getattr(program, "consts", []) for program in (first, second)]
    need(len(constants[0]) == len(constants[1]) and all(map(same, *constants)))

    def read(a: Any, b: Any) -> Dim:
        if isinstance(a, core.Literal):
            need(isinstance(b, core.Literal) and repr(a.val) == repr(b.val))  # NaN differs from itself
            return None
        return known[a]

    for a, b in zip(one.eqns, other.eqns, strict=True):
        need(a.primitive.name == b.primitive.name and len(a.invars) == len(b.invars))
        found = results(a, b, [read(*each) for each in zip(a.invars, b.invars, strict=True)])
        for left, right, dim in zip(a.outvars, b.outvars, found, strict=True):
            shapes = left.aval.shape, right.aval.shape
            need(len(shapes[0]) == len(shapes[1]))
            need([n for n in range(len(shapes[0])) if shapes[0][n] != shapes[1][n]] == ([] if dim is None else [dim]))
            known[left] = dim
    return [read(*each) for each in zip(one.outvars, other.outvars, strict=True)]


def same(a: Any, b: Any) -> bool:
    """Returns True if constants of two programs are equal."""
    return a is b or (not isinstance(a, Tracer) and not isinstance(b, Tracer) and np.array_equal(a, b))


def need(holds: bool) -> None:
    """Ends the proof unless the condition holds."""
    if not holds:
        raise Joint


def results(one: Any, other: Any, dims: list[Dim]) -> list[Dim]:
    """Returns the dims of the results of an equation; `walk` compares them with the shapes."""
    name = one.primitive.name
    if name in CALLS:
        return walk(one.params[CALLS[name]], other.params[CALLS[name]], dims)
    if name == "broadcast_in_dim":
        return [broadcast(one, other, dims[0])]
    slots = {dim for dim in dims if dim is not None}
    if not slots:
        return [None] * len(one.outvars)
    if name in ELEMENTWISE:
        need(len(slots) == 1 and one.params == other.params)
        (dim,) = slots
        for each, operand in zip(dims, (variable.aval.shape for variable in one.invars), strict=True):
            need(each == dim or not operand or operand[dim] == 1)  # any other would have as many rows as there are slots
        return [dim]
    rule = RULES.get(name) or (reduce if name.startswith(("reduce_", "arg")) else along if name in CUMULATIVE else None)
    if rule is None:
        raise Joint
    return rule(one, dims)


def broadcast(one: Any, other: Any, dim: Any) -> Dim:
    """Returns the dim of a broadcast, which may also repeat a value for every slot."""
    place = one.params["broadcast_dimensions"]
    need(place == other.params["broadcast_dimensions"])
    shapes = one.outvars[0].aval.shape, other.outvars[0].aval.shape
    differ = [n for n in range(len(shapes[0])) if shapes[0][n] != shapes[1][n]]
    if dim is not None:
        need(differ == [place[dim]])
        return place[dim]
    need(len(differ) < 2)
    return differ[0] if differ else None


def reduce(equation: Any, dims: list[Any]) -> list[Dim]:
    axes = equation.params.get("axes", ())
    dim: Any = dims[0]
    need(len(dims) == 1 and bool(axes) and dim not in axes)
    return [dim - sum(axis < dim for axis in axes)] * len(equation.outvars)


def along(equation: Any, dims: list[Any]) -> list[Dim]:
    """Rule of primitives that work along one dim, the same for all operands."""
    parameters = equation.params
    dim = next(parameters[name] for name in ("axis", "dimension") if name in parameters)
    need(len(set(dims)) == 1 and dims[0] != dim)
    return [dims[0]] * len(equation.outvars)


def reshape(equation: Any, dims: list[Any]) -> list[Dim]:
    """Rule of `reshape`: the dim stays whole if as many elements come before it as before."""
    shape, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    (dim,) = dims
    need(equation.params.get("dimensions") is None)
    found = [n for n in range(len(new)) if new[n] == shape[dim] and product(new[:n]) == product(shape[:dim])]
    need(bool(found) and product(shape[dim + 1 :]) == product(new[found[0] + 1 :]))
    return [found[0]]


def product(sizes: Sequence[int]) -> int:
    found = 1
    for size in sizes:
        found *= size
    return found


def squeeze(equation: Any, dims: list[Any]) -> list[Dim]:
    removed = equation.params["dimensions"]
    need(dims[0] not in removed)
    return [dims[0] - sum(axis < dims[0] for axis in removed)]


def transpose(equation: Any, dims: list[Any]) -> list[Dim]:
    return [equation.params["permutation"].index(dims[0])]


def cut(equation: Any, dims: list[Any]) -> list[Dim]:
    """Rule of `slice`, `dynamic_slice`, `rev` and `pad`, which must leave the slots as they are."""
    parameters = equation.params
    shape = equation.invars[0].aval.shape
    dim: Any = dims[0]
    need(all(each is None for each in dims[1:]))
    if "padding_config" in parameters:
        need(tuple(parameters["padding_config"][dim]) == (0, 0, 0))
    elif "slice_sizes" in parameters:
        need(parameters["slice_sizes"][dim] == shape[dim])
    elif "limit_indices" in parameters:
        steps = parameters["strides"] or (1,) * len(shape)
        need((parameters["start_indices"][dim], parameters["limit_indices"][dim], steps[dim]) == (0, shape[dim], 1))
    else:
        need(dim not in parameters["dimensions"])
    return [dim]


def dot_general(equation: Any, dims: list[Any]) -> list[Dim]:
    contracted, batch = equation.params["dimension_numbers"]
    free = [
        [n for n in range(len(variable.aval.shape)) if n not in contracted[side] and n not in batch[side]]
        for side, variable in enumerate(equation.invars)
    ]
    order = [("batch", n) for n in range(len(batch[0]))] + [(side, n) for side in (0, 1) for n in free[side]]
    if None not in dims:
        need(all(dims[side] in batch[side] for side in (0, 1)))
        places = [list(batch[side]).index(dims[side]) for side in (0, 1)]
        need(places[0] == places[1])
        return [places[0]]
    side = 0 if dims[0] is not None else 1
    need(dims[side] in free[side])
    return [order.index((side, dims[side]))]


def gather(equation: Any, dims: list[Any]) -> list[Dim]:
    """Rule of `gather`: slots index an array without slots, or their own rows, or all slots are read at the same place."""
    numbers = equation.params["dimension_numbers"]
    shape, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    batch = [n for n in range(len(result)) if n not in numbers.offset_dims]
    operand, indices = dims
    if indices is None:
        kept = [n for n in range(len(shape)) if n not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
        need(operand in kept and operand not in numbers.start_index_map)
        need(equation.params["slice_sizes"][operand] == shape[operand])
        return [numbers.offset_dims[kept.index(operand)]]
    need(indices < len(equation.invars[1].aval.shape) - 1)
    if operand is not None:
        pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        need((operand, indices) in pairs)
    return [batch[indices]]


def concatenate(equation: Any, dims: list[Any]) -> list[Dim]:
    need(len(set(dims)) == 1 and dims[0] != equation.params["dimension"])
    return [dims[0]]


def stack(equation: Any, dims: list[Any]) -> list[Dim]:
    dim: Any = dims[0]
    need(len(set(dims)) == 1)
    return [dim + (equation.params["axis"] <= dim)]


def tile(equation: Any, dims: list[Any]) -> list[Dim]:
    need(equation.params["reps"][dims[0]] == 1)
    return [dims[0]]


def top_k(equation: Any, dims: list[Any]) -> list[Dim]:
    last = len(equation.invars[0].aval.shape) - 1
    need(dims[0] not in (last, equation.params.get("axis", last)))
    return [dims[0]] * 2


RULES: dict[str, Callable[[Any, list[Any]], list[Dim]]] = {
    "concatenate": concatenate,
    "dot_general": dot_general,
    "dynamic_slice": cut,
    "gather": gather,
    "pad": cut,
    "reshape": reshape,
    "rev": cut,
    "slice": cut,
    "sort": along,
    "split": along,
    "squeeze": squeeze,
    "stack": stack,
    "tile": tile,
    "top_k": top_k,
    "transpose": transpose,
}
