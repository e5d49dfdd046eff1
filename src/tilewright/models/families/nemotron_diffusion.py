"""Nemotron-Labs-Diffusion (arXiv 2607.05722): Llama's layers, trained to decode and to denoise blocks with the same weights.

Block diffusion is that of the published `modeling_nemotron_labs_diffusion.py`, `generate` with a causal context.
"""

from typing import Any

from tilewright.models.config import ConfigReader, MaskedBlocks
from tilewright.models.family import Family, full_attention, mask_token

TYPES = ("llada", "dream")
"""Values of `dlm_type`: a masked position's logits predict its own token, or as in decoding the next one."""
PARADIGMS = ("bidirectional", "block_diff", "sbd_block_diff")
"""Values of `dlm_paradigm`: forms of training, which do not change inference."""
THRESHOLD = 0.9
"""Threshold of the model card's example."""


def read(read: ConfigReader) -> dict[str, Any]:
    read.expect("sliding_window", None)
    read.choice("dlm_paradigm", PARADIGMS)
    shifted = read.choice("dlm_type", TYPES) == "dream"
    length = read.integer("block_size")
    choices: Any = {"first_token": "drawn", "plain_confidence": True, "threshold": THRESHOLD}
    blocks = MaskedBlocks(mask_token(read), length, shifted, **choices)
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
    stored_parts=(("model.", "encoder."), ("lm_head.", "diffusion_head.")),
)
