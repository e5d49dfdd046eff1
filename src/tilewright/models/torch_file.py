"""Reads a tensor from a file that `torch.save` wrote, without torch and without running anything that stands in it.

Such a file is a zip archive. `data.pkl` in it describes objects as a program for a stack machine, in which calls of Python
functions may stand; the numbers lie beside it as they are. Here the program is only looked through (`pickletools` lists its
instructions): tensors become descriptions, mappings of them stay mappings, and anything else is refused by name.
"""

import pickletools
import zipfile
from collections.abc import Mapping
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
"""Of the description: that of a few tensors takes some hundred bytes."""


class Global(NamedTuple):
    """A function or class that the description names, "module name". It is never looked up."""

    name: str


class Storage(NamedTuple):
    """Numbers of a file in the archive."""

    dtype: Any
    key: str


class TorchTensor(NamedTuple):
    """A tensor as the description has it; offset and strides count numbers."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class NotATensor(ValueError):
    """Something in a description that no plain tensor needs."""


def load_tensors(path: Path) -> Any:
    """Content of a file: an array, or a mapping with arrays, numbers and texts.

    Raises:
        ValueError: it is no such file, is damaged, or holds anything else; it names the file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (each for each in archive.namelist() if each.endswith("/data.pkl"))
            if archive.getinfo(name).file_size > MOST_BYTES:
                raise NotATensor(f"a description of more than {MOST_BYTES:,} bytes")
            found = described(archive.read(name))
            folder = name.removesuffix("data.pkl")
            if isinstance(found, Mapping):
                return {key: read(archive, folder, value) for key, value in found.items()}
            return read(archive, folder, found)
    except NotATensor as error:
        raise ValueError(f"{path}: expected plain tensors, found {error}") from error
    except (OSError, ValueError, KeyError, IndexError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a readable file of torch.save: {error}") from error


def read(archive: zipfile.ZipFile, folder: str, value: Any) -> Any:
    """A tensor's numbers, of whose storage nothing else is read; any other value as it is."""
    if not isinstance(value, TorchTensor):
        return value
    dtype = np.dtype(value.storage.dtype)
    size = prod(value.shape)
    steps = [prod(value.shape[n + 1 :]) for n in range(len(value.shape))]
    if any(length > 1 and stride != step for length, stride, step in zip(value.shape, value.strides, steps, strict=True)):
        raise NotATensor("a tensor whose numbers do not lie row after row")
    if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
        raise NotATensor("numbers whose highest byte comes first")
    numbers = archive.getinfo(f"{folder}data/{value.storage.key}")
    if numbers.compress_type != zipfile.ZIP_STORED or min(value.offset, size) < 0:
        raise NotATensor("numbers that are compressed, or lie nowhere")
    with archive.open(numbers) as file:
        file.seek(value.offset * dtype.itemsize)
        held = file.read(size * dtype.itemsize)
    return np.frombuffer(held, dtype).reshape(value.shape)


def called(function: Any, arguments: tuple[Any, ...]) -> Any:
    """Value that a call in the description stands for."""
    match function, arguments:
        case Global(name), (Storage() as storage, int(offset), tuple(shape), tuple(strides), *_) if name == REBUILD:
            return TorchTensor(storage, offset, shape, strides)
        case Global(name), (TorchTensor() as tensor, *_) if name == PARAMETER:
            return tensor
        case Global(name), () if name == MAPPING:
            return {}
    raise NotATensor(f"a call of {function.name if isinstance(function, Global) else repr(function)}")


def stored(persistent: Any) -> Storage:
    """A storage that the description points to."""
    match persistent:
        case ("storage", Global(name), str(key), *_) if name in STORAGES:
            return Storage(STORAGES[name], key)
    raise NotATensor(f"numbers of the kind {persistent!r}")


def described(text: bytes) -> Any:
    """The object that a description ends with."""
    machine = StackMachine()
    for code, argument, _ in pickletools.genops(text):
        machine.step(code.name, argument)
    (result,) = machine.stack
    return result


class StackMachine:
    """The stack machine, of which only what descriptions of tensors need is there."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def since_mark(self) -> list[Any]:
        at = self.marks.pop()
        taken = self.stack[at:]
        del self.stack[at:]
        return taken

    def put(self, pairs: list[Any]) -> None:
        """Entries of the mapping on top."""
        if not isinstance(self.stack[-1], dict):
            raise NotATensor(f"entries of {self.stack[-1]!r}")
        self.stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))

    def step(self, name: str, argument: Any) -> None:
        """Carries an instruction out, by its name in `pickletools`."""
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
                self.put(self.since_mark())
            case "SETITEM":
                pair = self.stack[-2:]
                del self.stack[-2:]
                self.put(pair)
            case _:
                self.stack.append(self.made(name, argument))

    def made(self, name: str, argument: Any) -> Any:
        """Value that an instruction puts on the stack."""
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
                return called(function, arguments)
            case "BINPERSID":
                return stored(stack.pop())
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
        if isinstance(argument, int | float | str):  # a number or a text, in one of the forms that there are
            return argument
        raise NotATensor(f"the instruction {name}")
