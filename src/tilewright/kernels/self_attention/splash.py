"""Attention of a block over itself on a TPU, with a gradient: splash attention, as JAX ships it. Scores never reach HBM.

JAX's kernel multiplies float32 operands with fewer bits than XLA does in this package, hence bfloat16 only.

Legend: B rows of a batch, T positions, N query heads, K key/value heads, D head size.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Float

from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.operations import PLAIN_SCORES, Scores

LANES = 128
"""Positions are padded to a multiple of this."""
BLOCKS = (512, 384, 256, LANES)
"""Sizes of blocks of queries and of keys, largest first. MaxText trains with blocks of 512 on v5e and v5p."""

BLOCK_SIZES = "block_q block_kv block_kv_compute block_q_dkv block_kv_dkv block_kv_dkv_compute block_q_dq block_kv_dq".split()
"""Sizes of blocks in the three phases of the kernel, by JAX's names."""


def refuses(q: Array | jax.ShapeDtypeStruct, mask: AttentionMask, block_kv: Any, scores: Scores = PLAIN_SCORES) -> str:
    """Returns the reason why the kernel does not support these operands; empty if it does."""
    if block_kv is None or mask.form not in ("causal", "full") or mask.counts is not None or mask.shared_window:
        return "needs causal or full masks of whole sequences"
    if q.dtype != jnp.bfloat16:
        return "needs bfloat16"
    return "" if q.shape[1] >= LANES else f"needs {LANES} positions or more"


def static_mask(mask: AttentionMask, size: int) -> masks.Mask:
    """Returns the mask of `size` positions without segments."""
    causal = mask.form == "causal"
    if mask.window is not None:
        return masks.LocalMask((size, size), (mask.window - 1, 0 if causal else None), 0)
    return masks.CausalMask((size, size)) if causal else masks.FullMask((size, size))


def visible_blocks(mask: masks.Mask, block: int) -> int:
    """Counts the blocks of scores with a visible pair of positions: those that the kernel computes."""
    starts = range(0, mask.shape[0], block)
    return sum(bool(np.any(mask[slice(q, q + block), slice(k, k + block)])) for q in starts for k in starts)


def attend_block(
    q: Float[Array, "B T N D"],
    mask: AttentionMask,
    block_kv: tuple[Float[Array, "B K T D"], Float[Array, "B K T D"]],
    scores: Scores = PLAIN_SCORES,
    interpret: bool = False,
) -> Float[Array, "B T N D"]:
    """Computes `attention.xla.attend_block` for operands that `refuses` accepts.

    The name scope has the numbers of computed and of all blocks of scores, from which `perfmodel` gets the kernel's operations:
    the kernel declares none.

    Args:
        interpret: run without a TPU, slowly.
    """
    t, heads = q.shape[1:3]
    more = -t % LANES
    size = t + more
    block = next(each for each in BLOCKS if size % each == 0)

    def padded(x: Array, dim: int, value: int = 0) -> Array:
        return jnp.pad(x, [(0, more if at == dim else 0) for at in range(x.ndim)], constant_values=value)

    ids = mask.segment_ids
    if ids is None and more and mask.form == "full":
        ids = jnp.zeros(q.shape[:2], jnp.int32)
    segments = None
    if ids is not None:
        ids = padded(ids.astype(jnp.int32), 1, -1)  # padding sees itself, so that no softmax is empty
        segments = splash.SegmentIds(ids, ids)
    static = static_mask(mask, size)
    sizes: Any = dict.fromkeys(BLOCK_SIZES, block)
    kernel: Any = splash.make_splash_mha(
        masks.MultiHeadMask([static] * heads),
        block_sizes=splash.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=scores.softcap,
        interpret=interpret,
    )

    def each(q: Array, k: Array, v: Array, segments: splash.SegmentIds | None) -> Array:
        return kernel(q, k, v, segment_ids=segments, sinks=scores.sinks)

    queries = (q * scores.scale_of(q.shape[3])).swapaxes(1, 2)
    keys, values = (padded(part, 2) for part in block_kv)
    with jax.named_scope(f"splash_{visible_blocks(static, block)}_of_{(size // block) ** 2}"):
        out = jax.vmap(each)(padded(queries, 2), keys, values, segments)
    return out[:, :, :t].swapaxes(1, 2)
