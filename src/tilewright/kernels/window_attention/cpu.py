"""The operation on a CPU's vector unit; the kernel itself is `cpu.cc`.

Only exact queries meet all values; of the changes only the positions that changed are read. A query's result depends on no
other.
Float32 or bfloat16, in and out; everything between is float32.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int

from tilewright.kernels.attention.cpu import refuses as refuses


def window_attention(
    q: Float[Array, "B W N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    changes: Float[Array, "B C S K D"],
    lengths: Int[Array, " B"],
    kinds: Int[Array, "B W"],
    before: Float[Array, "B W _"],
) -> tuple[Float[Array, "B W _"], Float32[Array, "B W 3"]]:
    """Attention of a denoising step over a window, on the CPU's vector unit; see `reference.window_attention`."""
    results = (jax.ShapeDtypeStruct(before.shape, before.dtype), jax.ShapeDtypeStruct((*kinds.shape, 3), jnp.float32))
    call = jax.ffi.ffi_call("tilewright_window_attention", results)
    after, statistics = call(q, k, v, changes, lengths, kinds, before)
    return after, statistics
