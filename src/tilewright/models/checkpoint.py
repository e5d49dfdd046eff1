"""Reads and writes Hugging Face checkpoints: a folder with `config.json` and safetensors files."""

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from jax.typing import DTypeLike
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from safetensors.numpy import save_file

from tilewright.kernels.linear.blocks import PackedTable
from tilewright.kernels.linear.scaled import shard_matrix
from tilewright.kernels.operations import Operations
from tilewright.kernels.select import computes_bfloat16
from tilewright.models import gguf, published
from tilewright.models.config import bare_tensor, text_tensor
from tilewright.models.decoder import EMBEDDING, DecoderConfig, DecoderParams, config_from_hf, declare
from tilewright.models.family import Family
from tilewright.models.params import AUTO, ArraySpec, Bounds, from_tensors, held_parts, map_specs, spec_leaves, to_tensors
from tilewright.models.quantised import WeightLayout, quantised_layout
from tilewright.models.registry import FAMILIES
from tilewright.models.stored import (
    StoredTensor,
    compare,
    first_names,
    gathered,
    open_file,
    read_headers,
    read_native,
    read_weights,
    stacked,
    without_zero_biases,
)

Tree = TypeVar("Tree")

log = logging.getLogger("tilewright.models")

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
GPTQ_CONFIG = "quantize_config.json"
"""AutoGPTQ's configuration, beside a `config.json` without `quantization_config`."""
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MATRICES = ("matrix", "head", "experts")
"""Kinds of arrays that may stay in the file's quantised format."""
MTP = "mtp."
"""Beginning of the names of tensors of multi-token prediction."""
LOGGED_S = 10.0
"""Seconds between log lines about loading, without a progress bar."""


def byte_progress(console: Console | None) -> Progress:
    """Returns a progress bar that counts bytes; hidden without a console, and removed when done."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=console is None, transient=True)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file that must hold a JSON object; raises a `ValueError` that names the file for anything else."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not JSON, or not even UTF-8
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(fields).__name__}")
    return fields


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Reads the fields of `generation_config.json`, or of a GGUF file; empty if there is no such file.

    `published.PUBLISHED` adds fields that the file of a published model lacks.
    """
    if (file := gguf.gguf_file(folder)) is not None:
        return {**published.generation_config(file), **gguf.open_gguf(file).generation_config}
    path = folder / GENERATION_CONFIG
    return read_json(path) if path.is_file() else {}


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the fields of a checkpoint's `config.json`.

    `eos_token_id` is taken from `generation_config.json` if that file has one: chat models list every end token there, and only
    the first in `config.json`. `quantization_config` may be a separate file, written by AutoGPTQ.

    Raises:
        ValueError: the folder or its `config.json` is missing, or one of these files is not a JSON object.
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
    if "quantization_config" not in fields and (folder / GPTQ_CONFIG).is_file():
        fields["quantization_config"] = {"quant_method": "gptq", **read_json(folder / GPTQ_CONFIG)}
    return fields


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a checkpoint: `model.safetensors`, else those in the index, else the only one.

    Raises:
        ValueError: there is no file, there are several without an index, or the index is malformed or names a missing file.
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
        raise ValueError(f"{folder / INDEX}: expected names of files beside it, found {first_names(strays)}")
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"{folder / INDEX} names files that do not exist: {first_names(absent)}")
    return [folder / name for name in names]


STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def stored_dtype(folder: Path) -> str:
    """Returns the NumPy name of a checkpoint's dtype: that in `config.json`, else that of most of its numbers.

    Raises:
        ValueError: there is no configuration, or it has no dtype and no tensors can be read.
    """
    fields = read_config(folder)
    declared = fields.get("dtype") or fields.get("torch_dtype")
    if declared is not None:
        return str(declared).removeprefix("torch.")
    counts = Counter[str]()
    for tensor in read_headers(weight_files(folder)):
        if tensor.dtype in STORED:
            counts[STORED[tensor.dtype]] += prod(tensor.shape)
    return counts.most_common(1)[0][0] if counts else "float32"


def chosen_dtype(requested: str, stored: str, bfloat16: bool) -> str:
    """Returns the dtype that a model runs in.

    Args:
        requested: one of `params.DTYPES`, or "auto" for the checkpoint's dtype. "auto" selects bfloat16 for float16, in
            which nothing computes, and float32 if bfloat16 is slow.
        stored: the checkpoint's dtype.
        bfloat16: bfloat16 is fast on this device.
    """
    if requested != AUTO:
        return requested
    return "bfloat16" if bfloat16 and stored in ("bfloat16", "float16") else "float32"


def running_dtype(requested: str, folder: Path, ops: Operations) -> str:
    """Returns the dtype that a model runs in (see `chosen_dtype`); logs a warning if weights lose precision."""
    stored = stored_dtype(folder) if requested == AUTO else ""
    chosen = chosen_dtype(requested, stored, computes_bfloat16(ops))
    if stored == "float16" and chosen == "bfloat16":
        log.warning("%s: rounding float16 weights to bfloat16; --dtype float32 keeps their precision", folder)
    return chosen


def _match(
    folder: Path, specs: object, rename: Callable[[str], str], ignore: Callable[[str], bool], layout: WeightLayout | None
) -> dict[str, StoredTensor]:
    """Returns the stored tensor of each declared name, or raises one error that lists all mismatches."""
    tensors = [tensor for tensor in stored_tensors(folder, layout) if not ignore(tensor.name)]
    times = Counter(rename(tensor.name) for tensor in tensors)
    twice = [name for name, n in times.items() if n > 1]
    stored = {rename(tensor.name): tensor for tensor in tensors}
    if layout is not None:
        stored = without_zero_biases(stored, {spec.name for spec in spec_leaves(specs)})
    problems = compare(spec_leaves(specs), stored) + ([f"{len(twice)} stored twice: {first_names(twice)}"] if twice else [])
    if problems:
        raise ValueError(f"{folder}: the tensors do not fit the configuration; " + "; ".join(problems))
    return stored


def stored_tensors(folder: Path, layout: WeightLayout | None) -> list[StoredTensor]:
    """Returns the tensors of a folder's files, with the tensors of a quantised matrix, or of experts, merged."""
    headers = read_headers(weight_files(folder))
    try:
        return stacked(headers if layout is None else gathered(headers, layout))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _unchanged(name: str) -> str:
    return name


def _none(name: str) -> bool:
    return False


def load_params(
    folder: Path,
    specs: Tree,
    dtype: DTypeLike,
    *,
    rename: Callable[[str], str] = _unchanged,
    ignore: Callable[[str], bool] = _none,
    console: Console | None = None,
    shardings: Tree | None = None,
    ops: Operations | None = None,
    layout: WeightLayout | None = None,
) -> Tree:
    """Reads the arrays that `specs` declare from a folder: the tree with a JAX array for each spec.

    All headers are checked before any data is read. The data is converted and prepared tensor by tensor; with shardings, each
    process reads only what its own devices hold.

    Args:
        folder: folder of the files (see `weight_files`).
        specs: a tree with an `ArraySpec` for each array.
        dtype: the dtype of the result, for any dtype of the files.
        rename: from a stored name to the declared one.
        ignore: true for a stored name (before `rename`) that is not read.
        console: where to show a progress bar; None for no bar.
        shardings: see `params.from_tensors`; None for the default device.
        ops: prepares the arrays, and may keep matrices in the files' quantised format; None leaves arrays unprepared.
        layout: how the files store quantised matrices; None if there are none, and for GGUF files.

    Raises:
        ValueError: a file is missing or unreadable; or one message that lists the tensors that are missing, unknown, of the
            wrong shape, of an unsupported dtype, or stored twice; or a tensor is not finite.
    """
    stored = _match(folder, specs, rename, ignore, layout)
    sizes = map_specs(specs, shardings, lambda spec, sharding: _read_bytes(stored[spec.name], held_parts(spec.shape, sharding)))
    kept: list[str] = []
    converted: list[tuple[str, str]] = []  # list.append is thread-safe
    with ExitStack() as stack:
        files = {file: stack.enter_context(open_file(file)) for file in sorted({f for t in stored.values() for f in t.files})}
        advance = stack.enter_context(loading(console, folder, sum(jax.tree.leaves(sizes))))

        def read(name: str, bounds: Bounds) -> np.ndarray:
            value = read_weights(files, stored[name], bounds)
            advance(_read_bytes(stored[name], [bounds]))
            return value

        def native(spec: ArraySpec, sharding: Sharding | None) -> Any:
            tensor = stored[spec.name]
            kinds = (*MATRICES, *(("embedding",) if ops is not None and ops.scales_tables else ()))
            found = None if ops is None else native_matrix(files, tensor, spec, sharding, ops)
            if found is not None:
                advance(tensor.nbytes)
                kept.append(tensor.quantised)
            elif tensor.quantised and spec.kind in kinds:
                converted.append((tensor.quantised, tensor.native_format))
            return found

        params = from_tensors(specs, read, dtype, shardings, None if ops is None else ops.prepare_one, native)
    if kept:
        log.info("%s: keeping quantised: %s matrices", folder, listed(Counter(kept)))
    log_converted(folder, Counter(converted), ops, jnp.dtype(dtype).name)
    return params


def native_matrix(
    files: Mapping[Path, Any], tensor: StoredTensor, spec: ArraySpec, sharding: Sharding | None, ops: Operations
) -> Any:
    """Returns a matrix in its files' quantised format, sharded if needed; None if operations or devices cannot use it."""
    if spec.kind not in MATRICES or (spec.kind == "experts" and not ops.packs):  # only the CPU kernels read experts in blocks
        return None
    found = read_native(files, tensor, spec, ops.keeps_blocks, ops.keeps_fp8)
    return found if found is None or sharding is None else shard_matrix(found, spec.shape, sharding)


def _read_bytes(tensor: StoredTensor, parts: Collection[Bounds]) -> int:
    """Returns the bytes read for parts of a tensor; a matrix in several tensors is read whole for each part."""
    if tensor.layout is not None:
        return tensor.nbytes * len(parts)
    return sum(prod(stop - start for start, stop in part) for part in parts) * tensor.nbytes // max(1, prod(tensor.shape))


def log_converted(folder: Path, matrices: Mapping[tuple[str, str], int], ops: Operations | None, dtype: str) -> None:
    """Logs what quantised matrices were converted to, and the option that keeps them: a warning if nobody requested it.

    Args:
        matrices: number of matrices of each format, by its name for users and the format in which matmuls read it.
    """
    if not matrices:
        return
    counts = Counter[str]()
    for (name, _), count in matrices.items():
        counts[name] += count
    if ops is None or ops.weights == "dequantised":
        log.info("%s: dequantising to %s: %s matrices", folder, dtype, listed(counts))
        return
    readable = {"fp8" if native == "fp8" else "blocks" for _, native in matrices if native}
    if ops.weights == "auto" and not ops.keeps_blocks:
        action = f"dequantising to {dtype}"
        options = [option for kind, option in (("fp8", "fp8"), ("blocks", "int4")) if kind in readable]
        remedy = f"Use --weights {' or '.join(options)} to keep them quantised." if options else ""
    elif ops.weights == "auto":
        action = f"dequantising to {dtype}, because no CPU kernel reads their format or shards end within their blocks"
        remedy = "Use --weights int8 or int4 to quantise them again."
    elif ops.keeps_blocks or ops.keeps_fp8:
        action = "quantising again, because no matmul reads their format or shards end within their blocks"
        remedy = ""
    else:
        action = f"converting to {ops.weights}"
        kept = "blocks" in readable
        remedy = f"Use --weights {'auto' if ops.packs else 'int4'} to keep their bits." if kept else ""
    log.warning("%s: %s: %s matrices.%s", folder, action, listed(counts), f" {remedy}" if remedy else "")


def listed(counts: Mapping[str, int]) -> str:
    """Lists numbers of matrices by format."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


@contextmanager
def loading(console: Console | None, folder: Path, total: int) -> Iterator[Callable[[int], None]]:
    """Shows the progress of loading weights: a bar on a console, else log lines now and then.

    Yields a function to call with each number of bytes read, from any thread.
    """
    progress = byte_progress(console)
    task = progress.add_task("loading weights", total=total)
    began = logged = time.monotonic()
    lock = Lock()

    def advance(size: int) -> None:
        nonlocal logged
        progress.advance(task, size)
        with lock:
            now = time.monotonic()
            if console is not None or now - logged < LOGGED_S:
                return
            logged = now
        done = progress.tasks[0].completed
        log.info("%s: read %.1f of %.1f GB of weights in %.0f s", folder, done / 1e9, total / 1e9, now - began)

    with progress:
        yield advance


def load_stored(folder: Path, names: Collection[str], rename: Callable[[str], str] = _unchanged) -> dict[str, np.ndarray]:
    """Reads the named tensors in their stored dtype, including integers and flags; missing tensors are left out.

    Args:
        rename: from a stored name to one of `names`.
    """
    found = {rename(tensor.name): tensor for tensor in read_headers(weight_files(folder)) if rename(tensor.name) in names}
    values = {}
    for name, tensor in found.items():
        with open_file(tensor.file) as file:
            values[name] = file.get_tensor(tensor.name)
    return values


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Writes to a temporary file first, so that `path` never holds an incomplete file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: Iterable[tuple[str, np.ndarray]], metadata: dict[str, str]) -> None:
    """Writes a safetensors file atomically.

    Only process 0 writes, but all processes must call this function if `tensors` gathers from them (`params.to_host`).
    """
    gathered_tensors = {}
    for name, value in tensors:
        if jax.process_index() == 0:
            gathered_tensors[name] = value
    if jax.process_index() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda partial: save_file(gathered_tensors, partial, metadata=metadata))


def write_shards(folder: Path, tensors: Iterable[tuple[str, np.ndarray]], size: int, metadata: dict[str, str]) -> set[str]:
    """Writes a safetensors file in each process, and an index. Returns the names of all files.

    All processes must call this function with all tensors, in one order. Each keeps those of its own file only, so that no
    host holds them all.

    Args:
        folder: folder of the files, which all processes share.
        tensors: names and values.
        size: bytes of all tensors, about; files have equal parts of them.
        metadata: metadata of each file.
    """
    files = [f"model-{n + 1:05d}-of-{jax.process_count():05d}.safetensors" for n in range(jax.process_count())]
    own: dict[str, np.ndarray] = {}
    places: dict[str, str] = {}
    written = 0
    for name, value in tensors:
        owner = min(written * len(files) // max(size, 1), len(files) - 1)
        places[name] = files[owner]
        written += value.nbytes
        if owner == jax.process_index():
            own[name] = value
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / files[jax.process_index()], lambda partial: save_file(own, partial, metadata=metadata))
    multihost_utils.sync_global_devices(f"shards of {folder}")
    if jax.process_index() == 0:
        index = json.dumps({"metadata": {"total_size": written}, "weight_map": dict(sorted(places.items()))}, indent=2)
        replace_file(folder / INDEX, lambda path: path.write_text(index + "\n", encoding="utf-8"))
    return {*files, INDEX}


def save_params(
    folder: Path,
    hf_config: Mapping[str, Any],
    specs: object,
    params: object,
    dtype: DTypeLike,
    unconverted: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Writes `config.json` and safetensors files, which other libraries read too. Creates the folder.

    One process writes `model.safetensors`; of several, each writes a part (see `write_shards`). Files of an earlier save are
    removed. Parameters are stored as `dtype`, which is the `torch_dtype` of `config.json`; tensors in `unconverted` (integers,
    flags) keep their dtype. All processes must call this function, and return when everything is written.
    """
    text = json.dumps({**hf_config, "torch_dtype": jnp.dtype(dtype).name}, indent=2) + "\n"
    tensors = chain(to_tensors(specs, params, dtype), (unconverted or {}).items())
    metadata = {"format": "pt"}  # required by readers built on torch
    if jax.process_count() == 1:
        write_tensors(folder / WEIGHTS, tensors, metadata)
        files = {WEIGHTS}
    else:
        size = sum(prod(spec.shape) for spec in spec_leaves(specs)) * jnp.dtype(dtype).itemsize
        files = write_shards(folder, tensors, size, metadata)
    if jax.process_index() == 0:
        for path in (folder / WEIGHTS, folder / INDEX, *folder.glob("model-*-of-*.safetensors")):
            if path.name not in files:
                path.unlink(missing_ok=True)
        replace_file(folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))
    multihost_utils.sync_global_devices(f"saved {folder}")


def decoder_config(folder: Path) -> DecoderConfig:
    """Reads the configuration of a decoder. A decoder saved without an output head uses the embedding as its head.

    Raises:
        ValueError: see `read_config` and `config_from_hf`.
    """
    config = config_from_hf(read_config(folder), where=str(folder / CONFIG))
    return config if config.tie_word_embeddings or not is_headless(folder) else replace(config, tie_word_embeddings=True)


def is_headless(folder: Path) -> bool:
    """True for a decoder saved as an embedding model: no output head, and no `model.` before tensor names."""
    try:
        names = {tensor.name for tensor in read_headers(weight_files(folder))}
    except ValueError:  # missing or unreadable weights are reported when they are read
        return False
    return any(bare_tensor(name) == EMBEDDING for name in names) and not any(name.endswith("lm_head.weight") for name in names)


def load_decoder(
    folder: Path,
    dtype: DTypeLike,
    console: Console | None = None,
    shard: Callable[[DecoderParams], DecoderParams] | None = None,
    ops: Operations | None = None,
) -> tuple[DecoderConfig, DecoderParams]:
    """Reads a decoder language model: its configuration, and its parameters as `dtype`.

    If the operations keep a file's quantised blocks, a tied embedding in such blocks is read through the output head.

    Redundant tensors are ignored: rotary frequencies, which older files hold, and the output head of a model whose head is the
    embedding. So are layers of multi-token prediction (see `mtp.py`), and all but the text model of a multimodal model.

    Args:
        shard: from the declaration to the shardings, such as `lambda specs: shardings(specs, mesh, rules)`
            (`tilewright.parallel.sharding`); None for the default device.
        ops: prepares the parameters, array by array; None leaves them unprepared.

    Raises:
        ValueError: see `read_config`, `decoder.config_from_hf` and `load_params`.
    """
    config = decoder_config(folder)
    if config != config_from_hf(read_config(folder)):
        log.warning("%s has no output head: it is an embedding model, and its generated text is meaningless", folder)
    rename = declared_name(folder)
    multimodal = "text_config" in read_config(folder)

    def ignore(name: str) -> bool:
        if name.startswith(MTP) or (multimodal and text_tensor(name) is None):
            return True
        return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and rename(name) == "lm_head.weight")

    specs = declare(config, ops is not None and ops.separate_head, stored_family(folder, config))
    layout = quantised_layout(read_config(folder).get("quantization_config"))
    packs = ops is not None and ops.packs and ops.keeps_blocks
    shared = packs and config.tie_word_embeddings and holds_blocks(folder, EMBEDDING)
    if shared:
        specs = replace(specs, embed=())
    placed = None if shard is None else shard(specs)
    params = load_params(
        folder, specs, dtype, rename=rename, ignore=ignore, console=console, shardings=placed, ops=ops, layout=layout
    )
    if shared:
        table = PackedTable(params.head.panels, params.head.outputs, config.hidden_size, jnp.dtype(dtype).name)
        params = replace(params, embed=table)
    return config, params


def declared_name(folder: Path) -> Callable[[str], str]:
    """Returns a function from a stored tensor name to the declared name.

    For a multimodal model, names are those of its text model. Names without `model.`, of a decoder saved alone, get that
    prefix.
    """
    multimodal = "text_config" in read_config(folder)
    return lambda name: bare_tensor(name) or (multimodal and text_tensor(name)) or name


def native_formats(folder: Path) -> dict[str, str]:
    """Returns the format of each quantised matrix that matmuls can read without dequantising, by the array's name.

    Raises:
        ValueError: see `read_config` and `weight_files`.
    """
    layout = quantised_layout(read_config(folder).get("quantization_config"))
    rename = declared_name(folder)
    return {rename(each.name): each.native_format for each in stored_tensors(folder, layout) if each.native_format}


def stored_family(folder: Path, config: DecoderConfig, head: bool = False) -> Family:
    """Returns the family of a model, with the names of its experts' tensors in this folder.

    Args:
        head: look at the layers of multi-token prediction, which may store their experts in the other way.
    """
    family = FAMILIES[config.family]
    if config.mixture is None or family.experts_in_one is None:
        return family
    whole = family.experts_in_one.gate_up[0]
    names = [tensor.name for tensor in read_headers(weight_files(folder))]
    in_one = any(name.startswith(MTP) == head and name.endswith(whole) for name in names)
    return replace(family, experts=family.experts_in_one) if in_one else family


def holds_blocks(folder: Path, name: str) -> bool:
    """True if a GGUF file has a tensor in blocks that matmuls read."""
    file = gguf.gguf_file(folder)
    return (
        file is not None
        and (tensors := gguf.open_gguf(file)).names.get(name) is not None
        and tensors.get_slice(name).native_format != ""
    )
