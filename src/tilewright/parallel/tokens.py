"""Token threading: a zero passed from collective to collective fixes their order in the compiled program.

A compiler may run independent collectives in any order: all weight gathers at the earliest point, where they contend with
collectives of activations, or each gather right before its use, where nothing hides it. `thread` makes each collective wait for
the one before it, by a dependency that optimisers keep, and tags it with its purpose:

    token = tokens.new_token()
    w, token = tokens.thread(token, jax.lax.all_gather, shard, "fsdp", tiled=True, kind="fsdp_all_gather", stream=1)
    y, token = tokens.thread(token, jax.lax.psum, x @ w, "tp", kind="tp_all_reduce")

Collectives of one chain of tokens run one after another. Collectives of different chains do not wait for each other, so a chain
for weights and one for activations can be in flight together. To gather weights under a layer's matmuls, place the gathers
between that layer's collectives in one chain: if no later collective waits for them, a compiler begins them late. `done` makes
a token from any computed values. Functions that take a token also take a tuple of tokens and wait for all of them.

Collectives of the gradient are threaded in reverse order: the cotangent of a token is the token of the backward pass. `wait`
and `done` are each other's transpose. Use `checkpoint` for layers that run again in the backward pass. Tokens are float32
scalars equal to zero; they may be in the carry of a `jax.lax.scan`, and arguments and results of functions under `jax.jit` and
`jax.shard_map`.

On TPUs, `jax.lax.optimization_barrier` holds the order and leaves nothing in the compiled program. No program has run on a TPU:
`tests/parallel/test_tokens_tpu.py` checks the compiled programs for v5e and v6e. Other accelerators get the same barriers,
untested.

XLA's CPU compiler drops barriers before it orders operations. There, data holds the order, at some cost. A token is a zero that
is computed from the result in a way that the compiler cannot simplify, and an entry of the next operand is rewritten at the
token's index. The write is in place, or in a copy for arguments of the program. A result stays in memory until its token is
computed, which happens when the next collective needs the token.

After "Token Threading for FSDP" in the AWS Neuron SDK's "Overlapping compute and communication", whose compiler adds a
one-element tensor to each collective's operands, keeps the order, and drops the tensors again.
"""

import warnings
from collections.abc import Callable
from functools import partial, reduce
from operator import add
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, partial_eval

Tree = TypeVar("Tree")

Token = Array | tuple[Any, ...]
"""A float32 scalar equal to zero, or a (nested, possibly empty) tuple of such scalars."""


def new_token() -> Array:
    """Returns a token that begins a chain: no collective waits for it."""
    with jax.ensure_compile_time_eval():  # a constant, which distinguishes it from other tokens
        return jnp.zeros((), jnp.float32)


def thread(
    token: Token, collective: Callable[..., Any], *operands: Any, kind: str, stream: int = 0, **options: Any
) -> tuple[Any, Array]:
    """Runs a collective after the operations of the token.

    Args:
        token: token of the operations to wait for.
        collective: any function: a collective of `jax.lax`, or one of several steps, such as those of `rings`.
        operands: positional arguments of the collective; arrays in any pytrees wait for the token.
        kind: `collective_type` of the operations, a frontend attribute of HLO; also of the gradient's operations.
        stream: `stream_id` of the operations. Neuron runs the operations of a stream one after another, and several streams at
            a time. Other compilers ignore it. The order of operations depends on tokens only.
        options: keyword arguments of the collective.

    Returns:
        the collective's result, and its token.

    Raises:
        ValueError: no array among the operands, an empty kind, or a stream below 0.
    """
    if not kind or stream < 0:
        raise ValueError(f"expected the kind of a collective and a stream from 0, found {kind!r} and {stream}")
    operands, tokens = _tied(_wait, token, operands)
    with set_xla_metadata(collective_type=kind, stream_id=str(stream)):
        result = collective(*operands, **options)
    return done(result, tuple(tokens))


def wait(token: Token, values: Tree) -> Tree:
    """Returns the values, available after the operations of the token; leaves other than arrays are unchanged.

    Raises:
        ValueError: no array among the values.
    """
    return _tied(_wait, token, values)[0]


def done(values: Tree, token: Token = ()) -> tuple[Tree, Array]:
    """Returns the values unchanged, and a token of their computation.

    Args:
        token: token of the same chain; the values also wait for it. Without a token, a new chain begins. Pass tokens on where
            possible: the TPU compiler loses the order of collectives where each of them begins a new chain.

    Raises:
        ValueError: no array among the values.
    """
    return _tied(_done, token, values)


def joined(*tokens: Token) -> Array:
    """Joins tokens into one scalar token, for example for the carry of a loop."""
    return reduce(add, jax.tree.leaves(tokens))


def checkpoint(layer: Callable[..., tuple[Any, Array]]) -> Callable[..., tuple[Any, Array]]:
    """`jax.checkpoint` for threaded functions: recomputed collectives are threaded into the chain of the backward pass.

    A layer's recomputed collectives run after the backward collectives of the next layer and before its own. Collectives with
    results that the gradient does not need are dropped by `jax.jit`; a JAX version without `dce_rules` runs them, with a
    warning. `jax.checkpoint` would thread the recomputed collectives by the token of the forward pass, which does not order
    them within the backward pass.

    Args:
        layer: `layer(token, *operands) -> (result, token)`, for arrays in any pytrees. It is differentiated by the operands
            only; values that it closes over must not depend on differentiated values.
    """
    if not DROPS_UNREAD:
        message = f"JAX {jax.__version__} has no dce_rules: recomputation includes collectives with unused results"
        warnings.warn(message, stacklevel=2)

    @jax.custom_vjp
    def run(token: Array, *operands: Any) -> tuple[Any, Array]:
        return layer(token, *operands)

    def forward(token: Array, *operands: Any) -> tuple[tuple[Any, Array], Any]:
        return layer(token, *operands), operands

    def backward(operands: Any, cotangent: tuple[Any, Array]) -> Any:
        result_cotangent, token = cotangent
        operands, (token,) = _tied(_wait, token, operands)
        (_, token), back = jax.vjp(layer, token, *operands)
        return back((result_cotangent, token))

    run.defvjp(forward, backward)
    return run


def _tied(tie: Callable[..., Any], token: Token, values: Any) -> Any:
    """Applies `tie` to the arrays of a pytree and the tokens; returns the tied pytree and the new token or tokens."""
    leaves, tree = jax.tree.flatten(values)
    arrays = _arrays(leaves)
    # A constant token begins a chain and needs no wait.
    tokens = [each for each in jax.tree.leaves(token) if isinstance(each, Tracer)]
    values, new_tokens = tie(tokens, [leaves[at] for at in arrays])
    for at, value in zip(arrays, values, strict=True):
        leaves[at] = value
    return tree.unflatten(leaves), new_tokens


def _arrays(leaves: list[Any]) -> list[int]:
    """Indices of leaves that are non-empty arrays."""
    found = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Array | np.ndarray) and leaf.size]
    if not found:
        raise ValueError(f"expected an array to tie a token to, found {', '.join(map(str, leaves)) or 'nothing'}")
    return found


@jax.custom_vjp
def _wait(tokens: list[Array], values: list[Array]) -> tuple[list[Array], list[Array]]:
    return _after(tokens, values), tokens


def _wait_forward(tokens: list[Array], values: list[Array]) -> tuple[tuple[list[Array], list[Array]], int]:
    return _wait(tokens, values), len(tokens)


def _wait_backward(count: int, cotangent: tuple[list[Any], list[Array]]) -> tuple[list[Array], list[Any]]:
    values, tokens = cotangent
    real, token = _token_of(tokens, [each for each in values if _is_real(each)])
    return [token] * count, _put_back(values, real)


@jax.custom_vjp
def _done(tokens: list[Array], values: list[Array]) -> tuple[list[Array], Array]:
    return _token_of(tokens, values)


def _done_forward(tokens: list[Array], values: list[Array]) -> tuple[tuple[list[Array], Array], int]:
    return _done(tokens, values), len(tokens)


def _done_backward(count: int, cotangent: tuple[list[Any], Array]) -> tuple[list[Array], list[Any]]:
    values, token = cotangent
    return [token] * count, _put_back(values, _after([token], [each for each in values if _is_real(each)]))


def _put_back(values: list[Any], real: list[Array]) -> list[Any]:
    """Replaces the real cotangents; see `_is_real`."""
    left = iter(real)
    return [next(left) if _is_real(each) else each for each in values]


_wait.defvjp(_wait_forward, _wait_backward)
_done.defvjp(_done_forward, _done_backward)


def _is_real(cotangent: Any) -> bool:
    """Returns False for the empty cotangents (`float0`) of integers."""
    return cotangent.dtype != jax.dtypes.float0


def _after(tokens: list[Array], values: list[Array]) -> list[Array]:
    """Ties values to tokens."""
    return AFTER.bind(*tokens, *values, count=len(tokens)) if tokens and values else values


def _token_of(tokens: list[Array], values: list[Array]) -> tuple[list[Array], Array]:
    """Returns the values, and a zero tied to the values and the tokens."""
    tokens = tokens or [new_token()]
    if not values:
        return values, tokens[0]
    token, *values = TOKEN_OF.bind(*tokens, *values, count=len(tokens))
    return values, token


def _barrier_after(*args: Array, count: int) -> list[Array]:
    return list(jax.lax.optimization_barrier(args)[count:])


def _barrier_and_token(*args: Array, count: int) -> list[Array]:
    """Passes the first token and the values through one barrier; the compiler drops barriers around constants."""
    token, *values = [each for at, each in enumerate(jax.lax.optimization_barrier(args)) if at == 0 or at >= count]
    return [token, *values]


def _computed_after(*args: Array, count: int) -> list[Array]:
    return _written_anew(list(args[:count]), list(args[count:]))


def _computed_token(*args: Array, count: int) -> list[Array]:
    return [reduce(add, [*args[:count], *map(_zero_of, args[count:])]), *args[count:]]


def _written_anew(tokens: list[Array], values: list[Array]) -> list[Array]:
    """Rewrites the first entry of each value in place, at the index that the sum of the tokens gives."""
    first = reduce(add, tokens).astype(jnp.int32)

    def written(value: Array) -> Array:
        flat = value.reshape(1) if value.ndim == 0 else value
        entry = jax.lax.dynamic_slice(flat, (first,) * flat.ndim, (1,) * flat.ndim)
        return jax.lax.dynamic_update_slice(flat, entry, (first,) * flat.ndim).reshape(value.shape)

    return [written(value) for value in values]


def _zero_of(value: Array) -> Array:
    """Computes a zero from a value's first entry: no number has 128 set bits."""
    entry = jax.lax.slice(value, (0,) * value.ndim, (1,) * value.ndim).reshape(())
    if jnp.issubdtype(entry.dtype, jnp.complexfloating):
        entry = entry.real
    if entry.dtype == jnp.bool_:
        entry = entry.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(entry, jnp.dtype(f"uint{8 * entry.dtype.itemsize}"))
    return jax.lax.shift_right_logical(jax.lax.population_count(bits), bits.dtype.type(7)).astype(jnp.float32)


def _primitive(name: str, shapes: Any, dims: Any, barrier: Callable[..., Any], on_cpu: Callable[..., Any]) -> Primitive:
    """Makes a primitive with one lowering for CPUs and one for other platforms.

    `jax.lax.platform_dependent` would leave a branch around the operation.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *args, **options: jax.jit(partial(primitive.bind, **options))(*args))
    primitive.def_abstract_eval(shapes)
    mlir.register_lowering(primitive, mlir.lower_fun(barrier, multiple_results=True))
    mlir.register_lowering(primitive, mlir.lower_fun(on_cpu, multiple_results=True), platform="cpu")
    batching.primitive_batchers[primitive] = lambda args, at, **options: (
        primitive.bind(*args, **options),
        dims(at, **options),
    )
    return primitive


AFTER = _primitive("wait", lambda *args, count: args[count:], lambda at, count: at[count:], _barrier_after, _computed_after)
TOKEN_OF = _primitive(
    "done",
    lambda *args, count: [args[0], *args[count:]],
    lambda at, count: [at[0], *at[count:]],
    _barrier_and_token,
    _computed_token,
)


def _token_alone(read: list[bool], *args: Any) -> tuple[list[bool], Any]:
    """Drops unused values from the equation; the token then does not wait for them.

    JAX 0.12 passes further arguments before the equation.
    """
    *_, eqn = args
    count = eqn.params["count"]
    if not any(read):
        return [False] * len(eqn.invars), None
    if any(read[1:]):
        return [True] * len(eqn.invars), eqn
    alone = eqn.replace(invars=eqn.invars[:count], outvars=eqn.outvars[:1])
    return [at < count for at in range(len(eqn.invars))], alone


# JAX drops unused results when it lowers a program, by rules per primitive that are undocumented.
DROPS_UNREAD = hasattr(partial_eval, "dce_rules")
if DROPS_UNREAD:
    partial_eval.dce_rules[TOKEN_OF] = _token_alone
