"""Reference of LiLiCorr, in NumPy float64: forward, walk and loss, written from the description of the method.

What it has in common with DFlash, and with the other drafters that walk, is in `dflash_numpy.py` and `dflash2_numpy.py`. Here
every node and every pair of nodes is worked out by itself.

Source: LiLiCorr (arXiv 2608.20530) and NVIDIA/Model-Optimizer #2342, `modeling_lilicorr.py` and `hf_lilicorr.py`; tensor
names of newer checkpoints (vLLM 0.33, `lilicorr.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reference.dflash2_numpy import Choose, Drafter2, Walker, as_dflash2, softmax
from reference.dflash_numpy import Array, Pair, Target, random_matrix, random_norm, rms_norm

EPS = 1e-5
"""Epsilon of the LayerNorm."""


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


@dataclass(frozen=True)
class Scores:
    """Logits of a block's steps: from the anchor to slot 0, `[K]`, and from each slot to the next, `[K, K]` each."""

    first: Array
    later: list[Array]


class LiLiCorr(Drafter2):
    """A LiLiCorr drafter, with DFlash 2's convolutions or without any."""

    def hidden(self, known: int, features: Array, start: int, window: int | None, block_size: int) -> Array:
        kind = Walker if self.field("conv_kernel_size") is None else Drafter2
        return kind.hidden(self, known, features, start, window, block_size)

    def candidate_count(self) -> int:
        return self.field("lilicorr_candidate_topk")

    def dense(self, name: str, x: Array) -> Array:
        return x @ self.tensor(f"lilicorr.{name}.weight").T + self.tensor(f"lilicorr.{name}.bias")

    def rms(self, name: str, x: Array) -> Array:
        return rms_norm(x, self.tensor(f"lilicorr.{name}.weight"), self.config["rms_norm_eps"])

    def features(self, log_probs: Array, rank: int) -> Array:
        """Returns the features of the candidate with this rank in its slot, after LayerNorm and MLP."""
        own = log_probs[rank]
        part = rank / (len(log_probs) - 1) if len(log_probs) > 1 else 0.0
        x = np.array([own, math.exp(own), own - log_probs.max(), part, float(rank == 0)])
        x = (x - x.mean()) / np.sqrt(x.var() + EPS)
        x = x * self.tensor("lilicorr.feature_norm.weight") + self.tensor("lilicorr.feature_norm.bias")
        return self.dense("feature_mlp.down_proj", silu(self.dense("feature_mlp.up_proj", x)))

    def node(self, token: int, hidden: Array, log_probs: Array, slot: int, rank: int) -> Array:
        x = self.target.embed([token])[0]
        if "lilicorr.token_proj.weight" in self.tensors:
            x = self.dense("token_proj", x)
        x = x + self.dense("pass_hidden_proj", hidden) + self.features(log_probs, rank)
        return x + self.tensor("lilicorr.slot_embedding")[0, 0, slot, 0] + self.tensor("lilicorr.rank_embedding")[0, 0, 0, rank]

    def layer(self, n: int, x: Array, slots: Sequence[int]) -> Array:
        heads = self.field("lilicorr_num_heads")
        name = f"layers.{n}"
        weight, bias = (self.tensor(f"lilicorr.{name}.attn.in_proj_{part}") for part in ("weight", "bias"))
        flat = self.rms(f"{name}.attn_norm", x) @ weight.T + bias
        q, k, v = (part.reshape(len(x), heads, -1) for part in np.split(flat, 3, axis=1))
        table = self.tensor("lilicorr.relative_slot_bias")
        same = self.tensor("lilicorr.same_slot_bias")
        middle = self.field("block_size") - 1
        out = np.zeros(q.shape)
        for head in range(heads):
            for here, own in enumerate(slots):
                scores = k[:, head] @ q[here, head] / math.sqrt(q.shape[2])
                for there, other in enumerate(slots):
                    scores[there] += table[head, own - other + middle] + (same[head] if own == other else 0)
                out[here, head] = softmax(scores) @ v[:, head]
        x = x + self.dense(f"{name}.attn.out_proj", out.reshape(len(x), -1))
        return x + self.dense(f"{name}.mlp.down_proj", silu(self.dense(f"{name}.mlp.up_proj", self.rms(f"{name}.mlp_norm", x))))

    def unit(self, name: str, x: Array) -> Array:
        v = self.dense(name, x)
        return v / max(float(np.linalg.norm(v)), self.field("lilicorr_vector_eps"))

    def scores(self, hidden: Array, logits: Array, anchor: Array | None) -> Scores:
        """Scores a block from its slots' hidden states, the head's logits and the anchor's feature (None: no anchor)."""
        count = len(hidden)
        top_k = self.top_k
        nodes = []
        slots = []
        for slot in range(count):
            tokens = self.candidates(logits[slot])
            log_probs = logits[slot][tokens] - np.log(np.exp(logits[slot][self.ids]).sum())
            nodes += [self.node(token, hidden[slot], log_probs, slot, rank) for rank, token in enumerate(tokens)]
            slots += [slot] * top_k
        x = np.stack(nodes)
        for n in range(self.field("lilicorr_num_layers")):
            x = self.layer(n, x, slots)
        x = self.rms("output_norm", x)
        width = x.shape[1]
        state = self.rms("anchor_norm", np.zeros(width) if anchor is None else self.dense("context_proj", anchor))
        combined = [silu(self.dense("factor_input_proj", np.concatenate([node, state, node * state]))) for node in x]
        out, into = ([self.unit(name, node) for node in combined] for name in ("out_head", "in_head"))
        begin = self.unit("anchor_out_head", state)
        scale = self.field("lilicorr_logit_scale")
        first = scale * np.array([begin @ into[place] for place in range(top_k)])
        later = [
            scale
            * np.array([[out[slot * top_k + i] @ into[(slot + 1) * top_k + j] for j in range(top_k)] for i in range(top_k)])
            for slot in range(count - 1)
        ]
        return Scores(first, later)

    def chooser(self, hidden: Array, features: Array, start: int) -> Choose:
        logits = self.target.head(hidden)
        scores = self.scores(hidden, logits, features[start - 1] if start > 0 else None)

        def choose(slot: int, before: int) -> tuple[list[int], Array]:
            tokens = self.candidates(logits[slot])
            if slot == 0:
                return tokens, scores.first
            return tokens, scores.later[slot - 1][self.candidates(logits[slot - 1]).index(before)]

        return choose


@dataclass(frozen=True)
class Losses:
    """Sums over the slots of a block.

    Attributes:
        backbone: weight times cross-entropy in nats.
        weight: weights.
        lattice, penalty: cross-entropy and penalty of the lattice.
        count: number of slots in the loss of the lattice.
    """

    backbone: float
    weight: float
    lattice: float
    penalty: float
    count: int


def block_losses(
    drafter: LiLiCorr,
    hidden: Array,
    said: Array,
    anchor: Array | None,
    tokens: Sequence[int],
    counted: Sequence[bool],
    gamma: float,
) -> Losses:
    """The losses of a block whose slots, the known one included, should hold `tokens`.

    Args:
        hidden: normalised, of the slots after the known one.
        said: the target's logits of each of these slots' tokens, `[n, V]`.
        counted: whether each of them is in the loss.
    """
    logits = drafter.target.head(hidden)
    scores = drafter.scores(hidden, logits, anchor)
    sums = np.zeros(5)
    alive = True
    place = 0
    for slot, (token, counts) in enumerate(zip(tokens[1:], counted, strict=True)):
        weight = math.exp(-slot / gamma) if counts else 0.0
        candidates = drafter.candidates(logits[slot])
        alive = alive and counts and token in candidates
        sums[:2] += weight * np.array([-math.log(softmax(logits[slot])[token]), 1.0])
        if alive:
            row = scores.first if slot == 0 else scores.later[slot - 1][place]
            place = candidates.index(token)
            p = softmax(row)
            dear = sum(p[n] * max(said[slot][token] - said[slot][c], 0.0) for n, c in enumerate(candidates))
            sums[2:] += np.array([-math.log(p[place]), dear, 1.0])
    return Losses(sums[0], sums[1], sums[2], sums[3], int(sums[4]))


def as_lilicorr(
    pair: Pair,
    seed: int = 0,
    *,
    top_k: int = 4,
    size: int = 12,
    layers: int = 2,
    heads: int = 3,
    vector_size: int = 10,
    mlp_ratio: float = 1.5,
    conv: bool = False,
    **fields: Any,
) -> Pair:
    """The pair with a LiLiCorr drafter around the same backbone, all of its lattice random.

    Args:
        conv: with random convolutions besides.
        fields: more of `dflash_config`.
    """
    if conv:
        second = as_dflash2(pair, strength=0.2)
        pair = replace(pair, drafter_tensors=dict(pair.drafter_tensors))
        pair.drafter_tensors.update({name: x for name, x in second.drafter_tensors.items() if "_conv." in name})
        fields |= {name: second.drafter_config["dflash_config"][name] for name in ("conv_kernel_size", "conv_group_size")}
    rng = np.random.default_rng(seed)
    config = pair.drafter_config
    wide = config["hidden_size"]
    block = config["block_size"]
    inside = int(size * mlp_ratio)
    shapes = {
        "pass_hidden_proj": (size, wide),
        "context_proj": (size, wide),
        "factor_input_proj": (size, 3 * size),
        "feature_mlp.up_proj": (size, 5),
        "feature_mlp.down_proj": (size, size),
        "out_head": (vector_size, size),
        "in_head": (vector_size, size),
        "anchor_out_head": (vector_size, size),
    }
    if size != wide:
        shapes["token_proj"] = (size, wide)
    for n in range(layers):
        shapes |= {
            f"layers.{n}.attn.out_proj": (size, size),
            f"layers.{n}.mlp.up_proj": (inside, size),
            f"layers.{n}.mlp.down_proj": (size, inside),
        }
    made = {f"{name}.weight": random_matrix(rng, *shape) for name, shape in shapes.items()}
    vectors = {f"{name}.bias": shape[0] for name, shape in shapes.items()} | {"feature_norm.bias": 5}
    for n in range(layers):
        made[f"layers.{n}.attn.in_proj_weight"] = random_matrix(rng, 3 * size, size, 2.0)
        vectors[f"layers.{n}.attn.in_proj_bias"] = 3 * size
    made |= {name: (0.3 * rng.normal(size=length)).astype(np.float32) for name, length in vectors.items()}
    norms = ["output_norm", "anchor_norm", *(f"layers.{n}.{part}_norm" for n in range(layers) for part in ("attn", "mlp"))]
    made |= {f"{name}.weight": random_norm(rng, size) for name in norms} | {"feature_norm.weight": random_norm(rng, 5)}
    whole = {
        "slot_embedding": (1, 1, block - 1, 1, size),
        "rank_embedding": (1, 1, 1, top_k, size),
        "relative_slot_bias": (heads, 2 * block - 1),
        "same_slot_bias": (heads,),
    }
    made |= {name: rng.normal(size=shape).astype(np.float32) for name, shape in whole.items()}
    own = {
        "candidate_topk": top_k,
        "hidden_size": size,
        "num_layers": layers,
        "num_heads": heads,
        "mlp_ratio": mlp_ratio,
        "factor_dim": vector_size,
        "vector_eps": 1e-4,
        "logit_scale": 8.0,
        "enabled": True,
    }
    inner = config["dflash_config"] | {f"lilicorr_{name}": value for name, value in own.items()} | fields
    return replace(
        pair,
        drafter_config=config | {"architectures": ["LiLiCorrDraftModel"], "dflash_config": inner},
        drafter_tensors=dict(pair.drafter_tensors) | {f"lilicorr.{name}": tensor for name, tensor in made.items()},
    )


def build_lilicorr(pair: Pair) -> tuple[Target, LiLiCorr]:
    target = Target(pair.target_config, pair.target_tensors)
    return target, LiLiCorr(pair.drafter_config, pair.drafter_tensors, target)
