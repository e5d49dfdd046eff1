"""Matrices in 4 and 8 bits as published checkpoints store them, in several tensors each.

A layout defines the tensors that make up the weight of a linear layer, and their meaning; `quantised_layout` chooses one by a
configuration's `quantization_config`. A layout reads weights as float32 or, if matmuls can read them, in blocks of the same
bits. Layers that a checkpoint does not quantise (`modules_to_not_convert`, `ignore`) have a plain `weight`, which is read as
usual.

Legend: O outputs, I inputs, G groups of inputs that share a scale.

Sources: transformers (`quantizers/`, `integrations/awq.py`, `finegrained_fp8.py`), AutoAWQ's `utils/packing_utils.py`,
GPTQModel's `QuantLinear` and its conversion of format v1 to v2, compressed-tensors' `compressors/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tilewright.kernels.linear.blocks import BLOCK, QuantisedMatrix, joined_bits
from tilewright.kernels.linear.scaled import FP8, ScaledMatrix
from tilewright.models.mxfp4 import blocks_of_floats, check_scales, in_pairs, read_mxfp4

Arrays = Mapping[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]
MIDDLE = 8
"""Zero point of symmetric weights in 4 bits."""
V1_ZEROS = np.uint32(0x1111_1111)
"""Number that GPTQ's format v1 subtracts from eight zero points in one word."""
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Position of each of eight outputs in a word."""
SUPPORTED = (
    "gptq and awq of 4 bits, fp8, and compressed-tensors as pack-quantized of 4 bits, as float-quantized, int-quantized or "
    "naive-quantized of 8 bits, or as mxfp4-pack-quantized, and mxfp4 of gpt-oss' experts"
)
WORDS = ("I32",)
FLOATS = ("F16", "BF16", "F32")
Tensors = Mapping[str, tuple[str, ...]]
"""Names of tensors after the layer's, and their allowed safetensors dtypes."""
ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "q_scale", "k_scale", "v_scale")
"""Scales of activations, keys and values, ignored because these stay in the model's dtype."""


@runtime_checkable
class StoredWeight(Protocol):
    """Matrix as a layout has read it."""

    def weights(self) -> np.ndarray:
        """Dequantises the matrix to float32, `[O, I]`."""
        ...

    def blocks(self) -> QuantisedMatrix | None:
        """Converts the weights to blocks that matmuls read; None if no block format holds them exactly."""
        ...


@dataclass(frozen=True)
class Groups:
    """4-bit integers, each `(unit - zero) * scale` by its group of inputs.

    Attributes:
        units: uint8 `[O, I]`.
        scales: `[O, G]`.
        zeros: int16 `[O, G]`.
        size: inputs of a group.
        order: the group of each input `[I]`, if groups are not contiguous; else None.
    """

    units: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    size: int
    order: np.ndarray | None = None

    def weights(self) -> np.ndarray:
        inputs = self.units.shape[1]
        groups = np.arange(inputs) // self.size if self.order is None else self.order
        return (self.units - self.zeros[:, groups]).astype(np.float32) * self.scales.astype(np.float32)[:, groups]

    def blocks(self) -> QuantisedMatrix | None:
        outputs, inputs = self.units.shape
        scales = in_half_precision(self.scales)
        if self.order is not None or self.size % BLOCK or inputs % BLOCK or scales is None:
            return None
        each = self.size // BLOCK
        count = inputs // BLOCK
        integers = joined_bits(self.units.reshape(outputs, -1, BLOCK), 4)
        spread, zeros = (np.repeat(values, each, axis=1)[:, :count] for values in (scales, self.zeros))
        if (zeros == MIDDLE).all():
            return QuantisedMatrix("q4_0", integers, spread)
        return QuantisedMatrix("q4_z", integers, spread, lows=(-zeros).astype(np.int8))


@dataclass(frozen=True)
class Scaled:
    """8-bit numbers, floats or integers, times the scale of their block.

    Attributes:
        values: float8 or int8 `[O, I]`.
        scales: `[o, i]`, one for each block; the last blocks may have fewer weights.
        block: outputs and inputs of a block.
    """

    values: np.ndarray
    scales: np.ndarray
    block: tuple[int, int]

    def spread(self) -> np.ndarray:
        """Returns the scale of each weight of an output, `[O, i]`."""
        return np.repeat(self.scales.astype(np.float32), self.block[0], axis=0)[: len(self.values)]

    def weights(self) -> np.ndarray:
        wide = np.repeat(self.spread(), self.block[1], axis=1)[:, : self.values.shape[1]]
        return self.values.astype(np.float32) * wide

    def blocks(self) -> QuantisedMatrix | None:
        scales = in_half_precision(self.spread())
        inputs = self.values.shape[1]
        if self.values.dtype != np.int8 or inputs % BLOCK or self.block[1] % BLOCK or scales is None:
            return None
        spread = np.repeat(scales, self.block[1] // BLOCK, axis=1)[:, : inputs // BLOCK]
        return QuantisedMatrix("q8_0", self.values.view(np.uint8).reshape(len(self.values), -1, BLOCK), spread)

    def fp8(self) -> ScaledMatrix | None:
        """Returns 8-bit floats with scales for each output; None for integers, or if a block is not whole."""
        if self.values.dtype != FP8 or self.values.shape[1] % self.block[1]:
            return None
        return ScaledMatrix(np.ascontiguousarray(self.values.T), np.ascontiguousarray(self.spread().T))


@dataclass(frozen=True)
class Floats:
    """MXFP4: bytes of two weights `[O, I / 2]`, and shared scales `[O, I / 32]`."""

    pairs: np.ndarray
    scales: np.ndarray

    def weights(self) -> np.ndarray:
        return read_mxfp4(self.pairs.reshape(*self.scales.shape, -1), self.scales)

    def blocks(self) -> QuantisedMatrix | None:
        return blocks_of_floats(in_pairs(self.pairs).reshape(*self.scales.shape, -1), self.scales)


def in_half_precision(scales: np.ndarray) -> np.ndarray | None:
    """Converts scales to half precision; None if the conversion is not exact."""
    wide = scales.astype(np.float32)
    with np.errstate(over="ignore"):
        half = wide.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), wide) else None


def in_words(words: np.ndarray) -> np.ndarray:
    """Splits 32-bit words `[..., n]` into 4-bit integers `[..., 8 n]`, from the lowest bits on."""
    return in_pairs(np.ascontiguousarray(words).view(np.uint8))


@runtime_checkable
class WeightLayout(Protocol):
    """Layout in which a checkpoint stores the weight of a linear layer.

    Attributes:
        name: for users.
        required: the tensors that make up the weight.
        optional: tensors that may be present as well.
        separator: between a layer's name and those of its tensors.
        weight_suffix: after a layer's name, for the weight as a single tensor.
        dims: number of dims of the first required tensor.
    """

    @property
    def name(self) -> str: ...
    @property
    def separator(self) -> str: ...
    @property
    def weight_suffix(self) -> str: ...
    @property
    def dims(self) -> int: ...
    @property
    def native_format(self) -> str:
        """Format in which matmuls read it without dequantising: a `BlockFormat`, or "fp8"; empty for none."""
        ...

    @property
    def required(self) -> Tensors: ...
    @property
    def optional(self) -> Tensors: ...

    def expected(self, found: Shapes) -> dict[str, tuple[int, ...]]:
        """Returns the shape of the "weight", and the expected shapes of the tensors, from that of the first required one."""
        ...

    def read(self, arrays: Arrays) -> StoredWeight: ...


class MatrixNames:
    """Naming of the tensors of a matrix."""

    separator = "."
    weight_suffix = ".weight"
    dims = 2


def num_groups(inputs: int, size: int) -> int:
    return 1 if size < 1 else -(-inputs // size)


def format_of_groups(size: int, kind: str) -> str:
    """Returns `kind` if groups of that size consist of whole blocks; else "", for no format that matmuls read."""
    return kind if size < 1 or size % BLOCK == 0 else ""


@dataclass(frozen=True)
class Gptq(MatrixNames):
    """GPTQ: eight inputs to a word of `qweight [I / 8, O]`, eight outputs to one of `qzeros [G, O / 8]`, `scales [G, O]`.

    `g_idx [I]` is each input's group; groups are not contiguous if inputs were quantised by their activations (`desc_act`).
    """

    size: int
    v2: bool = False
    desc_act: bool = False
    name: str = "GPTQ"

    @property
    def native_format(self) -> str:
        return "" if self.desc_act else format_of_groups(self.size, "q4_z")

    @property
    def required(self) -> Tensors:
        return {"qweight": WORDS, "qzeros": WORDS, "scales": FLOATS}

    @property
    def optional(self) -> Tensors:
        return {"g_idx": WORDS}

    def expected(self, found: Shapes) -> dict[str, tuple[int, ...]]:
        words, outputs = found["qweight"]
        groups = num_groups(8 * words, self.size)
        zeros = (groups, outputs // 8)
        return {"weight": (outputs, 8 * words), "qzeros": zeros, "scales": (groups, outputs), "g_idx": (8 * words,)}

    def read(self, arrays: Arrays) -> Groups:
        units = in_words(arrays["qweight"].T)
        zeros = arrays["qzeros"].view(np.uint32)
        with np.errstate(over="ignore"):
            unpacked = in_words(zeros if self.v2 else zeros + V1_ZEROS)
        size = self.size if self.size > 0 else units.shape[1]
        order = arrays.get("g_idx")
        if order is not None and np.array_equal(order, np.arange(units.shape[1]) // size):
            order = None
        return Groups(units, arrays["scales"].T, unpacked.T.astype(np.int16), size, order)


@dataclass(frozen=True)
class Awq(MatrixNames):
    """AWQ: eight outputs, not in order, to a word of `qweight [I, O / 8]` and of `qzeros [G, O / 8]`; `scales [G, O]`."""

    size: int
    name: str = "AWQ"

    @property
    def native_format(self) -> str:
        return format_of_groups(self.size, "q4_z")

    @property
    def required(self) -> Tensors:
        return {"qweight": WORDS, "qzeros": WORDS, "scales": FLOATS}

    @property
    def optional(self) -> Tensors:
        return {}

    def expected(self, found: Shapes) -> dict[str, tuple[int, ...]]:
        inputs, words = found["qweight"]
        groups = num_groups(inputs, self.size)
        return {"weight": (8 * words, inputs), "qzeros": (groups, words), "scales": (groups, 8 * words)}

    def read(self, arrays: Arrays) -> Groups:
        def in_order(words: np.ndarray) -> np.ndarray:
            return in_words(words).reshape(*words.shape, 8)[..., AWQ_PLACES].reshape(len(words), -1)

        units = in_order(arrays["qweight"])
        zeros = in_order(arrays["qzeros"])
        size = self.size if self.size > 0 else len(units)
        return Groups(np.ascontiguousarray(units.T), arrays["scales"].T, zeros.T.astype(np.int16), size)


@dataclass(frozen=True)
class PackQuantized(MatrixNames):
    """compressed-tensors in 4 bits: `weight_packed [O, I / 8]`, `weight_scale [O, G]`, `weight_zero_point [O / 8, G]`."""

    size: int
    symmetric: bool
    name: str = "compressed-tensors' pack-quantized"

    @property
    def native_format(self) -> str:
        return format_of_groups(self.size, "q4_0" if self.symmetric else "q4_z")

    @property
    def optional(self) -> Tensors:
        return {"weight_g_idx": WORDS}

    @property
    def required(self) -> Tensors:
        zeros = {} if self.symmetric else {"weight_zero_point": WORDS}
        return {"weight_packed": WORDS, "weight_scale": FLOATS, "weight_shape": ("I64", "I32"), **zeros}

    def expected(self, found: Shapes) -> dict[str, tuple[int, ...]]:
        outputs, words = found["weight_packed"]
        groups = num_groups(8 * words, self.size)
        return {
            "weight": (outputs, 8 * words),
            "weight_scale": (outputs, groups),
            "weight_shape": (2,),
            "weight_zero_point": (-(-outputs // 8), groups),
            "weight_g_idx": (8 * words,),
        }

    def read(self, arrays: Arrays) -> Groups:
        units = in_words(arrays["weight_packed"])
        scales = arrays["weight_scale"]
        outputs, inputs = units.shape
        zeros = np.full(scales.shape, MIDDLE, np.int16)
        if not self.symmetric:
            zeros = in_words(arrays["weight_zero_point"].T).T[:outputs].astype(np.int16)
        size = self.size if self.size > 0 else inputs
        order = arrays.get("weight_g_idx")
        if order is not None and np.array_equal(order, np.arange(inputs) // size):
            order = None
        return Groups(units, scales, zeros, size, order)


@dataclass(frozen=True)
class EightBits(MatrixNames):
    """8-bit floats or integers in `weight [O, I]`, with scales per tensor, output, group of inputs, or block.

    Attributes:
        scale: the name of the tensor of scales.
        block: outputs and inputs of a block; 0 for all of them.
    """

    name: str
    scale: str
    block: tuple[int, int]
    native_format: str = "fp8"

    @property
    def optional(self) -> Tensors:
        return {}

    @property
    def required(self) -> Tensors:
        return {"weight": ("F8_E4M3", "I8"), self.scale: FLOATS}

    def expected(self, found: Shapes) -> dict[str, tuple[int, ...]]:
        shape = found["weight"]
        scales = found[self.scale]
        count = tuple(num_groups(entries, size) for entries, size in zip(shape, self.block, strict=True))
        is_single = int(np.prod(scales)) == 1 and count == (1, 1)
        return {"weight": shape, self.scale: scales if is_single else count}

    def read(self, arrays: Arrays) -> Scaled:
        values = arrays["weight"]
        scales = arrays[self.scale]
        block = tuple(size or entries for size, entries in zip(self.block, values.shape, strict=True))
        return Scaled(values, scales.reshape(1, 1) if scales.size == 1 else scales, (block[0], block[1]))


@dataclass(frozen=True)
class Mxfp4(MatrixNames):
    """compressed-tensors' MXFP4: bytes `weight_packed [O, I / 2]` of two weights each, and `weight_scale [O, I / 32]`."""

    name: str = "compressed-tensors' mxfp4-pack-quantized"
    native_format: str = "q5_0"

    @property
    def required(self) -> Tensors:
        return {"weight_packed": ("U8",), "weight_scale": ("U8",)}

    @property
    def optional(self) -> Tensors:
        return {}

    def expected(self, found: Shapes) -> dict[str, tuple[int, ...]]:
        outputs, pairs = found["weight_packed"]
        return {"weight": (outputs, 2 * pairs), "weight_scale": (outputs, pairs // 16)}

    def read(self, arrays: Arrays) -> Floats:
        check_scales(arrays["weight_scale"], "weight_scale")
        return Floats(arrays["weight_packed"], arrays["weight_scale"])


@dataclass(frozen=True)
class ExpertFloats:
    """MXFP4 of experts' matrices: bytes of two weights `[E, O, G, 16]`, and shared scales `[E, O, G]`."""

    pairs: np.ndarray
    scales: np.ndarray

    def weights(self) -> np.ndarray:
        """Dequantises the matrices to float32, `[E, I, O]`."""
        return read_mxfp4(self.pairs, self.scales).swapaxes(1, 2)

    def blocks(self) -> QuantisedMatrix | None:
        """Converts the weights to blocks; an expert's outputs follow another's."""
        groups = self.scales.shape[-1]
        return blocks_of_floats(in_pairs(self.pairs).reshape(-1, groups, BLOCK), self.scales.reshape(-1, groups))


@dataclass(frozen=True)
class ExpertMxfp4:
    """gpt-oss' experts in MXFP4: `*_blocks [E, O, G, 16]` and `*_scales [E, O, G]`."""

    name: str = "MXFP4"
    separator: str = "_"
    weight_suffix: str = ""
    dims: int = 4
    native_format: str = "q5_0"

    @property
    def required(self) -> Tensors:
        return {"blocks": ("U8",), "scales": ("U8",)}

    @property
    def optional(self) -> Tensors:
        return {}

    def expected(self, found: Shapes) -> dict[str, tuple[int, ...]]:
        experts, outputs, groups, _ = found["blocks"]
        return {"weight": (experts, BLOCK * groups, outputs), "scales": (experts, outputs, groups)}

    def read(self, arrays: Arrays) -> ExpertFloats:
        check_scales(arrays["scales"], "scales")
        return ExpertFloats(arrays["blocks"], arrays["scales"])


def quantised_layout(config: Mapping[str, Any] | None) -> WeightLayout | None:
    """Returns the layout of a `quantization_config`; None for no configuration.

    Raises:
        ValueError: the method, or one of its settings, is not supported; lists what is supported.
    """
    if config is None:
        return None
    method = config.get("quant_method")
    if method == "gptq":
        return gptq_layout(config)
    if method == "awq":
        expect(config, "awq", bits=(4,), version=("gemm", None), zero_point=(True, None))
        return Awq(checked_size(config.get("group_size"), "awq"))
    if method == "fp8":
        expect(config, "fp8", fmt=("e4m3", None))
        size = config.get("weight_block_size")
        good = size is None or (isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size))
        refuse(not good, "fp8", f"weight_block_size={size!r}", "two sizes, outputs and inputs")
        name: str = "FP8" if size is None else "FP8 in blocks"
        return EightBits(
            name, "weight_scale" if size is None else "weight_scale_inv", (0, 0) if size is None else (size[0], size[1])
        )
    if method == "mxfp4":
        return ExpertMxfp4()
    if method == "compressed-tensors":
        return compressed_layout(config)
    raise ValueError(f"quantization_config: quant_method={method!r} of the linear layers is not supported (only {SUPPORTED})")


def refuse(wrong: bool, method: str, found: str, supported: str) -> None:
    if wrong:
        raise ValueError(f"quantization_config: {method} with {found} is not supported (only {supported})")


def expect(config: Mapping[str, Any], method: str, **allowed: tuple[Any, ...]) -> None:
    """Raises a `ValueError` that names the first field with an unsupported value."""
    for name, values in allowed.items():
        found = config.get(name)
        shown = " or ".join(repr(value) for value in values if value is not None)
        refuse(found not in values, method, f"{name}={found!r}", f"{name}={shown}" if shown else f"no {name}")


def checked_size(size: Any, method: str) -> int:
    good = isinstance(size, int) and not isinstance(size, bool) and (size == -1 or size > 0)
    refuse(not good, method, f"group_size={size!r}", "a number of inputs, or -1 for all")
    return size


def gptq_layout(config: Mapping[str, Any]) -> Gptq:
    expect(config, "gptq", bits=(4,), checkpoint_format=("gptq", "gptq_v2", None), dynamic=(None, {}), lm_head=(False, None))
    size = checked_size(config.get("group_size"), "gptq")
    return Gptq(size, config.get("checkpoint_format") == "gptq_v2", bool(config.get("desc_act")))


def compressed_layout(config: Mapping[str, Any]) -> WeightLayout:
    """Returns the layout of compressed-tensors, whose layers must all be quantised in the same way."""
    groups = list((config.get("config_groups") or {}).values())
    formats = {group.get("format") or config.get("format") for group in groups}
    schemes = [group.get("weights") or {} for group in groups]
    method = "compressed-tensors"
    sparse = (config.get("sparsity_config") or {}).get("format", "dense")
    refuse(sparse != "dense", method, f"sparsity_config of format {sparse!r}", "dense")
    refuse(len(formats) != 1 or any(one != schemes[0] for one in schemes), method, f"{len(groups)} groups of layers", "one way")
    weights = schemes[0]
    kind = next(iter(formats))
    bits = weights.get("num_bits")
    dtype = weights.get("type", "int")
    strategy = weights.get("strategy")
    symmetric = weights.get("symmetric", True)
    size = weights.get("group_size")
    found = f"{kind} of {bits} bits, {dtype}, {'' if symmetric else 'a'}symmetric, by {strategy}"
    if kind == "pack-quantized":
        refuse(
            bits != 4 or dtype != "int" or strategy not in ("group", "channel"), method, found, "4 bits, int, group or channel"
        )
        return PackQuantized(checked_size(size, method) if strategy == "group" else -1, symmetric)
    if kind == "mxfp4-pack-quantized":
        refuse(
            bits != 4 or dtype != "float" or size != BLOCK or not symmetric, method, found, f"4 bits, float, group_size={BLOCK}"
        )
        return Mxfp4()
    if kind in ("float-quantized", "int-quantized", "naive-quantized"):
        block = weights.get("block_structure") or (0, 0)
        blocks = {"tensor": (0, 0), "channel": (1, 0), "group": (1, size or 0), "block": tuple(block)}
        good = bits == 8 and symmetric and strategy in blocks
        refuse(not good, method, found, f"8 bits, symmetric, by {', '.join(blocks)}")
        native_format = "q8_0" if dtype == "int" else "fp8"
        return EightBits(f"compressed-tensors' {kind}", "weight_scale", blocks[str(strategy)], native_format)
    raise ValueError(f"quantization_config: compressed-tensors of format {kind!r} is not supported (only {SUPPORTED})")
