"""Reference of DFlash speculative decoding in NumPy float64, which tests compare with the engine.

A Qwen3 target, a DFlash drafter and the greedy loop, written from the description of the method and not from the engine. There
are no caches: every round starts again from the tokens. One sequence at a time, so arrays have no batch dim.

Legend: n tokens, H hidden, N query heads, K key/value heads, D head size, V vocabulary, B block. Weights are kept as a
checkpoint stores them, `[out, in]`.

Sources: DFlash (arXiv 2602.06036) §3-4 and its published `dflash/model.py`; Qwen3 technical report (arXiv 2505.09388) §2.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

Array = NDArray[np.float64]
Tensors = Mapping[str, NDArray[Any]]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """`x / rms(x) * weight` over the last dim."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: Array, positions: Sequence[int], theta: float) -> Array:
    """RoPE in the rotate_half form: component i of `x` `[n, heads, D]` turns together with component i + D/2."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-np.arange(half) / half)
    angles = np.asarray(positions, np.float64)[:, None] * frequencies
    cos = np.cos(angles)[:, None, :]
    sin = np.sin(angles)[:, None, :]
    first = x[..., :half]
    second = x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(q: Array, k: Array, v: Array, visible: NDArray[np.bool_]) -> Array:
    """Attends `q` `[n, N, D]` to `k`, `v` `[m, K, D]` where `visible` `[n, m]`; gives `[n, N * D]`."""
    heads = []
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T / np.sqrt(q.shape[2])
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        heads.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, head // group])
    return np.concatenate(heads, axis=1)


@dataclass(frozen=True)
class Layer:
    """A Qwen3 layer. Target and drafter have the same arrays and differ in their attention masks."""

    config: Mapping[str, Any]
    tensors: Tensors
    prefix: str

    def weight(self, name: str) -> Array:
        return self.tensors[f"{self.prefix}.{name}.weight"].astype(np.float64)

    def norm(self, x: Array, name: str) -> Array:
        return rms_norm(x, self.weight(name), self.config["rms_norm_eps"])

    def heads(self, h: Array, name: str) -> Array:
        size = self.config["head_dim"]
        flat = h @ self.weight(f"self_attn.{name}").T
        return flat.reshape(len(h), flat.shape[1] // size, size)

    def queries(self, h: Array, positions: Sequence[int]) -> Array:
        return rotate(self.norm(self.heads(h, "q_proj"), "self_attn.q_norm"), positions, self.config["rope_theta"])

    def keys(self, h: Array, positions: Sequence[int]) -> Array:
        return rotate(self.norm(self.heads(h, "k_proj"), "self_attn.k_norm"), positions, self.config["rope_theta"])

    def values(self, h: Array) -> Array:
        return self.heads(h, "v_proj")

    def output(self, attended: Array) -> Array:
        return attended @ self.weight("self_attn.o_proj").T

    def mlp_inner(self, x: Array) -> Array:
        """Returns the input of `down_proj`: `silu(gate(h)) * up(h)` with h = norm(x)."""
        h = self.norm(x, "post_attention_layernorm")
        gate = h @ self.weight("mlp.gate_proj").T
        return gate / (1 + np.exp(-gate)) * (h @ self.weight("mlp.up_proj").T)

    def mlp(self, x: Array) -> Array:
        return self.mlp_inner(x) @ self.weight("mlp.down_proj").T


class Target:
    """A Qwen3 language model over whole sequences from position 0."""

    def __init__(self, config: Mapping[str, Any], tensors: Tensors):
        """`config` has the fields of a `config.json`, `tensors` the names and shapes of a checkpoint."""
        self.config = config
        self.tensors = tensors
        self.layers = [Layer(config, tensors, f"model.layers.{i}") for i in range(config["num_hidden_layers"])]

    def embed(self, tokens: Sequence[int]) -> Array:
        return self.tensors["model.embed_tokens.weight"].astype(np.float64)[list(tokens)]

    def head(self, x: Array) -> Array:
        """Logits `[n, V]` of states that are already normalised."""
        name = "model.embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"
        return x @ self.tensors[name].astype(np.float64).T

    def run(self, tokens: Sequence[int]) -> tuple[Array, list[Array]]:
        """Logits `[n, V]`, and the residual stream after each layer (before the final norm), each `[n, H]`."""
        positions = range(len(tokens))
        causal = np.tril(np.ones((len(tokens), len(tokens)), bool))
        x = self.embed(tokens)
        after = []
        for layer in self.layers:
            h = layer.norm(x, "input_layernorm")
            x = x + layer.output(attention(layer.queries(h, positions), layer.keys(h, positions), layer.values(h), causal))
            x = x + layer.mlp(x)
            after.append(x)
        return self.head(self.final_norm(x)), after

    def final_norm(self, x: Array) -> Array:
        return rms_norm(x, self.tensors["model.norm.weight"].astype(np.float64), self.config["rms_norm_eps"])


class Drafter:
    """A DFlash drafter: drafts a whole block in one pass, from the target's hidden states before the block."""

    def __init__(self, config: Mapping[str, Any], tensors: Tensors, target: Target):
        """`tensors` are named without a `model.` prefix; embedding and head are the target's.

        Raises:
            ValueError: a field of later drafters that changes the maths and is not described here.
        """
        later = ("is_causal", "input_embedding_scale", "output_multiplier", "final_logit_softcapping")
        inner = config["dflash_config"]
        for name in later:
            if config.get(name, inner.get(name)) is not None:
                raise ValueError(f"expected a drafter without {name}, got {config.get(name, inner.get(name))!r}")
        self.config = config
        self.tensors = tensors
        self.target = target
        self.layers = [Layer(config, tensors, f"layers.{i}") for i in range(config["num_hidden_layers"])]
        self.taps: list[int] = list(inner["target_layer_ids"])
        self.mask: int = inner["mask_token_id"]
        self.block_size: int = config["block_size"] if "block_size" in config else inner["block_size"]

    def weight(self, name: str) -> Array:
        return self.tensors[f"{name}.weight"].astype(np.float64)

    def context_features(self, hidden_after_layer: Sequence[Array], positions: Iterable[int]) -> Array:
        """The drafter's view of the target at `positions`: `hidden_norm(fc(taps))`, `[len(positions), H]`.

        A tap `i` is the residual stream *after* 0-based layer i; the taps are concatenated in the order listed. What follows
        the last layer passes through the target's final norm (`hidden_states[-1]` of transformers), as the published PyTorch
        code has it; a field of ours asks for the stream before it, which the published MLX code reads.
        """
        rows = np.asarray(list(positions), int)
        last = len(hidden_after_layer) - 1
        inner: Mapping[str, Any] = self.config.get("dflash_config", self.config)
        before = inner.get("last_tap_before_norm", False)
        tapped = [hidden_after_layer[i][rows] for i in self.taps]
        tapped = [self.target.final_norm(x) if i == last and not before else x for i, x in zip(self.taps, tapped, strict=True)]
        taps = np.concatenate(tapped, axis=1)
        return rms_norm(taps @ self.weight("fc").T, self.weight("hidden_norm"), self.config["rms_norm_eps"])

    def hidden(self, known: int, features: Array, start: int, window: int | None, block_size: int) -> Array:
        """The block stream `[B, H]` before the final norm; see `draft`."""
        if len(features) < start:
            raise ValueError(f"expected features of the {start} positions before the block, got {len(features)}")
        first = 0 if window is None else max(0, start - window)
        context = features[first:start]
        before = range(first, start)
        block = range(start, start + block_size)
        all_visible = np.ones((block_size, len(context) + block_size), bool)
        x = self.target.embed([known] + [self.mask] * (block_size - 1))
        for layer in self.layers:
            h = layer.norm(x, "input_layernorm")
            # The context enters keys and values only, and without the layer's input norm.
            k = np.concatenate([layer.keys(context, before), layer.keys(h, block)])
            v = np.concatenate([layer.values(context), layer.values(h)])
            x = x + layer.output(attention(layer.queries(h, block), k, v, all_visible))
            x = x + layer.mlp(x)
        return x

    def draft(
        self, tokens: Sequence[int], features: Array, start: int, window: int | None = None, block_size: int | None = None
    ) -> tuple[list[int], Array]:
        """Drafts the tokens at positions start + 1 .. start + B - 1.

        Args:
            tokens: all tokens up to and with the known one, which stands at `start`.
            features: one row a position, from position 0; only rows `< start` are read.
            window: read only the last `window` positions before `start`; None reads all.

        Returns:
            B - 1 tokens, and their logits `[B - 1, V]`.
        """
        if len(tokens) != start + 1:
            raise ValueError(f"expected {start + 1} tokens up to the known one, got {len(tokens)}")
        x = self.hidden(tokens[start], features, start, window, block_size or self.block_size)
        logits = self.target.head(rms_norm(x, self.weight("norm"), self.config["rms_norm_eps"]))[1:]
        return [int(token) for token in logits.argmax(axis=1)], logits


@dataclass(frozen=True)
class Round:
    """A draft and its verification.

    Attributes:
        start: position of the known token, which is the last one at hand.
        block: the known token and the drafted ones, B in all.
        target_argmax: slot i holds the target's choice for position start + i + 1, given the block up to slot i.
        accepted: drafted tokens that the target agrees with, before any cut.
        emitted: the accepted tokens and the target's next one, cut after EOS and at the length limit.
        draft_logits: `[B - 1, V]`.
        target_logits: `[B, V]`.
    """

    start: int
    block: list[int]
    target_argmax: list[int]
    accepted: int
    emitted: list[int]
    draft_logits: Array
    target_logits: Array

    @property
    def margin(self) -> float:
        """The smallest gap between the best two logits: how much rounding no choice of this round would notice."""
        best = np.sort(np.concatenate([self.draft_logits, self.target_logits]), axis=1)
        return float(np.min(best[:, -1] - best[:, -2]))


@dataclass(frozen=True)
class Generation:
    """The generated tokens (without the prompt), and the rounds they came from."""

    output: list[int]
    rounds: list[Round]


def cut(tokens: Sequence[int], limit: int, eos: Collection[int]) -> list[int]:
    """At most `limit` tokens, up to and with the first EOS."""
    kept: list[int] = []
    for token in tokens[:limit]:
        kept.append(token)
        if token in eos:
            break
    return kept


def speculative_greedy(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    max_new_tokens: int,
    block_size: int | None = None,
    window: int | None = None,
    eos: Collection[int] = (),
) -> Generation:
    """Greedy speculative decoding.

    The first round's known token is the last prompt token, so that every generated token comes out of a round. The published
    loop differs only there: it lets the target choose one token before its first round.
    """
    size = block_size or drafter.block_size
    tokens = list(prompt)
    output = []
    rounds = []
    while len(output) < max_new_tokens and not (output and output[-1] in eos):
        start = len(tokens) - 1
        _, hidden = target.run(tokens)
        features = drafter.context_features(hidden, range(start))
        drafted, draft_logits = drafter.draft(tokens, features, start, window, size)
        block = [tokens[start], *drafted]
        target_logits = target.run(tokens[:start] + block)[0][start:]
        choices = [int(token) for token in target_logits.argmax(axis=1)]
        accepted = 0
        while accepted < size - 1 and drafted[accepted] == choices[accepted]:
            accepted += 1
        emitted = cut([*drafted[:accepted], choices[accepted]], max_new_tokens - len(output), eos)
        rounds.append(Round(start, block, choices, accepted, emitted, draft_logits, target_logits))
        tokens += emitted
        output += emitted
    return Generation(output, rounds)


def autoregressive_greedy(target: Target, prompt: Sequence[int], max_new_tokens: int, eos: Collection[int] = ()) -> list[int]:
    """The generated tokens, one run of the target for each."""
    tokens = list(prompt)
    output = []
    while len(output) < max_new_tokens and not (output and output[-1] in eos):
        token = int(target.run(tokens)[0][-1].argmax())
        tokens.append(token)
        output.append(token)
    return output


@dataclass(frozen=True)
class Pair:
    """A target and a drafter as configurations and tensors (float32, as a checkpoint would hold them)."""

    target_config: dict[str, Any]
    target_tensors: dict[str, NDArray[np.float32]]
    drafter_config: dict[str, Any]
    drafter_tensors: dict[str, NDArray[np.float32]]

    def build(self) -> tuple[Target, Drafter]:
        target = Target(self.target_config, self.target_tensors)
        return target, Drafter(self.drafter_config, self.drafter_tensors, target)


def random_matrix(rng: np.random.Generator, rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
    """`[rows, columns]`; maps a vector of RMS 1 to one of RMS `gain`, more or less."""
    return (rng.normal(size=(rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)


def random_norm(rng: np.random.Generator, size: int) -> NDArray[np.float32]:
    return rng.uniform(0.5, 1.5, size).astype(np.float32)


def random_layer(rng: np.random.Generator, config: Mapping[str, Any], prefix: str) -> dict[str, NDArray[np.float32]]:
    """Queries and keys are large, so that attention is far from uniform and mistakes in it show."""
    h = config["hidden_size"]
    i = config["intermediate_size"]
    d = config["head_dim"]
    query = config["num_attention_heads"] * d
    key = config["num_key_value_heads"] * d
    tensors = {
        "input_layernorm": random_norm(rng, h),
        "self_attn.q_proj": random_matrix(rng, query, h),
        "self_attn.k_proj": random_matrix(rng, key, h),
        "self_attn.v_proj": random_matrix(rng, key, h),
        "self_attn.o_proj": random_matrix(rng, h, query, 1.5),
        "self_attn.q_norm": random_norm(rng, d) * np.float32(1.5),
        "self_attn.k_norm": random_norm(rng, d) * np.float32(1.5),
        "post_attention_layernorm": random_norm(rng, h),
        "mlp.gate_proj": random_matrix(rng, i, h, 1.5),
        "mlp.up_proj": random_matrix(rng, i, h),
        "mlp.down_proj": random_matrix(rng, h, i, 1.5),
    }
    return {f"{prefix}.{name}.weight": tensor for name, tensor in tensors.items()}


def random_pair(
    seed: int,
    *,
    vocab_size: int = 40,
    hidden_size: int = 32,
    intermediate_size: int = 48,
    drafter_intermediate_size: int | None = None,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    target_layers: int = 5,
    drafter_layers: int = 2,
    taps: Sequence[int] = (0, 2, 4),
    block_size: int = 6,
    tie_word_embeddings: bool = False,
    rope_theta: float = 10000.0,
    max_position_embeddings: int = 512,
    eos_token_id: int | None = None,
) -> Pair:
    """A small pair with random weights. Its drafts are guesses: with a vocabulary of 40 nearly all are rejected."""
    rng = np.random.default_rng(seed)
    common = {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": max_position_embeddings,
        "attention_bias": False,
        "vocab_size": vocab_size,
    }
    target_config = common | {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": target_layers,
        "tie_word_embeddings": tie_word_embeddings,
        "eos_token_id": eos_token_id,
    }
    drafter_config = common | {
        "architectures": ["DFlashDraftModel"],
        "intermediate_size": drafter_intermediate_size or intermediate_size,
        "num_hidden_layers": drafter_layers,
        "num_target_layers": target_layers,
        "layer_types": ["full_attention"] * drafter_layers,
        "tie_word_embeddings": False,
        "block_size": block_size,
        "dflash_config": {"mask_token_id": vocab_size - 1, "target_layer_ids": list(taps)},
    }
    target = {
        "model.embed_tokens.weight": random_matrix(rng, vocab_size, hidden_size, 3.0),
        "model.norm.weight": random_norm(rng, hidden_size),
    }
    if not tie_word_embeddings:
        target["lm_head.weight"] = random_matrix(rng, vocab_size, hidden_size, 3.0)
    for n in range(target_layers):
        target |= random_layer(rng, target_config, f"model.layers.{n}")
    drafter = {
        "fc.weight": random_matrix(rng, hidden_size, hidden_size * len(taps)),
        "hidden_norm.weight": random_norm(rng, hidden_size),
        "norm.weight": random_norm(rng, hidden_size),
    }
    for n in range(drafter_layers):
        drafter |= random_layer(rng, drafter_config, f"layers.{n}")
    return Pair(target_config, target, drafter_config, drafter)


def oracle_like_pair(
    seed: int,
    prompts: Sequence[Sequence[int]],
    *,
    length: int = 32,
    window: int | None = None,
    skill: float = 0.7,
    ridge: float = 0.1,
    drafter_intermediate_size: int = 256,
    first_slot: int = 1,
    **sizes: Any,
) -> Pair:
    """A `random_pair` whose drafter knows the target's continuations of `prompts` in part, so that some drafts are accepted.

    The last `down_proj` is fitted by ridge regression: the block stream at each slot should point to the output row of the
    token that the target puts there.

    Args:
        seed: of the random weights and of the choice of places.
        prompts: one or more; the longer they are together with `length`, the less the fit can remember.
        length: how many tokens of each continuation the drafter sees.
        window: the window that it will be run with. It is good only with this window and with blocks of its own size.
        skill: the share of places where a block can start that the fit sees.
        ridge: how much the fit is held back.
        drafter_intermediate_size: the wider, the more the fit can remember.
        first_slot: the first slot that drafts; 0 for a backbone in whose blocks the known token's slot drafts too.
        sizes: the other arguments of `random_pair`.
    """
    pair = random_pair(seed, drafter_intermediate_size=drafter_intermediate_size, **sizes)
    name = f"layers.{pair.drafter_config['num_hidden_layers'] - 1}.mlp.down_proj.weight"
    without = pair.drafter_tensors | {name: np.zeros_like(pair.drafter_tensors[name])}
    target = Target(pair.target_config, pair.target_tensors)
    drafter = Drafter(pair.drafter_config, without, target)
    size = drafter.block_size
    rng = np.random.default_rng(seed)
    directions = target.head(np.diag(drafter.weight("norm"))).T
    directions /= np.sqrt(np.mean(directions**2, axis=1, keepdims=True))
    inputs = []
    wanted = []
    for prompt in prompts:
        tokens = [*prompt, *autoregressive_greedy(target, prompt, length + size)]
        features = drafter.context_features(target.run(tokens)[1], range(len(tokens)))
        for start in range(len(prompt) - 1, len(prompt) + length):
            if rng.random() < skill:
                # Without the last `down_proj`, what comes out is what the last MLP reads.
                x = drafter.hidden(tokens[start], features, start, window, size - 1 + first_slot)[first_slot:]
                inputs.append(drafter.layers[-1].mlp_inner(x))
                wanted.append(4 * directions[tokens[start + 1 : start + size]] - x)
    a = np.concatenate(inputs)
    b = np.concatenate(wanted)
    fitted = np.linalg.solve(a.T @ a + ridge * np.eye(a.shape[1]), a.T @ b).T
    return Pair(pair.target_config, pair.target_tensors, pair.drafter_config, without | {name: fitted.astype(np.float32)})


def as_folders(folder: Path, pair: Pair, *, model_prefix: bool = False, block_size_inside: bool = False) -> tuple[Path, Path]:
    """Writes the pair as two Hugging Face style folders, `target` and `drafter`, under `folder`.

    Args:
        model_prefix: names the drafter's tensors with a leading `model.`.
        block_size_inside: puts the drafter's `block_size` into `dflash_config`, not at the top level.

    Returns:
        The target's folder, which also has a `tokenizer.json` (the word "t7" is token 7), and the drafter's.
    """
    config = dict(pair.drafter_config)
    if block_size_inside:
        config["dflash_config"] = config["dflash_config"] | {"block_size": config.pop("block_size")}
    prefix = "model." if model_prefix else ""
    tensors = {prefix + name: tensor for name, tensor in pair.drafter_tensors.items()}
    contents = {"target": (pair.target_config, pair.target_tensors), "drafter": (config, tensors)}
    for name, (fields, arrays) in contents.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(fields, indent=2))
        save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, folder / name / "model.safetensors")
    words = {f"t{token}": token for token in range(pair.target_config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "target" / "tokenizer.json"))
    return folder / "target", folder / "drafter"
