"""Target states that a drafter learns from, computed as a step needs them, or kept on disk from the first epoch on.

On a CPU the target takes about half of a step, and its states are the same in every epoch. They are kept in bfloat16, in a file
that has room for all of them and is filled as records come up, so that a run which ends early loses nothing.
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
from tilewright.train.records import RecordRows, Records, batches_of
from tilewright.train.text import Batches, TextOptions

FINGERPRINT_FILE = "taps.json"
"""File that says what kept states are of. It is written before any of them."""


class TargetStates(NamedTuple):
    """Target states that a drafter reads.

    Attributes:
        taps: the residual stream after each tapped layer, `[B, T, H]` each.
        stream: that after the last layer, before the final norm; None where it was not asked for.
    """

    taps: tuple[Array, ...]
    stream: Array | None


def tapped_layers(target: DecoderConfig, taps: tuple[int, ...], whole: bool) -> tuple[int, ...]:
    """The layers whose streams are read, the last one among them where all of the target is to run."""
    return tuple(dict.fromkeys((*taps, target.num_layers - 1) if whole else taps))


def streams(
    target: DecoderConfig, ops: Operations, tapped: tuple[int, ...], params: DecoderParams, tokens: Int[Array, "B T"]
) -> tuple[Float[Array, "B T H"], ...]:
    """The target's residual streams after these layers; what lies above the last of them does not run."""
    below = max(tapped) + 1
    config = replace(target, num_layers=below)
    params = replace(params, layers=params.layers[:below])
    return decoder.forward_full(config, ops, params, tokens, tapped).taps


def target_states(
    target: DecoderConfig, taps: tuple[int, ...], ops: Operations, params: DecoderParams, batch: Sequence[Array], whole: bool
) -> TargetStates:
    """The target's states over whole sequences. No gradient flows.

    Args:
        taps: the tapped layers.
        batch: tokens, what is in the loss, and, if they are kept, the streams (see `KeptRows`).
        whole: ask for the stream after the last layer.
    """
    tapped = tapped_layers(target, taps, whole)
    if len(batch) > 2:
        found = jnp.split(batch[2].astype(params.embed.dtype), len(tapped), axis=-1)
    else:
        found = streams(target, ops, tapped, params, batch[0])
    of = dict(zip(tapped, map(jax.lax.stop_gradient, found), strict=True))
    return TargetStates(tuple(of[layer] for layer in taps), of[target.num_layers - 1] if whole else None)


class KeptStates:
    """The states of some records, `[n, L * H]` for their n tokens, of which those of whole records are there or not.

    Attributes:
        states: bfloat16, a file.
        there: which records have theirs, uint8 `[R]`, a file.
    """

    def __init__(self, records: Records, folder: Path, name: str, width: int):
        self.records = records
        paths = folder / f"{name}.states", folder / f"{name}.there"
        self.states, self.there = (
            np.memmap(path, dtype, "r+" if path.exists() else "w+", shape=shape)
            for path, dtype, shape in zip(
                paths, (jnp.bfloat16, np.uint8), ((len(records.tokens), width), (len(records),)), strict=True
            )
        )

    def of(self, tokens: np.ndarray, chosen: np.ndarray, run: Callable[[np.ndarray], Array]) -> np.ndarray:
        """The states of some records, `[B, T, L * H]`, zero behind a record's end.

        Args:
            tokens: of the records, `[B, T]`.
            run: gives the states of all tokens; it runs only where one of the records has none yet.
        """
        size = tokens.shape[1]
        stretches = [slice(start, min(start + size, end)) for start, end in self.places(chosen)]
        if not self.there[chosen].all():
            made = np.asarray(run(tokens))
            for row, stretch in enumerate(stretches):
                self.states[stretch] = made[row, : stretch.stop - stretch.start]
            self.states.flush()  # before they are said to be there
            self.there[chosen] = 1
        rows = np.zeros((*tokens.shape, self.states.shape[1]), self.states.dtype)
        for row, stretch in enumerate(stretches):
            rows[row, : stretch.stop - stretch.start] = self.states[stretch]
        return rows

    def places(self, chosen: np.ndarray) -> list[tuple[int, int]]:
        return list(zip(self.records.starts[chosen].tolist(), self.records.ends[chosen].tolist(), strict=True))


@dataclass(frozen=True)
class KeptRows(RecordRows):
    """Batches of whole records with the target's states, `(tokens, in_loss, states)`; the states are `[B, T, L * H]`.

    Attributes:
        folder: holds the states; made where there is none.
        width: the size of a token's states, L * H.
        run: gives the states of tokens `[B, T]`, bfloat16.
        target: what tells the target's states from another's.
    """

    folder: Path
    width: int
    run: Callable[[np.ndarray], Array]
    target: Mapping[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        same = {
            **self.target,
            "width": self.width,
            "text": self.run_fingerprint()["text"],
            "length": self.options.sequence_length,
        }
        same["held_out"] = self.held_out.fingerprint
        kept = self.folder / FINGERPRINT_FILE
        metadata = json.loads(json.dumps(same))
        if kept.exists():
            if (found := json.loads(kept.read_text())) != metadata:
                wrong = ", ".join(
                    sorted(name for name in found.keys() | metadata.keys() if found.get(name) != metadata.get(name))
                )
                raise ValueError(f"{self.folder}: expected states of this target and text, found another {wrong}")
            return
        needed = 2 * self.width * (len(self.records.tokens) + len(self.held_out.tokens))
        self.folder.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(self.folder).free) < needed:
            raise ValueError(f"{self.folder}: expected room for {needed / 1e9:.1f} GB of states, found {free / 1e9:.1f} GB")
        kept.write_text(json.dumps(metadata))

    @cached_property
    def trained_states(self) -> KeptStates:
        return KeptStates(self.records, self.folder, "trained", self.width)

    @cached_property
    def held_out_states(self) -> KeptStates:
        return KeptStates(self.held_out, self.folder, "held_out", self.width)

    def rows(self, records: Records, length: int, chosen: np.ndarray) -> tuple[np.ndarray, ...]:
        tokens, in_loss = super().rows(records, length, chosen)
        kept = self.held_out_states if records is self.held_out else self.trained_states
        return tokens, in_loss, kept.of(tokens, chosen, self.run)


def batches_with_states(
    source: TokenSource,
    held_out: TokenSource,
    options: TextOptions,
    folder: Path | None,
    target: DecoderConfig,
    params: DecoderParams,
    tapped: tuple[int, ...],
    target_fingerprint: str,
    divided: bool,
) -> Batches:
    """Batches of a text; with a folder those of whole records, with the target's streams after some layers (see `KeptRows`).

    Args:
        folder: for the states; None where a step computes them.
        tapped: the layers, from 0.
        target_fingerprint: see `checkpoint.fingerprint`.
        divided: training runs over a mesh.

    Raises:
        ValueError: states are to be kept, and training runs over a mesh; the text is no records; the folder has other states,
            or no room for these.
    """
    if folder is None:
        return batches_of(source, held_out, options)
    if divided:
        raise ValueError("expected --keep-taps or --mesh, found both: states are kept on one device")
    if not isinstance(source, Records) or not isinstance(held_out, Records):
        raise ValueError("expected whole records for --keep-taps (--self-instruct makes them), found text in windows")

    @jax.jit
    def run(params: DecoderParams, tokens: Array) -> Array:
        return jnp.concatenate(streams(target, options.ops, tapped, params, tokens), axis=-1).astype(jnp.bfloat16)

    metadata = {"target": target_fingerprint, "taps": list(tapped)}
    return KeptRows(source, held_out, options, folder, len(tapped) * target.hidden_size, partial(run, params), metadata)
