"""Noise of draws: a number for each seed, position and token, which needs no other state.

The target draws the token with the largest sum of logit and noise at a position (the Gumbel-max rule). A drafter that uses the
noise of the same positions and tokens tends to draw the same tokens: for distributions p and q with a total variation distance
d, the two agree with a probability of at least (1 - d) / (1 + d) (Daliri, Musco and Suresh, arXiv 2408.07978); independent
draws agree with probability sum(p q). The output does not depend on the drafter, since the target draws by itself.

The bits are those of `jax.random.bits` with a Threefry key (Salmon et al., SC 2011), a token being an entry. That function
makes whole arrays, and on a CPU its hash is a loop of 40 small operations.

The noise is `-log(-log(1 - v))` with v in (0, 1) of 32 bits, as exact near 0 as float32 can be. It reaches 22.9: a token of
probability 1e-9 is drawn with its probability to within one per cent. `jax.random.gumbel` takes 23 bits and ends at 15.9:
tokens of probability 1e-7, together a hundredth of a large vocabulary, would be drawn a third as often as they should be.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32, Int32, UInt32

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(key: tuple[Array, Array], low: Array) -> tuple[Array, Array]:
    """Runs Threefry-2x32 with 20 rounds on the counters (0, `low`)."""
    first, second = key
    schedule = (first, second, first ^ second ^ np.uint32(0x1BD11BDA))
    x = schedule[0]
    y = low + schedule[1]
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
    """Returns the noise of tokens at positions of rows with these keys."""
    high, low = threefry((keys[:, :1], keys[:, 1:]), positions.astype(jnp.uint32))
    return noise((high[..., None], low[..., None]), tokens)


def noise(key: tuple[Array, Array], tokens: Array) -> Float32[Array, "*shape"]:
    """Returns the noise of tokens under a key; the two broadcast."""
    return from_bits(jnp.bitwise_xor(*threefry(key, tokens.astype(jnp.uint32))))


def from_bits(bits: UInt32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Returns the Gumbel noise of random bits, monotone in the bits, from -2.8 to 22.9."""
    # The middle of each of 2**32 intervals, since the noise is infinite at both ends. Rounding brings the last ones to 1.
    v = ((~bits).astype(jnp.float32) + 0.5) * np.float32(2**-32)
    return -jnp.log(-jnp.log1p(-jnp.minimum(v, np.float32(1 - 2**-24))))
