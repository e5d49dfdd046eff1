"""The loss that balances the experts of a mixture: what routers note, on one device and over a mesh.

`models/experts.py` has the formula, which sees the rows of all layers as one batch.
"""

from collections.abc import Callable
from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from tilewright.kernels.operations import Operations
from tilewright.models.decoder import DecoderConfig
from tilewright.models.experts import Mixture, RouterLoad, balancing_loss, router_load
from tilewright.parallel.experts import watched
from tilewright.parallel.sharding import GROUPED_AXES


def balanced(config: DecoderConfig) -> Mixture | None:
    """The mixture that training balances; None where there is none, or the loss for it has no weight."""
    return config.mixture if config.balance else None


class Loads:
    """The loads that the routers of a model note while a loss is traced.

    Attributes:
        ops: operations that note them.
    """

    def __init__(self, config: DecoderConfig, ops: Operations):
        self.config = config
        self.noted = list[RouterLoad]()
        mixture = balanced(config)
        self.ops = ops if mixture is None else watched(ops, lambda scores: self.noted.append(router_load(mixture, scores)))

    def loss(self) -> Float[Array, ""]:
        """The balancing loss times its weight; 0 where nothing is balanced."""
        if (mixture := balanced(self.config)) is None:
            return jnp.float32(0)
        return self.config.balance * balancing_loss(mixture, reduce(partial(jax.tree.map, add), self.noted))


def watching(config: DecoderConfig) -> tuple[Any, ...]:
    """The load of no rows, and what notes that of some: for `fully_sharded.run_layers`; empty where nothing is balanced."""
    if (mixture := balanced(config)) is None:
        return ()
    return RouterLoad(*(jnp.zeros(mixture.experts, jnp.float32) for _ in range(2))), partial(noted_load, mixture)


def noted_load(mixture: Mixture, ops: Operations, note: Callable[[RouterLoad], None]) -> Operations:
    """Operations that note the load that routers make; of rows that all devices of `GROUPED_AXES` have, a part each."""

    def part(scores: Array) -> None:
        load = router_load(mixture, scores)
        devices = jax.lax.axis_size(GROUPED_AXES)
        note(jax.tree.map(lambda each: each / devices, load))

    return watched(ops, part)


def own_share(config: DecoderConfig, load: Any, axes: tuple[str, ...]) -> Float[Array, ""]:
    """A device's share of the balancing loss times its weight, of what all devices of a mesh noted (see `watching`)."""
    if (mixture := balanced(config)) is None:
        return jnp.float32(0)
    whole = balancing_loss(mixture, jax.tree.map(lambda each: jax.lax.psum(each, axes), load))
    return config.balance / jax.lax.axis_size(axes) * whole
