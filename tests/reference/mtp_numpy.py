"""Reference of drafting with an MTP head in NumPy float64, which tests compare with the engine.

Written from the published code of the method and not from the engine. There are no caches: every draft step runs the head's
layer again over the whole sequence of pairs. One sequence at a time, so arrays have no batch dim.

Legend: n positions, H hidden, V vocabulary of the target, W draft vocabulary. Weights are kept as a checkpoint stores them,
`[out, in]`.

Sources: DeepSeek-V3 (arXiv 2412.19437) section 2.2; `qwen3_next_mtp.py` of vLLM and of SGLang.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from reference.dflash_numpy import Array, Target, Tensors, attention, random_matrix, random_norm, rms_norm, rotate
from reference.eagle3_numpy import Draft
from tilewright.models import mtp
from tilewright.models.checkpoint import decoder_config
from tilewright.models.params import initialise, to_tensors

Stored = dict[str, NDArray[Any]]


class Head:
    """An MTP head: one layer that reads, at position t, the target's normalised state of position t and the token at t + 1.

    Attributes:
        config: fields of the target's `config.json`. `partial_rotary_factor` and `attn_output_gate` are those of Qwen3-Next.
        offset: number added to stored norm weights.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Tensors, target: Target, offset: float = 0.0):
        self.config = config
        self.tensors = tensors
        self.target = target
        self.offset = offset
        self.map = None
        if "d2t" in tensors:
            self.map = [draft + int(shift) for draft, shift in enumerate(tensors["d2t"])]

    def weight(self, name: str) -> Array:
        return self.tensors[f"mtp.{name}.weight"].astype(np.float64)

    def norm(self, x: Array, name: str) -> Array:
        return rms_norm(x, self.offset + self.weight(name), self.config["rms_norm_eps"])

    def features(self, tokens: Sequence[int]) -> Array:
        """The target's states after its final norm, `[n, H]`."""
        return self.target.final_norm(self.target.run(tokens)[1][-1])

    def rotated(self, x: Array, positions: Sequence[int]) -> Array:
        size = int(x.shape[-1] * self.config.get("partial_rotary_factor", 1.0))
        return np.concatenate([rotate(x[..., :size], positions, self.config["rope_theta"]), x[..., size:]], axis=-1)

    def layer(self, h: Array, tokens: Sequence[int], first: int = 0) -> Array:
        """Runs the layer, causally, over pairs of `h[i]` and `tokens[i]` at positions from `first` on; `[n, H]`, normed."""
        positions = range(first, first + len(h))
        pair = [self.norm(self.target.embed(tokens), "pre_fc_norm_embedding"), self.norm(h, "pre_fc_norm_hidden")]
        x = np.concatenate(pair, axis=1) @ self.weight("fc").T
        inner = self.norm(x, "layers.0.input_layernorm")
        size = self.config["head_dim"]
        q, k, v = ((inner @ self.weight(f"layers.0.self_attn.{name}_proj").T).reshape(len(h), -1, size) for name in "qkv")
        gate = None
        if self.config.get("attn_output_gate"):  # each head's gate is stored behind its queries
            q, gate = q[:, ::2], q[:, 1::2]
        q, k = (self.norm(x, f"layers.0.self_attn.{name}_norm") for x, name in ((q, "q"), (k, "k")))
        causal = np.tril(np.ones((len(h), len(h)), bool))
        seen = attention(self.rotated(q, positions), self.rotated(k, positions), v, causal)
        if gate is not None:
            seen = seen / (1 + np.exp(-gate.reshape(len(h), -1)))
        x = x + seen @ self.weight("layers.0.self_attn.o_proj").T
        inner = self.norm(x, "layers.0.post_attention_layernorm")
        gated = inner @ self.weight("layers.0.mlp.gate_proj").T
        up = inner @ self.weight("layers.0.mlp.up_proj").T
        x = x + (gated / (1 + np.exp(-gated)) * up) @ self.weight("layers.0.mlp.down_proj").T
        return self.norm(x, "norm")

    def logits(self, outputs: Array) -> Array:
        """Over the draft vocabulary, `[n, W]`."""
        whole = self.target.head(outputs)
        return whole if self.map is None else whole[:, self.map]

    def draft(self, tokens: Sequence[int], features: Array, steps: int, forced: Sequence[int] = ()) -> Draft:
        """Drafts the tokens that follow `tokens`, whose last one is the last token.

        Args:
            tokens: all tokens.
            features: see `features`; those of the last token and later ones are not read.
            steps: number of drafts.
            forced: tokens that the chain reads in the place of its own first drafts.
        """
        known = len(tokens) - 1
        if known < 1 or len(features) < known:
            raise ValueError(f"expected features of at least one and all {known} earlier positions, found {len(features)}")
        h = features[:known]
        beside = list(tokens[1:])
        proposed = []
        logits = []
        for step in range(steps):
            output = self.layer(h, beside)[-1:]
            logits.append(self.logits(output)[0])
            index = int(logits[-1].argmax())
            proposed.append(index if self.map is None else self.map[index])
            h = np.concatenate([h, output])
            beside.append(forced[step] if step < len(forced) else proposed[-1])
        return Draft(proposed, np.stack(logits), h[known:])


def random_head(seed: int, target: Mapping[str, Any]) -> Stored:
    """Tensors of a random head for a target with this `config.json`, with norms around one."""
    rng = np.random.default_rng(seed)
    h = target["hidden_size"]
    size = target["head_dim"]
    query = target["num_attention_heads"] * size
    key = target["num_key_value_heads"] * size
    inner = target["intermediate_size"]
    tensors = {
        "fc": random_matrix(rng, h, 2 * h),
        "pre_fc_norm_embedding": random_norm(rng, h),
        "pre_fc_norm_hidden": random_norm(rng, h),
        "norm": random_norm(rng, h),
        "layers.0.input_layernorm": random_norm(rng, h),
        "layers.0.post_attention_layernorm": random_norm(rng, h),
        "layers.0.self_attn.q_norm": random_norm(rng, size),
        "layers.0.self_attn.k_norm": random_norm(rng, size),
        "layers.0.self_attn.q_proj": random_matrix(rng, query * (2 if target.get("attn_output_gate") else 1), h, 1.5),
        "layers.0.self_attn.k_proj": random_matrix(rng, key, h, 1.5),
        "layers.0.self_attn.v_proj": random_matrix(rng, key, h),
        "layers.0.self_attn.o_proj": random_matrix(rng, h, query, 1.5),
        "layers.0.mlp.gate_proj": random_matrix(rng, inner, h, 1.5),
        "layers.0.mlp.up_proj": random_matrix(rng, inner, h),
        "layers.0.mlp.down_proj": random_matrix(rng, h, inner, 1.5),
    }
    return {f"mtp.{name}.weight": tensor for name, tensor in tensors.items()}


def as_folder(folder: Path, target: Mapping[str, Any], tensors: Stored, ids: Sequence[int] = (), block_size: int = 4) -> Path:
    """Writes a head to a folder of its own, with the draft vocabulary `ids` if any."""
    layers = target["num_hidden_layers"]
    inner: dict[str, Any] = {"num_target_layers": layers, "block_size": block_size}
    if ids:
        tensors = tensors | {"d2t": np.asarray(ids, np.int64) - np.arange(len(ids))}
        inner |= {"draft_vocab_size": len(ids)}
    config = {**target, "architectures": ["MTPDraftModel"], "num_hidden_layers": 1, "mtp_config": inner}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def add_random_head(target: Path, seed: int = 2) -> Path:
    """Adds a head of random weights, with experts if the target has them, to a target's file. Returns the target's folder."""
    config = decoder_config(target)
    specs = mtp.declare(mtp.MtpConfig(layer=mtp.layer_config(config), num_target_layers=config.num_layers))
    tensors = to_tensors(specs, initialise(specs, jax.random.key(seed)), jnp.float32)
    return add_head(target, {name: np.asarray(tensor) for name, tensor in tensors})


def add_head(target: Path, tensors: Stored) -> Path:
    """Adds the tensors of a head to a target's file. Returns the target's folder."""
    file = target / "model.safetensors"
    save_file(load_file(file) | {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, file)
    return target
