"""Reference of block diffusion in NumPy float64, which tests compare with the engine.

Blocks of masks are denoised one after the other; a token sees its block and all blocks before. There are no caches: every pass
starts again from the tokens. Written from SDAR's published loop (`generate.py`, `block_diffusion_generate`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.dflash_numpy import Array, Layer, Tensors, attention, random_layer, random_matrix, random_norm, rms_norm
from reference.diffusion_numpy import Noise, Request, choose


@dataclass(frozen=True)
class Model:
    """A model with Qwen3's layers over whole sequences from position 0."""

    config: Mapping[str, Any]
    tensors: Tensors

    def logits(self, tokens: Sequence[int]) -> Array:
        """Logits `[n, V]`, where a token sees its block and those before."""
        positions = range(len(tokens))
        block = np.arange(len(tokens)) // self.config["block_size"]
        visible: NDArray[np.bool_] = block[None] <= block[:, None]
        x = self.tensors["model.embed_tokens.weight"].astype(np.float64)[list(tokens)]
        for n in range(self.config["num_hidden_layers"]):
            layer = Layer(self.config, self.tensors, f"model.layers.{n}")
            h = layer.norm(x, "input_layernorm")
            out = attention(layer.queries(h, positions), layer.keys(h, positions), layer.values(h), visible)
            x = x + layer.output(out)
            x = x + layer.mlp(x)
        norm = self.tensors["model.norm.weight"].astype(np.float64)
        return rms_norm(x, norm, self.config["rms_norm_eps"]) @ self.tensors["lm_head.weight"].astype(np.float64).T


@dataclass(frozen=True)
class Options:
    """Options of the published loop, named as there."""

    strategy: str = "low_confidence_dynamic"
    threshold: float = 0.85
    steps: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0


def transferred(confidence: Array, masked: NDArray[np.bool_], options: Options, quota: int) -> NDArray[np.bool_]:
    """The positions of a block that a pass commits."""
    chosen = np.zeros(len(masked), bool)
    if options.strategy == "sequential":
        first = int(np.flatnonzero(masked)[0])
        chosen[first : first + quota] = True
        return chosen & masked
    confidence = np.where(masked, confidence, -np.inf)
    above = confidence > options.threshold
    if options.strategy == "low_confidence_dynamic" and above.sum() >= quota:
        return above
    chosen[np.argsort(-confidence, kind="stable")[:quota]] = True
    return chosen & masked  # the published loop would overwrite given tokens where a block has fewer masks than the quota


def generate(
    model: Model, prompt: Sequence[int], new_tokens: int, options: Options, noise: Noise | None = None
) -> tuple[list[int], list[int]]:
    """The new tokens, up to an end-of-sequence token, and the number of passes that denoise each block.

    Args:
        noise: see `diffusion_numpy.choose`.
    """
    size = model.config["block_size"]
    mask = model.config["mask_token_id"]
    eos = model.config["eos_token_id"]
    steps = options.steps or size
    quotas = [size // steps + (n < size % steps) for n in range(steps)]
    top_p = options.top_p if options.temperature > 0 else 1.0
    rule = Request(mask, size, size, size, "maskgit_plus", temperature=options.temperature, top_p=top_p)
    blocks = -(-(len(prompt) + new_tokens) // size)
    tokens = [*prompt, *[mask] * (blocks * size - len(prompt))]
    passes = []
    for block in range(len(prompt) // size, blocks):
        start = block * size
        step = 0
        for step in range(steps + 1):
            masked = np.asarray(tokens[start : start + size]) == mask
            if not masked.any():
                break
            logits = model.logits(tokens[: start + size])[start:]
            found = [choose(row, rule, step, start + n, noise, None) for n, row in enumerate(logits)]
            confidence = np.asarray([each.probability for each in found])
            for n in np.flatnonzero(transferred(confidence, masked, options, quotas[step])):
                tokens[start + n] = found[n].token
        passes.append(step)
        if eos in tokens[len(prompt) : start + size]:
            break
    response = tokens[len(prompt) : len(prompt) + new_tokens]
    return response[: response.index(eos) + 1] if eos in response else response, passes


def random_model(seed: int, block: int = 4, vocab_size: int = 40, layers: int = 3, eos: int | None = None) -> Model:
    """A small model with random weights, whose probabilities are spread from near 0 to near 1."""
    config = {
        "model_type": "sdar",
        "architectures": ["SDARForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "mask_token_id": vocab_size - 1,
        "block_size": block,
        "eos_token_id": eos,
    }
    rng = np.random.default_rng(seed)
    tensors = {
        "model.embed_tokens.weight": random_matrix(rng, vocab_size, 32, 32**0.5),
        "model.norm.weight": random_norm(rng, 32),
        "lm_head.weight": random_matrix(rng, vocab_size, 32, 3.0),
    }
    for n in range(layers):
        tensors |= random_layer(rng, config, f"model.layers.{n}")
    return Model(config, tensors)
