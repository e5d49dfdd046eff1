"""Reads tensors from a file of `torch.save`, without torch and without running code of the file.

Such a file is a zip archive. Its `data.pkl` describes objects as a program for a stack machine, which may call Python
functions; the numbers are stored beside it. Here `pickletools` lists the program's instructions, which are interpreted without
calls: tensors become descriptions, mappings of them stay mappings, and anything else is an error.
"""

import pickletools
import zipfile
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

STORAGES: dict[str, Any] = {
    "torch FloatStorage": np.float32,
    "torch HalfStorage": np.float16,
    "torch BFloat16Storage": jnp.bfloat16,
    "torch DoubleStorage": np.float64,
}
REBUILD = "torch._utils _rebuild_tensor_v2"
PARAMETER = "torch._utils _rebuild_parameter"
MAPPING = "collections OrderedDict"
MOST_BYTES = 1 << 20
"""Maximum size of the description; that of a few tensors takes some hundred bytes."""


class Global(NamedTuple):
    """Function or class that the description names, "module name"; never imported."""

    name: str


class Storage(NamedTuple):
    """Numbers of a file in the archive."""

    dtype: Any
    key: str


class TorchTensor(NamedTuple):
    """Tensor as the description has it; offset and strides count numbers."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class NotATensor(ValueError):
    """Error for content of a description that plain tensors do not need."""


def load_tensors(path: Path) -> Any:
    """Reads a file: an array, or a mapping with arrays, numbers and texts.

    Raises:
        ValueError: the file is not from `torch.save`, is damaged, or holds anything else; names the file.
    """

    def contents(archive: zipfile.ZipFile, folder: str, found: Any) -> Any:
        if isinstance(found, Mapping):
            return {key: read(archive, folder, value) for key, value in found.items()}
        return read(archive, folder, found)

    return load(path, StackMachine(), contents)


def load(
    path: Path,
    machine: "StackMachine",
    contents: Callable[[zipfile.ZipFile, str, Any], Any],
    most_bytes: int = MOST_BYTES,
    expected: str = "plain tensors",
) -> Any:
    """Interprets the description of a file, and reads its numbers.

    Args:
        path: the file.
        machine: machine that interprets the description.
        contents: function `(archive, folder, description) -> result`.
        most_bytes: maximum size of the description.
        expected: noun for what the file should hold.

    Raises:
        ValueError: the file is not from `torch.save`, is damaged, or holds anything else; names the file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (each for each in archive.namelist() if each.endswith("/data.pkl"))
            if archive.getinfo(name).file_size > most_bytes:
                raise NotATensor(f"a description of more than {most_bytes:,} bytes")
            return contents(archive, name.removesuffix("data.pkl"), described(archive.read(name), machine))
    except NotATensor as error:
        raise ValueError(f"{path}: expected {expected}, found {error}") from error
    except (OSError, ValueError, KeyError, IndexError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a readable file of torch.save: {error}") from error


def numbers_of(archive: zipfile.ZipFile, folder: str, storage: Storage) -> zipfile.ZipInfo:
    """Returns the file of a storage, whose numbers are little-endian and not compressed."""
    if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
        raise NotATensor("big-endian numbers")
    numbers = archive.getinfo(f"{folder}data/{storage.key}")
    if numbers.compress_type != zipfile.ZIP_STORED:
        raise NotATensor("numbers that are compressed or out of range")
    return numbers


def read(archive: zipfile.ZipFile, folder: str, value: Any) -> Any:
    """Reads a tensor's numbers from its storage; returns any other value unchanged."""
    if not isinstance(value, TorchTensor):
        return value
    dtype = np.dtype(value.storage.dtype)
    size = prod(value.shape)
    steps = [prod(value.shape[n + 1 :]) for n in range(len(value.shape))]
    if any(length > 1 and stride != step for length, stride, step in zip(value.shape, value.strides, steps, strict=True)):
        raise NotATensor("a tensor that is not contiguous")
    numbers = numbers_of(archive, folder, value.storage)
    if min(value.offset, size) < 0:
        raise NotATensor("numbers that are compressed or out of range")
    with archive.open(numbers) as file:
        file.seek(value.offset * dtype.itemsize)
        content = file.read(size * dtype.itemsize)
    return np.frombuffer(content, dtype).reshape(value.shape)


def described(text: bytes, machine: "StackMachine") -> Any:
    """Returns the object of a description."""
    for code, argument, _ in pickletools.genops(text):
        machine.step(code.name, argument)
    (result,) = machine.stack
    return result


class StackMachine:
    """Stack machine with the instructions that descriptions of tensors need.

    Attributes:
        storages: dtypes by the names of torch's classes.
    """

    storages = STORAGES

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def called(self, function: Any, arguments: Any) -> Any:
        """Returns the value of a call in the description."""
        match function, arguments:
            case Global(name), (Storage() as storage, int(offset), tuple(shape), tuple(strides), *_) if name == REBUILD:
                return TorchTensor(storage, offset, shape, strides)
            case Global(name), (TorchTensor() as tensor, *_) if name == PARAMETER:
                return tensor
            case Global(name), () if name == MAPPING:
                return {}
        raise NotATensor(f"a call of {function.name if isinstance(function, Global) else repr(function)}")

    def stored(self, persistent: Any) -> Storage:
        """Returns a storage to which the description refers."""
        match persistent:
            case ("storage", Global(name), str(key), *_) if name in self.storages:
                return Storage(self.storages[name], key)
        raise NotATensor(f"numbers of the kind {persistent!r}")

    def since_mark(self) -> list[Any]:
        at = self.marks.pop()
        values = self.stack[at:]
        del self.stack[at:]
        return values

    def add_entries(self, pairs: list[Any]) -> None:
        """Adds entries to the mapping on top."""
        if not isinstance(self.stack[-1], dict):
            raise NotATensor(f"entries of {self.stack[-1]!r}")
        self.stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))

    def step(self, name: str, argument: Any) -> None:
        """Runs an instruction, given its name in `pickletools`."""
        match name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "MARK":
                self.marks.append(len(self.stack))
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = self.stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.stack[-1]
            case "SETITEMS":
                self.add_entries(self.since_mark())
            case "SETITEM":
                pair = self.stack[-2:]
                del self.stack[-2:]
                self.add_entries(pair)
            case _:
                self.stack.append(self.pushed(name, argument))

    def pushed(self, name: str, argument: Any) -> Any:
        """Returns the value that an instruction pushes on the stack."""
        stack = self.stack
        match name:
            case "GLOBAL":
                return Global(argument)
            case "STACK_GLOBAL":
                attribute = stack.pop()
                module = stack.pop()
                return Global(f"{module} {attribute}")
            case "REDUCE":
                arguments = stack.pop()
                function = stack.pop()
                return self.called(function, arguments)
            case "BINPERSID":
                return self.stored(stack.pop())
            case "BINGET" | "LONG_BINGET":
                return self.memo[argument]
            case "EMPTY_DICT" | "EMPTY_TUPLE":
                return {} if name == "EMPTY_DICT" else ()
            case "TUPLE":
                return tuple(self.since_mark())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self.marks.append(len(stack) - int(name[-1]))
                return tuple(self.since_mark())
            case "NEWTRUE" | "NEWFALSE" | "NONE":
                return {"NEWTRUE": True, "NEWFALSE": False}.get(name)
        if isinstance(argument, int | float | str):  # a number or a text
            return argument
        raise NotATensor(f"the instruction {name}")
