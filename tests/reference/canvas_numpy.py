"""Reference of DiffusionGemma in NumPy float64, which tests compare with the engine.

Layers and the loop are written from `modeling_diffusion_gemma.py` and `generation_diffusion_gemma.py` of transformers 5.24,
whose names of tensors and options they have. There are no caches: every pass starts again from the tokens. Random numbers are
given. The text ends with an end-of-sequence token, or at its length limit; the published loop pads or completes the canvas.

Legend: n tokens, T positions of a canvas, H hidden, E experts, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np

from reference.dflash_numpy import Array
from reference.sampling_numpy import gumbel_of


def randomness(seed: int, vocab: int, positions: int, passes: int) -> tuple[Array, Array]:
    """Gumbel noise `[passes, positions, V]` and random tokens `[passes, positions]`: functions of seed, position and pass."""

    def of_one(step: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), step)
        token = jax.random.randint(jax.random.fold_in(key, 1), (), 0, vocab, jnp.int32)
        return jax.random.bits(key, (vocab,), jnp.uint32), token

    bits, tokens = jax.jit(jax.vmap(jax.vmap(of_one, (None, 0)), (0, None)))(jnp.arange(passes), jnp.arange(positions))
    return gumbel_of(np.asarray(bits)), np.asarray(tokens)
