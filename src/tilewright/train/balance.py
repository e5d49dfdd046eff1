"""Balancing loss of a mixture of experts, on one device and over a mesh.

`models/experts.py` has the formula. It treats the tokens of all layers as one batch.
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
from tilewright.parallel.experts import with_router_callback
from tilewright.parallel.sharding import GROUPED_AXES


def balanced(config: DecoderConfig) -> Mixture | None:
    """Returns the mixture to balance; None without experts, or if the balancing loss has no weight."""
    return config.mixture if config.balance else None


class Loads:
    """Collects the loads of a model's routers while a loss is traced.

    Attributes:
        ops: operations that record the loads.
    """

    def __init__(self, config: DecoderConfig, ops: Operations):
        self.config = config
        self.recorded = list[RouterLoad]()
        mixture = balanced(config)
        self.ops = (
            ops
            if mixture is None
            else with_router_callback(ops, lambda scores: self.recorded.append(router_load(mixture, scores)))
        )

    def loss(self) -> Float[Array, ""]:
        """Returns the weighted balancing loss; 0 without a mixture to balance."""
        if (mixture := balanced(self.config)) is None:
            return jnp.float32(0)
        return self.config.balance * balancing_loss(mixture, reduce(partial(jax.tree.map, add), self.recorded))


def watching(config: DecoderConfig) -> tuple[Any, ...]:
    """Returns a zero load and the recorder of loads, for `fully_sharded.run_layers`; empty without a mixture to balance."""
    if (mixture := balanced(config)) is None:
        return ()
    return RouterLoad(*(jnp.zeros(mixture.experts, jnp.float32) for _ in range(2))), partial(recording_ops, mixture)


def recording_ops(mixture: Mixture, ops: Operations, record: Callable[[RouterLoad], None]) -> Operations:
    """Returns operations that record router loads, divided by the devices of `GROUPED_AXES`, which see the same tokens."""

    def part(scores: Array) -> None:
        load = router_load(mixture, scores)
        devices = jax.lax.axis_size(GROUPED_AXES)
        record(jax.tree.map(lambda each: each / devices, load))

    return with_router_callback(ops, part)


def local_share(config: DecoderConfig, load: Any, axes: tuple[str, ...]) -> Float[Array, ""]:
    """Returns a device's share of the weighted balancing loss of all devices; `load` is recorded as in `watching`."""
    if (mixture := balanced(config)) is None:
        return jnp.float32(0)
    loss = balancing_loss(mixture, jax.tree.map(lambda each: jax.lax.psum(each, axes), load))
    return config.balance / jax.lax.axis_size(axes) * loss
