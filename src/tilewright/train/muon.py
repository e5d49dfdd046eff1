"""Muon optimizer for matrices (Jordan et al. 2024), with the matrix products of the training's operations.

An update is the momentum with its singular values brought near 1 by five Newton-Schulz iterations. Their products cost as much
as the loss of a small batch. The products have the dtype of the training's operations: bfloat16 as in the paper, or float32,
which gives the updates of `optax.contrib.muon`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float

from tilewright.kernels.operations import Operations

BETA = 0.95
STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x³ and x⁵ in a Newton-Schulz iteration on the singular values."""


class MuonState(NamedTuple):
    """State of Muon.

    Attributes:
        steps: number of steps, int32.
        momentum: moving averages of the gradients.
    """

    steps: Array
    momentum: Any


def near_orthogonal(ops: Operations, x: Float[Array, "M N"]) -> Float[Array, "M N"]:
    """Brings the singular values of a matrix near 1: between 0.7 and 1.2, except tiny ones."""
    if x.shape[0] > x.shape[1]:
        return near_orthogonal(ops, x.T).T
    x, (first, third, fifth) = x / (jnp.linalg.norm(x) + 1e-8), COEFFICIENTS
    for _ in range(STEPS):
        square = ops.linear(x, x.T, jnp.float32)
        x = ops.linear(ops.linear(fifth * square, square, jnp.float32, add=third * square), x, jnp.float32, add=first * x)
    return x


def muon(rate: optax.ScalarOrSchedule, weight_decay: float, ops: Operations) -> optax.GradientTransformation:
    """Returns Muon with Nesterov momentum; all parameters must be matrices.

    Args:
        rate: learning rate.
        weight_decay: decoupled weight decay.
        ops: operations with the `linear` for the products.
    """

    def init(params: Any) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        steps = state.steps + 1
        momentum = optax.tree.update_moment(updates, state.momentum, BETA, 1)
        ahead = optax.tree.bias_correction(momentum, BETA, steps + 1)
        now = optax.tree.bias_correction(updates, BETA, steps)

        def change(ahead: Array, now: Array) -> Array:
            x = near_orthogonal(ops, BETA * ahead + (1 - BETA) * now)
            return x * max(1.0, x.shape[1] / x.shape[0]) ** 0.5

        return jax.tree.map(change, ahead, now), MuonState(steps, momentum)

    transformation = optax.GradientTransformation(init, update)
    return optax.chain(transformation, optax.add_decayed_weights(weight_decay), optax.scale_by_learning_rate(rate))
