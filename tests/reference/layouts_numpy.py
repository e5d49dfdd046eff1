"""Reference drafters of every published layout in NumPy float64.

A drafter can have every variation of published checkpoints, and its files every published layout. `Rules` describes the
drafter; one function per layout writes its files.

Sources: z-lab/dflash of September 2026, vLLM's `qwen3_dflash.py` and `configs/speculators`, speculators 0.9, and transformers'
`muse_glimmer_assistant`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.dflash2_numpy import Drafter2, Walker
from reference.dflash_numpy import Array, Layer, Pair, Target, Tensors, random_matrix, rms_norm, rotate
from reference.dspark_numpy import DSpark


@dataclass(frozen=True)
class Rules:
    """Behaviour of a drafter, independent of the layout of its files.

    Attributes:
        taps: target layers whose outputs the drafter reads.
        block: slots of a block.
        mask: the mask token.
        windows, causal: per layer; a window of w shows the w - 1 positions before a query's own.
        first_slot: the first slot that drafts.
        rotated: number of rotated entries of a head.
        value_scale: factor of the values.
    """

    taps: Sequence[int]
    block: int
    mask: int
    windows: Sequence[int | None]
    causal: Sequence[bool]
    first_slot: int = 1
    rotated: int | None = None
    value_scale: float = 1.0


class Shared(Target):
    """The target, with the drafter's own embedding, head and mask embedding."""

    def __init__(self, target: Target, rules: Rules, tensors: Tensors):
        super().__init__(target.config, target.tensors)
        self.own = tensors
        self.rules = rules

    def embed(self, tokens: Sequence[int]) -> Array:
        table = self.own.get("embed_tokens.weight")
        rows = super().embed(tokens) if table is None else table.astype(np.float64)[list(tokens)]
        if "mask_embedding" in self.own:
            rows = np.where(np.asarray(tokens)[:, None] == self.rules.mask, self.own["mask_embedding"].astype(np.float64), rows)
        return rows

    def head(self, x: Array) -> Array:
        """Logits over the target's tokens; of those that cannot be proposed, none."""
        table = self.own.get("lm_head.weight")
        if table is None:
            return super().head(x)
        ids = np.arange(len(table)) + self.own.get("d2t", np.zeros(len(table), np.int64))
        logits = np.full((len(x), self.config["vocab_size"]), -np.inf)
        logits[:, ids] = x @ table.astype(np.float64).T
        return logits


class Varied(Walker):
    """A drafter by its rules: drafts the likeliest tokens, unless another class here walks."""

    rules: Rules

    def __init__(self, rules: Rules, config: Mapping[str, Any], tensors: Tensors, target: Target):
        self.rules = rules
        self.config = config
        self.tensors = tensors
        self.target = Shared(target, rules, tensors)
        self.layers = [Layer(config, tensors, f"layers.{n}") for n in range(len(rules.windows))]
        self.taps = list(rules.taps)
        self.mask = rules.mask
        self.first_slot = rules.first_slot
        self.block_size = rules.block + 1 - rules.first_slot
        self.top_k = self.candidate_count()
        shifts = tensors.get("d2t", np.zeros(target.config["vocab_size"], np.int64))
        self.ids = [int(n + shift) for n, shift in enumerate(shifts)]

    def candidate_count(self) -> int:
        return 0

    def context_features(self, hidden_after_layer: Sequence[Array], positions: Any) -> Array:
        rows = np.asarray(list(positions), int)
        tapped = [hidden_after_layer[i][rows] for i in self.taps]
        last = len(hidden_after_layer) - 1
        tapped = [self.target.final_norm(x) if i == last else x for i, x in zip(self.taps, tapped, strict=True)]
        joined = np.concatenate(tapped, axis=1) @ self.weight("fc").T
        return rms_norm(joined, self.weight("hidden_norm"), self.config["rms_norm_eps"])

    def heads(self, layer: Layer, h: Array, kind: str, positions: Sequence[int]) -> Array:
        x = layer.norm(layer.heads(h, f"{kind}_proj"), f"self_attn.{kind}_norm")
        turned = x.shape[-1] if self.rules.rotated is None else self.rules.rotated
        return np.concatenate([rotate(x[..., :turned], positions, self.config["rope_theta"]), x[..., turned:]], axis=-1)

    def seen(self, n: int, before: Sequence[int], block: Sequence[int]) -> NDArray[np.bool_]:
        query = np.asarray(block)[:, None]
        key = np.asarray([*before, *block])[None]
        window = self.rules.windows[n]
        near = np.ones((len(block), key.shape[1]), bool) if window is None else np.abs(query - key) < window
        return near & (key <= query) if self.rules.causal[n] else near

    def attended(self, n: int, q: Array, k: Array, v: Array, seen: NDArray[np.bool_]) -> Array:
        """Attention whose softmax a head's sink, if there is one, takes part in."""
        sinks = self.tensors.get(f"layers.{n}.self_attn.attention_sink_bias")
        outs = []
        group = q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            scores = np.where(seen, q[:, head] @ k[:, head // group].T / np.sqrt(q.shape[2]), -np.inf)
            weights = np.exp(scores)
            sink = 0.0 if sinks is None else np.exp(float(sinks[head]))
            outs.append(weights / (weights.sum(axis=1, keepdims=True) + sink) @ v[:, head // group])
        return np.concatenate(outs, axis=1)

    def mixed(self, conv: str, h: Array) -> tuple[Any, Array]:
        """Before a sublayer: what its end needs, and what it reads."""
        return None, h

    def ended(self, kernels: Any, y: Array) -> Array:
        return y

    def hidden(self, known: int, features: Array, start: int, window: int | None, block_size: int) -> Array:
        first = 0 if window is None else max(0, start - window)
        context = features[first:start]
        before = range(first, start)
        block = range(start, start + block_size)
        x = self.target.embed([known] + [self.mask] * (block_size - 1))
        for n, layer in enumerate(self.layers):
            kernels, h = self.mixed(f"layers.{n}.attention_conv", layer.norm(x, "input_layernorm"))
            k = np.concatenate([self.heads(layer, context, "k", before), self.heads(layer, h, "k", block)])
            v = np.concatenate([layer.values(context), layer.values(h)]) * self.rules.value_scale
            out = self.attended(n, self.heads(layer, h, "q", block), k, v, self.seen(n, before, block))
            x = x + self.ended(kernels, layer.output(out))
            kernels, h = self.mixed(f"layers.{n}.mlp_conv", layer.norm(x, "post_attention_layernorm"))
            gate, up = (h @ layer.weight(f"mlp.{name}_proj").T for name in ("gate", "up"))
            x = x + self.ended(kernels, (gate / (1 + np.exp(-gate)) * up) @ layer.weight("mlp.down_proj").T)
        return x

    def draft(
        self, tokens: Sequence[int], features: Array, start: int, window: int | None = None, block_size: int | None = None
    ) -> tuple[list[int], Array]:
        logits = self.target.head(self.block_hidden(tokens[start], features, start, window, block_size))
        return [int(token) for token in logits.argmax(axis=1)], logits


class Varied2(Varied, Drafter2):
    """A DFlash 2 drafter by its rules."""

    hidden = Varied.hidden
    draft = Walker.draft

    def candidate_count(self) -> int:
        return self.config["selector_top_k"]

    def mixed(self, conv: str, h: Array) -> tuple[Any, Array]:
        kernels = self.kernels(conv, h)
        return kernels, self.convolve(kernels, 0, h)

    def ended(self, kernels: Any, y: Array) -> Array:
        return self.convolve(kernels, 1, y)


class VariedDSpark(Varied, DSpark):
    """A DSpark drafter by its rules."""

    hidden = Varied.hidden
    draft = Walker.draft

    def candidate_count(self) -> int:
        return self.config.get("candidate_top_k", 16)


def with_own(pair: Pair, *names: str, seed: int = 7, ids: Sequence[int] | None = None) -> Pair:
    """The pair with a drafter that has some of these tensors of its own, random.

    Args:
        names: `embedding`, `head`, `mask`, `sinks`.
        ids: the tokens that it can propose, rising; None for all.
    """
    rng = np.random.default_rng(seed)
    config = pair.drafter_config
    h = config["hidden_size"]
    v = config["vocab_size"]
    made: dict[str, NDArray[Any]] = {}
    if "embedding" in names:
        made["embed_tokens.weight"] = random_matrix(rng, v, h, 3.0)
    if "head" in names:
        made["lm_head.weight"] = random_matrix(rng, v if ids is None else len(ids), h, 3.0)
    if "mask" in names:
        made["mask_embedding"] = rng.normal(size=h).astype(np.float32)
    if "sinks" in names:
        for n in range(config["num_hidden_layers"]):
            shape = config["num_attention_heads"]
            made[f"layers.{n}.self_attn.attention_sink_bias"] = rng.normal(1.0, 1.0, shape).astype(np.float32)
    if ids is not None:
        made |= {"d2t": np.asarray(ids) - np.arange(len(ids)), "t2d": np.isin(np.arange(v), ids)}
    return replace(pair, drafter_tensors={**pair.drafter_tensors, **made})


SIZES = (
    "model_type hidden_act hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps "
    "rope_theta rope_scaling max_position_embeddings attention_bias vocab_size num_hidden_layers"
).split()


def as_speculators(
    pair: Pair, kind: str, layer_types: Sequence[str] | None = None, window: int | None = None, **fields: Any
) -> Pair:
    """The pair's drafter in speculators' layout; `fields` are more of it, at the top."""
    config = pair.drafter_config
    inner: Mapping[str, Any] = config.get("dflash_config", config)
    sizes = {name: config[name] for name in SIZES}
    if layer_types is not None:
        sizes |= {"layer_types": list(layer_types), "sliding_window": window, "use_sliding_window": True}
    names = {"dflash": "DFlashSpeculator", "dflash2": "DFlash2DraftModel", "dspark": "DSparkSpeculator"}
    made = {
        "architectures": [names[kind]],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "dtype": "float32",
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "somewhere", "architectures": []}},
        "transformer_layer_config": sizes,
        "block_size": config["block_size"],
        "mask_token_id": inner["mask_token_id"],
        "draft_vocab_size": config["vocab_size"],
        "target_hidden_size": None,
        "sliding_window_non_causal": kind == "dflash2",
        "aux_hidden_state_layer_ids": [layer + 1 for layer in inner["target_layer_ids"]],
    }
    return replace(pair, drafter_config=made | fields)


def as_muse(pair: Pair, window: int) -> Pair:
    """The pair's drafter in the layout of Muse Glimmer's assistant, whose windows show one position more."""
    config = {name: pair.drafter_config[name] for name in SIZES if name not in ("vocab_size", "attention_bias")}
    inner = pair.drafter_config["dflash_config"]
    made = (
        config
        | inner
        | {
            "architectures": ["MuseGlimmerAssistantModel"],
            "model_type": "muse_glimmer_assistant",
            "block_size": pair.drafter_config["block_size"],
            "sliding_window": window,
            "attention_dropout": 0,
            "layer_types": ["sliding_attention"] * config["num_hidden_layers"],
            "rope_parameters": {"rope_type": "default", "rope_theta": config.pop("rope_theta")},
        }
    )
    made.pop("rope_theta", None)
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    return replace(
        pair, drafter_config=made, drafter_tensors={renamed.get(name, name): x for name, x in pair.drafter_tensors.items()}
    )
