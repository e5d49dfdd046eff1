"""Attention of a block over itself on an NVIDIA GPU, with a gradient: cuDNN's fused attention. Scores never reach its
memory.

Legend: B rows of a batch, T positions, N query heads, K key/value heads, D head size.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.operations import PLAIN_SCORES, Scores

LARGEST_HEAD = 128
"""Largest head size on all GPUs with the kernel."""


def refuses(q: Array | jax.ShapeDtypeStruct, mask: AttentionMask, block_kv: Any, scores: Scores = PLAIN_SCORES) -> str:
    """Returns the reason why the kernel does not support these operands; empty if it does."""
    plain = mask.segment_ids is None and mask.counts is None and not mask.shared_window
    if block_kv is None or not plain or not (mask.form == "causal" or (mask.form == "full" and mask.window is None)):
        return "needs causal masks, or full ones without a window, of sequences with one segment"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return "needs bfloat16 or float16"
    if q.shape[3] > LARGEST_HEAD or q.shape[3] % 8:
        return f"needs head sizes up to {LARGEST_HEAD} that 8 divides"
    return "" if scores.plain else "needs scores without softcap and sinks"


def attend_block(
    q: Float[Array, "B T N D"],
    mask: AttentionMask,
    block_kv: tuple[Float[Array, "B K T D"], Float[Array, "B K T D"]],
    scores: Scores = PLAIN_SCORES,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B T N D"]:
    """Computes `attention.xla.attend_block` for operands that `refuses` accepts.

    Args:
        implementation: "xla" runs JAX's own operations, for tests without a GPU.
    """
    k, v = (part.swapaxes(1, 2) for part in block_kv)
    window = None if mask.window is None else (mask.window - 1, 0)
    rules = {"scale": scores.scale_of(q.shape[3]), "is_causal": mask.form == "causal", "local_window_size": window}
    return jax.nn.dot_product_attention(q, k, v, implementation=implementation, **rules)
