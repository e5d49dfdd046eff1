"""The gated delta rule: both forms against NumPy in float64, in pieces, and with positions that change nothing."""

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels.delta_rule import reference, xla

FORMS = {"reference": jax.jit(reference.delta_rule), "xla": jax.jit(xla.delta_rule)}
Operands = tuple[np.ndarray, ...]


def drawn(seed: int, rows: int, length: int, k: int = 2, r: int = 2, d: int = 8, e: int = 6) -> Operands:
    """Keys of length 1, as models have them, some repeated; decays from none to nearly all; and a state."""
    rng = np.random.default_rng(seed)
    q, keys = (rng.standard_normal((rows, length, k, d)) for _ in range(2))
    keys[:, 1::3] = keys[:, :-1:3][:, : keys[:, 1::3].shape[1]]
    q, keys = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, keys))
    decay = -np.exp(rng.uniform(-7, 2, (rows, length, k, r)))
    beta = rng.uniform(0, 1, (rows, length, k, r))
    return q, keys, rng.standard_normal((rows, length, k, r, e)), decay, beta, rng.standard_normal((rows, k, r, d, e))


def in_numpy(q: Any, k: Any, v: Any, decay: Any, beta: Any, state: Any) -> tuple[np.ndarray, np.ndarray]:
    """Head by head and position by position: the state times `decay * (1 - beta k k^T)`, plus `beta k v^T`."""
    out = np.zeros(v.shape)
    state = state.copy()
    for row, head, group in np.ndindex(*decay.shape[:1], *decay.shape[2:]):
        held = state[row, head, group]
        for at in range(decay.shape[1]):
            key = k[row, at, head]
            share = beta[row, at, head, group]
            forget = np.exp(decay[row, at, head, group]) * (np.eye(len(key)) - share * np.outer(key, key))
            held = forget @ held + share * np.outer(key, v[row, at, head, group])
            out[row, at, head, group] = held.T @ q[row, at, head]
        state[row, head, group] = held
    return out, state


def single(operands: Operands) -> tuple[Any, ...]:
    return tuple(jnp.asarray(x, jnp.float32) for x in operands)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 130])
def test_equals_numpy(form: str, length: int):
    operands = drawn(length, 2, length)
    for found, want in zip(FORMS[form](*single(operands)), in_numpy(*operands), strict=True):
        np.testing.assert_allclose(found, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("form", [reference.delta_rule, partial(xla.in_chunks, chunk=4)], ids=["reference", "chunks"])
def test_gradient_is_that_of_numpy(form: Any):
    """Compares directional derivatives with central differences, over several chunks with an incomplete last one."""
    operands = drawn(3, 1, 11, d=4, e=3)
    rng = np.random.default_rng(0)
    due = [rng.standard_normal(x.shape) for x in (operands[2], operands[5])]

    def total(found: tuple[Any, Any]) -> Any:
        return sum((one * each).sum() for one, each in zip(found, due, strict=True))

    gradient = jax.jit(jax.grad(lambda operands: total(form(*operands))))(single(operands))
    for which in range(len(operands)):
        direction = [rng.standard_normal(x.shape) * (n == which) for n, x in enumerate(operands)]
        ahead, behind = (
            total(in_numpy(*(x + by * d for x, d in zip(operands, direction, strict=True)))) for by in (1e-5, -1e-5)
        )
        slope = np.vdot(np.asarray(gradient[which], np.float64), direction[which])
        np.testing.assert_allclose(slope, (ahead - behind) / 2e-5, rtol=1e-4, atol=1e-3)


PIECE = 8
"""Positions that are computed of a piece, whatever it holds: lengths are data."""
PADDED = [jax.jit(form) for form in (reference.delta_rule, partial(xla.in_chunks, chunk=4), xla.delta_rule)]


@given(st.integers(0, 2**16), st.lists(st.integers(1, PIECE), min_size=1, max_size=4))
def test_a_text_in_pieces_is_the_text(seed: int, pieces: list[int]):
    """Tests every form, with each piece padded by positions that change nothing."""
    operands = drawn(seed, 2, sum(pieces), k=1)
    want = in_numpy(*operands)
    ends = np.cumsum(pieces)
    for form in PADDED:
        state = operands[-1]
        outs = []
        for begin, end in pairwise([0, *ends]):
            left = PIECE - end + begin
            piece = [np.pad(x[:, begin:end], [(0, 0), (0, left), *[(0, 0)] * (x.ndim - 2)]) for x in operands[:-1]]
            out, state = form(*single((*piece, state)))
            outs.append(out[:, : end - begin])
        np.testing.assert_allclose(np.concatenate(outs, axis=1), want[0], rtol=0, atol=2e-5)
        np.testing.assert_allclose(state, want[1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
def test_positions_without_decay_and_beta_leave_the_state(form: str):
    """Bitwise, so that shorter rows and rejected drafts can be skipped."""
    operands = single(drawn(3, 2, 7))
    still = [jnp.zeros_like(x) for x in operands[3:5]]
    _, state = FORMS[form](*operands[:3], *still, operands[5])
    np.testing.assert_array_equal(state, operands[5])


@pytest.mark.parametrize("form", FORMS)
def test_a_row_gives_what_it_gives_alone(form: str):
    operands = single(drawn(4, 3, 20))
    out, state = FORMS[form](*operands)
    alone = FORMS[form](*(x[1:2] for x in operands))
    for found, want in zip((out[1:2], state[1:2]), alone, strict=True):
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-6)


def test_repeated_keys_do_not_blow_up():
    """The system of a chunk whose keys are all the same has no small inverse by powers: it is solved."""
    q, k, v, decay, beta, state = drawn(5, 1, 64, 1, 1)
    k = np.broadcast_to(k[:, :1], k.shape)
    operands = (q, k, v, np.zeros_like(decay), np.full_like(beta, 0.999), state)
    for found, want in zip(xla.delta_rule(*single(operands)), in_numpy(*operands), strict=True):
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-4)
