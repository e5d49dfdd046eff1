"""Reference of DFlash 2, in NumPy float64: forward, walk and loss, written from the description of the method.

What DFlash and its engine have in common is in `dflash_numpy.py`. One sequence at a time, slot by slot, no caches.

Legend: n tokens, B block, H hidden, V vocabulary, K candidates, r rank. Weights are kept as a checkpoint stores them.

Source: z-lab/dflash, `dflash/model.py` of August 2026, and the trainers' loss (speculators #1006).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.dflash_numpy import Array, Drafter, Layer, Pair, Target, Tensors, attention, random_matrix, rms_norm


def softmax(x: Array) -> Array:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


Choose = Callable[[int, int], tuple[list[int], Array]]
"""`choose(slot, before)`: the candidates of a slot, and their scores after the token `before`."""


class Walker(Drafter):
    """A drafter that walks through each slot's K most likely tokens. What scores them is each kind's own, `chooser`.

    Attributes:
        first_slot: the first slot that drafts.
        ids: the tokens that it can propose, rising.
    """

    first_slot = 1

    def __init__(self, config: Mapping[str, Any], tensors: Tensors, target: Target):
        self.config = config
        self.tensors = tensors
        self.target = target
        self.layers = [Layer(config, tensors, f"layers.{i}") for i in range(config["num_hidden_layers"])]
        self.taps = list(self.field("target_layer_ids"))
        self.mask = self.field("mask_token_id")
        self.block_size = self.field("block_size") + 1 - self.first_slot
        self.top_k = self.candidate_count()
        shifts = tensors.get("d2t", np.zeros(config["vocab_size"], np.int64))
        self.ids = [int(n + shift) for n, shift in enumerate(shifts)]

    def candidate_count(self) -> int:
        return self.field("selector_top_k")

    def field(self, name: str, default: Any = None) -> Any:
        """`dflash_config` first, then the top level."""
        inner = self.config.get("dflash_config", {}).get(name)
        outer = self.config.get(name) if inner is None else inner
        return default if outer is None else outer

    def tensor(self, name: str) -> Array:
        return self.tensors[name].astype(np.float64)

    def normed(self, x: Array) -> Array:
        return rms_norm(x, self.weight("norm"), self.config["rms_norm_eps"])

    def candidates(self, logits: Array) -> list[int]:
        """The K most likely tokens of a slot, the first of equals first."""
        return sorted(self.ids, key=lambda token: -logits[token])[: self.top_k]

    def chooser(self, hidden: Array, features: Array, start: int) -> Choose:
        """Returns the function that scores the candidates of each slot of a block.

        Args:
            hidden: normalised, of the slots that draft.
            features: one row a position; only rows `< start` are read.
            start: the known token's position.
        """
        raise NotImplementedError

    def block_hidden(
        self, known: int, features: Array, start: int, window: int | None = None, block_size: int | None = None
    ) -> Array:
        """Returns the normalised hidden state of every drafting slot, the input of the head."""
        slots = (block_size or self.block_size) - 1 + self.first_slot
        return self.normed(self.hidden(known, features, start, window, slots))[self.first_slot :]

    def draft(
        self, tokens: Sequence[int], features: Array, start: int, window: int | None = None, block_size: int | None = None
    ) -> tuple[list[int], Array]:
        """The greedy walk. The logits are those of the head, before scale and cap, as the engine's head gives them."""
        hidden = self.block_hidden(tokens[start], features, start, window, block_size)
        choose = self.chooser(hidden, features, start)
        before = tokens[start]
        walked = []
        for slot in range(len(hidden)):
            choices, scores = choose(slot, before)
            before = choices[int(np.argmax(scores))]
            walked.append(before)
        return walked, self.target.head(hidden)

    def walk_distribution(
        self, hidden: Array, known: int, temperature: float, features: Array | None = None, start: int = 0
    ) -> dict[tuple[int, ...], float]:
        """The probability of every sampled walk over the slots of `hidden` `[n, H]`."""
        choose = self.chooser(hidden, np.zeros((0, 0)) if features is None else features, start)
        walks = {(): 1.0}
        for slot in range(len(hidden)):
            longer: dict[tuple[int, ...], float] = {}
            for walk, p in walks.items():
                choices, scores = choose(slot, walk[-1] if walk else known)
                for token, q in zip(choices, softmax(scores / temperature), strict=True):
                    longer[(*walk, token)] = p * q
            walks = longer
        return walks


class Drafter2(Walker):
    """A DFlash 2 drafter."""

    def kernels(self, conv: str, h: Array) -> NDArray[np.float64]:
        """`[n, side, tap, H]`: a base of every channel, and what the slot adds for each group of channels."""
        base = self.tensor(f"{conv}.base_kernel")
        flat = h @ self.tensor(f"{conv}.kernel_projection.weight").T
        size = self.field("conv_group_size")
        dynamic = flat.reshape(len(h), *base.shape[:2], base.shape[2] // size)
        return base + np.repeat(dynamic, size, axis=3)

    @staticmethod
    def convolve(kernels: NDArray[np.float64], side: int, y: Array) -> Array:
        out = np.zeros_like(y)
        for slot in range(len(y)):
            for tap in range(kernels.shape[2]):
                if slot >= tap:
                    out[slot] += kernels[slot, side, tap] * y[slot - tap]
        return out

    def visible(self, layer: int, before: Sequence[int], block: Sequence[int]) -> NDArray[np.bool_]:
        """Every query sees its whole block; of the context, in a sliding layer, only what is closer than the window."""
        seen = np.ones((len(block), len(before) + len(block)), bool)
        kinds = self.config.get("layer_types") or ["full_attention"] * len(self.layers)
        if kinds[layer] == "sliding_attention":
            for row, position in enumerate(block):
                seen[row, : len(before)] = [position - key < self.config["sliding_window"] for key in before]
        return seen

    def hidden(self, known: int, features: Array, start: int, window: int | None, block_size: int) -> Array:
        first = 0 if window is None else max(0, start - window)
        context = features[first:start]
        before = range(first, start)
        block = range(start, start + block_size)
        x = self.target.embed([known] + [self.mask] * (block_size - 1)) * self.field("input_embedding_scale", 1.0)
        for n, layer in enumerate(self.layers):
            h = layer.norm(x, "input_layernorm")
            kernels = self.kernels(f"layers.{n}.attention_conv", h)
            h = self.convolve(kernels, 0, h)
            k = np.concatenate([layer.keys(context, before), layer.keys(h, block)])
            v = np.concatenate([layer.values(context), layer.values(h)])
            seen = self.visible(n, before, block)
            x = x + self.convolve(kernels, 1, layer.output(attention(layer.queries(h, block), k, v, seen)))
            h = layer.norm(x, "post_attention_layernorm")
            kernels = self.kernels(f"layers.{n}.mlp_conv", h)
            h = self.convolve(kernels, 0, h)
            gate, up = (h @ layer.weight(f"mlp.{name}_proj").T for name in ("gate", "up"))
            x = x + self.convolve(kernels, 1, (gate / (1 + np.exp(-gate)) * up) @ layer.weight("mlp.down_proj").T)
        return x

    def logits(self, hidden: Array) -> Array:
        """Returns the logits that the selector adds its scores to, from normalised hidden states."""
        u = self.target.head(hidden) * self.field("output_multiplier", 1.0)
        cap = self.field("final_logit_softcapping", 0.0)
        return cap * np.tanh(u / cap) if cap > 0 else u

    def pair_score(self, hidden: Array, before: int, token: int) -> float:
        """Scores a token in a slot with this hidden state `[H]`, given the token of the slot before."""
        gate = self.tensor("candidate_selector.hidden_projection.weight") @ hidden
        predecessor, successor = (self.tensor(f"candidate_selector.{name}_codebook") for name in ("predecessor", "successor"))
        return float(np.sum(predecessor[before] * gate * successor[self.ids.index(token)]))

    def choices(self, hidden: Array, logits: Array, before: int) -> tuple[list[int], Array]:
        """Returns the candidates of a slot and their scores after the token `before`."""
        tokens = self.candidates(logits)
        return tokens, np.array([logits[token] + self.pair_score(hidden, before, token) for token in tokens])

    def chooser(self, hidden: Array, features: Array, start: int) -> Choose:
        logits = self.logits(hidden)
        return lambda slot, before: self.choices(hidden[slot], logits[slot], before)


@dataclass(frozen=True)
class Losses:
    """Sums over the slots of a block: weight times cross-entropy in nats, and weights."""

    backbone: float
    selector: float
    weight: float


def block_losses(drafter: Drafter2, hidden: Array, tokens: Sequence[int], counted: Sequence[bool], gamma: float) -> Losses:
    """The losses of a block whose slots, the known one included, should hold `tokens`.

    The selector scores K candidates after the true token before them; the right one takes the last one's place if it is not
    among them.

    Args:
        hidden: normalised, of the slots after the known one.
        counted: whether each slot but the known one is in the loss.
    """
    logits = drafter.logits(hidden)
    sums = np.zeros(3)
    for slot, (token, counts) in enumerate(zip(tokens[1:], counted, strict=True)):
        if not counts:
            continue
        weight = math.exp(-slot / gamma)
        candidates = drafter.candidates(logits[slot])
        if token not in candidates:
            candidates[-1] = token
        scores = np.array([logits[slot][c] + drafter.pair_score(hidden[slot], tokens[slot], c) for c in candidates])
        nll = -math.log(softmax(logits[slot])[token]), -math.log(softmax(scores)[candidates.index(token)])
        sums += weight * np.array([*nll, 1.0])
    return Losses(*sums)


def as_dflash2(
    pair: Pair,
    seed: int = 0,
    *,
    kernel: int = 2,
    group: int = 8,
    rank: int = 6,
    top_k: int = 5,
    window: int | None = None,
    sliding: Sequence[int] = (),
    strength: float = 1.0,
    **fields: Any,
) -> Pair:
    """The pair with a DFlash 2 drafter around the same backbone, convolutions and selector random.

    Args:
        window: of the layers in `sliding`.
        strength: of what convolutions and selector add.
        fields: more of `dflash_config`.
    """
    rng = np.random.default_rng(seed)
    config = pair.drafter_config
    layers = config["num_hidden_layers"]
    h = config["hidden_size"]
    v = config["vocab_size"]
    own = {"conv_kernel_size": kernel, "conv_group_size": group, "selector_rank": rank, "selector_top_k": top_k}
    tensors = dict(pair.drafter_tensors)
    for n in range(layers):
        for conv in (f"layers.{n}.attention_conv", f"layers.{n}.mlp_conv"):
            base = strength * 0.3 * rng.normal(size=(2, kernel, h)).astype(np.float32)
            base[:, 0] += 1
            tensors[f"{conv}.base_kernel"] = base
            tensors[f"{conv}.kernel_projection.weight"] = random_matrix(rng, 2 * kernel * h // group, h, 0.3 * strength)
    for name in ("predecessor", "successor"):
        tensors[f"candidate_selector.{name}_codebook"] = rng.normal(size=(v, rank)).astype(np.float32)
    tensors["candidate_selector.hidden_projection.weight"] = random_matrix(rng, rank, h, strength)
    kinds = ["sliding_attention" if n in sliding else "full_attention" for n in range(layers)]
    made = config | {
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": config["dflash_config"] | own | fields,
        "layer_types": kinds,
        "sliding_window": window,
        "use_sliding_window": bool(sliding),
        "is_causal": False,
    }
    return replace(pair, drafter_config=made, drafter_tensors=tensors)


def with_draft_vocab(pair: Pair, ids: Sequence[int], codebooks: Sequence[str] = ()) -> Pair:
    """The pair with a drafter that can propose these tokens alone, which are rising.

    Args:
        codebooks: tensors of which it keeps the rows of these tokens.
    """
    config = dict(pair.drafter_config)
    count = len(ids)
    if "dflash_config" in config:
        config["dflash_config"] = config["dflash_config"] | {"draft_vocab_size": count}
    else:
        config["draft_vocab_size"] = count
    kept = {name: pair.drafter_tensors[name][list(ids)] for name in codebooks}
    maps = {"d2t": np.asarray(ids) - np.arange(count), "t2d": np.isin(np.arange(config["vocab_size"]), ids)}
    return replace(pair, drafter_config=config, drafter_tensors={**pair.drafter_tensors, **kept, **maps})


def build2(pair: Pair) -> tuple[Target, Drafter2]:
    target = Target(pair.target_config, pair.target_tensors)
    return target, Drafter2(pair.drafter_config, pair.drafter_tensors, target)
