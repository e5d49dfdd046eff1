"""SmolLM3 (Hugging Face 2025): Llama's layers, some without rotary embedding (NoPE, arXiv 2501.18795)."""

from typing import Any

from tilewright.models.config import ConfigReader
from tilewright.models.family import Family, full_attention

INTERVAL = 4
"""Default period of layers without rotary embedding."""


def read(read: ConfigReader) -> dict[str, Any]:
    layers = read.integer("num_hidden_layers")
    listed = read.fields.get("no_rope_layers")
    if listed is None:
        every = read.integer("no_rope_layer_interval", default=INTERVAL)
        listed = [int((n + 1) % every != 0) for n in range(layers)]
    good = isinstance(listed, list) and len(listed) >= layers and all(flag in (0, 1) for flag in listed)
    read.require(good, f"no_rope_layers must have a 0 (no rotation) or a 1 for each layer, found {listed!r}")
    unrotated = tuple(n for n in range(layers) if not listed[n]) if good else ()
    return {"unrotated_layers": unrotated, **full_attention(read)}


def write(config: Any) -> dict[str, Any]:
    return {"no_rope_layers": [int(n not in config.unrotated_layers) for n in range(config.num_layers)]}


SMOLLM3 = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    read=read,
    write=write,
    defaults={"tie_word_embeddings": True, "rope_theta": 2e6},
    gguf="smollm3",
    pairwise=True,
)
