"""Training of a diffusion language model: prompts with responses, of which random tokens are masked.

Sources: LLaDA (arXiv 2502.09992) §2.2-2.3; t spread evenly over a batch: Kingma et al. 2021 (Variational Diffusion Models).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, islice, pairwise
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
from tilewright.models.chat import ChatTemplate
from tilewright.models.decoder import DecoderParams
from tilewright.models.diffusion import DiffusionConfig
from tilewright.models.params import initialise
from tilewright.train.arithmetic import LONGEST, Problem, problems
from tilewright.train.checkpoint import fingerprint
from tilewright.train.data import Document, choose_some, encode_each, special_tokens_as_text
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


def cut_text(tokenizer: Tokenizer, text: str, size: int) -> list[str]:
    """Cuts a text in pieces of about `size` tokens."""
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    cuts = [0, *dict.fromkeys(offsets[n][0] for n in range(size, len(offsets), size)), len(text)]
    return [text[begin:end] for begin, end in pairwise(cuts) if begin < end]


def fill_ins(tokenizer: Tokenizer, text: str, size: int) -> list[tuple[str, str]]:
    """Stretches of a text with at most `size` tokens, whose first quarter is the prompt of the rest.

    They begin and end with lines, prompts too. A line that is longer than a stretch is cut between tokens, and so is a stretch
    of one line.
    """
    lines = text.splitlines(keepends=True)
    sizes = [len(each.ids) for each in tokenizer.encode_batch(lines, add_special_tokens=False)]
    pieces = [
        piece
        for line, n in zip(lines, sizes, strict=True)
        for piece in (cut_text(tokenizer, line, size) if n > size else [line])
    ]
    counts = [len(each.ids) for each in tokenizer.encode_batch(pieces, add_special_tokens=False)]
    found: list[tuple[str, str]] = []
    stretch: list[str] = []
    filled = 0
    for line, tokens in [*zip(pieces, counts, strict=True), ("", size + 1)]:
        if filled + tokens > size and stretch:
            parts = stretch if len(stretch) > 1 else cut_text(tokenizer, stretch[0], max(1, -(-filled // 4)))
            cut = -(-len(parts) // 4)
            found.append(("".join(parts[:cut]), "".join(parts[cut:])))
            stretch = []
            filled = 0
        stretch.append(line)
        filled += tokens
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
    def encode(
        cls,
        tokenizer: Tokenizer,
        documents: Sequence[Document],
        window: int,
        ends: Sequence[int] = (),
        template: ChatTemplate | None = None,
        left_out: Counter[str] | None = None,
    ) -> "Pairs":
        """Tokenises prompts with their responses, and texts without a prompt in stretches (see `fill_ins`).

        A conversation makes a pair for each message of the assistant; its prompt is all that stands before. A response that
        does not fit the window with its end loses what is too long.

        Args:
            ends: tokens that end a message; the first, which fills up rows, is not kept at the end of a response.
            left_out: counts prompts without room for a response, stretches of a single token, and responses that are cut.
        """
        left_out = Counter() if left_out is None else left_out
        end = ends[0] if ends else -1
        found: list[tuple[list[int], list[int]]] = []
        asked = [document for document in documents if document.prompt or document.chat is not None]
        for sequences in encode_each(tokenizer, asked, (end, *ends[1:]), template):
            for ids, in_loss in sequences:
                edges = np.flatnonzero(np.diff([0, *in_loss, 0])).reshape(-1, 2).tolist()
                found += [(ids[:first], ids[first : last - (ids[last - 1] == end)]) for first, last in edges]
        size = window - 1 - tokenizer.num_special_tokens_to_add(False)
        with special_tokens_as_text(tokenizer):
            texts = [document.text for document in documents if not document.prompt and document.chat is None]
            pieces = [piece for text in texts for piece in fill_ins(tokenizer, text, size)]
            prompts = tokenizer.encode_batch([prompt for prompt, _ in pieces])
            responses = tokenizer.encode_batch([response for _, response in pieces], add_special_tokens=False)
        found += [(prompt.ids, response.ids) for prompt, response in zip(prompts, responses, strict=True)]
        pairs = []
        for prompt, response in found:
            if not response:
                left_out["stretches of a single token"] += 1
            elif len(prompt) >= window:
                left_out[f"prompts that fill {window} tokens"] += 1
            else:
                left_out[f"ends of responses beyond {window} tokens"] += len(prompt) + len(response) >= window
                pairs.append((prompt, response[: window - len(prompt)]))
        return cls.of(pairs)

    @classmethod
    def of(cls, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> "Pairs":
        """Pairs of prompts and responses."""
        tokens: list[int] = []
        starts: list[tuple[int, int, int]] = []
        for prompt, response in pairs:
            first = len(tokens) + len(prompt)
            starts.append((len(tokens), first, first + len(response)))
            tokens += [*prompt, *response]
        return cls(np.asarray(tokens, np.int32), np.asarray(starts, np.int32).reshape(-1, 3))

    def split(self, held_out: float, seed: int) -> "tuple[Pairs, Pairs]":
        """Pairs to train on, and a share that is held out, at least one.

        Raises:
            ValueError: there are fewer than two.
        """
        held = choose_some(np.arange(len(self.starts)), held_out, seed, "stretches of text, or prompts with responses")
        return self.take(np.flatnonzero(~held)), self.take(np.flatnonzero(held))

    def take(self, chosen: np.ndarray) -> "Pairs":
        """Some of the pairs."""
        return Pairs.of(
            [
                (self.tokens[begin:first].tolist(), self.tokens[first:end].tolist())
                for begin, first, end in self.starts[chosen].tolist()
            ]
        )

    def __add__(self, other: "Pairs") -> "Pairs":
        return Pairs(
            np.concatenate([self.tokens, other.tokens]),
            np.concatenate([self.starts, other.starts + np.int32(len(self.tokens))]),
        )

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
        given = self.tokenizer.encode(problem.prompt).ids
        worked = self.tokenizer.encode(problem.response, add_special_tokens=False).ids
        return np.asarray([*given, *worked], np.int32), len(given)

    def batch(self, rng: np.random.Generator, held_out: bool) -> Batch:
        """A batch that `rng` draws. Half of the rows end before the window does, so that the model learns every length."""
        rows = self.options.batch_size
        length = self.options.sequence_length
        tokens = np.full((rows, length), self.end, np.int32)
        bounds = np.empty((3, rows), np.int32)
        drawn = problems(rng, held_out)
        texts = self.held_out if held_out else self.texts
        for row in range(rows):
            solved = rng.random() < self.arithmetic
            ids, begin = self.encode(next(drawn)) if solved else texts[int(rng.integers(len(texts.starts)))]
            tokens[row, : len(ids)] = ids
            whole_row = rng.random() < 0.5 or len(ids) == length  # a response that was cut has no end
            size = length if whole_row else int(rng.integers(len(ids) + 1, length + 1))
            bounds[:, row] = begin, min(len(ids) + 1, length), size
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
        same = {**self.options.run_fingerprint(), "arithmetic": self.arithmetic, "text": text}
        if self.arithmetic and self.tokenizer.num_special_tokens_to_add(False):
            same["problem"] = fingerprint((self.encode(LONGEST)[0],))  # responses had special tokens in earlier versions
        return same


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
    predict = partial(masked_tokens, config)
    optimizer = make_optimizer(options, hidden_matrices)
    return train(over_mesh(task(own, same, place=partial(on_mesh, over)), over, optimizer, init, predict), console, out)


def bidirectional(config: DiffusionConfig, setup: ShardedSetup) -> ShardedSetup:
    """The setup of a decoder's layers for those of a diffusion model, whose positions see all of their row."""
    shift = partial(diffusion.predicting, config) if config.shifted else None
    return replace(setup, attend=cast(decoder.Attend, diffusion.bidirectional_attend), predicting=shift)
