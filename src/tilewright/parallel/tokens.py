"""Token threading: a zero that is handed from collective to collective and fixes their order in the compiled program.

A compiler is free to run collectives that don't depend on one another in any order: those of weights all at the earliest point,
where they contend with those of activations, or each just before its use, where nothing hides it. `thread` makes each wait for
the one before it, by a dependency that the optimisers keep, and tags it with what it is for:

    token = tokens.new_token()
    w, token = tokens.thread(token, jax.lax.all_gather, shard, "fsdp", tiled=True, kind="fsdp_all_gather", stream=1)
    y, token = tokens.thread(token, jax.lax.psum, x @ w, "tp", kind="tp_all_reduce")

Collectives of one token follow one another: the next begins when the one before it has ended. Those of different tokens don't
wait for one another, so that a chain for weights and another for activations can be under way at the same time. For weights to
be gathered under a layer's products, put them between that layer's collectives in one chain: where nothing waits for them
after the products, a compiler begins them late. `done` makes a token of whatever has been computed; where a token is taken,
a tuple of several is, all of which are waited for.

The gradient's collectives are threaded too, each token's in reverse: the token's cotangent is the token of the backward pass.
For that, `wait` and `done` are each other's transpose. Layers that are to run again in the backward pass go through
`checkpoint`. Tokens are float32 scalars, always zero: they can be in the carry of a `jax.lax.scan`, and arguments and results
of functions under `jax.jit` and `jax.shard_map`.

What holds the order: on TPUs `jax.lax.optimization_barrier`, of which nothing is left in a compiled program. No program was run
on one: what is known of them is what their compiler makes, as `tests/parallel/test_tokens_tpu.py` has it for v5e and v6e. Other
accelerators get the same barriers, and nothing has been seen of them.

XLA's CPU compiler drops barriers before it orders anything, so that the order must be held by data, which costs something. A
token is a number that is computed of the result and is zero, though the compiler can't know, and an entry of the next operand
is written anew at that index: where it is, but in a copy if it is a program's argument, for these are not written to. A result
stays in memory until its token is taken, which the compiler does when the next collective needs it.

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
"""A float32 scalar that is zero, or several of them, also tuples of them; none at all in an empty tuple."""


def new_token() -> Array:
    """A token that nothing has to be waited for."""
    with jax.ensure_compile_time_eval():  # a number and not an operation, which tells it from other tokens
        return jnp.zeros((), jnp.float32)


def thread(
    token: Token, collective: Callable[..., Any], *operands: Any, kind: str, stream: int = 0, **options: Any
) -> tuple[Any, Array]:
    """Runs a collective after what the token stands for.

    Args:
        token: of what comes before it.
        collective: any function, one of `jax.lax`'s or one of several steps, such as those of `rings`.
        operands: its arguments; the arrays among them, in any pytrees, wait for the token.
        kind: `collective_type` of its operations, among the frontend attributes of HLO; the gradient's have the same.
        stream: `stream_id` of its operations. Neuron runs those of one stream one after another, and several streams at a time;
            to other compilers it is only a tag. What waits for what is up to the tokens.
        options: its keyword arguments.

    Returns:
        what it returns, and the token of it.

    Raises:
        ValueError: no array among the operands, an empty kind, or a stream below 0.
    """
    if not kind or stream < 0:
        raise ValueError(f"expected the kind of a collective and a stream from 0, found {kind!r} and {stream}")
    operands, passed = _tied(_wait, token, operands)
    with set_xla_metadata(collective_type=kind, stream_id=str(stream)):
        result = collective(*operands, **options)
    return done(result, tuple(passed))


def wait(token: Token, values: Tree) -> Tree:
    """The values, once what the token stands for is done; those of a pytree that are no arrays as they are.

    Raises:
        ValueError: no array among the values.
    """
    return _tied(_wait, token, values)[0]


def done(values: Tree, token: Token = ()) -> tuple[Tree, Array]:
    """The values, and a token of them. Whatever reads the values that come back reads them as if there were no token.

    Args:
        token: of the same chain, which the values then wait for too. Without one a chain begins. Hand tokens on where you can:
            TPUs' compiler loses the order of collectives whose chains begin anew after each of them.

    Raises:
        ValueError: no array among the values.
    """
    return _tied(_done, token, values)


def joined(*tokens: Token) -> Array:
    """One token of several, done when all of them are: for where a single one is asked for, such as a loop's carry."""
    return reduce(add, jax.tree.leaves(tokens))


def checkpoint(layer: Callable[..., tuple[Any, Array]]) -> Callable[..., tuple[Any, Array]]:
    """`jax.checkpoint` for threaded functions: what is computed again in the backward pass takes its place in its chain.

    A layer's collectives run again after those of the backward pass of the layer behind it, and before its own; those whose
    results the gradient does not need don't (`jax.jit` drops them; a JAX that cannot be told runs them, and a warning says so).
    `jax.checkpoint` itself would give them the token of the forward pass, which says nothing of when the backward pass has come
    to them.

    Args:
        layer: `layer(token, *operands) -> (result, token)`, of arrays in any pytrees. The gradient is taken by the operands
            alone: what it reads besides them must not depend on what is differentiated.
    """
    if not DROPS_UNREAD:
        message = f"JAX {jax.__version__} has no dce_rules: what runs again includes collectives whose results nothing reads"
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
    """The values' pytree with its arrays tied, and the token or tokens that come with them."""
    leaves, tree = jax.tree.flatten(values)
    arrays = _arrays(leaves)
    # What is known while a program is traced need not be waited for.
    tokens = [each for each in jax.tree.leaves(token) if isinstance(each, Tracer)]
    made, passed = tie(tokens, [leaves[at] for at in arrays])
    for at, value in zip(arrays, made, strict=True):
        leaves[at] = value
    return tree.unflatten(leaves), passed


def _arrays(leaves: list[Any]) -> list[int]:
    """Which leaves are arrays with anything in them."""
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
    made, token = _token_of(tokens, [each for each in values if _is_real(each)])
    return [token] * count, _put_back(values, made)


@jax.custom_vjp
def _done(tokens: list[Array], values: list[Array]) -> tuple[list[Array], Array]:
    return _token_of(tokens, values)


def _done_forward(tokens: list[Array], values: list[Array]) -> tuple[tuple[list[Array], Array], int]:
    return _done(tokens, values), len(tokens)


def _done_backward(count: int, cotangent: tuple[list[Any], Array]) -> tuple[list[Array], list[Any]]:
    values, token = cotangent
    return [token] * count, _put_back(values, _after([token], [each for each in values if _is_real(each)]))


def _put_back(values: list[Any], real: list[Array]) -> list[Any]:
    """The cotangents, those with numbers in them replaced."""
    left = iter(real)
    return [next(left) if _is_real(each) else each for each in values]


_wait.defvjp(_wait_forward, _wait_backward)
_done.defvjp(_done_forward, _done_backward)


def _is_real(cotangent: Any) -> bool:
    """Whether there is a number in it: integers' cotangents have none."""
    return cotangent.dtype != jax.dtypes.float0


def _after(tokens: list[Array], values: list[Array]) -> list[Array]:
    """The values, tied to the tokens."""
    return AFTER.bind(*tokens, *values, count=len(tokens)) if tokens and values else values


def _token_of(tokens: list[Array], values: list[Array]) -> tuple[list[Array], Array]:
    """The values, and a zero tied to them and to the tokens."""
    tokens = tokens or [new_token()]
    if not values:
        return values, tokens[0]
    token, *values = TOKEN_OF.bind(*tokens, *values, count=len(tokens))
    return values, token


def _barrier_after(*args: Array, count: int) -> list[Array]:
    return list(jax.lax.optimization_barrier(args)[count:])


def _barrier_and_token(*args: Array, count: int) -> list[Array]:
    """The token goes through the barriers of its chain from the first to the last: of those around a constant nothing is left.
    The values must come out of them too."""
    token, *values = [each for at, each in enumerate(jax.lax.optimization_barrier(args)) if at == 0 or at >= count]
    return [token, *values]


def _computed_after(*args: Array, count: int) -> list[Array]:
    return _written_anew(list(args[:count]), list(args[count:]))


def _computed_token(*args: Array, count: int) -> list[Array]:
    return [reduce(add, [*args[:count], *map(_zero_of, args[count:])]), *args[count:]]


def _written_anew(tokens: list[Array], values: list[Array]) -> list[Array]:
    """The values, their first entry written to where it is, which is at the index that the tokens' sum gives."""
    first = reduce(add, tokens).astype(jnp.int32)

    def written(value: Array) -> Array:
        flat = value.reshape(1) if value.ndim == 0 else value
        entry = jax.lax.dynamic_slice(flat, (first,) * flat.ndim, (1,) * flat.ndim)
        return jax.lax.dynamic_update_slice(flat, entry, (first,) * flat.ndim).reshape(value.shape)

    return [written(value) for value in values]


def _zero_of(value: Array) -> Array:
    """Computed of a value's first entry, whatever that is: no number has 128 bits that are one."""
    entry = jax.lax.slice(value, (0,) * value.ndim, (1,) * value.ndim).reshape(())
    if jnp.issubdtype(entry.dtype, jnp.complexfloating):
        entry = entry.real
    if entry.dtype == jnp.bool_:
        entry = entry.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(entry, jnp.dtype(f"uint{8 * entry.dtype.itemsize}"))
    return jax.lax.shift_right_logical(jax.lax.population_count(bits), bits.dtype.type(7)).astype(jnp.float32)


def _primitive(name: str, shapes: Any, dims: Any, barrier: Callable[..., Any], on_cpu: Callable[..., Any]) -> Primitive:
    """An operation that is lowered in one way for CPUs and in another for all else, without the branch around it that
    `jax.lax.platform_dependent` leaves."""
    made = Primitive(name)
    made.multiple_results = True
    made.def_impl(lambda *args, **options: jax.jit(partial(made.bind, **options))(*args))
    made.def_abstract_eval(shapes)
    mlir.register_lowering(made, mlir.lower_fun(barrier, multiple_results=True))
    mlir.register_lowering(made, mlir.lower_fun(on_cpu, multiple_results=True), platform="cpu")
    batching.primitive_batchers[made] = lambda args, at, **options: (made.bind(*args, **options), dims(at, **options))
    return made


AFTER = _primitive("wait", lambda *of, count: of[count:], lambda at, count: at[count:], _barrier_after, _computed_after)
TOKEN_OF = _primitive(
    "done",
    lambda *of, count: [of[0], *of[count:]],
    lambda at, count: [at[0], *at[count:]],
    _barrier_and_token,
    _computed_token,
)


def _token_alone(read: list[bool], *of: Any) -> tuple[list[bool], Any]:
    """Where nothing reads the values, the token does not wait for them either. JAX 0.12 passes more before the equation."""
    *_, eqn = of
    count = eqn.params["count"]
    if not any(read):
        return [False] * len(eqn.invars), None
    if any(read[1:]):
        return [True] * len(eqn.invars), eqn
    alone = eqn.replace(invars=eqn.invars[:count], outvars=eqn.outvars[:1])
    return [at < count for at in range(len(eqn.invars))], alone


# JAX drops what nothing reads as it lowers a program; how it is told what a primitive reads is not documented.
DROPS_UNREAD = hasattr(partial_eval, "dce_rules")
if DROPS_UNREAD:
    partial_eval.dce_rules[TOKEN_OF] = _token_alone
