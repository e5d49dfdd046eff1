"""Multi-token prediction (MTP): a head of one decoder layer that drafts token after token from its target's last hidden state.

DeepSeek-V3 (arXiv 2412.19437, section 2.2) trains such a head with the model. Qwen3-Next and Qwen3.5 store one in their
checkpoints, under `mtp.`; the maths is that of vLLM's `qwen3_next_mtp.py` and of SGLang's file of the same name.

The layer reads pairs: the target's hidden state at position t, *after* its final norm, and the embedding of the token at t + 1.
Each gets a norm of its own; `fc` joins them, the embedding first. The layer is of the target's own kind, with full attention.
Its output, after the head's final norm, predicts the token at t + 2 through the target's output head. A chain continues without
the target: the next pair is that normalised output, and the embedding of the token just drafted. A pair has position t.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int
from rich.console import Console

from tilewright.kernels.operations import Heads, Norm, Operations, Projection
from tilewright.models import decoder, gguf
from tilewright.models.checkpoint import (
    CONFIG,
    MTP,
    load_params,
    load_stored,
    read_config,
    save_params,
    stored_family,
    weight_files,
)
from tilewright.models.config import ConfigReader, HeadSizes, text_config
from tilewright.models.decoder import DecoderConfig, Layer, declare_layer, head_norms, stack_of
from tilewright.models.draft_vocab import MAPS, DraftVocab, maps_from_target_ids, target_ids_from_maps
from tilewright.models.family import Family
from tilewright.models.params import matrix, norm_weight
from tilewright.models.quantised import quantised_layout
from tilewright.models.registry import FAMILIES
from tilewright.models.stack import SINGLE_DEVICE, Rows
from tilewright.models.stored import read_headers

BLOCK_SIZE = 4
"""Default block size: the last token and three drafts."""
ARCHITECTURE = "MTPDraftModel"
"""Architecture of a head in a folder of its own, which `tilewright train drafter` writes."""
COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Fields of a target's `config.json` with the number of its heads."""
FIELDS = ("num_target_layers", "block_size", "draft_vocab_size", "expected_acceptance")
"""Fields of `mtp_config`."""


@dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """Sizes of an MTP head.

    Attributes:
        layer: decoder of one layer with full attention: the head's layer.
        num_target_layers: layers of the target.
        block_size: tokens of a block, the last token included.
        draft_vocab_size: number of tokens that the head can propose (see `draft_vocab.py`); None for all.
        expected_acceptance: see `DFlashConfig`.
    """

    layer: DecoderConfig
    num_target_layers: int
    block_size: int = BLOCK_SIZE
    draft_vocab_size: int | None = None
    expected_acceptance: tuple[float, ...] = ()

    @property
    def vocab_size(self) -> int:
        return self.layer.vocab_size

    @property
    def num_proposable(self) -> int:
        """Number of tokens that the head can propose."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """The tapped layer: the target's last."""
        return (self.num_target_layers - 1,)

    @property
    def heads(self) -> HeadSizes:
        """Heads of keys and values."""
        return self.layer.heads(self.layer.kind(0))


def layer_config(target: DecoderConfig) -> DecoderConfig:
    """Returns the configuration of a head's layer: one layer of the target, with full attention, and with experts if any."""
    return replace(
        target,
        num_layers=1,
        unrotated_layers=(),
        sliding_window=None,
        sliding_layers=(),
        dense_layers=(),
        delta_layers=(),
        masked_blocks=None,
    )


def is_mtp(fields: Mapping[str, Any]) -> bool:
    """True if a `config.json` declares an MTP head in a folder of its own."""
    return fields.get("architectures") == [ARCHITECTURE]


def config_from_hf(fields: Mapping[str, Any], where: str = CONFIG) -> MtpConfig:
    """Reads the `config.json` of a head in a folder of its own: the fields of its layer as a decoder, and `mtp_config`.

    Raises:
        ValueError: one message that lists everything missing or unsupported.
    """
    inner = fields.get("mtp_config")
    if not isinstance(inner, Mapping):
        raise ValueError(f"{where}: mtp_config must be an object, found {inner!r}")
    layer = decoder.config_from_hf({name: value for name, value in fields.items() if name != "mtp_config"}, where)
    read = ConfigReader({name: value for name, value in inner.items() if value is not None}, where)
    read.require(layer.num_layers == 1, f"num_hidden_layers must be 1, found {layer.num_layers}")
    unknown = sorted(inner.keys() - set(FIELDS))
    read.require(not unknown, f"mtp_config has unknown fields: {', '.join(unknown)}")
    config = MtpConfig(
        layer=layer_config(layer),
        num_target_layers=read.integer("num_target_layers"),
        block_size=read.integer("block_size", default=BLOCK_SIZE),
        draft_vocab_size=read.integer("draft_vocab_size") if "draft_vocab_size" in read.fields else None,
        expected_acceptance=read.fractions("expected_acceptance"),
    )
    too_many = f"draft_vocab_size {config.draft_vocab_size} exceeds vocab_size {config.vocab_size}"
    read.require((config.draft_vocab_size or 0) <= config.vocab_size, too_many)
    read.require(config.block_size >= 2, f"block_size must be at least 2, found {config.block_size}")
    drafts = config.block_size - 1
    count = len(config.expected_acceptance)
    read.require(count in (0, drafts), f"expected_acceptance must have {drafts} entries, found {count}")
    read.finish()
    return config


def config_to_hf(config: MtpConfig) -> dict[str, Any]:
    """Returns the `config.json` of a head in a folder of its own."""
    inner = {
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "expected_acceptance": list(config.expected_acceptance) or None,
    }
    return {
        **decoder.config_to_hf(config.layer),
        "architectures": [ARCHITECTURE],
        "mtp_config": {name: value for name, value in inner.items() if value is not None},
    }


def check_fits(head: MtpConfig, target: DecoderConfig) -> None:
    """Raises a `ValueError` that lists every mismatch between a head and its target."""
    sizes = (
        ("vocab_size", head.vocab_size, target.vocab_size),
        ("hidden_size", head.hidden_size, target.hidden_size),
        ("num_target_layers", head.num_target_layers, target.num_layers),
    )
    if problems := [f"{name} is {have} but the target's is {want}" for name, have, want in sizes if have != want]:
        raise ValueError("the drafter does not fit the target: " + "; ".join(problems))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MtpParams:
    """All arrays of a head.

    Attributes:
        fc: matrix `[2 * hidden, hidden]` of the normalised embedding and the normalised state.
        norm: final norm of the head.
        vocab: the draft vocabulary with its part of the target's output head; None in a declaration, in training, and if the
            target's whole head is used.
    """

    embedding_norm: Any
    hidden_norm: Any
    fc: Any
    layer: Layer
    norm: Any
    vocab: Any = None


def declare(config: MtpConfig, family: Family | None = None) -> MtpParams:
    """Declares the head's arrays under their checkpoint names.

    Args:
        family: replaces the layer's family, for other tensor names.
    """
    h = config.hidden_size
    family = family or FAMILIES[config.layer.family]

    def norm(name: str) -> Any:
        return norm_weight(f"{MTP}{name}.weight", h, offset=family.norm_offset)

    return MtpParams(
        embedding_norm=norm("pre_fc_norm_embedding"),
        hidden_norm=norm("pre_fc_norm_hidden"),
        fc=matrix(f"{MTP}fc.weight", 2 * h, h, ("taps", "hidden")),
        layer=declare_layer(config.layer, f"{MTP}layers.0", family, kind=config.layer.kind(0)),
        norm=norm("norm"),
    )


def is_stored(folder: Path) -> bool:
    """True if a target's folder has an MTP head."""
    if gguf.gguf_file(folder) is not None:
        return False
    return any(tensor.name.startswith(MTP) for tensor in read_headers(weight_files(folder)))


def check_stored(folder: Path) -> None:
    """Raises a `ValueError` for a target's folder without a head, or with a head that is not supported."""
    if gguf.gguf_file(folder) is not None:
        raise ValueError(f"{folder}: expected a folder of safetensors with an MTP head, found a GGUF file")
    read = ConfigReader(text_config(read_config(folder)), str(folder / CONFIG))
    for name in COUNTS:
        read.expect(name, 1)
    read.expect("mtp_use_dedicated_embeddings", False)
    if not is_stored(folder):
        trained = "tilewright train drafter --kind mtp trains one"
        raise ValueError(f"{folder}: expected an MTP head (tensors {MTP}*), found none; {trained}")
    read.finish()


def load_stored_head(
    folder: Path, target: DecoderConfig, dtype: DTypeLike, console: Console | None = None
) -> tuple[MtpConfig, MtpParams]:
    """Reads the head in a target's own folder: its configuration, and its parameters as `dtype`.

    Quantised matrices are dequantised, like those of other drafters.

    Raises:
        ValueError: see `check_stored`; or one message with all tensors that do not match.
    """
    check_stored(folder)
    config = MtpConfig(layer=layer_config(target), num_target_layers=target.num_layers)
    layout = quantised_layout(read_config(folder).get("quantization_config"))
    specs = declare(config, stored_family(folder, config.layer, head=True))
    params = load_params(folder, specs, dtype, ignore=lambda name: not name.startswith(MTP), console=console, layout=layout)
    return config, params


def load(folder: Path, target: DecoderConfig, dtype: DTypeLike, console: Console | None = None) -> tuple[MtpConfig, MtpParams]:
    """Reads a head from a folder of its own: its configuration, and its parameters as `dtype`.

    Raises:
        ValueError: see `config_from_hf`; or one message with all mismatches with the target, and all tensors that do not match.
    """
    config = config_from_hf(read_config(folder), str(folder / CONFIG))
    check_fits(config, target)
    params = load_params(folder, declare(config), dtype, ignore=lambda name: name in MAPS, console=console)
    if config.draft_vocab_size is None:
        return config, params
    ids = target_ids_from_maps(config.draft_vocab_size, config.vocab_size, load_stored(folder, MAPS), str(folder))
    return config, replace(params, vocab=DraftVocab(jnp.asarray(ids)))


def save(folder: Path, config: MtpConfig, params: MtpParams, dtype: DTypeLike) -> None:
    """Writes a head with its draft vocabulary to a folder of its own; see `checkpoint.save_params`."""
    vocab = params.vocab
    maps = None if vocab is None else maps_from_target_ids(np.asarray(vocab.ids), config.vocab_size)
    save_params(folder, config_to_hf(config), declare(config), replace(params, vocab=None), dtype, maps)


def joined(
    config: MtpConfig, ops: Operations, params: MtpParams, h: Float[Array, "B T H"], embeds: Float[Array, "B T H"]
) -> Float[Array, "B T H"]:
    """Returns the layer's input: the normalised embedding and the normalised state, joined by `fc`."""
    eps = config.layer.rms_norm_eps
    pair = [ops.rms_norm(embeds, params.embedding_norm, eps), ops.rms_norm(h, params.hidden_norm, eps)]
    return ops.linear(jnp.concatenate(pair, axis=-1), params.fc)


def keys(
    config: MtpConfig,
    ops: Operations,
    params: MtpParams,
    h: Float[Array, "B T H"],
    embeds: Float[Array, "B T H"],
    positions: Int[Array, "B T"],
) -> tuple[Float[Array, "B K T D"], Float[Array, "B K T D"]]:
    """Computes keys and values of pairs for a cache; both depend only on a pair and its position.

    Args:
        h: the target's normalised hidden states, or outputs of `step` that are fed back.
        embeds: the embedding of the token *after* each position.
        positions: those of the hidden states.
    """
    layer = params.layer
    x = joined(config, ops, params, h, embeds)
    heads = head_norms(config.layer, layer, config.layer.rope_tables(positions)[layer.kind.rotation])
    norm = Norm(layer.input_norm, config.layer.rms_norm_eps)
    _, k, v = ops.heads(ops.project(x, layer.qkv, norm, first=1, bias=layer.qkv_bias), heads)
    return k, v


def step(
    config: MtpConfig,
    ops: Operations,
    params: MtpParams,
    h: Float[Array, "B T H"],
    embeds: Float[Array, "B T H"],
    positions: Int[Array, "B T"],
    attend: Callable[[Projection, Heads], Float[Array, "B T _"]],
) -> Float[Array, "B T H"]:
    """Runs the layer over pairs (see `keys`); `attend` computes their attention.

    Returns:
        the output after the final norm: the input of the output head, and `h` of the next step of a chain.
    """

    def attend_pairs(ops: Operations, projection: Projection, heads: Heads, metadata: Any, cache: Any) -> tuple[Array, None]:
        return attend(projection, heads), None

    x = joined(config, ops, params, h, embeds)
    rows = Rows(config.layer.rope_tables(positions), None)
    stack = stack_of(config.layer, ops, (params.layer,), attend_pairs)
    x, _, _ = SINGLE_DEVICE.run(stack, x, rows, (None,), ())
    return ops.rms_norm(x, params.norm, config.layer.rms_norm_eps)
