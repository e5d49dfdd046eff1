"""Text model of DiffusionGemma: Gemma 4's layers with experts beside the MLP, which encode text and refine canvases.

After `modeling_diffusion_gemma.py` of transformers 5.24. Encoder and decoder share their weights, but for the scalars of the
layers; the decoder's self-conditioning adds weights of its own (`models/canvas.py`).
"""

from dataclasses import replace
from typing import Any

from tilewright.models.canvas import DECODER
from tilewright.models.config import Canvas, ConfigReader
from tilewright.models.families import gemma4

LENGTH = 256
"""Canvas length of published models, for configurations that name none."""
IMPLIED = ("enable_moe_block", "attention_k_eq_v")
"""Fields of Gemma 4 that are always true here, and that configurations lack."""


def read(reader: ConfigReader) -> dict[str, Any]:
    for name in IMPLIED:
        reader.expect(name, True)
    reader.expect("tie_word_embeddings", True)
    return {**gemma4.read(reader), "canvas": Canvas(reader.integer("canvas_length"))}


def write(config: Any) -> dict[str, Any]:
    found = {name: value for name, value in gemma4.write(config).items() if name not in IMPLIED}
    return {**found, "canvas_length": config.canvas.length}


DIFFUSION_GEMMA = replace(
    gemma4.GEMMA4,
    name="diffusion_gemma_text",
    architecture="DiffusionGemmaForBlockDiffusion",
    read=read,
    write=write,
    defaults={
        **gemma4.SIZES,
        **dict.fromkeys(IMPLIED, True),
        "sliding_window": 512,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": 30.0,
        "canvas_length": LENGTH,
    },
    stored_parts=tuple((f"model.{part}", f"{DECODER}{part}") for part in ("embed_tokens", "layers", "norm")),
)
