"""Adds layers to a trained model without changing its outputs.

Training continues from the loss of the shallow model, whose tokens cost less. Sources: copied layers, Gong et al. 2019
(progressive stacking); unchanged outputs, Chen et al. 2016 (Net2Net).
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.models.decoder import DecoderConfig, DecoderParams, Layer


def grow(
    config: DecoderConfig, params: DecoderParams, num_layers: int | None = None, context: int | None = None
) -> tuple[DecoderConfig, DecoderParams]:
    """Adds layers or context to a model without changing its outputs.

    Copies follow each layer, evenly distributed. The output matrices `o` and `down` of a copy are zero, so that the copy passes
    its input on.

    Args:
        config: configuration of the model.
        params: parameters of the model.
        num_layers: layers of the new model; by default unchanged.
        context: longest sequence of the new model; by default unchanged.

    Raises:
        ValueError: the new model has fewer layers or a shorter context.
    """
    num_layers = num_layers or config.num_layers
    context = context or config.max_position_embeddings
    for label, new, old in (("layers", num_layers, config.num_layers), ("context", context, config.max_position_embeddings)):
        if new < old:
            raise ValueError(f"expected {label} of at least the model's {old}, found {new}")
    sources = [n * config.num_layers // num_layers for n in range(num_layers)]
    layers = [
        params.layers[source] if n == 0 or sources[n - 1] != source else identity_copy(params.layers[source])
        for n, source in enumerate(sources)
    ]
    grown = replace(config, num_layers=num_layers, max_position_embeddings=context)
    return grown, replace(params, layers=tuple(layers))


def identity_copy(layer: Layer) -> Layer:
    """Copies a layer with zero output matrices, so that the copy adds nothing to its input."""

    def zero(tree: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, tree)

    router = layer.router
    if router is not None and router.expert_bias is not None:
        router = replace(router, expert_bias=(router.expert_bias[0], zero(router.expert_bias[1])))
    beside = None if layer.beside is None else replace(layer.beside, down=zero(layer.beside.down))
    scalar = None if layer.scalar is None else jnp.ones_like(layer.scalar)
    copy = replace(layer, o=zero(layer.o), o_bias=zero(layer.o_bias), down=zero(layer.down), router=router)
    return replace(copy, beside=beside, scalar=scalar)
