"""Cases of sparse attention, and what they mean in NumPy float64: query by query and head by head."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.sparse_attention.reference import CARRIED, EXACT, IDLE

Operands = dict[str, jax.Array]


@dataclass(frozen=True)
class Sizes:
    """A batch of `rows`, each with `window` queries over `positions`; `group` query heads share each of `heads`."""

    rows: int
    window: int
    positions: int
    heads: int
    group: int
    d: int
    changes: int

    def draw(self, seed: int, dtype: Any = jnp.float32) -> Operands:
        """Lengths from 0 to all positions, all kinds, and changes of about half of the positions."""
        rng = np.random.default_rng(seed)
        b = self.rows
        w = self.window
        s = self.positions
        k = self.heads
        d = self.d

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        changes = normal(b, self.changes, s, k, d) * (rng.random((b, self.changes, s, 1, 1)) < 0.5)
        lengths = rng.integers(0, s + 1, b)
        lengths[0] = rng.choice([0, 1, s])
        lengths[-1] = s
        drawn = {
            "q": normal(b, w, k * self.group, d) * 2,
            "k": normal(b, s, k, d),
            "v": normal(b, s, k, d),
            "changes": changes,
            "before": normal(b, w, k * self.group * d),
        }
        kinds = rng.integers(IDLE, CARRIED + self.changes, (b, w))
        return {name: jnp.asarray(x, dtype) for name, x in drawn.items()} | {
            "lengths": jnp.asarray(lengths, jnp.int32),
            "kinds": jnp.asarray(kinds, jnp.int32),
        }


SIZES = [Sizes(1, 1, 1, 1, 1, 16, 1), Sizes(2, 7, 37, 2, 3, 16, 2), Sizes(3, 61, 50, 1, 2, 48, 2), Sizes(2, 5, 16, 3, 1, 64, 1)]


def wide(x: Any) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


def expected(case: Operands) -> tuple[np.ndarray, np.ndarray]:
    """Contexts and statistics."""
    q, k, v, changes, before = (wide(case[name]) for name in ("q", "k", "v", "changes", "before"))
    lengths = np.asarray(case["lengths"])
    kinds = np.asarray(case["kinds"])
    (b, w, n, d), group = q.shape, q.shape[2] // k.shape[2]
    after = before.reshape(b, w, n, d).copy()
    for row, at, head in np.ndindex(b, w, n):
        kind = kinds[row, at]
        is_visible = lengths[row]
        key_head = head // group
        if kind == IDLE or (is_visible == 0 and kind != EXACT):
            continue
        powers = np.exp(k[row, :is_visible, key_head] @ q[row, at, head] / math.sqrt(d))
        values = v[row, :is_visible, key_head] if kind == EXACT else changes[row, kind - CARRIED, :is_visible, key_head]
        step = powers @ values / powers.sum() if is_visible else 0.0
        after[row, at, head] = step + (0 if kind == EXACT else after[row, at, head])
    after = after.reshape(before.shape)
    return after, np.stack([(x * y).sum(-1) for x, y in ((before, after), (before, before), (after, after))], axis=-1)


def check(run: Any, case: Operands) -> None:
    """Whether an implementation gives what a case means, as exactly as its dtype can hold it."""
    found, statistics = run(**case)
    contexts, sums = expected(case)
    assert found.dtype == case["before"].dtype
    assert statistics.dtype == jnp.float32
    unit = 2.0**-7 if found.dtype == jnp.bfloat16 else 2.0**-20
    np.testing.assert_allclose(wide(found), contexts, atol=4 * unit, rtol=unit)
    norms = np.sqrt(sums[..., 1] * sums[..., 2])[..., None]
    np.testing.assert_allclose(np.asarray(statistics), sums, atol=1e-6 + 4 * unit * max(norms.max(), 1.0), rtol=2 * unit)
    idle = np.asarray(case["kinds"]) == IDLE
    np.testing.assert_array_equal(wide(found)[idle], wide(case["before"])[idle])
