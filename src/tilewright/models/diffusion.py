"""Diffusion language models: LLaDA and Dream.

Their layers are a decoder's (`decoder.py`); this module holds the differences. Every position attends to every valid position,
a token may be the mask, and the logits of all positions are predictions of one denoising step.

Sources: LLaDA (arXiv 2502.09992) and its `modeling_llada.py`; Dream (arXiv 2508.15487), whose backbone is Qwen2.5's; tensor
names as in their checkpoints.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int
from rich.console import Console

from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.operations import Heads, KeyValueRows, Operations, Projection
from tilewright.models import decoder
from tilewright.models.checkpoint import CONFIG, load_params, read_config
from tilewright.models.config import ConfigReader
from tilewright.models.decoder import DecoderConfig, DecoderParams, Forward, read_decoder
from tilewright.models.stack import SINGLE_DEVICE, Strategy

Family = Literal["llada", "dream"]
MODEL_TYPES: dict[str, Family] = {"llada": "llada", "Dream": "dream"}

END_OF_TURN = {("llada", 126336): 126348, ("dream", 151666): 151645}
"""End-of-turn token of published models, by family and mask id; only their tokenizers name it."""

LLADA_ONLY: dict[str, Any] = {
    "block_type": "llama",
    "block_group_size": 1,
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "bias_for_layer_norm": False,
    "attention_layer_norm": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "multi_query_attention": False,
    "rope": True,
    "rope_full_precision": True,
    "alibi": False,
    "clip_qkv": None,
    "input_emb_norm": False,
    "scale_logits": False,
}
"""Fields with their only supported value; other values change the maths."""

LLADA_NAMES = {
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "model.layers": "model.transformer.blocks",
    "input_layernorm": "attn_norm",
    "self_attn.o_proj": "attn_out",
    "self_attn.": "",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
"""Parts of a decoder's tensor names, and LLaDA's names for them.

`ff_out` is the output head, and in a block the MLP's last matrix."""


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """Configuration of a diffusion language model.

    Attributes:
        family: the form of its checkpoint.
        decoder: sizes of its layers; of the family "llama" for LLaDA and "qwen2" for Dream.
        mask_token_id: token of positions that are not denoised yet.
        pad_token_id: padding token in training; None if the model names none.
        eot_token_id: token that ends a turn; None if the model has none, or none that is known.
    """

    family: Family
    decoder: DecoderConfig
    mask_token_id: int
    pad_token_id: int | None = None
    eot_token_id: int | None = None

    @property
    def shifted(self) -> bool:
        """True if a position's logits predict the next token, as in the decoder from which Dream was made."""
        return self.family == "dream"

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.decoder.eos_token_ids


def is_diffusion(folder: Path) -> bool:
    """True if a folder holds a LLaDA or Dream model. Raises a `ValueError` if it holds no configuration."""
    return read_config(folder).get("model_type") in MODEL_TYPES


def read_diffusion(folder: Path) -> DiffusionConfig:
    """Reads the configuration of a LLaDA or Dream model. Raises a `ValueError` for any other, or unsupported, model."""
    return config_from_hf(read_config(folder), where=str(folder / CONFIG))


def config_from_hf(fields: Mapping[str, Any], where: str = "config.json") -> DiffusionConfig:
    """Reads the `config.json` of a LLaDA or Dream model.

    Raises:
        ValueError: one message that lists every missing field, every unsupported value, and every special token outside the
            vocabulary.
    """
    read = ConfigReader(fields, where)
    family = MODEL_TYPES[read.choice("model_type", tuple(MODEL_TYPES))]
    read.expect("quantization_config", None)
    sizes = read_llada(read) if family == "llada" else read_decoder(read, "qwen2")
    read.require(not any(sizes.windows), "use_sliding_window=True is not supported (only False)")
    mask, pad, eot = (read.token_ids(name) for name in ("mask_token_id", "pad_token_id", "eot_token_id"))
    read.require(len(mask) == 1, f"mask_token_id must be a token id, found {fields.get('mask_token_id')!r}")
    for name, ids in (("mask", mask), ("pad", pad), ("eot", eot), ("eos", sizes.eos_token_ids)):
        outside = [i for i in ids if i >= sizes.vocab_size]
        read.require(not outside, f"{name}_token_id {outside} lies outside the vocabulary of {sizes.vocab_size}")
    read.finish()
    return DiffusionConfig(
        family=family,
        decoder=sizes,
        mask_token_id=mask[0],
        pad_token_id=pad[0] if pad else None,
        eot_token_id=eot[0] if eot else END_OF_TURN.get((family, mask[0])),
    )


def read_llada(read: ConfigReader) -> DecoderConfig:
    """Reads the configuration of LLaDA's layers. Problems are collected in `read`."""
    for name, only in LLADA_ONLY.items():
        read.expect(name, only)
    hidden = read.integer("d_model")
    heads = read.integer("n_heads")
    kv_heads = read.integer("n_kv_heads", default=heads)
    theta = read.rope()[0]
    read.require(hidden % (2 * heads) == 0, "d_model must give each of n_heads an even size")
    read.require(heads % kv_heads == 0, "n_heads is no multiple of n_kv_heads")
    return DecoderConfig(
        family="llama",
        # The embedding may have more rows than the tokenizer has entries.
        vocab_size=read.integer("vocab_size" if read.fields.get("embedding_size") is None else "embedding_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("mlp_hidden_size", default=read.integer("mlp_ratio", default=4) * hidden),
        num_layers=read.integer("n_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=max(hidden // heads, 2),
        rms_norm_eps=read.number("rms_norm_eps", default=1e-5),
        rope_theta=theta,
        tie_word_embeddings=read.flag("weight_tying", default=True),
        max_position_embeddings=read.integer("max_sequence_length"),
        eos_token_ids=read.token_ids("eos_token_id"),
    )


def config_to_hf(config: DiffusionConfig) -> dict[str, Any]:
    """Returns the `config.json` of a model.

    Raises:
        ValueError: the family's configurations have no field for a setting.
    """
    sizes = config.decoder
    special: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "pad_token_id": config.pad_token_id,
        "eot_token_id": config.eot_token_id,
    }
    if sizes.family != ("llama" if config.family == "llada" else "qwen2"):
        raise ValueError(f"expected the layers of {config.family}, found those of {sizes.family}")
    if config.family == "dream":
        return {**decoder.config_to_hf(sizes), "architectures": ["DreamModel"], "model_type": "Dream", **special}
    if sizes.hidden_size != sizes.num_heads * sizes.head_dim or sizes.rope_scaling is not None:
        raise ValueError("expected heads that make up the hidden size, and no rope_scaling: LLaDA has no field for either")
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        **LLADA_ONLY,
        "d_model": sizes.hidden_size,
        "n_heads": sizes.num_heads,
        "n_kv_heads": sizes.num_kv_heads,
        "n_layers": sizes.num_layers,
        "mlp_hidden_size": sizes.intermediate_size,
        "vocab_size": sizes.vocab_size,
        "embedding_size": sizes.vocab_size,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": sizes.rope_theta,
        "weight_tying": sizes.tie_word_embeddings,
        "max_sequence_length": sizes.max_position_embeddings,
        "eos_token_id": list(sizes.eos_token_ids) or None,
        **special,
    }


def llada_name(name: str) -> str:
    """Returns LLaDA's name of a decoder's tensor."""
    for part, llada_part in LLADA_NAMES.items():
        name = name.replace(part, llada_part)
    return name


def declare(config: DiffusionConfig, separate_head: bool = False) -> DecoderParams:
    """Declares the model's arrays: a decoder's, under the family's names."""
    specs = decoder.declare(config.decoder, separate_head)
    return specs if config.family == "dream" else jax.tree.map(lambda spec: replace(spec, name=llada_name(spec.name)), specs)


def load_diffusion(
    folder: Path,
    dtype: DTypeLike,
    console: Console | None = None,
    shard: Callable[[DecoderParams], DecoderParams] | None = None,
    ops: Operations | None = None,
) -> tuple[DiffusionConfig, DecoderParams]:
    """Reads a diffusion language model: its configuration, and its parameters as `dtype`.

    `hub.resolve` finds the folder of a hub id. No code in the folder is executed. See `checkpoint.load_decoder` for arguments
    and for tensors that are ignored.

    Raises:
        ValueError: see `checkpoint.read_config`, `config_from_hf` and `checkpoint.load_params`.
    """
    config = read_diffusion(folder)
    head = "lm_head.weight" if config.family == "dream" else llada_name("lm_head.weight")

    def ignore(name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (config.decoder.tie_word_embeddings and name == head)

    specs = declare(config, ops is not None and ops.separate_head)
    placed = None if shard is None else shard(specs)
    return config, load_params(folder, specs, dtype, ignore=ignore, console=console, shardings=placed, ops=ops)


def bidirectional_attend(
    ops: Operations, projection: Projection, heads: Heads, valid: Int[Array, " B"], kv_cache: Any
) -> tuple[Float[Array, "B T _"], None]:
    """Computes attention of every position over the row's first `valid` positions."""
    q, k, v = ops.heads(projection, heads)
    out = ops.attend(q, KeyValueRows(k, v), AttentionMask(valid[:, None]))
    return out.reshape(*out.shape[:2], -1), None


def forward_full(
    config: DiffusionConfig,
    ops: Operations,
    params: DecoderParams,
    tokens: Int[Array, "B L"],
    valid: Int[Array, " B"],
    tap_layers: tuple[int, ...] = (),
    schedule: Strategy = SINGLE_DEVICE,
) -> Forward:
    """Runs whole sequences from position 0, of which row b's first `valid[b]` positions are valid.

    Outputs of padding positions are meaningless.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    sizes = config.decoder
    attend = cast(decoder.Attend, bidirectional_attend)
    return decoder.forward(sizes, ops, params, tokens, positions, attend, valid, tap_layers=tap_layers, schedule=schedule)


def predicting(config: DiffusionConfig, hidden: Float[Array, "B L H"]) -> Float[Array, "B L H"]:
    """Returns the rows that predict each position, for `logits`.

    With shifted logits these are the rows before; the first position keeps its own.
    """
    return jnp.concatenate([hidden[:, :1], hidden[:, :-1]], axis=1) if config.shifted else hidden


def logits(
    config: DiffusionConfig,
    ops: Operations,
    params: DecoderParams,
    hidden: Float[Array, "*rows H"],
    schedule: Strategy = SINGLE_DEVICE,
) -> Float[Array, "*rows V"]:
    """Applies the final norm and the output head to rows in the order of the backbone, or of `predicting`."""
    return decoder.logits(config.decoder, ops, params, hidden, schedule)
