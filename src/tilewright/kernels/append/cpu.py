"""The operation on a CPU; the kernel itself is `cpu.cc`.

XLA:CPU has no updates of bfloat16: it converts the whole cache to float32, and back, to write a few entries.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, Shaped


def append(
    cache: Shaped[Array, "B K S D"], new: Shaped[Array, "B K T D"], start: Int[Array, " B"], count: Int[Array, " B"]
) -> Shaped[Array, "B K S D"]:
    """Writes new entries of each row into a cache, in place if nothing else reads it afterwards; see `xla.append`."""
    call = jax.ffi.ffi_call("tilewright_append", jax.ShapeDtypeStruct(cache.shape, cache.dtype), input_output_aliases={0: 0})
    return call(cache, new, start.astype(jnp.int32), count.astype(jnp.int32))
