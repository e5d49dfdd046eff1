"""Fast-dLLM v2 (arXiv 2509.26328): Qwen2.5's layers, whose blocks are denoised one after the other, a small block at a time.

Generation is that of the published `modeling.py`, `generate` without the cache of small blocks, which is an approximation.
"""

from dataclasses import replace
from typing import Any

from tilewright.models.config import ConfigReader, MaskedBlocks
from tilewright.models.families.qwen import QWEN2
from tilewright.models.family import full_attention, mask_token

DEFAULTS: dict[str, Any] = {"mask_token_id": 151665, "bd_size": 32, "eos_token_id": 151645}
"""Tokens and block length of the published code, for configurations that name none."""
PUBLISHED: dict[str, Any] = {"shifted": True, "causal": False, "first_token": "likely", "threshold": 0.9, "small_length": 8}
"""Form of the blocks, and the options of the model card's example."""


def read(read: ConfigReader) -> dict[str, Any]:
    return {"masked_blocks": MaskedBlocks(mask_token(read), read.integer("bd_size"), **PUBLISHED), **full_attention(read)}


def write(config: Any) -> dict[str, Any]:
    blocks = config.masked_blocks
    return {"mask_token_id": blocks.mask_token_id, "bd_size": blocks.length}


FAST_DLLM = replace(
    QWEN2,
    name="Fast_dLLM_Qwen",
    architecture="Fast_dLLM_QwenForCausalLM",
    read=read,
    write=write,
    defaults=DEFAULTS,
    gguf=None,
)
