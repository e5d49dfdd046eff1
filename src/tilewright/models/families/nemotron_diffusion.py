"""Nemotron-Labs-Diffusion (arXiv 2607.05722): Llama's layers, trained to decode and to denoise blocks with the same weights."""

from typing import Any

from tilewright.models.config import ConfigReader, MaskedBlocks
from tilewright.models.family import Family, full_attention, mask_token

TYPES = ("llada", "dream")
"""Values of `dlm_type`: a masked position's logits predict its own token, or as in decoding the next one."""
PARADIGMS = ("bidirectional", "block_diff", "sbd_block_diff")
"""Values of `dlm_paradigm`: forms of training, which do not change inference."""


def read(read: ConfigReader) -> dict[str, Any]:
    read.expect("sliding_window", None)
    read.choice("dlm_paradigm", PARADIGMS)
    shifted = read.choice("dlm_type", TYPES) == "dream"
    blocks = MaskedBlocks(mask_token(read), read.integer("block_size"), shifted)
    return {"masked_blocks": blocks, **full_attention(read)}


def write(config: Any) -> dict[str, Any]:
    blocks = config.masked_blocks
    return {"mask_token_id": blocks.mask_token_id, "block_size": blocks.length, "dlm_type": TYPES[blocks.shifted]}


NEMOTRON_DIFFUSION = Family(
    name="nemotron_labs_diffusion",
    architecture="NemotronLabsDiffusionModel",
    read=read,
    write=write,
    defaults={"dlm_paradigm": PARADIGMS[0], "dlm_type": TYPES[0], "block_size": 32, "rope_theta": 1e6},
    stored_prefixes=(("model.", "encoder."), ("lm_head.", "diffusion_head.")),
)
