"""Sparse denoising attention on a CPU's vector unit; the kernel is `cpu.cc`.

Only exact queries read all values; of the changes, only changed positions are read. Queries are independent of one another.
Inputs and outputs are float32 or bfloat16, intermediate values float32.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int

from tilewright.kernels.heads.cpu import refuses_head_dim


def refuses(q: Array | jax.ShapeDtypeStruct, *rest: object) -> str:
    """Returns the reason why the kernel does not support these operands; empty if it does."""
    return refuses_head_dim(q.shape[3])


def sparse_attention(
    q: Float[Array, "B W N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    changes: Float[Array, "B C S K D"],
    lengths: Int[Array, " B"],
    kinds: Int[Array, "B W"],
    before: Float[Array, "B W _"],
) -> tuple[Float[Array, "B W _"], Float32[Array, "B W 3"]]:
    """Computes attention of a denoising step over a window; see `reference.sparse_attention`."""
    results = (jax.ShapeDtypeStruct(before.shape, before.dtype), jax.ShapeDtypeStruct((*kinds.shape, 3), jnp.float32))
    call = jax.ffi.ffi_call("tilewright_window_attention", results)
    after, statistics = call(q, k, v, changes, lengths, kinds, before)
    return after, statistics
