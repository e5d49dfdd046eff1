"""Training with the CPU kernels: products in bfloat16 with float32 sums, forward and backward, of weights that stay float32."""

from dataclasses import replace
from typing import Any

import jax

from tilewright.kernels import native
from tilewright.kernels.linear.cpu import TrainedMatrix
from tilewright.models import decoder
from tilewright.models.decoder import DecoderParams
from tilewright.models.eagle3 import Eagle3Params


def check_products(products: str) -> None:
    """Raises a `ValueError` if a training run cannot multiply so."""
    if products not in ("float32", "bfloat16"):
        raise ValueError(f"expected products in float32 or bfloat16, found {products!r}")
    if products == "bfloat16" and native.kernels().isa is None:
        raise ValueError(f"products in bfloat16 need the CPU kernels: {native.kernels().reason}")


def fastest_products() -> str:
    """The products that this machine trains fastest with."""
    return "float32" if native.kernels().isa is None else "bfloat16"


def trained(params: Any) -> Any:
    """Parameters, or a tree with such in it, with every matrix but an embedding as a `TrainedMatrix`.

    The output head of a tied model becomes a matrix of its own, so that its gradient reaches the embedding through it.
    """

    def has_embedding(tree: Any) -> bool:
        return isinstance(tree, DecoderParams | Eagle3Params)

    def wrap(tree: Any) -> Any:
        if not has_embedding(tree):
            return TrainedMatrix(tree) if tree.ndim == 2 else tree
        if isinstance(tree, DecoderParams):
            tree = replace(tree, head=decoder.output_head(tree))
        return replace(jax.tree.map(wrap, replace(tree, embed=None)), embed=tree.embed)

    return jax.tree.map(wrap, params, is_leaf=has_embedding)
