"""Weights of passes over a canvas: the scalars of their layers, and self-conditioning.

All other weights are those of the layers that encode finished tokens (DiffusionGemma; `modeling_diffusion_gemma.py` of
transformers 5.24).
"""

from dataclasses import dataclass, replace
from typing import Any

import jax

from tilewright.models.params import ArraySpec, matrix, norm_weight

DECODER = "model.decoder."
"""Prefix of the tensors that both kinds of passes share, and of those of passes over a canvas."""
ENCODER = "model.encoder.language_model."
"""Prefix of the tensors that only the encoder of finished tokens has: the scalars of its layers."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CanvasWeights:
    """Weights of passes over a canvas.

    Attributes:
        scalars: factor `[1]` of the residual stream after each layer, in place of the encoder's.
        norm: norm of the self-conditioning's inputs, the expected embeddings.
        gate_up, down: matrices of the self-conditioning's MLP.
    """

    scalars: tuple[Any, ...]
    norm: Any
    gate_up: tuple[Any, Any]
    down: Any


def declare_canvas(
    scalars: tuple[ArraySpec, ...], hidden: int, intermediate: int
) -> tuple[tuple[ArraySpec, ...], CanvasWeights]:
    """Declares the weights of passes over a canvas.

    Args:
        scalars: declared scalars of the layers, under the names that they have in passes over a canvas.

    Returns:
        the declared scalars of the encoder's layers, and the other weights.
    """
    encoder = tuple(replace(scalar, name=scalar.name.replace(DECODER, ENCODER, 1)) for scalar in scalars)
    prefix = f"{DECODER}self_conditioning"
    gate, up = (matrix(f"{prefix}.{name}_proj.weight", hidden, intermediate, ("hidden", "mlp")) for name in ("gate", "up"))
    down = matrix(f"{prefix}.down_proj.weight", intermediate, hidden, ("mlp", "hidden"))
    return encoder, CanvasWeights(scalars, norm_weight(f"{prefix}.pre_norm.weight", hidden), (gate, up), down)
