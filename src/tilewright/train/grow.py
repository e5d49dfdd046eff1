"""A deeper model from a shallower one: new layers that change nothing yet stand behind those that are there.

Training begins where the shallow model ended, at a third of the cost of its first tokens for three times the layers. Growing by
copies: Gong et al. 2019 (progressive stacking); that the output stays as it was: Chen et al. 2016 (Net2Net).
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.models.decoder import DecoderConfig, DecoderParams, Layer


def grow(
    config: DecoderConfig, params: DecoderParams, num_layers: int | None = None, context: int | None = None
) -> tuple[DecoderConfig, DecoderParams]:
    """A model of more layers, or of a longer context, that says what `params` say.

    Each layer is followed by copies of itself, as many as for its fellows or one more; a copy's last products, `o` and `down`,
    are zero, so that it passes its input on until training changes that.

    Args:
        num_layers: of the new model; as before by default.
        context: its longest sequence; as before by default.

    Raises:
        ValueError: there are fewer layers or a shorter context than before.
    """
    num_layers = num_layers or config.num_layers
    context = context or config.max_position_embeddings
    for what, new, old in (("layers", num_layers, config.num_layers), ("context", context, config.max_position_embeddings)):
        if new < old:
            raise ValueError(f"a model grows from {what} {old}, found {new}")
    sources = [n * config.num_layers // num_layers for n in range(num_layers)]
    layers = [
        params.layers[source] if n == 0 or sources[n - 1] != source else silent(params.layers[source])
        for n, source in enumerate(sources)
    ]
    grown = replace(config, num_layers=num_layers, max_position_embeddings=context)
    return grown, replace(params, layers=tuple(layers))


def silent(layer: Layer) -> Layer:
    """A copy of a layer that adds nothing to its input."""

    def zero(tree: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, tree)

    router = layer.router
    if router is not None and router.expert_bias is not None:
        router = replace(router, expert_bias=(router.expert_bias[0], zero(router.expert_bias[1])))
    return replace(layer, o=zero(layer.o), o_bias=zero(layer.o_bias), down=zero(layer.down), router=router)
