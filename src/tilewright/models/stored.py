"""Tensors in files: what their headers describe, and how parts of them are read.

safetensors files are read by `pread`, each part straight into its own memory: threads read at the same time, and no mapped page
stays behind that would count as memory of the process.
"""

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from tilewright.kernels.linear.blocks import QuantisedMatrix, side_by_side
from tilewright.kernels.linear.scaled import ScaledMatrix
from tilewright.models import gguf
from tilewright.models.params import ArraySpec, Bounds, bits
from tilewright.models.quantised import ACTIVATIONS, Scaled, WeightLayout

DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
"""NumPy's dtype for each dtype name of safetensors."""
FLOATS = ("F32", "F16", "BF16")
"""Dtypes of weights that are not quantised."""
AT_ONCE = 1 << 30
"""Bytes of a read call; the operating system returns less than 2 GiB."""
EXPONENTS = {"float32": 0x7F80_0000, "bfloat16": 0x7F80, "float16": 0x7C00}
"""Bits of a number's exponent, all of which are set in infinity and NaN."""
EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
"""Name of an expert's tensor: the part before its number, the number, and the part after it."""
LISTED = 8
"""Number of tensors of one kind that an error names; the rest is counted."""


@dataclass(frozen=True)
class TensorSlice:
    """Tensor of an open safetensors file, read part by part."""

    descriptor: int
    begin: int
    shape: tuple[int, ...]
    dtype: str

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.dtype

    def __getitem__(self, bounds: Sequence[slice]) -> np.ndarray:
        """Reads these parts of each dim.

        Of a matrix only the part is read; with more dims, everything from the first row to the last.
        """
        if not self.shape:
            return self.read(np.empty((), DTYPES[self.dtype]), 0)
        rows, *other_dims = (part.indices(size)[:2] for part, size in zip(bounds, self.shape, strict=True))
        count = max(0, rows[1] - rows[0])
        row = prod(self.shape[1:])
        if len(self.shape) == 2 and other_dims[0] != (0, row):
            begin, end = other_dims[0]
            found = np.empty((count, max(0, end - begin)), DTYPES[self.dtype])
            for n in range(count):
                self.read(found[n], (rows[0] + n) * row + begin)
            return found
        found = self.read(np.empty((count, *self.shape[1:]), DTYPES[self.dtype]), rows[0] * row)
        return found[(slice(None), *(slice(*part) for part in other_dims))]

    def read(self, found: np.ndarray, first: int) -> np.ndarray:
        """Fills an array with entries from number `first` on."""
        left = memoryview(found.reshape(-1).view(np.uint8).data)
        at = self.begin + first * found.itemsize
        while left:
            done = os.preadv(self.descriptor, [left[:AT_ONCE]], at)
            if done == 0:
                raise ValueError(f"expected more of a tensor in a safetensors file, found its end at byte {at:,}")
            left = left[done:]
            at = at + done
        return found


class SafetensorsFile:
    """Open safetensors file. Raises a `ValueError` that names the file if it is invalid, damaged or cut off."""

    def __init__(self, path: Path):
        try:
            with safe_open(path, framework="numpy"), path.open("rb") as file:  # it checks the header and the file's length
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
                self.descriptor = os.dup(file.fileno())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
        header.pop("__metadata__", None)
        self.tensors = {
            name: TensorSlice(self.descriptor, 8 + length + each["data_offsets"][0], tuple(each["shape"]), each["dtype"])
            for name, each in header.items()
        }

    def keys(self) -> Collection[str]:
        return self.tensors.keys()

    def get_slice(self, name: str) -> TensorSlice:
        return self.tensors[name]

    def get_tensor(self, name: str) -> np.ndarray:
        part = self.tensors[name]
        return part[tuple(slice(None) for _ in part.shape)]

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.descriptor)


class StoredTensor(NamedTuple):
    """Tensor as described by the headers of files.

    Attributes:
        file: the file that holds it, or the first of its parts.
        name: its name in that file.
        shape: its shape in that file, or that of the matrix that its parts make up.
        dtype: its safetensors dtype ("F32", "BF16", ...).
        quantised: format of quantised weights, by its name for users; empty for plain numbers.
        native_format: format in which matmuls read it without dequantising: a `BlockFormat`, or "fp8"; empty for none.
        layout: meaning of its parts; None for a single tensor.
        parts: its parts in a quantised layout, by their names after the layer's.
        members: the tensors of all experts, which it stacks; empty for any other.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    quantised: str = ""
    native_format: str = ""
    layout: WeightLayout | None = None
    parts: Mapping[str, "StoredTensor"] | None = None
    members: tuple["StoredTensor", ...] = ()

    @property
    def files(self) -> set[Path]:
        if self.members:
            return set().union(*(member.files for member in self.members))
        return {self.file} if self.parts is None else {part.file for part in self.parts.values()}

    @property
    def nbytes(self) -> int:
        """Bytes that are read; for GGUF files, the size in float32."""
        if self.members:
            return sum(member.nbytes for member in self.members)
        if self.parts is not None:
            return sum(part.nbytes for part in self.parts.values())
        return prod(self.shape) * np.dtype(DTYPES.get(self.dtype, np.uint8)).itemsize


def open_file(file: Path) -> Any:
    return gguf.open_gguf(file) if file.suffix == gguf.SUFFIX else SafetensorsFile(file)


def read_headers(files: Iterable[Path]) -> list[StoredTensor]:
    """Reads names, shapes and dtypes of all tensors in `files`, without their data."""
    found = []
    for file in files:
        with open_file(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping: it cannot be iterated)
                part = tensors.get_slice(name)
                formats = (part.quantised, part.native_format) if isinstance(part, gguf.GGUFSlice) else ("", "")
                found.append(StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype(), *formats))
    return found


def first_names(entries: Iterable[str]) -> str:
    """Returns the first names of many, and the number of the other_dims."""
    names = sorted(entries)
    rest = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {rest} more" if rest > 0 else "")


def compare(specs: Iterable[ArraySpec], stored: Mapping[str, StoredTensor]) -> list[str]:
    """Lists all mismatches between `stored`, keyed by the declared names, and `specs`."""
    wanted = {spec.name: spec for spec in specs}
    missing = [name for name in wanted if name not in stored]
    unknown = [tensor.name for name, tensor in stored.items() if name not in wanted]
    declared = [(wanted[name].stored_shape, tensor) for name, tensor in stored.items() if name in wanted]
    shapes = [f"{t.name} (expected {list(shape)}, found {list(t.shape)})" for shape, t in declared if t.shape != shape]
    dtypes = [f"{t.name} ({t.dtype})" for _, t in declared if t.dtype not in FLOATS]
    kinds = {
        "missing": missing,
        "unknown": unknown,
        "of the wrong shape": shapes,
        f"of a dtype other than {', '.join(FLOATS)}": dtypes,
    }
    return [f"{len(found)} {kind}: {first_names(found)}" for kind, found in kinds.items() if found]


def without_zero_biases(stored: Mapping[str, StoredTensor], wanted: Collection[str]) -> dict[str, StoredTensor]:
    """Leaves out biases that are not declared and are all zeros, which GPTQ writes for every layer."""
    extra = {name: tensor for name, tensor in stored.items() if name.endswith(".bias") and name not in wanted}
    zeros = set[str]()
    for path in {tensor.file for tensor in extra.values()}:
        with open_file(path) as file:
            zeros |= {name for name, tensor in extra.items() if tensor.file == path and not file.get_tensor(tensor.name).any()}
    return {name: tensor for name, tensor in stored.items() if name not in zeros}


def gathered(tensors: Iterable[StoredTensor], layout: WeightLayout) -> list[StoredTensor]:
    """Merges the tensors that a layout uses for one matrix into one `weight`.

    Raises:
        ValueError: a layer lacks some of them, or they have other shapes or dtypes; names all such layers.
    """
    found = []
    layers = dict[str, dict[str, StoredTensor]]()
    for tensor in tensors:
        layer, _, suffix = tensor.name.rpartition(layout.separator)
        if suffix in layout.required or suffix in layout.optional:
            layers.setdefault(layer, {})[suffix] = tensor
        elif suffix not in ACTIVATIONS:
            found.append(tensor)
    problems = []
    for layer, parts in layers.items():
        if parts.keys() == {"weight"}:  # a layer that is not quantised
            found.append(parts["weight"])
        elif problem := misfit(parts, layout):
            problems.append(f"{layer}: {problem}")
        else:
            shape = layout.expected({suffix: part.shape for suffix, part in parts.items()})["weight"]
            first = next(iter(parts.values()))
            found.append(
                StoredTensor(
                    first.file, layer + layout.weight_suffix, shape, "F32", layout.name, layout.native_format, layout, parts
                )
            )
    if problems:
        raise ValueError(f"tensors that do not match {layout.name}; {first_names(problems)}")
    return found


def stacked(tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    """Merges the tensors of all experts into one, whose name has a `*` for an expert's number.

    Raises:
        ValueError: experts are missing, or their tensors differ in shape or dtype; names all such tensors.
    """
    found = []
    experts = dict[str, dict[int, StoredTensor]]()
    for tensor in tensors:
        if match := EXPERT.fullmatch(tensor.name):
            experts.setdefault(f"{match[1]}*{match[3]}", {})[int(match[2])] = tensor
        else:
            found.append(tensor)
    problems = []
    for name, numbered in experts.items():
        members = tuple(numbered[n] for n in sorted(numbered))
        first = members[0]
        alike = all((member.shape, member.dtype) == (first.shape, first.dtype) for member in members)
        if sorted(numbered) != list(range(len(members))) or not alike:
            problems.append(name)
        shape = (len(members), *first.shape)
        found.append(StoredTensor(first.file, name, shape, first.dtype, first.quantised, members=members))
    if problems:
        raise ValueError(f"experts whose tensors are missing, or differ in shape or dtype: {first_names(problems)}")
    return found


def misfit(parts: Mapping[str, StoredTensor], layout: WeightLayout) -> str:
    """Describes the problems of the tensors of one layer; empty if there are none."""
    if missing := [suffix for suffix in layout.required if suffix not in parts]:
        return f"it lacks {', '.join(missing)}"
    dtypes = {**layout.required, **layout.optional}
    for suffix, part in parts.items():
        if part.dtype not in dtypes[suffix]:
            return f"{suffix} (expected {' or '.join(dtypes[suffix])}, found {part.dtype})"
    first = next(iter(layout.required))
    if len(parts[first].shape) != layout.dims:
        expected = "a matrix" if layout.dims == 2 else f"{layout.dims} dims"
        return f"{first} (expected {expected}, found {list(parts[first].shape)})"
    expected = layout.expected({suffix: part.shape for suffix, part in parts.items()})
    wrong = [
        f"{suffix} (expected {list(expected[suffix])}, found {list(part.shape)})"
        for suffix, part in parts.items()
        if suffix != "weight" and part.shape != expected.get(suffix, part.shape)
    ]
    return ", ".join(wrong)


def read_part(file: Any, name: str, bounds: Bounds) -> np.ndarray:
    """Reads a part of a tensor of an open file."""
    return file.get_slice(name)[tuple(slice(start, stop) for start, stop in bounds)]


def read_weights(files: Mapping[Path, Any], tensor: StoredTensor, bounds: Bounds) -> np.ndarray:
    """Reads a part of a tensor of weights. Raises a `ValueError` if it holds infinity or NaN.

    A matrix in several tensors is read whole, since any part of it may need any of them.
    """
    if tensor.members:
        (first, last), *rest = bounds
        return np.stack([read_weights(files, member, tuple(rest)) for member in tensor.members[first:last]])
    if tensor.layout is None:
        value = read_part(files[tensor.file], tensor.name, bounds)
    else:
        value = tensor.layout.read(read_parts(files, tensor)).weights()[tuple(slice(*part) for part in bounds)]
    if not is_finite(value):
        raise ValueError(f"{tensor.name}: expected finite numbers, found infinity or NaN")
    return value


def read_parts(files: Mapping[Path, Any], tensor: StoredTensor) -> dict[str, np.ndarray]:
    """Reads the tensors that a matrix is stored as."""
    return {suffix: files[part.file].get_tensor(part.name) for suffix, part in (tensor.parts or {}).items()}


def read_native(
    files: Mapping[Path, Any], tensor: StoredTensor, spec: ArraySpec, blocks: bool, fp8: bool
) -> QuantisedMatrix | ScaledMatrix | None:
    """Reads a matrix in its files' quantised format; None if matmuls cannot read that format.

    Parts of a stored tensor (`ArraySpec.rows`) are supported for GGUF files only. Experts' matrices become one, in which an
    expert's outputs follow another's.

    Args:
        blocks, fp8: matmuls read integers in blocks, or FP8.
    """
    if spec.pieces:
        if tensor.layout is None:
            whole = read_blocks(files, tensor) if blocks else None
        else:
            whole = read_native(files, tensor, replace(spec, pieces=()), blocks, fp8)
        order = np.concatenate([np.arange(first, first + count) for first, count in spec.pieces])
        return None if whole is None else in_order(whole, order)
    if tensor.members:
        found = [read_native(files, member, spec, blocks, False) for member in tensor.members] if spec.rows is None else []
        in_blocks = [each for each in found if isinstance(each, QuantisedMatrix)]
        same_kind = len({each.kind for each in in_blocks}) == 1 and len(in_blocks) == len(found)
        return side_by_side(in_blocks) if same_kind else None
    if tensor.layout is not None:
        if spec.rows is not None:
            return None
        read = tensor.layout.read(read_parts(files, tensor))
        return (read.blocks() if blocks else None) or (read.fp8() if fp8 and isinstance(read, Scaled) else None)
    if not blocks:
        return None
    rows, *_ = spec.stored_bounds(tuple((0, size) for size in spec.shape))
    return read_blocks(files, tensor, slice(*rows))


def read_blocks(files: Mapping[Path, Any], tensor: StoredTensor, rows: slice = slice(None)) -> QuantisedMatrix | None:
    """Reads rows of a GGUF tensor as its blocks; None for formats that matmuls cannot read, and for other files."""
    return files[tensor.file].get_slice(tensor.name).blocks(rows) if tensor.file.suffix == gguf.SUFFIX else None


def in_order(matrix: QuantisedMatrix | ScaledMatrix, order: np.ndarray) -> QuantisedMatrix | ScaledMatrix:
    """Selects and reorders outputs of a matrix, each of which has its own scales."""
    if isinstance(matrix, QuantisedMatrix):
        return QuantisedMatrix(matrix.kind, **{name: array[order] for name, array in matrix.arrays.items()})
    return replace(matrix, values=matrix.values[:, order], scales=matrix.scales[:, order])


def is_finite(values: np.ndarray) -> bool:
    """True if all values are finite.

    The check uses their bits: other threads keep running, and it takes half the time of `isfinite`.
    """
    exponent = bits(values).dtype.type(EXPONENTS[values.dtype.name])
    return not np.any((bits(values) & exponent) == exponent)
