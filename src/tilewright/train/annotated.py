"""Auto-sharded train step (GSPMD): sharding constraints place the arrays, and XLA's partitioner inserts the collectives.

Model, mesh and partitions are those of `sharded.py`; the order of collectives is XLA's. It is the baseline for comparisons. The
backward pass recomputes each layer from its input (`FullyShardedPlan.remat` recomputes each half).

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
    """Single-device schedule with a residual stream that is sharded along sequences and positions between sublayers."""

    mesh: Mesh

    def placed(self, x: Float[Array, "B T H"], positions: Any = GROUPED_AXES) -> Float[Array, "B T H"]:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(DATA, positions)))

    def run(
        self, stack: Any, x: Float[Array, "B T H"], rows: Any, caches: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        """Runs the layers; see `models.stack.Strategy.run`. Returns no taps, and `caches` unchanged."""

        def run_layer(n: int, layer: Any, x: Array) -> Array:
            ops = stack.ops
            with jax.named_scope(f"layer_{n}/attention"):
                out, _ = stack.attend(ops, layer, stack.project(ops, layer, x), rows, None)
                x = self.placed(x + stack.post_reduce(ops, layer, "attention", stack.output(ops, layer, out)))
            with jax.named_scope(f"layer_{n}/mlp"):
                return self.placed(x + stack.post_reduce(ops, layer, "mlp", stack.mlp(ops, layer, x)))

        x = self.placed(x)
        for n, layer in enumerate(stack.layers):
            x = jax.checkpoint(partial(run_layer, n))(layer, x)
        return x, (), caches


def annotated_loss(setup: ShardedSetup, params: Any, tokens: Array, in_loss: Array) -> Float[Array, ""]:
    """Computes the mean loss of a batch, equal to `lm.next_token_loss`."""
    config = setup.config
    schedule = Annotated(setup.mesh)
    cast = jax.tree.map(lambda w: w.astype(setup.plan.dtype), params)
    hidden = decoder.forward_full(config, setup.ops, cast, tokens[:, :-1], schedule=schedule).hidden
    logits = decoder.logits(config, setup.ops, cast, schedule.placed(hidden, None))
    weights = in_loss[:, 1:].astype(jnp.float32)
    is_label = tokens[:, 1:, None] == jnp.arange(logits.shape[-1])
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def annotated_gradient(setup: ShardedSetup) -> Gradient:
    """Returns the gradient function of `annotated_loss` for `sharded.jitted_step`; of the plan only `dtype` applies."""
    return jax.value_and_grad(partial(annotated_loss, setup))
