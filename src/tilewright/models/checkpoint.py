"""Reads and writes Hugging Face checkpoints: a folder with `config.json` and its tensors in safetensors files."""

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from jax.typing import DTypeLike
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tilewright.kernels.linear.blocks import PackedTable, QuantisedMatrix
from tilewright.kernels.operations import Operations
from tilewright.kernels.select import computes_bfloat16
from tilewright.models import gguf
from tilewright.models.decoder import EMBEDDING, DecoderConfig, DecoderParams, config_from_hf, declare
from tilewright.models.params import AUTO, ArraySpec, Bounds, bits, each, from_tensors, held_parts, spec_leaves, to_tensors

Tree = TypeVar("Tree")

log = logging.getLogger("tilewright.models")

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
BYTES_OF = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of an element, for each stored dtype that is read."""
LISTED = 8
"""How many tensors of one kind an error names before it only counts."""


def byte_progress(console: Console | None) -> Progress:
    """A progress bar that counts bytes; silent without a console, and gone from the terminal when done."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=console is None, transient=True)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file that must hold a JSON object; anything else is a `ValueError` that names it."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not JSON, or not even UTF-8
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must hold a JSON object, found a {type(fields).__name__}")
    return fields


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The fields of `generation_config.json`, or of a GGUF file in its place; none where there is no such file."""
    if (file := gguf.gguf_file(folder)) is not None:
        return gguf.open_gguf(file).generation_config
    path = folder / GENERATION_CONFIG
    return read_json(path) if path.is_file() else {}


def read_config(folder: Path) -> dict[str, Any]:
    """The fields of a checkpoint's `config.json`.

    `eos_token_id` comes from `generation_config.json` where that file has one: there the chat models list every token that ends
    an answer, and `config.json` only the first.

    Raises:
        ValueError: the folder or its `config.json` is missing, or one of the two files is not a JSON object.
    """
    if (file := gguf.gguf_file(folder)) is not None:
        return gguf.open_gguf(file).config
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is not a checkpoint: it has no {CONFIG}")
    fields = read_json(folder / CONFIG)
    ends = read_generation_config(folder).get("eos_token_id")
    if ends is not None:
        fields["eos_token_id"] = ends
    return fields


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: `model.safetensors`, else those that the index names, else the only one.

    Raises:
        ValueError: there is none, there are several without an index, or the index is malformed or names an absent file.
    """
    if (file := gguf.gguf_file(folder)) is not None:
        return [file]
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return _indexed_files(folder)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    found = ", ".join(file.name for file in files) or "none"
    raise ValueError(f"{folder}: expected {WEIGHTS}, {INDEX} or a single *.safetensors file, found {found}")


def _indexed_files(folder: Path) -> list[Path]:
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{folder / INDEX}: weight_map must map tensor names to file names")
    names = sorted(set(places.values()))
    if strays := [name for name in names if Path(name).name != name]:
        raise ValueError(f"{folder / INDEX}: expected names of files beside it, found {_some(strays)}")
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"{folder / INDEX} names files that are not there: {_some(absent)}")
    return [folder / name for name in names]


STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def stored_dtype(folder: Path) -> str:
    """The dtype of a checkpoint, in NumPy's words: what `config.json` says, else that of most of its numbers.

    Raises:
        ValueError: there is no configuration, or it says nothing and no tensors can be read.
    """
    fields = read_config(folder)
    said = fields.get("dtype") or fields.get("torch_dtype")
    if said is not None:
        return str(said).removeprefix("torch.")
    counts = Counter[str]()
    for tensor in read_headers(weight_files(folder)):
        counts[STORED.get(tensor.dtype, tensor.dtype)] += prod(tensor.shape)
    return counts.most_common(1)[0][0] if counts else "float32"


def chosen_dtype(asked: str, stored: str, bfloat16: bool) -> str:
    """The dtype that a model runs in.

    Args:
        asked: one of `params.DTYPES`, or "auto": the checkpoint's, bfloat16 for float16, which nothing here computes in, and
            float32 where bfloat16 is slow.
        stored: the checkpoint's.
        bfloat16: whether bfloat16 is fast.
    """
    if asked != AUTO:
        return asked
    return "bfloat16" if bfloat16 and stored in ("bfloat16", "float16") else "float32"


def running_dtype(asked: str, folder: Path, ops: Operations) -> str:
    """The dtype that the model of a folder runs in (see `chosen_dtype`); says so where numbers lose digits by it."""
    stored = stored_dtype(folder) if asked == AUTO else ""
    chosen = chosen_dtype(asked, stored, computes_bfloat16(ops))
    if stored == "float16" and chosen == "bfloat16":
        log.warning("%s is in float16: its weights are rounded to bfloat16; --dtype float32 keeps all of their digits", folder)
    return chosen


class StoredTensor(NamedTuple):
    """What a file's header says about a tensor.

    Attributes:
        file: the file that holds it.
        name: its name in that file.
        shape: its shape in that file.
        dtype: its dtype in the words of safetensors ("F32", "BF16", ...).
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def _open(file: Path) -> Any:
    if file.suffix == gguf.SUFFIX:
        return gguf.open_gguf(file)
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from error


def read_headers(files: Iterable[Path]) -> list[StoredTensor]:
    """Names, shapes and dtypes of all tensors in `files`, without reading any data."""
    found = []
    for file in files:
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping: it cannot be iterated)
                part = tensors.get_slice(name)
                found.append(StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype()))
    return found


def read_part(file: Any, name: str, bounds: Bounds) -> np.ndarray:
    """A part of a tensor of an open safetensors file, of which nothing else is read."""
    return file.get_slice(name)[tuple(slice(start, stop) for start, stop in bounds)]


def read_weights(file: Any, name: str, bounds: Bounds) -> np.ndarray:
    """A part of a tensor of weights. Raises a `ValueError` if it holds infinity or NaN."""
    value = read_part(file, name, bounds)
    if not finite(value):
        raise ValueError(f"{name} holds infinity or NaN, of which nothing can be computed")
    return value


EXPONENTS = {"float32": 0x7F80_0000, "bfloat16": 0x7F80, "float16": 0x7C00}
"""The bits of a number's exponent, all of which are set in infinity and NaN."""


def finite(values: np.ndarray) -> bool:
    """Whether all are finite; told by their bits, which leaves other threads running and takes half the time of `isfinite`."""
    exponent = bits(values).dtype.type(EXPONENTS[values.dtype.name])
    return not np.any((bits(values) & exponent) == exponent)


def _some(entries: Iterable[str]) -> str:
    names = sorted(entries)
    rest = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _compare(specs: Iterable[ArraySpec], stored: Mapping[str, StoredTensor]) -> list[str]:
    """Everything that keeps `stored`, keyed by the declared names, from being what `specs` declare."""
    wanted = {spec.name: spec for spec in specs}
    missing = [name for name in wanted if name not in stored]
    unknown = [tensor.name for name, tensor in stored.items() if name not in wanted]
    known = [(wanted[name].stored_shape, tensor) for name, tensor in stored.items() if name in wanted]
    shapes = [f"{t.name} (expected {list(shape)}, found {list(t.shape)})" for shape, t in known if t.shape != shape]
    dtypes = [f"{t.name} ({t.dtype})" for _, t in known if t.dtype not in BYTES_OF]
    kinds = {
        "missing": missing,
        "unknown": unknown,
        "of the wrong shape": shapes,
        f"of a dtype other than {', '.join(BYTES_OF)}": dtypes,
    }
    return [f"{len(found)} {kind}: {_some(found)}" for kind, found in kinds.items() if found]


def _match(folder: Path, specs: object, rename: Callable[[str], str], ignore: Callable[[str], bool]) -> dict[str, StoredTensor]:
    """The stored tensor of each declared name, or one error that lists all that does not fit."""
    kept = [tensor for tensor in read_headers(weight_files(folder)) if not ignore(tensor.name)]
    times = Counter(rename(tensor.name) for tensor in kept)
    twice = [name for name, n in times.items() if n > 1]
    stored = {rename(tensor.name): tensor for tensor in kept}
    problems = _compare(spec_leaves(specs), stored) + ([f"{len(twice)} stored twice: {_some(twice)}"] if twice else [])
    if problems:
        raise ValueError(f"{folder}: the tensors do not fit the configuration; " + "; ".join(problems))
    return stored


def _same(name: str) -> str:
    return name


def _none(name: str) -> bool:
    return False


def read_blocks(tensor: StoredTensor) -> QuantisedMatrix | None:
    """A matrix in the blocks that its file has it in; None where products do not read such as they are."""
    return gguf.open_gguf(tensor.file).get_slice(tensor.name).blocks() if tensor.file.suffix == gguf.SUFFIX else None


def load_params(
    folder: Path, specs: Tree, dtype: DTypeLike, *, rename: Callable[[str], str] = _same,
    ignore: Callable[[str], bool] = _none, console: Console | None = None, shardings: Tree | None = None,
    prepare: Callable[[Any, Any], Any] | None = None, keep_blocks: bool = False,
) -> Tree:  # fmt: skip
    """Reads the arrays that `specs` declare from a folder's safetensors files.

    All headers are checked before any data is read. The data is converted and prepared tensor by tensor; with shardings, each
    process reads only what its own devices hold.

    Args:
        folder: where the files lie (see `weight_files`).
        specs: a tree with an `ArraySpec` for each array.
        dtype: the dtype of the result, whatever the files hold.
        rename: from a stored name to the declared one.
        ignore: true for a stored name (before `rename`) that is to be passed over.
        console: where to show a progress bar; None for no bar.
        shardings, prepare: see `params.from_tensors`; None for the default device, and for arrays as they are.
        keep_blocks: matrices that a GGUF file has in blocks that products read (see `linear/blocks.py`) are prepared as these.

    Returns:
        The tree with a JAX array for each spec.

    Raises:
        ValueError: a file is missing or unreadable; or one message that lists the tensors that are missing, unknown, of the
            wrong shape, of an unsupported dtype, or stored twice; or the name of one that is not finite.
    """
    stored = _match(folder, specs, rename, ignore)

    def size(spec: ArraySpec, sharding: Sharding | None) -> int:
        entries = sum(prod(stop - start for start, stop in part) for part in held_parts(spec.shape, sharding))
        return entries * BYTES_OF[stored[spec.name].dtype]

    total = sum(jax.tree.leaves(each(specs, shardings, size)))
    with ExitStack() as stack:
        files = {file: stack.enter_context(_open(file)) for file in {tensor.file for tensor in stored.values()}}
        progress = stack.enter_context(byte_progress(console))
        task = progress.add_task("loading weights", total=total)

        def read(name: str, bounds: Bounds) -> np.ndarray:
            value = read_weights(files[stored[name].file], stored[name].name, bounds)
            progress.advance(task, value.nbytes)
            return value

        def kept(spec: ArraySpec) -> QuantisedMatrix | None:
            found = read_blocks(stored[spec.name]) if keep_blocks and spec.kind in ("matrix", "head") else None
            progress.advance(task, 0 if found is None else size(spec, None))
            return found

        return from_tensors(specs, read, dtype, shardings, prepare, kept)


def load_stored(folder: Path, names: Collection[str], rename: Callable[[str], str] = _same) -> dict[str, np.ndarray]:
    """The tensors of these names as they are stored, integers and flags too; what a checkpoint lacks is left out.

    Args:
        rename: from a stored name to the one asked for.
    """
    found = {rename(tensor.name): tensor for tensor in read_headers(weight_files(folder)) if rename(tensor.name) in names}
    values = {}
    for name, tensor in found.items():
        with _open(tensor.file) as file:
            values[name] = file.get_tensor(tensor.name)
    return values


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file under another name first, so that `path` never holds half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: Iterable[tuple[str, np.ndarray]], metadata: dict[str, str]) -> None:
    """Writes a safetensors file, which appears whole or not at all.

    Of several processes the first one writes, but all must call this where `tensors` gathers what they hold (`params.to_host`).
    """
    kept = {}
    for name, value in tensors:
        if jax.process_index() == 0:
            kept[name] = value
    if jax.process_index() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, lambda partial: save_file(kept, partial, metadata=metadata))


def save_params(
    folder: Path,
    hf_config: Mapping[str, Any],
    specs: object,
    params: object,
    dtype: DTypeLike,
    as_they_are: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Writes `config.json` and `model.safetensors`, as other libraries read them too. Creates the folder.

    The parameters are stored as `dtype`, which `config.json` names as its `torch_dtype`; the tensors in `as_they_are`
    (integers, flags) keep their own. Of several processes all must call this; the first one writes, and all return once it has.
    """
    text = json.dumps({**hf_config, "torch_dtype": jnp.dtype(dtype).name}, indent=2) + "\n"
    tensors = chain(to_tensors(specs, params, dtype), (as_they_are or {}).items())
    # Readers built on torch refuse a file that does not say "pt".
    write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
    if jax.process_index() == 0:
        _replace(folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))
    multihost_utils.sync_global_devices(f"saved {folder}")


def decoder_config(folder: Path) -> DecoderConfig:
    """The configuration of a decoder language model. Raises a `ValueError` as `read_config` and `config_from_hf` do."""
    return config_from_hf(read_config(folder), where=str(folder / CONFIG))


def load_decoder(
    folder: Path,
    dtype: DTypeLike,
    console: Console | None = None,
    shard: Callable[[DecoderParams], DecoderParams] | None = None,
    ops: Operations | None = None,
) -> tuple[DecoderConfig, DecoderParams]:
    """Reads a decoder language model: its configuration, and its parameters as `dtype`.

    Where the operations keep a file's blocks, a tied embedding that has some is read out of the output head.

    Two kinds of tensor are passed over, because they repeat what is known: rotary frequencies, which older files hold, and the
    head of a model whose head is the embedding.

    Args:
        shard: from the declaration to the shardings, say `lambda specs: shardings(specs, mesh, rules)`
            (`tilewright.parallel.sharding`); None for the default device.
        ops: what the parameters are prepared for, array by array; None leaves them as they are.

    Raises:
        ValueError: see `read_config`, `decoder.config_from_hf` and `load_params`.
    """
    config = decoder_config(folder)

    def ignore(name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")

    specs = declare(config, ops is not None and ops.own_head)
    keep_blocks = ops is not None and ops.keeps_blocks
    stored = read_headers(weight_files(folder)) if keep_blocks and config.tie_word_embeddings else []
    shared = any(read_blocks(tensor) is not None for tensor in stored if tensor.name == EMBEDDING)
    if shared:
        specs = replace(specs, embed=())
    placed, prepare = None if shard is None else shard(specs), None if ops is None else ops.prepare_one
    params = load_params(
        folder, specs, dtype, ignore=ignore, console=console, shardings=placed, prepare=prepare,
        keep_blocks=keep_blocks,
    )  # fmt: skip
    if shared:
        table = PackedTable(params.head.panels, config.vocab_size, config.hidden_size, jnp.dtype(dtype).name)
        params = replace(params, embed=table)
    return config, params
