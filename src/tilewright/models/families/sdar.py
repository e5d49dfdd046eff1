"""SDAR and its mixtures of experts (arXiv 2510.06303): Qwen3's layers, whose blocks are denoised one after the other."""

from dataclasses import replace
from typing import Any

from tilewright.models.config import ConfigReader, MaskedBlocks
from tilewright.models.families.qwen import QWEN3, QWEN3_MOE
from tilewright.models.family import Family, Reads, full_attention, mask_token

MASK = 151669
"""Mask token of published models, for configurations that name none."""
LENGTH = 4
"""Block length of published models without a number in their name."""


def with_blocks(family: Family, name: str, architecture: str) -> Family:
    """Returns a family with the layers of another one, whose models denoise blocks."""
    layers: Reads = family.read

    def read(read: ConfigReader) -> dict[str, Any]:
        blocks = MaskedBlocks(mask_token(read), read.integer("block_size"), causal=False)
        return {"masked_blocks": blocks, **layers(read), **full_attention(read)}

    def write(config: Any) -> dict[str, Any]:
        blocks = config.masked_blocks
        return {**family.write(config), "mask_token_id": blocks.mask_token_id, "block_size": blocks.length}

    defaults = {**family.defaults, "mask_token_id": MASK, "block_size": LENGTH}
    return replace(family, name=name, architecture=architecture, read=read, write=write, defaults=defaults, gguf=None)


SDAR = with_blocks(QWEN3, "sdar", "SDARForCausalLM")
SDAR_MOE = with_blocks(QWEN3_MOE, "sdar_moe", "SDARMoeForCausalLM")
