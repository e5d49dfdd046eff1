"""Reference of LLaDA2.0 and LLaDA2.1 in NumPy float64, which tests compare with the engine.

Layers and loops are written from the published `modeling_llada2_moe.py`, whose names of tensors and options they have. There
are no caches: every pass starts again from the tokens. Three things differ from the published loops: a mask is never chosen,
drawn tokens come from given noise, and LLaDA2.0's text ends with any pass behind which no mask is before an end-of-sequence
token. The published loop looks only behind passes that choose such a token, if `eos_early_stop` is set.

Legend: n tokens, H hidden, E experts, K of them chosen for a token, G groups, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.dflash_numpy import Array, Tensors, attention, random_matrix, random_norm, rms_norm, rotate
from reference.diffusion_numpy import Noise, Request, choose


@dataclass(frozen=True)
class Model:
    """A model over whole sequences from position 0."""

    config: Mapping[str, Any]
    tensors: Tensors

    def weight(self, name: str) -> Array:
        return self.tensors[f"{name}.weight"].astype(np.float64)

    def norm(self, x: Array, name: str) -> Array:
        return rms_norm(x, self.weight(name), self.config["rms_norm_eps"])

    def attend(self, h: Array, prefix: str, visible: NDArray[np.bool_]) -> Array:
        size = self.config["head_dim"]
        rotated = int(size * self.config["partial_rotary_factor"])
        queries = self.config["num_attention_heads"]
        keys = self.config["num_key_value_heads"]
        heads = (h @ self.weight(f"{prefix}.query_key_value").T).reshape(len(h), queries + 2 * keys, size)
        q, k, v = np.split(heads, [queries, queries + keys], axis=1)
        turned = []
        for x, name in ((q, "query_layernorm"), (k, "key_layernorm")):
            normed = self.norm(x, f"{prefix}.{name}")
            first = rotate(normed[..., :rotated], range(len(h)), self.config["rope_theta"])
            turned.append(np.concatenate([first, normed[..., rotated:]], axis=-1))
        return attention(turned[0], turned[1], v, visible) @ self.weight(f"{prefix}.dense").T

    def mlp(self, h: Array, prefix: str) -> Array:
        gate = h @ self.weight(f"{prefix}.gate_proj").T
        inner = gate / (1 + np.exp(-gate)) * (h @ self.weight(f"{prefix}.up_proj").T)
        return inner @ self.weight(f"{prefix}.down_proj").T

    def routed(self, row: Array, prefix: str) -> list[tuple[int, float]]:
        """The experts of a token's `row` `[H]`, each with its weight."""
        c = self.config
        scores = 1 / (1 + np.exp(-self.weight(f"{prefix}.gate") @ row))
        ranked = scores + self.tensors[f"{prefix}.gate.expert_bias"].astype(np.float64)
        each = c["num_experts"] // c["n_group"]
        sums = [np.sort(ranked[g * each : (g + 1) * each])[-2:].sum() for g in range(c["n_group"])]
        groups = np.argsort(-np.asarray(sums), kind="stable")[: c["topk_group"]]
        allowed = [e for e in range(c["num_experts"]) if e // each in groups]
        chosen = sorted(allowed, key=lambda e: (-ranked[e], e))[: c["num_experts_per_tok"]]
        total = sum(scores[e] for e in chosen) if len(chosen) > 1 else 1.0
        return [(e, scores[e] / total * c["routed_scaling_factor"]) for e in chosen]

    def mixture(self, h: Array, prefix: str) -> Array:
        out = np.zeros_like(h)
        for n, row in enumerate(h):
            for expert, weight in self.routed(row, prefix):
                out[n] += weight * self.mlp(row, f"{prefix}.experts.{expert}")
        return out + self.mlp(h, f"{prefix}.shared_experts") if self.config["num_shared_experts"] else out

    def logits(self, tokens: Sequence[int]) -> Array:
        """Logits `[n, V]`, where a token sees its block and those before."""
        block = np.arange(len(tokens)) // self.config["block_size"]
        visible: NDArray[np.bool_] = block[None] <= block[:, None]
        x = self.weight("model.word_embeddings")[list(tokens)]
        for n in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{n}"
            x = x + self.attend(self.norm(x, f"{layer}.input_layernorm"), f"{layer}.attention", visible)
            mlp = self.mlp if n < self.config["first_k_dense_replace"] else self.mixture
            x = x + mlp(self.norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
        return self.norm(x, "model.norm") @ self.weight("lm_head").T


@dataclass(frozen=True)
class Options:
    """Options of the published loops, named as there. `editing` is the loop of LLaDA2.1, which ignores `steps`.

    LLaDA2.0's defaults are `threshold=0.95`, 32 steps and no `num_to_transfer`, which follows from the steps. LLaDA2.1's model
    card names `threshold=0.5` and `editing_threshold=0.0`, or 0.7 and 0.5.
    """

    editing: bool
    threshold: float = 0.95
    steps: int | None = None
    editing_threshold: float = 0.0
    max_post_steps: int = 16
    num_to_transfer: int = 1
    temperature: float = 0.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Generation:
    """Results of a loop.

    Attributes:
        tokens: new tokens, up to an end-of-sequence token.
        passes: number of passes over each block.
        unchanged: whether the last pass over each block changed nothing.
        edited: tokens that were replaced by others.
        probabilities: of each new token, in the pass that last set it.
    """

    tokens: list[int]
    passes: list[int]
    unchanged: list[bool]
    edited: list[int]
    probabilities: list[float]


def transferred(confidence: Array, masked: NDArray[np.bool_], threshold: float, quota: int) -> NDArray[np.bool_]:
    """The masks that a pass replaces: all above the threshold, or the quota of the best ones if these are more."""
    confidence = np.where(masked, confidence, -np.inf)
    above = confidence > threshold
    if above.sum() >= quota:
        return above
    best = np.zeros(len(masked), bool)
    best[np.argsort(-confidence, kind="stable")[: min(quota, masked.sum())]] = True
    return best


def generate(
    model: Model,
    prompt: Sequence[int],
    new_tokens: int,
    options: Options,
    noise: Noise | None = None,
    presence_penalty: float = 0.0,
) -> Generation:
    """The published `generate` of LLaDA2.0, or of LLaDA2.1 with `options.editing`.

    Args:
        noise: see `diffusion_numpy.choose`.
        presence_penalty: subtracted from logits of the generated tokens before a position; the published loops have none.
    """
    size = model.config["block_size"]
    mask = model.config["mask_token_id"]
    eos = model.config["eos_token_id"]
    steps = options.steps or size
    rule = Request(mask, size, size, size, "maskgit_plus", temperature=options.temperature, top_p=options.top_p)
    blocks = -(-(len(prompt) + new_tokens) // size)
    tokens = [*prompt, *[mask] * (blocks * size - len(prompt))]
    probabilities = [0.0] * len(tokens)
    passes: list[int] = []
    unchanged: list[bool] = []
    edited_tokens: list[int] = []
    for start in range(len(prompt) // size * size, blocks * size, size):
        step = 0
        post_steps = 0
        while True:
            block = np.asarray(tokens[start : start + size])
            masked = block == mask
            if not masked.any():
                post_steps += 1
                if not options.editing or post_steps > options.max_post_steps:
                    unchanged.append(False)
                    break
            logits = model.logits(tokens[: start + size])[start:]
            for n, row in enumerate(logits):
                row[list({*tokens[len(prompt) : start + n]} - {mask})] -= presence_penalty
            found = [choose(row, rule, step, start + n, noise, None) for n, row in enumerate(logits)]
            confidence = np.asarray([each.probability for each in found])
            quota = options.num_to_transfer if options.editing else size // steps + (step < size % steps)
            replaced = transferred(confidence, masked, options.threshold, quota) if masked.any() else masked
            edited = np.zeros(size, bool)
            if options.editing:
                is_prompt = start + np.arange(size) < len(prompt)
                other = np.asarray([each.token for each in found]) != block
                edited = ~masked & ~is_prompt & other & (confidence > options.editing_threshold)
            for n in np.flatnonzero(replaced | edited):
                tokens[start + n] = found[n].token
                probabilities[start + n] = found[n].probability
            edited_tokens += block[edited].tolist()
            step += 1
            new = tokens[len(prompt) : start + size]
            if not options.editing and eos in new and mask not in new[: new.index(eos)]:
                unchanged.append(False)
                break
            if not masked.any() and not edited.any():
                unchanged.append(True)
                break
        passes.append(step)
        if eos in tokens[len(prompt) : start + size]:
            break
    response = tokens[len(prompt) : len(prompt) + new_tokens]
    response = response[: response.index(eos) + 1] if eos in response else response
    return Generation(response, passes, unchanged, edited_tokens, probabilities[len(prompt) :][: len(response)])


def random_model(seed: int, block: int = 4, vocab_size: int = 40, eos: int | None = None, **changes: Any) -> Model:
    """A small model with random weights: a dense layer, and two with experts in groups."""
    config: dict[str, Any] = {
        "model_type": "llada2_moe",
        "architectures": ["LLaDA2MoeModelLM"],
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "first_k_dense_replace": 1,
        "num_experts": 16,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "moe_intermediate_size": 16,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_bias": False,
        "mask_token_id": vocab_size - 1,
        "block_size": block,
        "eos_token_id": eos,
        **changes,
    }
    rng = np.random.default_rng(seed)
    h = config["hidden_size"]
    d = config["head_dim"]
    heads = config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    tensors: dict[str, NDArray[np.float32]] = {
        "model.word_embeddings.weight": random_matrix(rng, vocab_size, h, h**0.5),
        "model.norm.weight": random_norm(rng, h),
        "lm_head.weight": random_matrix(rng, vocab_size, h, 3.0),
    }

    def add_mlp(prefix: str, size: int) -> None:
        for name, shape in (("gate_proj", (size, h)), ("up_proj", (size, h)), ("down_proj", (h, size))):
            tensors[f"{prefix}.{name}.weight"] = random_matrix(rng, *shape, 1.5)

    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        tensors[f"{layer}.input_layernorm.weight"] = random_norm(rng, h)
        tensors[f"{layer}.post_attention_layernorm.weight"] = random_norm(rng, h)
        tensors[f"{layer}.attention.query_key_value.weight"] = random_matrix(rng, heads * d, h)
        tensors[f"{layer}.attention.dense.weight"] = random_matrix(rng, h, config["num_attention_heads"] * d, 1.5)
        for name in ("query_layernorm", "key_layernorm"):
            tensors[f"{layer}.attention.{name}.weight"] = random_norm(rng, d) * np.float32(1.5)
        if n < config["first_k_dense_replace"]:
            add_mlp(f"{layer}.mlp", config["intermediate_size"])
            continue
        tensors[f"{layer}.mlp.gate.weight"] = random_matrix(rng, config["num_experts"], h)
        # As large as the differences of the affinities, so that it decides on many experts.
        tensors[f"{layer}.mlp.gate.expert_bias"] = (0.3 * rng.standard_normal(config["num_experts"])).astype(np.float32)
        size = config["moe_intermediate_size"]
        for expert in range(config["num_experts"]):
            add_mlp(f"{layer}.mlp.experts.{expert}", size)
        if config["num_shared_experts"]:
            add_mlp(f"{layer}.mlp.shared_experts", size * config["num_shared_experts"])
    return Model(config, tensors)
