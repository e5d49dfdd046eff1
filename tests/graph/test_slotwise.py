"""The proof that a function treats each slot by itself."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.graph.slotwise import slotwise

SLOTS = 6
HEADS = 2
WIDTH = 4
TABLE = np.arange(15, dtype=np.float32).reshape(5, 3)
MATRIX = np.linspace(-1, 1, HEADS * WIDTH * 3, dtype=np.float32).reshape(HEADS, WIDTH, 3)
KEY = jax.random.key(0)


def operands(slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, a whole number, and other features of each slot."""
    rng = np.random.default_rng(0)
    shape = (slots, HEADS, WIDTH)
    return rng.normal(size=shape).astype(np.float32), rng.integers(0, 5, slots), rng.normal(size=shape).astype(np.float32)


def proved(function: Callable[..., Any]) -> bool:
    programs = []
    for slots in (SLOTS, SLOTS + 1):
        shapes = [jax.ShapeDtypeStruct(each.shape, jax.dtypes.canonicalize_dtype(each.dtype)) for each in operands(slots)]
        programs.append(jax.make_jaxpr(function)(*shapes))
    return slotwise(*programs)


@jax.custom_vjp
def normalised(x: Any) -> Any:
    return x


normalised.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.linalg.norm(g),))


BY_SLOT: dict[str, Callable[..., Any]] = {
    "GATv2's score": lambda x, n, y: (jax.nn.leaky_relu(x + y, 0.2) * MATRIX[..., 0]).sum(-1),
    "attention": lambda x, n, y: jnp.einsum("thd,thd->th", x, y) / 2.0,
    "matrices by head": lambda x, n, y: jnp.einsum("thd,hde->the", x, MATRIX),
    "one matrix": lambda x, n, y: jax.nn.gelu(x.reshape(x.shape[0], -1) @ MATRIX.reshape(-1, 3)),
    "a norm": lambda x, n, y: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5),
    "a softmax of features": lambda x, n, y: jax.nn.softmax(x) * y,
    "a table by number": lambda x, n, y: jnp.asarray(TABLE)[n],
    "one-hot numbers": lambda x, n, y: jax.nn.one_hot(n, 5) @ TABLE,
    "features by number": lambda x, n, y: jnp.take_along_axis(x, (n % WIDTH)[:, None, None], axis=-1),
    "a column": lambda x, n, y: x[:, 1],
    "turned features": lambda x, n, y: jnp.concatenate(jnp.split(x, 2, -1)[::-1], -1) + x[..., ::-1],
    "sorted features": lambda x, n, y: jnp.sort(x) + jnp.cumsum(y, 1) + jax.lax.top_k(x, WIDTH)[0],
    "features side by side": lambda x, n, y: jnp.tile(jnp.stack([x, y], 1).mean(1), (1, 1, 2)),
    "vmap": lambda x, n, y: jax.vmap(lambda a, b: a @ b.T)(x, y),
    "constants": lambda x, n, y: jnp.zeros_like(x) + jnp.ones((x.shape[0], 1, 1)),
    "noise of features": lambda x, n, y: x * jax.random.normal(KEY, (WIDTH,)),
    "padded features": lambda x, n, y: jnp.pad(x, ((0, 0), (1, 0), (0, 2))),
}
JOINTLY: dict[str, Callable[..., Any]] = {
    "the first slot": lambda x, n, y: x - x[0:1],
    "the next slot": lambda x, n, y: jnp.roll(x, 1, 0),
    "turned slots": lambda x, n, y: x[::-1],
    "other slots": lambda x, n, y: x[n],
    "shifted slots": lambda x, n, y: jnp.pad(x[1:], ((1, 0), (0, 0), (0, 0))),
    "a mean of slots": lambda x, n, y: x - x.mean(0),
    "a softmax of slots": lambda x, n, y: jax.nn.softmax(x, 0),
    "sorted slots": lambda x, n, y: jnp.sort(x, 0),
    "sums of slots": lambda x, n, y: jnp.cumsum(x, 0),
    "a scan": lambda x, n, y: jax.lax.scan(lambda c, a: (c + a, c), x[0], x)[1],
    "a decision": lambda x, n, y: jax.lax.cond((n > 3).any(), lambda a: a, lambda a: 2 * a, x),
    "pairs of slots": lambda x, n, y: jnp.einsum("thd,shd->ts", x, y),
    "a product over slots": lambda x, n, y: x * jnp.einsum("thd,the->de", x, y).sum(),
    "noise of slots": lambda x, n, y: x * jax.random.normal(KEY, x.shape),
    "the place of a slot": lambda x, n, y: x * jnp.arange(x.shape[0], dtype=jnp.float32)[:, None, None],
    "a sum of places": lambda x, n, y: x * jnp.arange(x.shape[0], dtype=jnp.float32).sum(),
    "the number of slots": lambda x, n, y: x / x.shape[0],
    "counted slots": lambda x, n, y: x / jnp.ones_like(x).sum(),
    "an array of the number of slots": lambda x, n, y: x * np.full(WIDTH, x.shape[0], np.float32),
    "a power by the number of slots": lambda x, n, y: jax.lax.integer_pow(x, x.shape[0]),
    "parts of slots": lambda x, n, y: jnp.moveaxis(x.reshape(HEADS, -1, WIDTH), 0, 1),
    "a sum": lambda x, n, y: x.sum(),
    "sums by number": lambda x, n, y: jax.ops.segment_sum(x, n, num_segments=x.shape[0]),
    "a gradient over all slots": lambda x, n, y: normalised(x),
}


@pytest.mark.parametrize("name", BY_SLOT)
def test_functions_of_each_slot_are_proved_and_give_the_same_for_parts_of_the_slots(name: str):
    assert proved(BY_SLOT[name])
    whole = operands(SLOTS)
    parts = [BY_SLOT[name](*(each[first : first + 2] for each in whole)) for first in range(0, SLOTS, 2)]
    np.testing.assert_allclose(BY_SLOT[name](*whole), np.concatenate(parts), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", JOINTLY)
def test_functions_of_several_slots_are_not_proved(name: str):
    assert not proved(JOINTLY[name])
