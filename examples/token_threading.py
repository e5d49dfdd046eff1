"""Token threading in a model of one's own: weights gathered a layer ahead, and not before.

Eight devices of a CPU stand for a mesh of four "fsdp" by two "tp". Each layer's weights are gathered over "fsdp" while the
layer before it is computed; `parallel/tokens.py` keeps the compiler from gathering them all at once or each too late.

    python examples/token_threading.py
"""

import os
import re

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tilewright.parallel import tokens
from tilewright.parallel.mesh import make_mesh

LAYERS = 4
WIDTH = 64
ROWS = 16


def loss(layers: list[jax.Array], x: jax.Array) -> jax.Array:
    """Computes the loss of one device's rows. Rows of the weights are sharded over "fsdp", columns over "tp"."""

    def gather(layer: int, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        shard = layers[layer]
        return tokens.thread(token, jax.lax.all_gather, shard, "fsdp", tiled=True, kind="fsdp_all_gather", stream=1)

    w, token = gather(0, tokens.new_token())
    for layer in range(LAYERS):
        x, token = tokens.done(x, token)  # the next weights are not gathered before this layer has its input
        ahead, token = gather(layer + 1, token) if layer + 1 < LAYERS else (w, token)
        y = jax.nn.silu(x @ w)
        y, token = tokens.thread(token, jax.lax.all_gather, y, "tp", axis=1, tiled=True, kind="tp_all_gather")
        x = x + y
        w = ahead
    return jax.lax.pmean(jnp.mean(x**2), "fsdp")


def main() -> None:
    mesh = make_mesh({"fsdp": 4, "tp": 2})
    parts = (P("fsdp", "tp"), P("fsdp"))
    step = jax.jit(jax.value_and_grad(jax.shard_map(loss, mesh=mesh, in_specs=parts, out_specs=P(), check_vma=False)))
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    layers = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys[1:]]
    x = jax.random.normal(keys[0], (ROWS, WIDTH))
    value, gradient = step(layers, x)
    print(f"loss {value:.4f}, gradient of {len(gradient)} matrices")
    hlo = step.lower(layers, x).compile().as_text() or ""
    for line in re.findall(r" (all-gather|reduce-scatter)\(.*?collective_type=\"(\w+)\",stream_id=\"(\d)\"", hlo):
        print("{:15} {:16} stream {}".format(*line))


if __name__ == "__main__":
    main()
