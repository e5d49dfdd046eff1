"""Training of a diffusion language model: prompts with responses, of which random tokens are masked.

Sources: LLaDA (arXiv 2502.09992) §2.2-2.3; t spread evenly over a batch: Kingma et al. 2021 (Variational Diffusion Models).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.kernels.operations import Operations
from tilewright.models import decoder, diffusion
from tilewright.models.decoder import DecoderParams
from tilewright.models.diffusion import DiffusionConfig
from tilewright.models.params import initialise
from tilewright.train.arithmetic import LONGEST, Problem, problems
from tilewright.train.checkpoint import fingerprint
from tilewright.train.data import Document
from tilewright.train.flops import token_flops
from tilewright.train.lm import hidden_matrices
from tilewright.train.loop import TrainResult, train
from tilewright.train.sharded import Predicted, ShardedSetup, on_mesh, over_mesh, sharded_loss
from tilewright.train.text import TextOptions, make_optimizer, text_task

LEAST_MASKED = 1e-3
"""Of a sequence's tokens, in expectation: the weight of a masked token is the inverse of that share."""
PADDING_WEIGHT = 0.1
"""In the loss, of the end-of-text tokens behind the first: there are many of them, and all say the same."""
HELD_OUT_BATCHES = 8


class Batch(NamedTuple):
    """Sequences of one window, each a prompt, a response and end-of-text tokens up to its length.

    Attributes:
        tokens: `[B, L]`; behind a row's length anything.
        first: where the response begins.
        end: behind the response's first end-of-text token.
        valid: the row's length.
    """

    tokens: Any
    first: Any
    end: Any
    valid: Any


def masked_tokens(config: DiffusionConfig, batch: Batch, key: Array) -> tuple[Predicted, Float[Array, ""]]:
    """Masked tokens that a batch is to predict, and the weight of all tokens of its responses.

    A row's t, the share that it has masked in expectation, is uniform from 0 to 1, and the rows of a batch spread over that
    range evenly. Prompts are never masked.
    """
    rows, length = batch.tokens.shape
    for_t, for_mask = jax.random.split(key)
    spread = (jax.random.uniform(for_t) + jnp.arange(rows, dtype=jnp.float32) / rows) % 1
    t = (LEAST_MASKED + (1 - LEAST_MASKED) * spread)[:, None]
    place = jnp.arange(length)[None]
    response = (batch.first[:, None] <= place) & (place < batch.valid[:, None])
    masked = response & (jax.random.uniform(for_mask, (rows, length)) < t)
    weights = jnp.where(response, jnp.where(place < batch.end[:, None], 1.0, PADDING_WEIGHT), 0.0)
    total = jnp.sum(weights)
    of_masked = jnp.where(masked, weights / t, 0.0) / jnp.maximum(total, 1.0)
    return Predicted(jnp.where(masked, config.mask_token_id, batch.tokens), batch.tokens, of_masked, batch.valid), total


def diffusion_loss(
    config: DiffusionConfig, ops: Operations, params: DecoderParams, batch: Batch, key: Array
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Cross-entropy in nats of the masked tokens, each over the share t that its row has masked in expectation; and the weight.

    It is the sum over the tokens of the responses, divided by their weight: a bound of a response's negative log-likelihood.
    """
    found, total = masked_tokens(config, batch, key)
    hidden = diffusion.predicting(config, diffusion.forward_full(config, ops, params, found.inputs, found.seen).hidden)
    return decoder.cross_entropy(config.decoder, ops, params, hidden, found.labels, found.weights), total


def fill_ins(tokenizer: Tokenizer, documents: Sequence[Document], window: int) -> list[Document]:
    """Documents that fit a window with room for an end: those with a prompt as they are, others in stretches of lines.

    The first quarter of a stretch is its prompt. A line that stands alone is left out: it cannot be cut in two.
    """
    found = [document for document in documents if document.prompt]
    for document in documents:
        if document.prompt:
            continue
        lines = document.text.splitlines(keepends=True)
        sizes = [len(encoding.ids) for encoding in tokenizer.encode_batch(lines)]
        stretch: list[str] = []
        filled = 0
        for line, size in [*zip(lines, sizes, strict=True), ("", window)]:
            if filled + size >= window:
                cut = -(-len(stretch) // 4)
                found += [Document("".join(stretch[cut:]), "".join(stretch[:cut]))] if len(stretch) > 1 else []
                stretch, filled = [], 0
            stretch.append(line)
            filled += size
    return found


@dataclass(frozen=True)
class Pairs:
    """Tokenised prompts and responses, end to end.

    Attributes:
        tokens: int32 `[n]`.
        starts: int32 `[pairs, 3]`: where prompt and response begin, and where the response ends.
    """

    tokens: np.ndarray
    starts: np.ndarray

    @classmethod
    def encode(cls, tokenizer: Tokenizer, documents: Sequence[Document], window: int) -> "Pairs":
        """Those of `fill_ins`, without any that do not fit the window after all."""
        tokens: list[int] = []
        starts: list[tuple[int, int, int]] = []
        kept = fill_ins(tokenizer, documents, window)
        encoded = (tokenizer.encode_batch([getattr(document, part) for document in kept]) for part in ("prompt", "text"))
        for prompt, response in zip(*encoded, strict=True):
            first, size = len(prompt.ids), len(prompt.ids) + len(response.ids)
            if size < window and first < size:
                starts.append((len(tokens), len(tokens) + first, len(tokens) + size))
                tokens += [*prompt.ids, *response.ids]
        return cls(np.asarray(tokens, np.int32), np.asarray(starts, np.int32).reshape(-1, 3))

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """Prompt and response together, and the prompt's size."""
        begin, first, end = self.starts[index]
        return self.tokens[begin:end], int(first - begin)


@dataclass(frozen=True)
class Examples:
    """Batches of problems and of texts, in an order that `options` set; see `text.Batches`.

    Attributes:
        texts, held_out: what is trained on, and what is held out.
        arithmetic: share of the rows that are problems of `arithmetic.py`; the others are texts.
        end: the token that fills up a row.
        rows: of each batch that this process's devices compute on; None for all. Nothing else depends on it.
    """

    tokenizer: Tokenizer
    texts: Pairs
    held_out: Pairs
    arithmetic: float
    end: int
    options: TextOptions
    rows: Int[np.ndarray, " R"] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.arithmetic <= 1:
            raise ValueError(f"expected a share of arithmetic from 0 to 1, found {self.arithmetic}")
        longest = len(self.encode(LONGEST)[0])
        if self.arithmetic and longest >= self.options.sequence_length:
            raise ValueError(f"expected sequences above a problem's {longest} tokens, found {self.options.sequence_length}")
        for what, pairs in (("training", self.texts), ("held-out", self.held_out)):
            if self.arithmetic < 1 and not len(pairs.starts):
                raise ValueError(f"the {what} text has no prompt and response that fit {self.options.sequence_length} tokens")

    def encode(self, problem: Problem) -> tuple[np.ndarray, int]:
        """Prompt and response together, and the prompt's size."""
        given, worked = (self.tokenizer.encode(part).ids for part in (problem.prompt, problem.response))
        return np.asarray([*given, *worked], np.int32), len(given)

    def batch(self, rng: np.random.Generator, held_out: bool) -> Batch:
        """A batch that `rng` draws. Half of the rows end before the window does, so that the model learns every length."""
        rows, length = self.options.batch_size, self.options.sequence_length
        tokens = np.full((rows, length), self.end, np.int32)
        bounds = np.empty((3, rows), np.int32)
        drawn, texts = problems(rng, held_out), self.held_out if held_out else self.texts
        for row in range(rows):
            solved = rng.random() < self.arithmetic
            ids, begin = self.encode(next(drawn)) if solved else texts[int(rng.integers(len(texts.starts)))]
            tokens[row, : len(ids)] = ids
            size = length if rng.random() < 0.5 else int(rng.integers(len(ids) + 1, length + 1))
            bounds[:, row] = begin, len(ids) + 1, size
        whole = Batch(tokens, *bounds)
        return whole if self.rows is None else Batch(*(each[self.rows] for each in whole))

    def batches(self, first: int) -> Iterator[Batch]:
        """Training batches from step `first` on; a step's rows depend on the seed and the step alone."""
        return (self.batch(np.random.default_rng((self.options.seed, 0, step)), False) for step in count(first))

    def held_out_batches(self) -> list[Batch]:
        """Held-out batches, the same at every evaluation."""
        each = (self.batch(np.random.default_rng((self.options.seed, 1, n)), True) for n in count())
        return list(islice(each, HELD_OUT_BATCHES))

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step computes."""
        return self.options.batch_size * self.options.sequence_length

    def run_fingerprint(self) -> dict[str, Any]:
        """Fingerprint of the run: what a checkpoint must agree with."""
        text = fingerprint((self.texts.tokens, self.texts.starts))
        return {**self.options.run_fingerprint(), "arithmetic": self.arithmetic, "text": text}


def train_diffusion(
    config: DiffusionConfig,
    examples: Examples,
    out: Path,
    console: Console,
    start: DecoderParams | None = None,
    run_fingerprint: Mapping[str, Any] = MappingProxyType({}),
    setup: ShardedSetup | None = None,
) -> TrainResult:
    """Trains a diffusion language model; see `loop.train` for checkpoints and resumption.

    Args:
        start: parameters to go on from, float32; by default random ones. Over a mesh those in their places are DONATED.
        run_fingerprint: what else a resumed run must agree on.
        setup: of the mesh to train over, for the layers' sizes; by default one device.
    """
    options = examples.options
    over = None if setup is None else bidirectional(config, setup)

    def loss(params: Any, frozen: None, batch: Any, key: Array) -> tuple[Array, Array]:
        if over is None:
            return diffusion_loss(config, options.ops, params, batch, key)
        found, total = masked_tokens(config, batch, key)
        return sharded_loss(over)(params, found), total

    def init() -> DecoderParams:
        if start is not None:
            return start
        shardings = None if over is None else over.shardings
        return initialise(diffusion.declare(config), jax.random.key(options.seed), shardings=shardings)

    same = {"config": asdict(config), "start": None if start is None else fingerprint(start), **run_fingerprint}
    flops = token_flops(config.decoder, options.sequence_length)
    task = partial(text_task, "diffusion model", loss, init, hidden_matrices, flops=flops)
    if over is None:
        return train(task(examples, same), console, out)
    own = replace(examples, rows=over.own_rows(options.batch_size))
    predict, optimizer = lambda batch, key: masked_tokens(config, batch, key)[0], make_optimizer(options, hidden_matrices)
    return train(over_mesh(task(own, same, place=partial(on_mesh, over)), over, optimizer, init, predict), console, out)


def bidirectional(config: DiffusionConfig, setup: ShardedSetup) -> ShardedSetup:
    """The setup of a decoder's layers for those of a diffusion model, whose positions see all of their row."""
    shift = partial(diffusion.predicting, config) if config.shifted else None
    return replace(setup, attend=cast(decoder.Attend, diffusion.bidirectional_attend), predicting=shift)
