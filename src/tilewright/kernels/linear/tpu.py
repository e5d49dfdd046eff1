"""Linear layers on a TPU: XLA's, with a Pallas kernel for block-quantised matrices, and single rows for the matrix unit."""

from functools import partial
from typing import Any

from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from tilewright.kernels.cross_entropy import xla as loss_xla
from tilewright.kernels.head_argmax import xla as argmax_xla
from tilewright.kernels.head_top_k import xla as top_k_xla
from tilewright.kernels.linear import xla
from tilewright.kernels.linear.scaled import ScaledMatrix
from tilewright.kernels.registry import first


def product(x: Float[Array, "*rows I"], w: Any, out_dtype: DTypeLike | None = None) -> Float[Array, "*rows O"]:
    """Computes `x @ w` with the fastest implementation."""
    if isinstance(w, ScaledMatrix) and w.in_blocks:
        return first("product", "tpu", x, w).product(x, w, out_dtype)
    return xla.tpu_product(x, w, out_dtype)


linear = partial(xla.linear, product=product)
gated_linear = partial(xla.gated_linear, product=product)
project = partial(xla.project, product=product)
cross_entropy = partial(loss_xla.cross_entropy, linear=linear)
head_argmax = partial(argmax_xla.head_argmax, product=product)
head_top_k = partial(top_k_xla.head_top_k, product=product)
