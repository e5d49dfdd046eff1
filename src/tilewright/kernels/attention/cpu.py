"""The operation on a CPU's vector unit; the kernel itself is `cpu.cc`.

It reads only keys that some query sees, and a query's result is the same bit for bit whatever is computed beside it.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

HEAD_MULTIPLE = 16
"""Head sizes that the kernel takes are multiples of this."""


def prefix_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    lengths: Int[Array, "B T"],
    own: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None = None,
) -> Float[Array, "B T N D"]:
    """Attention of each query over the first `lengths` entries of a cache, and over all of `own`.

    Scores and sums are float32. A query that sees nothing gets zeros.
    """
    if own is None:
        own = (k[:, :, :0], v[:, :, :0])
    call = jax.ffi.ffi_call("tilewright_attention", jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return call(q.astype(jnp.float32), k, v, lengths.astype(jnp.int32), *own).astype(q.dtype)
