"""Training of drafters that propose a chain: the chain is unrolled over all positions of a sequence at once.

This is training-time test (EAGLE-3, arXiv 2503.01840, section 3.2). Step i combines the drafter's own output of step i - 1 (at
step 0 the target's features) with the embedding of the token i + 1 positions later, and learns the target's distribution of the
following token. A position attends to step 0 up to itself, and to later steps at itself only, as when drafting.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int
from rich.console import Console

from tilewright.kernels.operations import PLAIN_SCORES, Scores, softcapped
from tilewright.kernels.select import MASKED, by_blocks
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.train.checkpoint import fingerprint
from tilewright.train.data import TokenSource
from tilewright.train.loop import TrainResult, train
from tilewright.train.step import Objective, TrainingPlacement, make_task
from tilewright.train.taps import batches_with_states, tapped_layers
from tilewright.train.text import TextOptions

SEQUENCES = 8
"""Sequences that an accelerator computes at a time; a single one would leave it mostly idle."""
POSITIONS = 1024
"""Positions, approximately, that a CPU computes at a time, since it repacks a matrix for each product."""


@dataclass(frozen=True)
class ChainOptions:
    """Options of the training of a drafter that proposes a chain.

    Attributes:
        decay: loss weight of a draft step relative to the step before; EAGLE-3's published value is 0.8.
        keep_taps: folder that caches the target's hidden states (see `taps.RowsWithStates`); None computes them in each step.
    """

    decay: float = 0.8
    keep_taps: Path | None = None

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"expected a decay above 0 and at most 1, found {self.decay}")


class Teacher(NamedTuple):
    """Hidden states and predictions of the target, which the drafter learns from.

    Attributes:
        taps: hidden states after the tapped layers, `[B, T, G]` each.
        probabilities: probabilities of the next token over the draft vocabulary, `[B, T, W]`.
        best: the next token that greedy drafts must match, `[B, T]`.
    """

    taps: tuple[Array, ...]
    probabilities: Array
    best: Array


@dataclass(frozen=True)
class ChainKind:
    """Training of one kind of drafter that proposes a chain.

    Attributes:
        title: title of the progress bar.
        config: configuration of the drafter.
        end: token that ends a text; -1 if the target has none.
        specs: declaration of the parameters.
        is_hidden_matrix: see `text.make_optimizer`.
        ids: `frozen -> target ids of the draft vocabulary [W]`; None for all tokens.
        teach: `(frozen, batch, exact) -> Teacher`: runs the target over whole sequences, or reads its cached states. `batch` is
            as in `taps.target_states`. With `exact`, `Teacher.best` is the target's choice, else perhaps the text's token.
        unrolled: `(params, frozen, teacher, tokens [B, T]) -> the draft logits [B, T, W] of each step`; those of step i at
            position t predict the token at t + 2 + i.
    """

    title: str
    config: Any
    end: int
    specs: Any
    is_hidden_matrix: Callable[[Any], Any]
    ids: Callable[[Any], Array | None]
    teach: Callable[[Any, Sequence[Array], bool], Teacher]
    unrolled: Callable[[Any, Any, Teacher, Array], Iterator[Array]]


def together(rows: int, length: int) -> int:
    """Returns the number of sequences to compute at a time, a divisor of `rows`."""
    most = POSITIONS // length if jax.default_backend() == "cpu" else SEQUENCES
    return next(size for size in range(max(1, min(most, rows)), 0, -1) if rows % size == 0)


def following(x: Array, n: int) -> Array:
    """Shifts `x` `[B, T, ...]` by `n` positions to the left, with zeros at the end."""
    return jnp.pad(x[:, n:], ((0, 0), (0, n), *((0, 0),) * (x.ndim - 2)))


def chain_attention(
    q: Float[Array, "B T N D"],
    pairs: Sequence[tuple[Float[Array, "B K T D"], Float[Array, "B K T D"]]],
    rules: Scores = PLAIN_SCORES,
) -> Float[Array, "B T N D"]:
    """Computes the attention of one unrolled step, with a float32 softmax, in blocks of queries.

    A query attends to the first step's entries up to its position, and to the later steps' entries at its position.

    Args:
        q: queries.
        pairs: keys and values of all steps so far; the last ones belong to the current step.
        rules: rules for attention scores.
    """
    (k, v), chain = pairs[0], pairs[1:]

    def attend(q: Array, position: Array, *later: Array) -> Array:
        """Computes some queries `[B, t, N, D]`, at `position` `[1, t]`; `later` are keys and values `[B, t, K, D]`."""
        b, t, n, d = q.shape
        grouped = (q * rules.scale_of(d)).reshape(b, t, k.shape[1], -1, d)
        scores = partial(jnp.einsum, preferred_element_type=jnp.float32)
        before = softcapped(scores("btkgd,bksd->bkgts", grouped, k), rules.softcap)
        columns = [jnp.where(jnp.arange(k.shape[2]) <= position[0][:, None], before, MASKED)]
        columns += [softcapped(scores("btkgd,btkd->bkgt", grouped, keys)[..., None], rules.softcap) for keys in later[::2]]
        if rules.sinks is not None:
            sinks = rules.sinks.astype(jnp.float32).reshape(-1, n // k.shape[1], 1, 1)
            columns.append(jnp.broadcast_to(sinks, (*before.shape[:-1], 1)))
        weights = jax.nn.softmax(jnp.concatenate(columns, axis=-1), axis=-1).astype(q.dtype)
        size = k.shape[2]
        out = jnp.einsum("bkgts,bksd->btkgd", weights[..., :size], v)
        for step, values in enumerate(later[1::2]):
            out = out + jnp.einsum("bkgt,btkd->btkgd", weights[..., size + step], values)
        return out.reshape(b, t, n, d)

    return by_blocks(attend, q, jnp.arange(q.shape[1])[None], *(part.swapaxes(1, 2) for pair in chain for part in pair))


def step_counts(tokens: Int[Array, "B T"], in_loss: Bool[Array, "B T"], steps: int, end: int) -> list[Bool[Array, "B T"]]:
    """Returns a mask per step: positions whose label is in the loss, and in the same text as the last token."""
    alive = jnp.ones_like(in_loss)
    counted = []
    for i in range(steps):
        alive = alive & (following(tokens, i + 1) != end)
        counted.append(alive & following(in_loss, i + 2))
    return counted


def end_token(target: DecoderConfig) -> int:
    """Returns the token that ends a text; -1 if the target has none."""
    return target.eos_token_ids[0] if target.eos_token_ids else -1


def chain_loss(
    kind: ChainKind, decay: float, params: Any, frozen: Any, batch: Sequence[Array]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Computes the weighted mean cross-entropy in nats against the target's distribution over the draft vocabulary.

    A token counts if `Teacher.best` is in the draft vocabulary; otherwise no greedy draft can be accepted. Forward and backward
    passes compute a few sequences at a time, so that memory does not grow with the batch.

    Args:
        kind: kind of drafter.
        decay: see `ChainOptions`.
        params: parameters of the drafter.
        frozen: parameters of the target and what else does not change.
        batch: as in `taps.target_states`.

    Returns:
        the loss, and the sum of the weights.
    """
    config = kind.config
    ids = kind.ids(frozen)

    @jax.checkpoint
    def chains_loss(params: Any, teacher: Teacher, tokens: Array, in_loss: Array) -> tuple[Array, Array]:
        reachable = jnp.ones_like(in_loss)
        if ids is not None:
            reachable = jnp.zeros(config.vocab_size, bool).at[ids].set(True)[teacher.best]
        counted = step_counts(tokens, in_loss, config.block_size - 1, kind.end)
        summed = jnp.float32(0)
        total = jnp.float32(0)
        for i, logits in enumerate(kind.unrolled(params, frozen, teacher, tokens)):
            weights = decay**i * (counted[i] & following(reachable, i + 1)).astype(jnp.float32)
            expected = jnp.sum(following(teacher.probabilities, i + 1) * logits, axis=-1)
            summed += jnp.sum((jax.nn.logsumexp(logits, axis=-1) - expected) * weights)
            total += jnp.sum(weights)
        return summed, total

    def group_loss(group: Sequence[Array]) -> tuple[Array, Array]:
        return chains_loss(params, kind.teach(frozen, group, False), *group[:2])

    size = together(*batch[0].shape)  # groups take strided rows, so that a batch stays sharded over a mesh
    groups = [x.reshape(size, -1, *x.shape[1:]).swapaxes(0, 1) for x in batch]
    summed, total = (jnp.sum(part) for part in jax.lax.map(group_loss, groups))
    return summed / jnp.maximum(total, 1e-6), total


def chain_agreement(
    kind: ChainKind, params: Any, frozen: Any, batch: Sequence[Array]
) -> tuple[Int[Array, " steps"], Int[Array, " steps"]]:
    """Counts positions where the drafter's most likely token is the target's, per step, and all counted positions per step.

    The chains read the text, not their own proposals: step i measures a draft after i accepted drafts. The arguments are those
    of `chain_loss`.
    """
    tokens, in_loss = batch[:2]
    ids = kind.ids(frozen)
    teacher = kind.teach(frozen, batch, True)
    counted = step_counts(tokens, in_loss, kind.config.block_size - 1, kind.end)
    choices = [jnp.argmax(logits, axis=-1) for logits in kind.unrolled(params, frozen, teacher, tokens)]
    found = choices if ids is None else [ids[index] for index in choices]
    same = [token == following(teacher.best, i + 1) for i, token in enumerate(found)]
    agreed = [jnp.sum(each & flags) for each, flags in zip(same, counted, strict=True)]
    return jnp.stack(agreed), jnp.stack([jnp.sum(flags) for flags in counted])


def train_chain(
    kind: ChainKind,
    target: DecoderConfig,
    frozen: Any,
    target_params: DecoderParams,
    init: Callable[[], Any],
    stream: TokenSource,
    held_out: TokenSource,
    options: TextOptions,
    chain_options: ChainOptions,
    settings: dict[str, Any],
    out: Path,
    console: Console,
    placement: TrainingPlacement,
) -> tuple[TrainResult, list[float]]:
    """Trains a drafter of a `ChainKind` with `chain_loss`.

    Args:
        kind: kind of drafter.
        target: configuration of the target.
        frozen: frozen arrays of the loss.
        target_params: parameters of the target, sharded by `placement`.
        init: returns the initial parameters.
        stream: training text.
        held_out: held-out text.
        options: options of the training loop.
        chain_options: options of the loss.
        settings: settings that a checkpoint must match.
        out: folder for checkpoints.
        console: console for progress.
        placement: devices.

    Returns:
        the result, and per draft step the share of held-out positions where drafter and target agree (see `chain_agreement`).

    Raises:
        ValueError: sequences are too short.
    """
    size = kind.config.block_size
    if options.sequence_length <= size:
        raise ValueError(f"expected a sequence length above the block size {size}, found {options.sequence_length}")

    def loss(params: Any, frozen: Any, batch: Any) -> tuple[Array, Array]:
        return chain_loss(kind, chain_options.decay, params, frozen, batch)

    settings = {**settings, "target": fingerprint(target_params)}
    tapped = tapped_layers(target, kind.config.target_layer_ids, whole=True)
    states = (chain_options.keep_taps, target, target_params, tapped, settings["target"], placement.mesh is not None)
    windows = batches_with_states(stream, held_out, options, *states)
    objective = Objective(kind.title, kind.specs, kind.is_hidden_matrix, loss, frozen=frozen)
    result = train(make_task(objective, init, windows, settings, placement), console, out)
    agree = jax.jit(partial(chain_agreement, kind))
    counts = [agree(result.params, frozen, batch) for batch in windows.held_out_batches()]
    hits, totals = (np.sum([np.asarray(part[n]) for part in counts], axis=0) for n in range(2))
    agreed = (hits / np.maximum(totals, 1)).tolist()
    console.print("agreement with the target, by draft step: " + " ".join(f"{share:.3f}" for share in agreed))
    return result, agreed
