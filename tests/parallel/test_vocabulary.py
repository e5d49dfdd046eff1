"""The loss over parts of the vocabulary against that over the whole one, in float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tilewright.parallel import vocabulary
from tilewright.parallel.mesh import make_mesh

ROWS = 10
HIDDEN = 16
VOCABULARY = 24


def reference(x: np.ndarray, head: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss, and its gradient by `x` and by the head."""
    logits = x.astype(np.float64) @ head
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    loss = -(weights * np.log(shares[np.arange(ROWS), labels])).sum()
    due = weights[:, None] * (shares - np.eye(VOCABULARY)[labels])
    return loss, due @ head.T, x.T @ due


@pytest.mark.parametrize("devices, rows", [(4, 10), (8, 3), (1, 4)])
def test_loss_and_gradient_are_those_of_the_whole_vocabulary(devices: int, rows: int, monkeypatch: pytest.MonkeyPatch):
    """Also where blocks of rows do not divide them."""
    monkeypatch.setattr(vocabulary, "BLOCK_BYTES", rows * 4 * VOCABULARY // devices)
    rng = np.random.default_rng(devices)
    x = rng.normal(size=(ROWS, HIDDEN)).astype(np.float32)
    head = 3 * rng.normal(size=(HIDDEN, VOCABULARY)).astype(np.float32)
    labels = rng.integers(0, VOCABULARY, ROWS).astype(np.int32)
    weights = rng.random(ROWS).astype(np.float32)

    def inside(x, head, labels, weights):
        def loss(x, head):
            return vocabulary.cross_entropy(lambda x, w: x @ w, "tp", x, head, labels, weights)

        value, (x_due, head_due) = jax.value_and_grad(loss, (0, 1))(x, head)
        return jax.lax.psum((value, loss(x, head), x_due), "tp"), head_due

    whole = PartitionSpec()
    columns = PartitionSpec(None, "tp")
    run = jax.shard_map(
        inside,
        mesh=make_mesh({"tp": devices}),
        in_specs=(whole, columns, whole, whole),
        out_specs=(whole, columns),
        check_vma=False,
    )
    (value, again, x_due), head_due = jax.jit(run)(*map(jnp.asarray, (x, head, labels, weights)))
    loss, x_wanted, head_wanted = reference(x, head, labels, weights)
    np.testing.assert_allclose([value, again], loss, rtol=1e-5)
    np.testing.assert_allclose(x_due, x_wanted, atol=1e-5 * np.abs(x_wanted).max())
    np.testing.assert_allclose(head_due, head_wanted, atol=1e-5 * np.abs(head_wanted).max())
