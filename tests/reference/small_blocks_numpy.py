"""Reference of block diffusion in small blocks, with shifted logits, in NumPy float64, which tests compare with the engine.

Blocks begin at multiples of their length. A token sees its block and all blocks before, and its logits predict the next token:
a finished block predicts the first token of the next one. Within a block, small blocks are denoised one after the other. There
are no caches: every pass starts again from the tokens. Written from the published loop of Fast-dLLM v2 (arXiv 2509.26328,
`modeling.py`, `generate` with `use_block_cache=False`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference import block_diffusion_numpy
from reference.dflash_numpy import Array, Layer, Tensors, attention, rms_norm, rotate
from reference.diffusion_numpy import Noise, Request, choose


@dataclass(frozen=True)
class Model:
    """A model with Qwen2's layers over whole sequences from position 0."""

    config: Mapping[str, Any]
    tensors: Tensors

    def logits(self, tokens: Sequence[int], size: int) -> Array:
        """Logits `[n, V]`, where a token sees its block of `size` tokens and those before."""
        positions = range(len(tokens))
        theta = self.config["rope_theta"]
        block = np.arange(len(tokens)) // size
        visible: NDArray[np.bool_] = block[None] <= block[:, None]
        x = self.tensors["model.embed_tokens.weight"].astype(np.float64)[list(tokens)]
        for n in range(self.config["num_hidden_layers"]):
            layer = Layer(self.config, self.tensors, f"model.layers.{n}")
            h = layer.norm(x, "input_layernorm")
            q, k, v = (layer.heads(h, name) + self.bias(n, name) for name in ("q_proj", "k_proj", "v_proj"))
            x = x + layer.output(attention(rotate(q, positions, theta), rotate(k, positions, theta), v, visible))
            x = x + layer.mlp(x)
        norm = self.tensors["model.norm.weight"].astype(np.float64)
        return rms_norm(x, norm, self.config["rms_norm_eps"]) @ self.tensors["lm_head.weight"].astype(np.float64).T

    def bias(self, layer: int, name: str) -> Array:
        flat = self.tensors[f"model.layers.{layer}.self_attn.{name}.bias"].astype(np.float64)
        return flat.reshape(-1, self.config["head_dim"])


@dataclass(frozen=True)
class Options:
    """Options of the published loop, named as there."""

    threshold: float = 0.9
    small_block_size: int = 8
    temperature: float = 0.0
    top_p: float = 1.0


def ends(tokens: Sequence[int], stop: int | None, mask: int) -> bool:
    """True if a stop token has no mask before it."""
    return stop in tokens and mask not in tokens[: list(tokens).index(stop)]  # type: ignore[arg-type]


def generate(
    model: Model, prompt: Sequence[int], new_tokens: int, size: int, options: Options, noise: Noise | None = None
) -> tuple[list[int], list[int]]:
    """The new tokens, up to a stop token, and the number of passes that denoise each block.

    The published loop takes a number of blocks; here blocks follow until there are enough tokens, and the last one is cut. It
    forgets a prompt of exactly one block, which is treated as other prompts of whole blocks here. It may choose a mask.

    Args:
        noise: see `diffusion_numpy.choose`. Steps are counted in each block.
    """
    mask = model.config["mask_token_id"]
    stop = model.config["eos_token_id"]
    small = options.small_block_size
    top_p = options.top_p if options.temperature > 0 else 1.0
    rule = Request(mask, size, size, size, "maskgit_plus", temperature=options.temperature, top_p=top_p)
    tokens = list(prompt)
    finished = len(prompt)
    passes = []
    while finished < len(prompt) + new_tokens:
        if len(tokens) % size == 0:
            last = np.where(np.arange(model.config["vocab_size"]) == mask, -np.inf, model.logits(tokens, size)[-1])
            tokens.append(int(np.argmax(last)))
        passes.append(0)
        if tokens[-1] == stop and len(tokens) > len(prompt):
            break
        start = (len(tokens) - 1) // size * size
        tokens += [mask] * (start + size - len(tokens))
        for first in range(start, start + size, small):
            part = slice(first, first + small)
            while mask in tokens[part] and not ends(tokens[len(prompt) :], stop, mask):
                shifted = np.roll(model.logits(tokens, size)[start:], 1, axis=0)[first - start : first - start + small]
                found = [choose(row, rule, passes[-1], first + n, noise, None) for n, row in enumerate(shifted)]
                masked = [token == mask for token in tokens[part]]
                confidence = np.where(masked, [each.probability for each in found], -np.inf)
                for n in {*np.flatnonzero(confidence > options.threshold).tolist(), int(np.argmax(confidence))}:
                    tokens[first + n] = found[n].token
                passes[-1] += 1
        finished = len(tokens)
        if ends(tokens[len(prompt) :], stop, mask):
            break
    response = tokens[len(prompt) : len(prompt) + new_tokens]
    return response[: response.index(stop) + 1] if stop in response else response, passes


def random_model(seed: int, size: int = 16, vocab_size: int = 40, layers: int = 3, eos: int | None = None) -> Model:
    """SDAR's random model with biases in place of head norms."""
    sdar = block_diffusion_numpy.random_model(seed, size, vocab_size, layers, eos)
    config = {**sdar.config, "model_type": "Fast_dLLM_Qwen", "architectures": ["Fast_dLLM_QwenForCausalLM"]}
    config["bd_size"] = config.pop("block_size")
    tensors = {name: value for name, value in sdar.tensors.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))}
    rng = np.random.default_rng([seed, 1])
    for n in range(layers):
        for name, heads in (("q", 4), ("k", 2), ("v", 2)):
            bias = rng.normal(scale=0.3, size=heads * 16).astype(np.float32)
            tensors[f"model.layers.{n}.self_attn.{name}_proj.bias"] = bias
    return Model(config, tensors)
