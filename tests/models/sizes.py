"""Configurations of decoders on one line."""

from typing import Any

from tilewright.models.decoder import DecoderConfig

ORDER = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


def decoder_config(family: str, *sizes: int, **more: Any) -> DecoderConfig:
    """A configuration of these sizes, in the order of `ORDER`."""
    named: dict[str, Any] = dict(zip(ORDER, sizes, strict=True))
    return DecoderConfig(family=family, **named, **more)
