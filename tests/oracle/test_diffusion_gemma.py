"""DiffusionGemma against transformers: logits of both kinds of passes, and tokens of the published generation loop.

Weights are random, and files are those that transformers saves. The loop's random numbers are replaced by the engine's, which
are a function of the seed, the position and the pass; so tokens have to be equal.
"""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llm.support import prompts
from reference.canvas_numpy import randomness
from reference.self_speculation_numpy import write_words
from tilewright.diffusion.canvas import CanvasDenoising
from tilewright.llm.language_model import LanguageModel, load
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

SEED = int(os.environ.get("ORACLE_SEED", secrets.randbelow(2**31)))
TOLERANCE = 1e-4
VOCAB = 64
EOS = 5
WINDOW = 12
TABLE = ShapeTable(batches=(8,), capacities=(128,), chunks=(32,))
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "sliding_window": WINDOW,
    "max_position_embeddings": 256,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "eos_token_id": EOS,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def torch_model(seed: int, length: int) -> Any:
    """Makes a DiffusionGemma with random weights, norms and scalars, and canvases of a length."""
    config = transformers.DiffusionGemmaConfig(
        text_config=transformers.DiffusionGemmaTextConfig(**SIZES),
        vision_config=transformers.Gemma4VisionConfig(**VISION),
        canvas_length=length,
    )
    config._experts_implementation = "eager"
    model = transformers.DiffusionGemmaForBlockDiffusion(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if "vision" in name or "rotary" in name or "embed_scale" in name:
                continue
            drawn = torch.randn(weight.shape, generator=generator)
            if "layer_scalar" in name:
                weight.copy_(0.8 + 0.3 * torch.rand(weight.shape, generator=generator))
            elif weight.ndim == 1:
                weight.copy_(1.0 + 0.3 * drawn)
            else:
                weight.copy_(drawn * (0.6 if "embed" in name else weight.shape[-1] ** -0.5))
    return model.eval()


def loaded(folder: Path, model: Any) -> LanguageModel:
    model.save_pretrained(folder)
    write_words(folder, VOCAB)
    return load(folder, table=TABLE, dtype="float32")


@contextmanager
def drawing_as_engine(seed: int, start: int, length: int) -> Iterator[None]:
    """Replaces the random numbers of the published loop for one prompt of `start` tokens."""
    place = {"canvas": -1, "canvases": 0, "passes": 0}
    noise, tokens = randomness(seed, VOCAB)

    def positions() -> slice:
        first = start + length * place["canvas"]
        return slice(first, first + length)

    def initialize_canvas(self: Any, batch_size: int, device: Any) -> Any:
        assert batch_size == 1
        if place["passes"] < 0:
            place["canvas"] += 1
            place["passes"] = 0
        return torch.from_numpy(tokens[place["passes"], positions()][None].astype(np.int64))

    def multinomial(p: Any, num_samples: int) -> Any:
        found = torch.log(p.double()) + torch.from_numpy(noise[place["passes"], positions()])
        place["passes"] += 1
        return torch.argmax(found, dim=-1, keepdim=True)

    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSampler

    prepare = transformers.DiffusionGemmaForBlockDiffusion._prepare_denoiser_inputs

    def prepare_denoiser_inputs(self: Any, **arguments: Any) -> Any:
        place["passes"] = -1
        return prepare(self, **arguments)

    with (
        patch.object(EntropyBoundSampler, "initialize_canvas", initialize_canvas),
        patch.object(torch, "multinomial", multinomial),
        patch.object(transformers.DiffusionGemmaForBlockDiffusion, "_prepare_denoiser_inputs", prepare_denoiser_inputs),
    ):
        yield


def expected(model: Any, prompt: list[int], new: int, options: CanvasDenoising, seed: int) -> list[int]:
    """Returns the tokens of the published loop, up to an end-of-sequence token or the length limit."""
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

    length = model.config.canvas_length
    with drawing_as_engine(seed, len(prompt), length), torch.no_grad():
        found = (
            model.generate(
                torch.tensor([prompt]),
                max_new_tokens=new,
                max_denoising_steps=options.steps,
                sampler_config=EntropyBoundSamplerConfig(options.entropy_bound),
                t_min=options.t_min,
                t_max=options.t_max,
                stability_threshold=options.stability_threshold,
                confidence_threshold=options.confidence_threshold,
                eos_token_id=EOS,
                pad_token_id=0,
            )
            .sequences[0, len(prompt) :]
            .tolist()
        )
    found = found[:new]
    return found[: found.index(EOS) + 1] if EOS in found else found
