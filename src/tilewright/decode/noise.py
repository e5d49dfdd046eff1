"""The noise of draws: for each seed, position and token one number, which anyone can compute by itself.

What a target draws at a position is the largest of its logits with this noise (the Gumbel-max rule). A drafter that draws with
the noise of the same position and tokens tends to draw the same: of distributions p and q with a total variation distance d the
two agree with a chance of at least (1 - d) / (1 + d) (Daliri, Musco and Suresh, arXiv 2408.07978); independent draws agree with
the sum of p q. The output does not depend on it: the target draws by itself, whatever was drafted.

The numbers are those of `jax.random.gumbel` with a Threefry key (Salmon et al., SC 2011), a token being an entry. That function
gives an array as a whole; and on a CPU the hash is a loop there, of 40 small operations in turns.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32, Int32, UInt32

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(key: tuple[Array, Array], low: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds of the counters (0, `low`)."""
    first, second = key
    schedule = (first, second, first ^ second ^ np.uint32(0x1BD11BDA))
    x, y = schedule[0], low + schedule[1]
    for group in range(5):
        for bits in ROTATIONS[group % 2]:
            x = x + y
            y = x ^ (y << bits | y >> 32 - bits)
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


def gumbel(
    keys: UInt32[Array, "B 2"], positions: Int32[Array, "B T"], tokens: Int32[Array, "#B #T K"]
) -> Float32[Array, "B T K"]:
    """The noise of these tokens at these positions of rows with these keys."""
    row = (keys[:, :1], keys[:, 1:])
    high, low = threefry(row, positions.astype(jnp.uint32))
    bits = jnp.bitwise_xor(*threefry((high[..., None], low[..., None]), tokens.astype(jnp.uint32)))
    below_one = jax.lax.bitcast_convert_type(bits >> 9 | np.uint32(0x3F800000), jnp.float32) - 1
    return -jnp.log(-jnp.log(jnp.maximum(below_one, jnp.finfo(jnp.float32).tiny)))
