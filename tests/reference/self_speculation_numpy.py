"""Reference of linear self-speculation in NumPy float64, which tests compare with the engine.

One model drafts a block of masks that all see each other, and verifies the drafts as it decodes. There are no caches: every
pass starts again from the tokens. Written from the published loop of Nemotron-Labs-Diffusion (arXiv 2607.05722,
`linear_spec_generate`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from reference.dflash_numpy import Array, Layer, Tensors, attention, random_layer, random_matrix, random_norm, rms_norm, rotate


@dataclass(frozen=True)
class Model:
    """A model with Llama's layers over whole sequences from position 0."""

    config: Mapping[str, Any]
    tensors: Tensors

    def logits(
        self, tokens: Sequence[int], visible: NDArray[np.bool_], adapted: "Model | None" = None, first: int = 0
    ) -> Array:
        """Logits `[n, V]`, where token i sees the tokens j with `visible[i, j]`.

        Args:
            adapted: the model that tokens from `first` on run through; None for this model.
        """
        positions = range(len(tokens))
        theta = self.config["rope_theta"]
        from_first = (np.arange(len(tokens)) >= first)[:, None]
        models = (self, self if adapted is None else adapted)
        x = self.tensors["encoder.embed_tokens.weight"].astype(np.float64)[list(tokens)]
        for n in range(self.config["num_hidden_layers"]):
            layers = [Layer(each.config, each.tensors, f"encoder.layers.{n}") for each in models]

            def both(function: Callable[[Layer], Array], layers: Sequence[Layer] = layers) -> Array:
                before, behind = map(function, layers)
                return np.where(from_first if before.ndim == 2 else from_first[:, None], behind, before)

            h = both(lambda layer, x=x: layer.norm(x, "input_layernorm"))
            q, k, v = (both(lambda layer, h=h, name=name: layer.heads(h, name)) for name in ("q_proj", "k_proj", "v_proj"))
            out = attention(rotate(q, positions, theta), rotate(k, positions, theta), v, visible)
            x = x + both(lambda layer, out=out: layer.output(out))
            x = x + both(lambda layer, x=x: layer.mlp(x))
        norm = self.tensors["encoder.norm.weight"].astype(np.float64)
        return rms_norm(x, norm, self.config["rms_norm_eps"]) @ self.tensors["diffusion_head.weight"].astype(np.float64).T


def self_speculation(
    target: Model, drafting: Model, prompt: Sequence[int], new_tokens: int, block: int
) -> tuple[list[int], list[int]]:
    """Greedy loop: the new tokens, and how many of them each round added, the last cut at `new_tokens`.

    Args:
        drafting: the target, with the draft pass's adapter if there is one. The tokens before the block run without it.
    """
    config = target.config
    shifted = config["dlm_type"] == "dream"
    tokens = list(prompt)
    rounds = []
    while len(tokens) < len(prompt) + new_tokens:
        context = len(tokens) - 1
        masked = [*tokens, *[config["mask_token_id"]] * (block - 1)]
        visible = np.tril(np.ones((len(masked), len(masked)), bool))
        visible[context:, context:] = True
        found = target.logits(masked, visible, drafting, context)[context:].argmax(axis=1).tolist()
        drafts = found[:-1] if shifted else found[1:]
        drafted = [*tokens, *drafts]
        causal = np.tril(np.ones((len(drafted), len(drafted)), bool))
        verified = target.logits(drafted, causal)[context:].argmax(axis=1).tolist()
        accepted = next((n for n, draft in enumerate(drafts) if draft != verified[n]), len(drafts))
        new = verified[: accepted + 1][: len(prompt) + new_tokens - len(tokens)]
        rounds.append(len(new))
        tokens += new
    return tokens[len(prompt) :], rounds


def random_model(seed: int, dlm_type: str = "llada", vocab_size: int = 24, layers: int = 3) -> Model:
    """A small model with random weights. With so few tokens, a draft is right now and then by chance."""
    config = {
        "model_type": "nemotron_labs_diffusion",
        "architectures": ["NemotronLabsDiffusionModel"],
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "dlm_paradigm": "bidirectional",
        "dlm_type": dlm_type,
        "mask_token_id": vocab_size - 1,
        "block_size": 8,
        "eos_token_id": None,
    }
    rng = np.random.default_rng(seed)
    tensors = {
        "encoder.embed_tokens.weight": random_matrix(rng, vocab_size, 32, 32**0.5),
        "encoder.norm.weight": random_norm(rng, 32),
        "diffusion_head.weight": random_matrix(rng, vocab_size, 32, 4.0),
    }
    for n in range(layers):
        layer = random_layer(rng, config, f"encoder.layers.{n}")
        tensors |= {name: value for name, value in layer.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))}
    return Model(config, tensors)


def as_folder(folder: Path, model: Model) -> Path:
    """Writes a model as a folder with a tokenizer, in which the word "t7" is token 7."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config))
    save_file({name: np.ascontiguousarray(value) for name, value in model.tensors.items()}, folder / "model.safetensors")
    write_words(folder, model.config["vocab_size"])
    return folder


def write_words(folder: Path, vocab: int) -> None:
    """Writes a tokenizer in which the word "t7" is token 7."""
    words = {f"t{token}": token for token in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


CHARACTERS = ("Ġ", *map(chr, range(33, 127)), "</s>", "<mask>")
"""The printable ASCII characters, "Ġ" being a space, an end of sequence and a mask."""


def with_characters(folder: Path, model: Any) -> Path:
    """Writes a model as a folder whose tokens are `CHARACTERS`, for grammars."""
    as_folder(folder, model)
    write_characters(folder)
    return folder


def write_characters(folder: Path) -> None:
    """Writes the tokenizer of `CHARACTERS`, the last two of which are special."""
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(CHARACTERS)}, unk_token="?"))
    characters = pre_tokenizers.Split("", "isolated")
    signs = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([characters, signs])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CHARACTERS[-2:]))
    tokenizer.save(str(folder / "tokenizer.json"))
