"""Gated delta rule on a TPU: XLA's in chunks, for blocks of drafts too.

Position by position, the vector unit would pass over the state once per position.
"""

from jax import Array

from tilewright.kernels.delta_rule import xla


def delta_rule(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array, by_position: bool = False
) -> tuple[Array, Array]:
    """Computes `Operations.delta_rule` in chunks, ignoring `by_position`."""
    return xla.delta_rule(q, k, v, log_decay, beta, state)
