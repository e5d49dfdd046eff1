"""The auto-sharded train step (GSPMD): it says where arrays lie, and the partitioner adds the collectives.

The same model, mesh and partitions as `sharded.py` has, without its order of collectives: what others are compared with. Layers
run again in the backward pass from the stream before each, as `FullyShardedPlan.remat` has it for each half.

Legend: B sequences of a batch, T positions, H hidden size.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from tilewright.models import decoder
from tilewright.models.stack import SingleDevice
from tilewright.parallel.sharding import GROUPED_AXES
from tilewright.train.sharded import DATA, Gradient, ShardedSetup


@dataclass(frozen=True)
class Annotated(SingleDevice):
    """The plain schedule, whose stream is divided along its sequences and positions between the halves of layers."""

    mesh: Mesh

    def placed(self, x: Float[Array, "B T H"], positions: Any = GROUPED_AXES) -> Float[Array, "B T H"]:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(DATA, positions)))

    def run(
        self, stack: Any, x: Float[Array, "B T H"], rows: Any, kept: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        """See `models.stack.Schedule.run`; without taps, and keeping nothing."""

        def run_layer(n: int, layer: Any, x: Array) -> Array:
            ops = stack.ops
            with jax.named_scope(f"layer_{n}/attention"):
                out, _ = stack.attend(ops, layer, stack.project(ops, layer, x), rows, None)
                x = self.placed(x + stack.summed(ops, layer, "attention", stack.output(ops, layer, out)))
            with jax.named_scope(f"layer_{n}/mlp"):
                return self.placed(x + stack.summed(ops, layer, "mlp", stack.mlp(ops, layer, x)))

        x = self.placed(x)
        for n, layer in enumerate(stack.layers):
            x = jax.checkpoint(partial(run_layer, n))(layer, x)
        return x, (), kept


def annotated_loss(setup: ShardedSetup, params: Any, tokens: Array, in_loss: Array) -> Float[Array, ""]:
    """The mean loss of a batch, as `lm.next_token_loss` has it."""
    config = setup.config
    schedule = Annotated(setup.mesh)
    cast = jax.tree.map(lambda w: w.astype(setup.plan.dtype), params)
    hidden = decoder.forward_full(config, setup.ops, cast, tokens[:, :-1], schedule=schedule).hidden
    logits = decoder.logits(config, setup.ops, cast, schedule.placed(hidden, None))
    weights = in_loss[:, 1:].astype(jnp.float32)
    own = tokens[:, 1:, None] == jnp.arange(logits.shape[-1])
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(own, logits, 0.0), axis=-1)
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def annotated_gradient(setup: ShardedSetup) -> Gradient:
    """Loss and gradient for `sharded.jitted_step`, of `annotated_loss`; of the setup's plan only the dtype counts."""
    return jax.value_and_grad(partial(annotated_loss, setup))
