"""Reads a Hugging Face `config.json` and reports all its problems in one error."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, TypeGuard

from jax import Array
from jaxtyping import Int

from tilewright.kernels.operations import HEAD_MULTIPLE
from tilewright.models.delta import DeltaSizes
from tilewright.models.experts import Mixture
from tilewright.models.layers import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    RopeScaling,
    YarnScaling,
    rope_frequencies,
    rope_tables,
)

SCALINGS: dict[object, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        (
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "finetuned",
            "llama_4_scaling_beta",
        ),
    ),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor", "original_max_position_embeddings")),
    "proportional": (("partial_rotary_factor",), ("factor",)),
}
"""Kinds of `rope_scaling`, each with its required and its optional fields.

"dynamic" changes nothing here: it scales positions beyond `max_position_embeddings`, which no context exceeds."""

YARN_FLAGS = ("truncate", "finetuned")
"""Boolean fields of "yarn". `finetuned` changes nothing here."""

ROPE_THETA = 10000.0
"""Default rotary base (Su et al. 2021, and the libraries' default)."""

IMAGE_AXES = ("mrope_section", "mrope_interleaved")
"""Multimodal fields of `rope_parameters`, ignored because text has the same position on all axes."""

Rotation = Literal["global", "local", "none"]
"""Rotation of a layer: "global" (the model's), "local" (a separate base of sliding-window layers) or "none"."""


@dataclass(frozen=True)
class HeadSizes:
    """Keys and values of a layer.

    Attributes:
        kv_heads, head_dim: number of key/value heads, and size of all heads.
        keys_are_values: values are the keys before their norm and rotation, and have no matrix of their own.
    """

    kv_heads: int
    head_dim: int
    keys_are_values: bool = False


@dataclass(frozen=True)
class LayerKind:
    """Settings in which the layers of one model differ, besides their arrays.

    Attributes:
        window, scale, softcap: see `operations.Scores`.
        mixture: the experts that replace the MLP; None for an MLP.
        delta: the linear attention that replaces attention; None for attention.
        heads: the layer's own heads; None for those of the model.
        value_norm: values have an RMSNorm per head, without weights.
    """

    rotation: Rotation = "global"
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    mixture: Mixture | None = None
    delta: DeltaSizes | None = None
    heads: HeadSizes | None = None
    value_norm: bool = False


FirstToken = Literal["likely", "drawn"]
"""Choice of a block's first token from the logits of the token before: the most likely token, or a draw as in decoding."""


@dataclass(frozen=True)
class MaskedBlocks:
    """Training of a decoder to denoise blocks too: masks in a block that follows its context, all of which sees all of it.

    Attributes:
        mask_token_id: token of positions that are not denoised yet.
        length: positions of a block in training.
        shifted: a position's logits predict the next token, as in decoding, and not its own.
        causal: finished tokens see those before them only, so that the model also decodes token by token. Its blocks begin
            right behind the prompt. If false, finished tokens see their whole block, and blocks are counted from position 0.
        first_token: choice of a block's first token in the pass that stores the block before; None if it is denoised.
        plain_confidence: tokens are ranked by their probability before temperature and filters, and a token whose probability
            equals the threshold is committed. If false, it is the probability after them, and has to exceed the threshold.
        threshold: published default of `diffusion.blocks.BlockDenoising.threshold`.
        small_length: published default of `diffusion.blocks.BlockDenoising.small_block_size`; None for whole blocks. If it does
            not divide the length, the greatest common divisor is the default.
    """

    mask_token_id: int
    length: int
    shifted: bool = False
    causal: bool = True
    first_token: FirstToken | None = None
    plain_confidence: bool = False
    threshold: float = 0.85
    small_length: int | None = None

    @property
    def denoised(self) -> int:
        """Number of a block's tokens that are denoised."""
        return self.length - (self.first_token is not None)

    def first_block(self, length: int) -> tuple[int, int]:
        """Returns first position and number of positions of the block that runs first, behind a text of `length` tokens.

        If its tokens are all known, the first pass stores them, and chooses the first token behind them.
        """
        if self.causal:
            return length - 1, 1
        denoised = length if self.first_token is None else length - 1
        return denoised // self.length * self.length, self.length


@dataclass(frozen=True)
class Canvas:
    """Blocks of a model that refines random tokens: a canvas follows the finished tokens, which see those before them only.

    Attributes:
        length: positions of a canvas.
    """

    length: int

    causal: ClassVar[bool] = True

    def first_block(self, length: int) -> tuple[int, int]:
        """Returns first position and number of positions of the canvas behind a text of `length` tokens."""
        return length, self.length


class RopeFields(NamedTuple):
    """Rotary settings of a configuration."""

    rope_theta: float
    rope_scaling: RopeScaling | None
    partial_rotary_factor: float


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes that every model of decoder layers has; the fields are those of its `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = ROPE_THETA
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = 1.0

    @property
    def rope_frequencies(self) -> list[float]:
        rotated = int(self.head_dim * self.partial_rotary_factor)
        return rope_frequencies(rotated, self.rope_theta, self.rope_scaling)

    def heads(self, kind: LayerKind) -> HeadSizes:
        """Returns the heads of a layer of this kind."""
        return kind.heads or HeadSizes(self.num_kv_heads, self.head_dim)

    @property
    def needs_xla(self) -> bool:
        """True if XLA must compute attention on CPUs, because the CPU kernels do not support the head size."""
        return self.head_dim % HEAD_MULTIPLE != 0

    def rope_tables(self, positions: Int[Array, "B T"]) -> dict[Rotation, Rope]:
        """Computes cosines and sines of positions, for each rotation that the layers use."""
        factor = 1.0 if self.rope_scaling is None else self.rope_scaling.attention_factor
        return {"global": rope_tables(positions, self.rope_frequencies, factor)}

    def sizes(self) -> dict[str, Any]:
        """Returns these fields by name, for a drafter with its target's sizes."""
        return {field.name: getattr(self, field.name) for field in fields(Sizes)}

    def to_hf(self) -> dict[str, Any]:
        """Returns these fields under their `config.json` names."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else scaling_fields(self.rope_scaling),
        } | ({} if self.partial_rotary_factor == 1 else {"partial_rotary_factor": self.partial_rotary_factor})


def scaling_fields(scaling: RopeScaling) -> dict[str, Any]:
    """Returns a scaling's `config.json` fields. LongRoPE's `long` is left out, because it follows from the context."""
    return {name: value for name, value in vars(scaling).items() if name != "long" and value is not None}


def with_yarn_context(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a configuration's fields with `max_position_embeddings` extended by YaRN.

    Model cards advise adding YaRN for long texts, and often leave `max_position_embeddings` unchanged. A YaRN scaling without
    `original_max_position_embeddings` leaves the context unchanged. With a scale of queries (`llama_4_scaling_beta`), the
    context ends at the original length, up to which the scale is 1.
    """
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters")
    context = fields.get("max_position_embeddings")
    if not isinstance(scaling, Mapping) or "yarn" not in (scaling.get("rope_type"), scaling.get("type")):
        return fields
    factor = scaling.get("factor")
    original = scaling.get("original_max_position_embeddings")
    if not (is_number(context) and is_number(factor) and is_number(original)):
        return fields
    whole = min(context, original) if scaling.get("llama_4_scaling_beta") else max(context, round(factor * original))
    return {**fields, "max_position_embeddings": whole}


def for_context(config: Any, context: int | None) -> Any:
    """Returns a decoder's configuration for a shorter declared context.

    Only LongRoPE changes: the model gets that context and the matching frequency factors.
    """
    scaling = config.rope_scaling
    if context is None or context >= config.max_position_embeddings or not isinstance(scaling, LongRopeScaling):
        return config
    return replace(config, max_position_embeddings=context, rope_scaling=scaling.for_context(context))


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class ConfigReader:
    """Reads configuration fields and collects problems, which `finish` raises as a single `ValueError`."""

    def __init__(self, fields: Mapping[str, Any], where: str):
        self.fields = fields
        self.where = where
        self.problems: list[str] = []

    def require(self, condition: bool, problem: str) -> None:
        if not condition:
            self.problems.append(problem)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.fields.get(name)
        if value is None:
            value = default
        good = isinstance(value, int) and not isinstance(value, bool) and value > 0
        self.require(good, f"{name} must be a positive integer, found {value!r}")
        return value if good and isinstance(value, int) else 1

    def number(self, name: str, default: float) -> float:
        value = self.fields.get(name, default)
        good = is_number(value) and value > 0
        self.require(good, f"{name} must be a positive number, found {value!r}")
        return float(value) if good else default

    def choice(self, name: str, allowed: Sequence[str]) -> str:
        value = self.fields.get(name)
        self.require(value in allowed, f"{name} must be one of {', '.join(allowed)}, found {value!r}")
        return value if isinstance(value, str) and value in allowed else allowed[0]

    def expect(self, name: str, only: object) -> None:
        """Notes a problem unless a field is absent, null or `only`, because other values change the maths."""
        value = self.fields.get(name)
        self.require(value is None or value == only, f"{name}={value!r} is not supported (only {only!r})")

    def expect_all(self, name: str, only: str) -> None:
        values = self.fields.get(name) or []
        good = isinstance(values, list) and all(value == only for value in values)
        self.require(good, f"{name}={values!r} is not supported (only {only!r})")

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self.fields.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        good = all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids)
        self.require(good, f"{name} must be a token id or a list of them, found {value!r}")
        return tuple(ids) if good else ()

    def fractions(self, name: str) -> tuple[float, ...]:
        """Reads a list of numbers from 0 to 1; empty if the field is absent."""
        value = self.fields.get(name, [])
        good = isinstance(value, list) and all(is_number(each) and 0 <= each <= 1 for each in value)
        self.require(good, f"{name} must be a list of numbers from 0 to 1, found {value!r}")
        return tuple(map(float, value)) if good else ()

    def flag(self, name: str, default: bool) -> bool:
        value = self.fields.get(name)
        self.require(value is None or isinstance(value, bool), f"{name} must be true or false, found {value!r}")
        return value if isinstance(value, bool) else default

    def rope(self, section: str | None = None) -> RopeFields:
        """Reads rotary base, scaling and rotated fraction from `rope_theta` and `rope_scaling`, or from `rope_parameters`.

        Args:
            section: key in a `rope_parameters` that has an entry for each kind of layer.
        """
        older = self.fields.get("rope_scaling")
        newer = self.fields.get("rope_parameters")
        if section is not None and isinstance(newer, Mapping):
            newer = newer.get(section, newer)
        if not all(isinstance(fields or {}, Mapping) for fields in (older, newer)):
            self.require(False, f"rope_scaling and rope_parameters must be objects, found {older!r} and {newer!r}")
            return RopeFields(ROPE_THETA, None, 1.0)
        scaling = dict(older or newer or {})
        theta = scaling.pop("rope_theta", self.fields.get("rope_theta"))
        good = theta is None or (is_number(theta) and theta > 1)
        self.require(good, f"rope_theta must be a number above 1, found {theta!r}")
        fraction = scaling.pop("partial_rotary_factor", None) or self.fields.get("partial_rotary_factor") or 1.0
        in_range = is_number(fraction) and 0 < fraction <= 1
        self.require(in_range, f"partial_rotary_factor must be a number above 0, at most 1, found {fraction!r}")
        older_kind = scaling.pop("type", None)
        kind = scaling.pop("rope_type", None) or older_kind or "default"
        kind = "longrope" if kind == "su" else kind  # older configurations of Phi-3
        for name in IMAGE_AXES:
            scaling.pop(name, None)
        base = float(theta) if good and theta is not None else ROPE_THETA
        fraction = float(fraction) if in_range else 1.0
        if kind == "proportional":  # the fraction chooses frequencies, and the whole head counts as rotated
            scaling["partial_rotary_factor"], fraction = fraction, 1.0
        return RopeFields(base, self._rope_scaling(kind, scaling), fraction)

    def _rope_scaling(self, kind: object, given: dict[str, Any]) -> RopeScaling | None:
        if kind not in SCALINGS:
            self.require(False, f"rope_scaling type {kind!r} is not supported (only {', '.join(map(repr, SCALINGS))})")
            return None
        required, optional = SCALINGS[kind]
        if kind == "yarn" and given.get("original_max_position_embeddings") is None:
            given["original_max_position_embeddings"] = self.fields.get("max_position_embeddings")
        unknown = sorted(given.keys() - {*required, *optional})
        self.require(not unknown, f"rope_scaling has unknown fields: {', '.join(unknown)}")
        if kind == "longrope":
            return self._longrope(given)
        missing = [name for name in required if not is_number(given.get(name)) or given[name] <= 0]
        self.require(not missing, f"rope_scaling lacks {', '.join(missing)} (positive numbers)")
        if kind == "yarn":
            for name in YARN_FLAGS:
                self.require(given.get(name) in (None, True, False), f"rope_scaling: {name} must be true or false")
        wrong = [name for name in optional if name not in YARN_FLAGS and given.get(name) is not None]
        wrong = [
            name for name in wrong if kind in ("yarn", "proportional") and not (is_number(given[name]) and given[name] >= 0)
        ]
        self.require(not wrong, f"rope_scaling: {', '.join(wrong)} must be positive numbers")
        if missing or wrong or kind in ("default", "dynamic"):
            return None
        if kind == "linear":
            return LinearScaling(float(given["factor"]))
        if kind == "proportional":
            return ProportionalScaling(float(given["partial_rotary_factor"]), float(given.get("factor") or 1))
        if kind == "yarn":
            return self._yarn(given)
        factor, low, high, original = (given[name] for name in required)
        self.require(high > low, f"rope_scaling: high_freq_factor ({high}) must exceed low_freq_factor ({low})")
        return Llama3Scaling(float(factor), float(low), float(high), int(original))

    def _yarn(self, given: Mapping[str, Any]) -> YarnScaling:
        factor = float(given["factor"])
        attention = given.get("attention_factor")
        numerator = given.get("mscale")
        denominator = given.get("mscale_all_dim")
        if attention is None and numerator and denominator:
            over, under = (YarnScaling.default_attention_factor(factor, scale) for scale in (numerator, denominator))
            attention = over / under
        elif attention is None:
            attention = YarnScaling.default_attention_factor(factor)
        return YarnScaling(
            factor,
            int(given["original_max_position_embeddings"]),
            float(attention),
            beta_fast=float(given.get("beta_fast") or 32),
            beta_slow=float(given.get("beta_slow") or 1),
            truncate=given.get("truncate") is not False,
            llama_4_scaling_beta=given.get("llama_4_scaling_beta"),
        )

    def _longrope(self, given: Mapping[str, Any]) -> LongRopeScaling | None:
        """Reads LongRoPE. The original length may be at the top level; by default it is the context."""
        before = len(self.problems)
        name = "original_max_position_embeddings"
        longest = self.integer("max_position_embeddings")
        original = given.get(name) or self.fields.get(name) or longest
        self.require(isinstance(original, int) and original > 1, f"{name} must be an integer above 1, found {original!r}")
        sets = [given.get(field) for field in ("short_factor", "long_factor")]
        for field, factors in zip(("short_factor", "long_factor"), sets, strict=True):
            good = isinstance(factors, list) and all(is_number(each) and each > 0 for each in factors)
            self.require(good, f"rope_scaling: {field} must be a list of positive numbers, found {str(factors)[:60]}")
        for field in ("factor", "attention_factor"):
            value = given.get(field)
            self.require(value is None or (is_number(value) and value > 0), f"rope_scaling: {field} must be a positive number")
        if len(self.problems) > before:
            return None
        attention = given.get("attention_factor")
        if attention is None:
            attention = LongRopeScaling.default_attention_factor(given.get("factor") or longest / original, original)
        short, long = (tuple(map(float, factors or ())) for factors in sets)
        return LongRopeScaling(short, long, original, float(attention), longest > original)

    def sizes(self, head_dim: int | None = None, rope_section: str | None = None) -> dict[str, Any]:
        """Reads the fields of `Sizes`.

        Args:
            head_dim: head size if the configuration names none; by default the hidden size divided by the number of heads.
            rope_section: see `rope`.
        """
        hidden = self.integer("hidden_size")
        heads = self.integer("num_attention_heads")
        sizes = {
            "vocab_size": self.integer("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": self.integer("intermediate_size"),
            "num_layers": self.integer("num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": self.integer("num_key_value_heads", default=heads),
            "head_dim": self.integer("head_dim", default=head_dim or max(hidden // heads, 2)),
            "rms_norm_eps": self.number("rms_norm_eps", default=1e-6),
            **self.rope(rope_section)._asdict(),
        }
        self.require(heads % sizes["num_kv_heads"] == 0, "num_attention_heads is no multiple of num_key_value_heads")
        self.require(sizes["head_dim"] % 2 == 0, "head_dim must be even")
        if isinstance(scaling := sizes["rope_scaling"], LongRopeScaling):
            pairs = int(sizes["head_dim"] * sizes["partial_rotary_factor"]) // 2
            found = len(scaling.short_factor), len(scaling.long_factor)
            problem = f"rope_scaling: expected {pairs} factors in each set, found {found[0]} and {found[1]}"
            self.require(found == (pairs, pairs), problem)
        return sizes

    def finish(self) -> None:
        if self.problems:
            raise ValueError(f"{self.where}: " + "; ".join(self.problems))


def text_config(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the text model's configuration of a multimodal model; other configurations unchanged."""
    text = fields.get("text_config")
    if not isinstance(text, Mapping):
        return fields
    # `read_config` writes the end tokens of `generation_config.json` to the top level.
    shared = ("eos_token_id", "quantization_config", "tie_word_embeddings", "canvas_length")
    ends = {} if fields.get("eos_token_id") is None else {"eos_token_id": fields["eos_token_id"]}
    return {**{name: fields[name] for name in shared if name in fields}, **text, **ends}


BARE = re.compile(r"(?:language_model\.)?((?:embed_tokens|layers|norm)\..*)")
"""Name of a tensor of a decoder that was saved without an output head, possibly inside a multimodal model."""


def bare_tensor(name: str) -> str | None:
    """Adds `model.` to the tensor name of a decoder saved without an output head; returns None for other names."""
    found = BARE.fullmatch(name)
    return f"model.{found[1]}" if found else None


TEXT_PARTS = ("lm_head.", "model.decoder.", "model.encoder.language_model.")
"""Prefixes of tensor names that a multimodal checkpoint's text model has, too."""


def text_tensor(name: str) -> str | None:
    """Maps a multimodal checkpoint's tensor name to the text model's; returns None for tensors of other parts."""
    for prefix, instead in (("language_model.model.", "model."), ("language_model.", ""), ("model.language_model.", "model.")):
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name if name.startswith(TEXT_PARTS) else None
