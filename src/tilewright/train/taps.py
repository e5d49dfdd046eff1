"""Hidden states of the target that a drafter learns from, computed in each step or cached on disk.

On a CPU the target takes about half of a step, and its states are the same in each epoch. The cache is a bfloat16 file for all
records. Steps fill it, so that an interrupted run keeps the states so far.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.operations import Operations
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.train.data import TokenSource
from tilewright.train.records import RecordRows, Records, make_batches
from tilewright.train.text import Batches, TextOptions

FINGERPRINT_FILE = "taps.json"
"""File with the target and the text of cached states; it is written before the states."""


class TargetStates(NamedTuple):
    """Hidden states of the target.

    Attributes:
        taps: residual stream after each tapped layer, `[B, T, H]` each.
        stream: residual stream after the last layer, before the final norm, `[B, T, H]`; None if not requested.
    """

    taps: tuple[Array, ...]
    stream: Array | None


def tapped_layers(target: DecoderConfig, taps: tuple[int, ...], whole: bool) -> tuple[int, ...]:
    """Returns the layers with streams to read; with `whole`, including the last layer."""
    return tuple(dict.fromkeys((*taps, target.num_layers - 1) if whole else taps))


def streams(
    target: DecoderConfig, ops: Operations, tapped: tuple[int, ...], params: DecoderParams, tokens: Int[Array, "B T"]
) -> tuple[Float[Array, "B T H"], ...]:
    """Computes the target's residual streams after the tapped layers; later layers do not run."""
    below = max(tapped) + 1
    config = replace(target, num_layers=below)
    params = replace(params, layers=params.layers[:below])
    return decoder.forward_full(config, ops, params, tokens, tapped).taps


def target_states(
    target: DecoderConfig, taps: tuple[int, ...], ops: Operations, params: DecoderParams, batch: Sequence[Array], whole: bool
) -> TargetStates:
    """Computes the target's states over whole sequences, without gradient.

    Args:
        target: configuration of the target.
        taps: tapped layers.
        ops: operations.
        params: parameters of the target.
        batch: tokens, loss mask and, if cached, the streams (see `RowsWithStates`).
        whole: include the stream after the last layer.
    """
    tapped = tapped_layers(target, taps, whole)
    if len(batch) > 2:
        found = jnp.split(batch[2].astype(params.embed.dtype), len(tapped), axis=-1)
    else:
        found = streams(target, ops, tapped, params, batch[0])
    by_layer = dict(zip(tapped, map(jax.lax.stop_gradient, found), strict=True))
    return TargetStates(tuple(by_layer[layer] for layer in taps), by_layer[target.num_layers - 1] if whole else None)


class CachedStates:
    """Cached states of records, `[n, L * H]` for their n tokens.

    Attributes:
        states: memory-mapped file of the states, bfloat16.
        present: memory-mapped file with 1 for each record with states, uint8 `[R]`.
    """

    def __init__(self, records: Records, folder: Path, name: str, width: int):
        self.records = records
        paths = folder / f"{name}.states", folder / f"{name}.there"
        self.states, self.present = (
            np.memmap(path, dtype, "r+" if path.exists() else "w+", shape=shape)
            for path, dtype, shape in zip(
                paths, (jnp.bfloat16, np.uint8), ((len(records.tokens), width), (len(records),)), strict=True
            )
        )

    def rows(self, tokens: np.ndarray, chosen: np.ndarray, run: Callable[[np.ndarray], Array]) -> np.ndarray:
        """Returns the states of records, `[B, T, L * H]`, zero after a record's end.

        Args:
            tokens: tokens of the records, `[B, T]`.
            chosen: indices of the records, `[B]`.
            run: computes the states of the tokens; called only if a record has no states yet.
        """
        size = tokens.shape[1]
        spans = [slice(start, min(start + size, end)) for start, end in self.places(chosen)]
        if not self.present[chosen].all():
            made = np.asarray(run(tokens))
            for row, span in enumerate(spans):
                self.states[span] = made[row, : span.stop - span.start]
            self.states.flush()  # before the records are marked as present
            self.present[chosen] = 1
        rows = np.zeros((*tokens.shape, self.states.shape[1]), self.states.dtype)
        for row, span in enumerate(spans):
            rows[row, : span.stop - span.start] = self.states[span]
        return rows

    def places(self, chosen: np.ndarray) -> list[tuple[int, int]]:
        return list(zip(self.records.starts[chosen].tolist(), self.records.ends[chosen].tolist(), strict=True))


@dataclass(frozen=True)
class RowsWithStates(RecordRows):
    """Batches of whole records with cached target states: `(tokens, in_loss, states)` with states `[B, T, L * H]`.

    Attributes:
        folder: folder of the cache, created if absent.
        width: numbers per token, L * H.
        run: computes the states of tokens `[B, T]` in bfloat16.
        target: metadata that identifies the target and its tapped layers.
    """

    folder: Path
    width: int
    run: Callable[[np.ndarray], Array]
    target: Mapping[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        settings = {
            **self.target,
            "width": self.width,
            "text": self.run_fingerprint()["text"],
            "length": self.options.sequence_length,
        }
        settings["held_out"] = self.held_out.fingerprint
        file = self.folder / FINGERPRINT_FILE
        metadata = json.loads(json.dumps(settings))
        if file.exists():
            if (found := json.loads(file.read_text())) != metadata:
                wrong = ", ".join(
                    sorted(name for name in found.keys() | metadata.keys() if found.get(name) != metadata.get(name))
                )
                raise ValueError(
                    f"{self.folder}: expected states of this target and text, found another {wrong}; name another folder"
                )
            return
        needed = 2 * self.width * (len(self.records.tokens) + len(self.held_out.tokens))
        self.folder.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(self.folder).free) < needed:
            raise ValueError(
                f"{self.folder}: expected {needed / 1e9:.1f} GB of free disk space for states, found {free / 1e9:.1f} GB"
            )
        file.write_text(json.dumps(metadata))

    @cached_property
    def trained_states(self) -> CachedStates:
        return CachedStates(self.records, self.folder, "trained", self.width)

    @cached_property
    def held_out_states(self) -> CachedStates:
        return CachedStates(self.held_out, self.folder, "held_out", self.width)

    def rows(self, records: Records, length: int, chosen: np.ndarray) -> tuple[np.ndarray, ...]:
        tokens, in_loss = super().rows(records, length, chosen)
        cached = self.held_out_states if records is self.held_out else self.trained_states
        return tokens, in_loss, cached.rows(tokens, chosen, self.run)


def batches_with_states(
    source: TokenSource,
    held_out: TokenSource,
    options: TextOptions,
    folder: Path | None,
    target: DecoderConfig,
    params: DecoderParams,
    tapped: tuple[int, ...],
    target_fingerprint: str,
    sharded: bool,
) -> Batches:
    """Returns batches of a text; with a folder, batches of whole records with cached target states (see `RowsWithStates`).

    Args:
        source: training text.
        held_out: held-out text.
        options: options of the training loop.
        folder: folder of the cache; None computes the states in each step.
        target: configuration of the target.
        params: parameters of the target.
        tapped: layers with streams to read, from 0.
        target_fingerprint: see `checkpoint.fingerprint`.
        sharded: True for training over a mesh.

    Raises:
        ValueError: with a folder: training runs over a mesh, the text has no records, the folder has states of another target
            or text, or the disk is full.
    """
    if folder is None:
        return make_batches(source, held_out, options)
    if sharded:
        raise ValueError("expected --keep-taps or --mesh, found both: states are cached on one device")
    if not isinstance(source, Records) or not isinstance(held_out, Records):
        raise ValueError("expected whole records for --keep-taps (--self-instruct makes them), found text in windows")

    @jax.jit
    def run(params: DecoderParams, tokens: Array) -> Array:
        return jnp.concatenate(streams(target, options.ops, tapped, params, tokens), axis=-1).astype(jnp.bfloat16)

    metadata = {"target": target_fingerprint, "taps": list(tapped)}
    return RowsWithStates(source, held_out, options, folder, len(tapped) * target.hidden_size, partial(run, params), metadata)
