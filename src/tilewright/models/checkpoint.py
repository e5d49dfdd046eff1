"""Reads and writes Hugging Face checkpoints: a folder with `config.json` and its tensors in safetensors files."""

import json
import logging
import os
import re
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
from tilewright.kernels.linear.scaled import divided
from tilewright.kernels.operations import Operations
from tilewright.kernels.select import computes_bfloat16
from tilewright.models import gguf, published
from tilewright.models.config import bare_tensor, text_tensor
from tilewright.models.decoder import EMBEDDING, DecoderConfig, DecoderParams, config_from_hf, declare
from tilewright.models.family import Family
from tilewright.models.params import AUTO, ArraySpec, Bounds, each, from_tensors, held_parts, spec_leaves, to_tensors
from tilewright.models.quantised import WeightLayout, quantised_layout
from tilewright.models.registry import FAMILIES
from tilewright.models.stored import (
    StoredTensor,
    compare,
    gathered,
    open_file,
    read_headers,
    read_kept,
    read_weights,
    some,
    stacked,
    without_zero_biases,
)

Tree = TypeVar("Tree")

log = logging.getLogger("tilewright.models")

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
GPTQ_CONFIG = "quantize_config.json"
"""AutoGPTQ's file on its quantisation, beside a `config.json` that says nothing of it."""
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MATRICES = ("matrix", "head", "experts")
"""Kinds of arrays whose bits may be kept."""
LOGGED_S = 10.0
"""Seconds between two lines on how far loading is, where there is no bar."""


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
        raise ValueError(f"{path}: expected a JSON object, found {type(fields).__name__}")
    return fields


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The fields of `generation_config.json`, or of a GGUF file in its place; none where there is no such file.

    What the file of a published model lacks, `published.PUBLISHED` has.
    """
    if (file := gguf.gguf_file(folder)) is not None:
        return {**published.generation_config(file), **gguf.open_gguf(file).generation_config}
    path = folder / GENERATION_CONFIG
    return read_json(path) if path.is_file() else {}


def read_config(folder: Path) -> dict[str, Any]:
    """The fields of a checkpoint's `config.json`.

    `eos_token_id` comes from `generation_config.json` where that file has one: there the chat models list every token that ends
    an answer, and `config.json` only the first. `quantization_config` may be a file of its own, as AutoGPTQ wrote it.

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
        raise ValueError(f"{folder / INDEX}: expected names of files beside it, found {some(strays)}")
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"{folder / INDEX} names files that are not there: {some(absent)}")
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
        if tensor.dtype in STORED:
            counts[STORED[tensor.dtype]] += prod(tensor.shape)
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


def _match(
    folder: Path, specs: object, rename: Callable[[str], str], ignore: Callable[[str], bool], layout: WeightLayout | None
) -> dict[str, StoredTensor]:
    """The stored tensor of each declared name, or one error that lists all that does not fit."""
    kept = [tensor for tensor in stored_tensors(folder, layout) if not ignore(tensor.name)]
    times = Counter(rename(tensor.name) for tensor in kept)
    twice = [name for name, n in times.items() if n > 1]
    stored = {rename(tensor.name): tensor for tensor in kept}
    if layout is not None:
        stored = without_zero_biases(stored, {spec.name for spec in spec_leaves(specs)})
    problems = compare(spec_leaves(specs), stored) + ([f"{len(twice)} stored twice: {some(twice)}"] if twice else [])
    if problems:
        raise ValueError(f"{folder}: the tensors do not fit the configuration; " + "; ".join(problems))
    return stored


def stored_tensors(folder: Path, layout: WeightLayout | None) -> list[StoredTensor]:
    """Tensors of a folder's files; a matrix in several tensors is one, and so are those of experts."""
    headers = read_headers(weight_files(folder))
    try:
        return stacked(headers if layout is None else gathered(headers, layout))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _same(name: str) -> str:
    return name


def _none(name: str) -> bool:
    return False


def load_params(
    folder: Path,
    specs: Tree,
    dtype: DTypeLike,
    *,
    rename: Callable[[str], str] = _same,
    ignore: Callable[[str], bool] = _none,
    console: Console | None = None,
    shardings: Tree | None = None,
    ops: Operations | None = None,
    layout: WeightLayout | None = None,
) -> Tree:
    """Reads the arrays that `specs` declare from a folder's files: the tree with a JAX array for each spec.

    All headers are checked before any data is read. The data is converted and prepared tensor by tensor; with shardings, each
    process reads only what its own devices hold.

    Args:
        folder: where the files lie (see `weight_files`).
        specs: a tree with an `ArraySpec` for each array.
        dtype: the dtype of the result, whatever the files hold.
        rename: from a stored name to the declared one.
        ignore: true for a stored name (before `rename`) that is to be passed over.
        console: where to show a progress bar; None for no bar.
        shardings: see `params.from_tensors`; None for the default device.
        ops: what the arrays are prepared for, which may keep the bits of matrices that the files have in few bits; None leaves
            them as they are.
        layout: how the files hold matrices that are quantised; None where they hold none, or are GGUF files.

    Raises:
        ValueError: a file is missing or unreadable; or one message that lists the tensors that are missing, unknown, of the
            wrong shape, of an unsupported dtype, or stored twice; or the name of one that is not finite.
    """
    stored = _match(folder, specs, rename, ignore, layout)
    sizes = each(specs, shardings, lambda spec, sharding: _read_bytes(stored[spec.name], held_parts(spec.shape, sharding)))
    dequantised: list[tuple[str, str]] = []
    with ExitStack() as stack:
        files = {file: stack.enter_context(open_file(file)) for file in sorted({f for t in stored.values() for f in t.files})}
        advance = stack.enter_context(loading(console, folder, sum(jax.tree.leaves(sizes))))

        def read(name: str, bounds: Bounds) -> np.ndarray:
            value = read_weights(files, stored[name], bounds)
            advance(_read_bytes(stored[name], [bounds]))
            return value

        def kept(spec: ArraySpec, sharding: Sharding | None) -> Any:
            tensor = stored[spec.name]
            kinds = (*MATRICES, *(("embedding",) if ops is not None and ops.scales_tables else ()))
            found = None if ops is None else kept_matrix(files, tensor, spec, sharding, ops)
            if found is not None:
                advance(tensor.nbytes)
            elif tensor.quantised and spec.kind in kinds:
                dequantised.append((tensor.quantised, tensor.kept))  # by any thread
            return found

        params = from_tensors(specs, read, dtype, shardings, None if ops is None else ops.prepare_one, kept)
    say_dequantised(folder, Counter(dequantised), ops, jnp.dtype(dtype).name)
    return params


def kept_matrix(
    files: Mapping[Path, Any], tensor: StoredTensor, spec: ArraySpec, sharding: Sharding | None, ops: Operations
) -> Any:
    """A matrix in its files' bits, as operations and devices take it; None if they do not."""
    if spec.kind not in MATRICES or (spec.kind == "experts" and not ops.packs):  # only the CPU kernels read experts in blocks
        return None
    found = read_kept(files, tensor, spec, ops.keeps_blocks, ops.keeps_fp8)
    return found if found is None or sharding is None else divided(found, spec.shape, sharding)


def _read_bytes(tensor: StoredTensor, parts: Collection[Bounds]) -> int:
    """Bytes that parts of a tensor take; of a matrix in several tensors all of these are read for each part."""
    if tensor.layout is not None:
        return tensor.nbytes * len(parts)
    return sum(prod(stop - start for start, stop in part) for part in parts) * tensor.nbytes // max(1, prod(tensor.shape))


def say_dequantised(folder: Path, matrices: Mapping[tuple[str, str], int], ops: Operations | None, dtype: str) -> None:
    """One line on matrices whose bits are not kept, if there are some, and what keeps them.

    Args:
        matrices: how many there are of each format, as users read it and as products read it.
    """
    if not matrices:
        return
    listed = ", ".join(f"{count} in {name}" for (name, _), count in sorted(matrices.items()))
    if ops is not None and (ops.keeps_blocks or ops.keeps_fp8):
        anew = "no product reads them as they are or devices' parts end within their blocks"
        log.warning("%s: matrices are dequantised, then quantised anew, for %s: %s", folder, anew, listed)
        return
    bits = bits_of(*max(matrices, key=lambda each: matrices[each]))  # of most matrices
    running = dtype if ops is None or ops.weights == "auto" else f"{ops.weights} and {dtype}"
    kept = {"fp8" if kept == "fp8" else "int4" for _, kept in matrices if kept}
    if ops is not None and ops.packs:
        kept -= {"fp8"}  # which no CPU kernel reads
    remedy = "".join(f"; add --weights {weights} to keep its bits" for weights in sorted(kept))
    what = "file" if folder.is_file() else "checkpoint"
    log.warning("%s: %d-bit %s, running in %s%s (matrices: %s)", folder, bits, what, running, remedy, listed)


def bits_of(name: str, kept: str) -> int:
    """Bits of a weight in a format, by its name, or by the one under which products read it."""
    return int(next(found[0] for text in (name, kept, "32") if (found := re.search(r"\d+", text))))


@contextmanager
def loading(console: Console | None, folder: Path, total: int) -> Iterator[Callable[[int], None]]:
    """Shows how many bytes of weights are read: as a bar on a console, else by a line in the log now and then.

    Gives what is to be called with each number of bytes, from any thread.
    """
    progress = byte_progress(console)
    task = progress.add_task("loading weights", total=total)
    began = said = time.monotonic()
    lock = Lock()

    def advance(size: int) -> None:
        nonlocal said
        progress.advance(task, size)
        with lock:
            now = time.monotonic()
            if console is not None or now - said < LOGGED_S:
                return
            said = now
        done = progress.tasks[0].completed
        log.info("%s: read %.1f of %.1f GB of weights in %.0f s", folder, done / 1e9, total / 1e9, now - began)

    with progress:
        yield advance


def load_stored(folder: Path, names: Collection[str], rename: Callable[[str], str] = _same) -> dict[str, np.ndarray]:
    """The tensors of these names as they are stored, integers and flags too; what a checkpoint lacks is left out.

    Args:
        rename: from a stored name to the one asked for.
    """
    found = {rename(tensor.name): tensor for tensor in read_headers(weight_files(folder)) if rename(tensor.name) in names}
    values = {}
    for name, tensor in found.items():
        with open_file(tensor.file) as file:
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
    """The configuration of a decoder language model; one that was saved without its head takes the embedding for it.

    Raises:
        ValueError: see `read_config` and `config_from_hf`.
    """
    config = config_from_hf(read_config(folder), where=str(folder / CONFIG))
    return config if config.tie_word_embeddings or not is_headless(folder) else replace(config, tie_word_embeddings=True)


def is_headless(folder: Path) -> bool:
    """True for a decoder alone, as models of embeddings are saved: no output head, no `model.` before the tensors' names."""
    try:
        names = {tensor.name for tensor in read_headers(weight_files(folder))}
    except ValueError:  # there are no weights yet, or none that can be read: whoever reads them says so
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

    Where the operations keep a file's blocks, a tied embedding that has some is read out of the output head.

    Two kinds of tensor are passed over, because they repeat what is known: rotary frequencies, which older files hold, and the
    head of a model whose head is the embedding; so are layers that predict further tokens (`mtp.`), which are no part of the
    model. Of a multimodal model the text half alone is read.

    Args:
        shard: from the declaration to the shardings, say `lambda specs: shardings(specs, mesh, rules)`
            (`tilewright.parallel.sharding`); None for the default device.
        ops: what the parameters are prepared for, array by array; None leaves them as they are.

    Raises:
        ValueError: see `read_config`, `decoder.config_from_hf` and `load_params`.
    """
    config = decoder_config(folder)
    if config != config_from_hf(read_config(folder)):
        log.warning("%s has no output head: what it is for is embeddings, and what it generates means nothing", folder)
    rename = declared_name(folder)
    multimodal = "text_config" in read_config(folder)

    def ignore(name: str) -> bool:
        if name.startswith("mtp.") or (multimodal and text_tensor(name) is None):
            return True
        return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and rename(name) == "lm_head.weight")

    specs = declare(config, ops is not None and ops.own_head, stored_family(folder, config))
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
    """From the name of a decoder's tensor to that of the declared array: of a multimodal model the text half's.

    Names that lack the `model.` in front, where a decoder was saved without what is around it, get it.
    """
    multimodal = "text_config" in read_config(folder)
    return lambda name: bare_tensor(name) or (multimodal and text_tensor(name)) or name


def kept_formats(folder: Path) -> dict[str, str]:
    """The formats in which a folder's files have a decoder's matrices in few bits, by the arrays' names.

    Raises:
        ValueError: see `read_config` and `weight_files`.
    """
    layout = quantised_layout(read_config(folder).get("quantization_config"))
    rename = declared_name(folder)
    return {rename(each.name): each.kept for each in stored_tensors(folder, layout) if each.kept}


def stored_family(folder: Path, config: DecoderConfig) -> Family:
    """The family of a model, with the names that its experts' tensors have in this folder."""
    family = FAMILIES[config.family]
    if config.mixture is None or family.experts_in_one is None:
        return family
    whole = family.experts_in_one.gate_up[0]
    in_one = any(tensor.name.endswith(whole) for tensor in read_headers(weight_files(folder)))
    return replace(family, experts=family.experts_in_one) if in_one else family


def holds_blocks(folder: Path, name: str) -> bool:
    """True if a GGUF file has a tensor in blocks that products read."""
    file = gguf.gguf_file(folder)
    return (
        file is not None
        and (tensors := gguf.open_gguf(file)).names.get(name) is not None
        and tensors.get_slice(name).kept != ""
    )
