"""GGUF files: a model in one file, read like a Hugging Face folder.

llama.cpp's format holds configuration, tokenizer, chat template and tensors together. llama.cpp's library dequantises them.
This module gives them the names and layouts of `config.json`, `tokenizer.json` and safetensors, so that the rest of the package
reads one kind of checkpoint.

Source: the format's description in ggml (docs/gguf.md), and how llama.cpp's converter writes each family.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tilewright.models.delta import DeltaSizes
from tilewright.models.family import Family
from tilewright.models.gguf_delta import PREFIX, SHARED_GATE, STRIDED_VALUE_HEADS, delta_fields, delta_names, delta_slice
from tilewright.models.gguf_head import MAGIC, GGUFTensor, read_head
from tilewright.models.gguf_slices import ArrangedSlice, GGUFSlice, TransposedSlice
from tilewright.models.gguf_tokenizer import (
    CONTROL,
    END_TEXTS,
    ENDS,
    MORE_END_TEXTS,
    UNKNOWN,
    begins_with_bos,
    build_tokenizer,
    special_id,
    token_types,
)
from tilewright.models.layers import Llama3Scaling, YarnScaling, rope_frequencies
from tilewright.models.registry import FAMILIES

SUFFIX = ".gguf"
PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
"""Name of one of several files that hold a model together."""
ARCHITECTURES = {family.gguf: family for family in reversed(FAMILIES.values()) if family.gguf is not None}
"""Families by supported value of `general.architecture`; Mistral's files use Llama's."""
WITH_EXPERTS = {"llama": FAMILIES["mixtral"]}
"""Families of files with experts, if other than in `ARCHITECTURES`."""

GLOBAL_NAMES = ("model.embed_tokens", "model.norm", "lm_head")
LAYER_NAMES = (
    *(f"self_attn.{part}" for part in ("o_proj", "q_norm", "k_norm")),
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
"""Hugging Face's names for the parts of a layer; llama.cpp's library maps them to its names."""
SEPARATE_NAMES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
JOINED_NAMES = ("self_attn.qkv_proj", "mlp.gate_up_proj")
"""Names of projections: separate in most families, joined in the checkpoints of some."""
EXPERT_NAMES = tuple(f"mlp.experts.{part}_proj" for part in ("gate", "up", "down"))
"""Names by which llama.cpp's library knows the stacked tensors of all experts."""
SHARED_SIZE = "expert_shared_feed_forward_length"
GATES = "ffn_gate_exps"
UPS = "ffn_up_exps"
"""llama.cpp's names for experts' gates and ups, which are one tensor in gpt-oss' checkpoints."""
ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of divisors of the rotary frequencies: Llama 3's scaling, already computed."""
LONG_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
"""Tensors of divisors of the rotary frequencies: LongRoPE's two sets."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Published values of Llama 3's scaling, of which a file holds only the resulting factors."""

MESSAGE_END = "<|end|>"
"""Token that ends an answer of Phi-3, and one of several messages of gpt-oss."""
HARMONY_ENDS = ("<|return|>", "<|call|>")
"""Tokens that end an answer of gpt-oss."""
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Sampling defaults: llama.cpp's names under `general.sampling`, and those of `generation_config.json`."""
SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the 27B models, whose scores are scaled by hidden size / heads; files do not store this."""


def gguf_file(path: Path) -> Path | None:
    """Finds the GGUF file of a path: the path itself, or the only one in a folder without a `config.json`; else None.

    Raises:
        ValueError: the folder has several, or parts of one model.
    """
    if path.suffix == SUFFIX and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    found = sorted(path.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        parts = [part for file in found if (part := PART.fullmatch(file.name))]
        if len(parts) == len(found):
            raise in_parts(found[0], int(parts[0][2]))
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{path}: expected one {SUFFIX} file, found {len(found)}: {names}; name one of them")
    return found[0] if found else None


def in_parts(path: Path, count: int) -> ValueError:
    """Returns the error for a file that holds a part of a model."""
    first = PART.sub(r"\1-00001-of-\2.gguf", path.name)
    return ValueError(
        f"{path} is one of {count} parts of a model: `llama-gguf-split --merge {first} model.gguf` makes one file of them"
    )


def open_gguf(path: Path) -> "GGUFCheckpoint":
    """Opens a GGUF file, of which only the head is read. Opened files are cached until they change.

    Raises:
        ValueError: the file is not GGUF, is damaged or cut off, holds an unsupported architecture or a part of a model, or the
            extra `gguf` is missing.
    """
    stat = path.stat()
    return _opened(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4)
def _opened(path: Path, changed: int, size: int) -> "GGUFCheckpoint":
    try:
        import gguf  # noqa: F401 (dequantises tensors, and maps their names)
    except ImportError as error:
        raise ValueError(f"{path} is a GGUF file: `pip install 'tilewright[gguf]'` installs its reader") from error
    with path.open("rb") as file:
        start = file.read(4)
    if start != MAGIC:
        raise ValueError(f"{path} is not a GGUF file: it begins with {start!r}")
    try:
        fields, tensors = read_head(path)
    except (ValueError, TypeError, ZeroDivisionError, OverflowError, MemoryError) as error:  # of damaged bytes
        raise ValueError(f"{path} is damaged or cut off: its head cannot be read ({error})") from error
    if isinstance(count := fields.get("split.count"), int) and count > 1:
        raise in_parts(path, count)
    end = max((tensor.data_offset + tensor.n_bytes for tensor in tensors.values()), default=0)
    if end > size:
        raise ValueError(f"{path} is cut off: its tensors end at byte {end:,}, the file at {size:,}")
    for kind in {tensor.tensor_type: tensor for tensor in tensors.values()}.values():
        check_type(kind, path)
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(f"{path}: expected the architecture to be one of {supported}, found {architecture!r}")
    families = {**ARCHITECTURES, **WITH_EXPERTS} if fields.get(f"{architecture}.expert_count") else ARCHITECTURES
    return GGUFCheckpoint(path, families[architecture], fields, tensors)


def with_suffix(name: str, suffix: str) -> str:
    """Returns the name of a layer's other tensor from that of its weights: `q.bias` for `q.weight`, `down_bias` for `down`."""
    if suffix == "weight":
        return name
    return f"{name.removesuffix('weight')}{suffix}" if name.endswith(".weight") else f"{name}_{suffix}"


def check_type(tensor: GGUFTensor, path: Path) -> None:
    """Raises a `ValueError` if llama.cpp's library cannot dequantise a tensor."""
    from gguf.quants import dequantize

    try:
        dequantize(tensor.data.reshape(-1, tensor.data.shape[-1])[:1], tensor.tensor_type)
    except NotImplementedError:
        raise ValueError(f"{path}: {tensor.name} is of type {tensor.tensor_type.name}, which cannot be dequantised") from None


@dataclass(frozen=True, eq=False)
class GGUFCheckpoint:
    """GGUF file under the names of a Hugging Face checkpoint.

    Attributes:
        family: that of its architecture.
        fields: the metadata by llama.cpp's names.
        tensors: by llama.cpp's names.
    """

    path: Path
    family: Family
    fields: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def field(self, name: str, default: Any = None) -> Any:
        """Returns an architecture's value by its short name: `llama.block_count` for "block_count"."""
        return self.fields.get(f"{self.family.gguf}.{name}", default)

    @property
    def architecture(self) -> str:
        return str(self.family.gguf)

    @property
    def layers(self) -> int | None:
        """Number of layers; layers of multi-token prediction, which follow them, do not count."""
        count = self.field("block_count")
        return None if count is None else int(count) - int(self.field("nextn_predict_layers", 0))

    @property
    def vocabulary(self) -> list[str]:
        return self.fields.get("tokenizer.ggml.tokens", [])

    @cached_property
    def config(self) -> dict[str, Any]:
        """Fields of a `config.json`. Missing values stay None, so that their reader reports them."""
        heads = self.field("attention.head_count")
        hidden = self.field("embedding_length")
        head_dim = self.field("attention.key_length") or (hidden // heads if heads and hidden else None)
        self.check_supported(head_dim)
        theta = self.field("rope.freq_base", 10000.0)
        rotated = self.field("rope.dimension_count")
        return {
            "model_type": self.family.name,
            "vocab_size": self.field("vocab_size") or len(self.vocabulary) or None,
            "hidden_size": hidden,
            "intermediate_size": self.field("feed_forward_length", self.family.defaults.get("intermediate_size")),
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self.field("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self.field("context_length"),
            "rms_norm_eps": self.field("attention.layer_norm_rms_epsilon"),
            "rope_theta": theta,
            "rope_scaling": self.rope_scaling(head_dim, theta),
            "partial_rotary_factor": rotated / head_dim if rotated and head_dim else None,
            "sliding_window": self.field("attention.sliding_window") or None,
            **self.mixture(),
            **self.gemma(head_dim),
            **(delta_fields(self.field, self.architecture, str(self.path)) if self.architecture in STRIDED_VALUE_HEADS else {}),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "eos_token_id": self.end_ids,
            "dtype": "float16" if any(t.tensor_type.name == "F16" for t in self.tensors.values()) else "bfloat16",
        }

    def mixture(self) -> dict[str, Any]:
        """Returns the fields of a mixture of experts; llama.cpp's default is normalised weights."""
        if self.family.experts is None:
            return {}
        return {
            "num_experts": self.field("expert_count"),
            "num_local_experts": self.field("expert_count"),
            "num_experts_per_tok": self.field("expert_used_count"),
            "moe_intermediate_size": self.field("expert_feed_forward_length"),
            "norm_topk_prob": self.field("expert_weights_norm", True),
            **({"shared_expert_intermediate_size": self.field(SHARED_SIZE)} if self.family.experts.shared else {}),
        }

    def gemma(self, head_dim: int | None) -> dict[str, Any]:
        """Returns the fields of Gemma that the file has; the family's defaults are llama.cpp's."""
        if not self.family.post_norms:
            return {}
        heads = self.field("attention.head_count")
        hidden = self.field("embedding_length")
        wide = self.field("block_count") == SCALED_BY_WIDTH.get(self.architecture) and heads and hidden
        found = {
            "query_pre_attn_scalar": hidden / heads if wide else head_dim,
            "attn_logit_softcapping": self.field("attn_logit_softcapping"),
            "final_logit_softcapping": self.field("final_logit_softcapping"),
            "rope_local_base_freq": self.field("rope.freq_base_swa"),
        }
        return {name: value for name, value in found.items() if value is not None}

    def check_supported(self, head_dim: int | None) -> None:
        """Raises a `ValueError` that names a metadata value whose maths is not supported."""
        for name, supported in (
            *([] if self.family.experts is not None else [("expert_count", (None, 0))]),
            ("attention.value_length", (None, head_dim)),
            ("rope.scaling.type", (None, "none", "linear", "yarn", *(["longrope"] if self.has_longrope else []))),
            *([] if self.family.windows else [("attention.sliding_window", (None, 0))]),
        ):
            found = self.field(name)
            if found not in supported:
                expected = " or ".join(str(value) for value in supported if value is not None)
                raise ValueError(f"{self.path}: expected {self.family.gguf}.{name} to be absent or {expected}, found {found!r}")

    @cached_property
    def end_ids(self) -> list[int]:
        """Token ids that end an answer, found by their text.

        Phi-3's files do not mark `<|end|>` as a control token.
        """
        named = [special_id(self.fields, name, str(self.path)) for name in ENDS]
        wanted = {*END_TEXTS, *MORE_END_TEXTS, *HARMONY_ENDS, MESSAGE_END}
        numbers = {text: n for n, text in enumerate(self.vocabulary) if text in wanted}
        control = set(self.control_texts)
        others = [text for text in MORE_END_TEXTS if text in control]
        ends = dict.fromkeys(end for end in chain(named, map(numbers.get, (*END_TEXTS, *others))) if end is not None)
        if all(text in numbers for text in HARMONY_ENDS):
            ends.pop(numbers.get(MESSAGE_END, -1), None)
        return list(ends)

    def yarn(self) -> dict[str, Any]:
        """Returns YaRN's scaling. The file's attention factor multiplies the paper's."""
        factor = self.rope_factor or 1.0
        original = self.field("rope.scaling.original_context_length", self.field("context_length"))
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": self.field("rope.scaling.yarn_beta_fast"),
            "beta_slow": self.field("rope.scaling.yarn_beta_slow"),
        }
        if self.family.yarn_ramp == "between":
            scaling["truncate"] = False
        more = self.field("rope.scaling.attn_factor")
        if more is not None:
            scaling["attention_factor"] = more * YarnScaling.default_attention_factor(factor)
        return scaling

    @property
    def rope_factor(self) -> float | None:
        """Factor of the rotary scaling, under its current or its former name; None if the file has none, or 0."""
        return self.field("rope.scaling.factor") or self.field("rope.scale_linear") or None

    def rope_scaling(self, head_dim: int | None, theta: float) -> dict[str, Any] | None:
        """Returns the rotary scaling: YaRN, LongRoPE, Llama 3's or linear.

        LongRoPE's factors are tensors. Llama 3's scaling is recognised by the tensor of its factors. As in llama.cpp, a factor
        without a type is linear scaling, and linear scaling without a factor has factor 1.

        Raises:
            ValueError: the tensor's factors are not Llama 3's, or the file has both the tensor and linear scaling.
        """
        kind = self.field("rope.scaling.type")
        if kind == "yarn":
            return self.yarn()
        if self.has_longrope:
            return self.longrope()
        factor = self.rope_factor or 1.0
        linear = None if kind == "none" or factor == 1.0 else {"rope_type": "linear", "factor": factor}
        if ROPE_FACTORS not in self.tensors:
            return linear
        if linear is not None:
            raise ValueError(f"{self.path}: expected {ROPE_FACTORS} or linear scaling, found both, with a factor of {factor}")
        assert head_dim is not None, "checked with the sizes"
        factors = np.asarray(self.tensors[ROPE_FACTORS].data, np.float64).reshape(-1)
        scaling = Llama3Scaling(factor=float(factors.max()), **LLAMA3)
        plain, scaled = (np.asarray(rope_frequencies(head_dim, theta, one)) for one in (None, scaling))
        if factors.shape != plain.shape or not np.allclose(plain / scaled, factors, rtol=1e-4):
            raise ValueError(f"{self.path}: {ROPE_FACTORS} holds factors other than those of Llama 3's scaling")
        return dict(vars(scaling))

    @property
    def has_longrope(self) -> bool:
        """True if the file has LongRoPE's factors."""
        return any(name in self.tensors for name in LONG_FACTORS.values())

    def longrope(self) -> dict[str, Any]:
        """Returns LongRoPE's scaling. Files store the attention factor only if it is not 1."""
        sets = {
            field: np.asarray(self.tensors[name].data, np.float64).reshape(-1).tolist()
            for field, name in LONG_FACTORS.items()
            if name in self.tensors
        }
        return {
            "rope_type": "longrope",
            **sets,
            "attention_factor": self.field("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": self.field("rope.scaling.original_context_length"),
        }

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """Fields of a `generation_config.json`: end tokens, and the sampling defaults that the file has."""
        found = {hf: self.fields.get(f"general.sampling.{name}") for name, hf in SAMPLING.items()}
        return {"eos_token_id": self.end_ids} | {name: value for name, value in found.items() if value is not None}

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """Fields of a `tokenizer_config.json`: the chat template, and the special tokens that it may use."""
        named = {}
        for name in ("bos", "eos", "unknown", "padding"):
            number = special_id(self.fields, f"{name}_token_id", str(self.path))
            if number is not None:
                named[{"unknown": "unk", "padding": "pad"}.get(name, name) + "_token"] = self.vocabulary[number]
        begins = {"add_bos_token": begins_with_bos(self.fields)}
        return named | begins | {"chat_template": self.fields.get("tokenizer.chat_template")}

    @property
    def control_texts(self) -> list[str]:
        """Tokens that are not text, such as marks of turns."""
        types = token_types(self.fields, str(self.path))
        return [text for text, kind in zip(self.vocabulary, types, strict=True) if kind in (CONTROL, UNKNOWN)]

    def tokenizer(self) -> Tokenizer:
        """Builds the tokenizer. Raises a `ValueError` for an unsupported kind."""
        return build_tokenizer(self.fields, str(self.path))

    @cached_property
    def names(self) -> dict[str, str]:
        """llama.cpp's name of each tensor, by Hugging Face's name; unknown tensors keep their name.

        Experts' gates and ups that are one tensor in Hugging Face's checkpoints map to the gates.
        """
        import gguf

        blocks = self.layers or 0
        gguf_names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, self.architecture.upper().replace("-", "_")), blocks)
        parts = {name: f"{name}.weight" for name in (*LAYER_NAMES, *(JOINED_NAMES if self.family.joined else SEPARATE_NAMES))}
        parts |= self.expert_names
        layers = {f"model.layers.{n}.{name}": f"model.layers.{n}.{part}" for n in range(blocks) for name, part in parts.items()}
        whole = {name: f"{name}.weight" for name in GLOBAL_NAMES}
        hf_names = {gguf_names.get_name(name): hf_name for name, hf_name in chain(whole.items(), layers.items())}
        found = dict[str, str]()
        linear = delta_names(self.architecture, blocks)
        ahead = tuple(f"blk.{n}." for n in range(blocks, int(self.field("block_count", 0))))
        for name in self.tensors:
            if name.startswith(ahead) or linear.get(name) == "":
                continue
            if name in linear:
                found[linear[name]] = name
                continue
            stem, _, suffix = name.rpartition(".")
            if not (self.is_transposed(name) and UPS in name):
                found[with_suffix(hf_names[stem], suffix) if stem in hf_names else name] = name
        for name in (ROPE_FACTORS, *LONG_FACTORS.values()):
            found.pop(name, None)
        return found

    @property
    def delta(self) -> DeltaSizes:
        """Sizes of the layers of linear attention."""
        fields = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        return DeltaSizes(*(self.config[f"linear_{name}"] for name in fields))

    @property
    def expert_names(self) -> dict[str, str]:
        """Checkpoint names of the tensors of a layer with experts, by the names that llama.cpp's library knows."""
        names = self.family.experts
        if names is None:
            return {}
        sinks = {"self_attn.sinks": "self_attn.sinks"} if self.family.sinks else {}
        experts = zip(EXPERT_NAMES, (names.gate_up[0], names.gate_up[-1], names.down), strict=True)
        shared = [f"{names.shared}.{part}_proj" for part in ("gate", "up", "down")] if names.shared else []
        others = [names.router, *shared, *([f"{names.shared}_gate"] if names.shared else [])]
        return {**sinks, **{name: f"{name}.weight" for name in others}, **dict(experts)}

    def is_transposed(self, name: str) -> bool:
        """True if llama.cpp's tensor is transposed in checkpoints; see `TransposedSlice`."""
        return self.family.experts is not None and self.family.experts.biased and "_exps." in name

    # The interface of `safetensors.safe_open`.

    def keys(self) -> Sequence[str]:
        return list(self.names)

    def get_slice(self, name: str) -> GGUFSlice:
        tensor = self.tensors[self.names[name]]
        if f".{PREFIX}" in name:
            return delta_slice(self.tensors, tensor.name, name, self.delta, STRIDED_VALUE_HEADS[self.architecture])
        if name.endswith(SHARED_GATE):
            return ArrangedSlice([tensor], shape=(1, self.config["hidden_size"]))
        if not self.is_transposed(tensor.name):
            offset = self.family.norm_offset if name.endswith("norm.weight") else 0.0
            return GGUFSlice(tensor, self.row_order(name), offset)
        if GATES not in tensor.name:
            return TransposedSlice(tensor)
        other = tensor.name.replace(GATES, UPS)
        if other not in self.tensors or self.tensors[other].shape != tensor.shape:
            raise ValueError(f"{self.path}: expected {other} of the shape of {tensor.name}, found none")
        return TransposedSlice(tensor, self.tensors[other])

    def get_tensor(self, name: str) -> np.ndarray:
        part = self.get_slice(name)
        return part[tuple(slice(None) for _ in part.get_shape())]

    def row_order(self, name: str) -> np.ndarray | None:
        """Row in the file of each row of a projection of queries or keys, if the rotation is pairwise; else None."""
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        part = next((part for part in heads if f".{part}." in name), None)
        if part is None or not self.family.pairwise:
            return None
        rows = np.arange(self.config[heads[part]] * self.config["head_dim"])
        return rows.reshape(self.config[heads[part]], -1, 2).swapaxes(1, 2).reshape(-1)

    def __enter__(self) -> "GGUFCheckpoint":
        return self

    def __exit__(self, *error: object) -> None:
        """Does nothing: the file is mapped into memory, and cached for the next caller."""
