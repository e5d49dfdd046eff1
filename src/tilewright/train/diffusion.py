"""Training of a diffusion language model on prompts and responses with random masked tokens.

Sources: LLaDA (arXiv 2502.09992) §2.2-2.3; evenly spread t over a batch: Kingma et al. 2021 (Variational Diffusion Models).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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

from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.operations import Heads, Operations, Projection
from tilewright.models import decoder, diffusion
from tilewright.models.chat import ChatTemplate
from tilewright.models.decoder import DecoderParams
from tilewright.models.diffusion import DiffusionConfig
from tilewright.train.arithmetic import LONGEST, Problem, problems
from tilewright.train.checkpoint import fingerprint
from tilewright.train.data import Document, choose_some, encode_each, special_tokens_as_text
from tilewright.train.lm import train_predictor
from tilewright.train.loop import TrainResult
from tilewright.train.predictions import Predicted, Predictor
from tilewright.train.step import ONE_DEVICE, TrainingPlacement
from tilewright.train.text import Batches, TextOptions

LEAST_MASKED = 1e-3
"""Smallest expected share of masked tokens in a sequence; a masked token is weighted by the inverse of the share."""
PADDING_WEIGHT = 0.1
"""Loss weight of the repeated end-of-text tokens after the first."""
HELD_OUT_BATCHES = 8


class Batch(NamedTuple):
    """Batch of sequences: a prompt, a response and end-of-text tokens up to the length of the row.

    Attributes:
        tokens: token ids `[B, L]`; arbitrary after the length of a row.
        first: start of the response, `[B]`.
        end: position after the response's first end-of-text token, `[B]`.
        valid: length of the row, `[B]`.
    """

    tokens: Any
    first: Any
    end: Any
    valid: Any


def masked_denoiser(config: DiffusionConfig) -> Predictor:
    """Returns a LLaDA or Dream model, whose tokens all see each other.

    The loss is the sum of the cross-entropies of the masked tokens, each divided by the expected share t of its row, over the
    weight of all response tokens. It bounds the negative log-likelihood of the responses.
    """
    return Predictor(
        config=config,
        predict=partial(masked_tokens, config.mask_token_id),
        attend=cast(decoder.Attend, valid_attend),
        predicting=partial(diffusion.predicting, config) if config.shifted else None,
    )


def valid_attend(
    ops: Operations, projection: Projection, heads: Heads, valid: Int[Array, " B"], kv_cache: Any
) -> tuple[Float[Array, "B T _"], None]:
    """Computes attention of a row's first `valid` positions over each other, with a gradient. Padding sees padding."""
    q, k, v = ops.heads(projection, heads)
    is_padding = jnp.arange(q.shape[1]) >= valid[:, None]
    mask = AttentionMask(jnp.zeros_like(valid)[:, None], "full", segment_ids=is_padding.astype(jnp.int32))
    out = ops.attend(q, None, mask, (k, v))
    return out.reshape(*out.shape[:2], -1), None


def response_weights(batch: Batch) -> Float[Array, "B L"]:
    """Returns the loss weight of each position: 0 for prompts, less for repeated end-of-text tokens."""
    place = jnp.arange(batch.tokens.shape[1])[None]
    weights = jnp.where(place < batch.end[:, None], 1.0, PADDING_WEIGHT)
    return jnp.where(batch.first[:, None] <= place, weights, 0.0)


def masked_tokens(mask_token_id: int, batch: Batch, key: Array) -> Predicted:
    """Masks random tokens of the responses; returns the predictions, whose counts are the weights of response tokens.

    The expected share t of masked tokens of a row is uniform from 0 to 1, evenly spread over the rows of the batch. Prompts are
    never masked.
    """
    rows, length = batch.tokens.shape
    for_t, for_mask = jax.random.split(key)
    spread = (jax.random.uniform(for_t) + jnp.arange(rows, dtype=jnp.float32) / rows) % 1
    t = (LEAST_MASKED + (1 - LEAST_MASKED) * spread)[:, None]
    weights = jnp.where(jnp.arange(length) < batch.valid[:, None], response_weights(batch), 0.0)
    masked = (weights > 0) & (jax.random.uniform(for_mask, (rows, length)) < t)
    masked_weights = jnp.where(masked, weights / t, 0.0)
    inputs = jnp.where(masked, mask_token_id, batch.tokens)
    return Predicted(inputs, batch.tokens, masked_weights, jnp.sum(weights, axis=1), batch.valid)


def cut_text(tokenizer: Tokenizer, text: str, size: int) -> list[str]:
    """Cuts a text into pieces of about `size` tokens."""
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    cuts = [0, *dict.fromkeys(offsets[n][0] for n in range(size, len(offsets), size)), len(text)]
    return [text[begin:end] for begin, end in pairwise(cuts) if begin < end]


def fill_ins(tokenizer: Tokenizer, text: str, size: int) -> list[tuple[str, str]]:
    """Cuts a text into excerpts of at most `size` tokens, each with its first quarter as prompt and the rest as response.

    Cuts are between lines. A line longer than an excerpt is cut between tokens, and so is an excerpt of one line.
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
    """Concatenated tokens of prompts and responses.

    Attributes:
        tokens: token ids, int32 `[n]`.
        starts: start of the prompt, start of the response and end of the response, int32 `[pairs, 3]`.
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
        """Tokenises prompts with responses, and cuts texts without a prompt into pairs (see `fill_ins`).

        A conversation becomes a pair for each message of the assistant, with all text before the message as prompt. A response
        is truncated to fit the window.

        Args:
            tokenizer: tokenizer of the model.
            documents: the documents.
            window: tokens per sequence.
            ends: tokens that end a message; the first one pads rows, and is removed from the end of responses.
            template: chat template for conversations.
            left_out: counts prompts without room for a response, excerpts of one token, and truncated responses.
        """
        left_out = Counter() if left_out is None else left_out
        end = ends[0] if ends else -1
        encoded: list[tuple[list[int], list[int]]] = []
        prompted = [document for document in documents if document.prompt or document.chat is not None]
        for sequences in encode_each(tokenizer, prompted, (end, *ends[1:]), template):
            for ids, in_loss in sequences:
                edges = np.flatnonzero(np.diff([0, *in_loss, 0])).reshape(-1, 2).tolist()
                encoded += [(ids[:first], ids[first : last - (ids[last - 1] == end)]) for first, last in edges]
        size = window - 1 - tokenizer.num_special_tokens_to_add(False)
        with special_tokens_as_text(tokenizer):
            texts = [document.text for document in documents if not document.prompt and document.chat is None]
            pieces = [piece for text in texts for piece in fill_ins(tokenizer, text, size)]
            prompts = tokenizer.encode_batch([prompt for prompt, _ in pieces])
            responses = tokenizer.encode_batch([response for _, response in pieces], add_special_tokens=False)
        encoded += [(prompt.ids, response.ids) for prompt, response in zip(prompts, responses, strict=True)]
        pairs = []
        for prompt, response in encoded:
            if not response:
                left_out["excerpts of a single token"] += 1
            elif len(prompt) >= window:
                left_out[f"prompts that fill {window} tokens"] += 1
            else:
                left_out[f"ends of responses beyond {window} tokens"] += len(prompt) + len(response) >= window
                pairs.append((prompt, response[: window - len(prompt)]))
        return cls.from_pairs(pairs)

    @classmethod
    def from_pairs(cls, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> "Pairs":
        """Concatenates pairs of prompts and responses."""
        tokens: list[int] = []
        starts: list[tuple[int, int, int]] = []
        for prompt, response in pairs:
            first = len(tokens) + len(prompt)
            starts.append((len(tokens), first, first + len(response)))
            tokens += [*prompt, *response]
        return cls(np.asarray(tokens, np.int32), np.asarray(starts, np.int32).reshape(-1, 3))

    def split(self, held_out: float, seed: int) -> "tuple[Pairs, Pairs]":
        """Splits the pairs at random into training pairs and held-out pairs, at least one of each.

        Raises:
            ValueError: there are fewer than two pairs.
        """
        is_held_out = choose_some(np.arange(len(self.starts)), held_out, seed, "excerpts of text, or prompts with responses")
        return self.take(np.flatnonzero(~is_held_out)), self.take(np.flatnonzero(is_held_out))

    def take(self, chosen: np.ndarray) -> "Pairs":
        """Returns the pairs with the given indices."""
        return Pairs.from_pairs(
            [
                (self.tokens[begin:first].tolist(), self.tokens[first:end].tolist())
                for begin, first, end in self.starts[chosen].tolist()
            ]
        )

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """Returns the tokens of a pair, and the length of its prompt."""
        begin, first, end = self.starts[index]
        return self.tokens[begin:end], int(first - begin)


def encode_problem(tokenizer: Tokenizer, problem: Problem) -> tuple[np.ndarray, int]:
    """Tokenises a problem; returns the tokens, and the length of the prompt."""
    prompt = tokenizer.encode(problem.prompt).ids
    response = tokenizer.encode(problem.response, add_special_tokens=False).ids
    return np.asarray([*prompt, *response], np.int32), len(prompt)


def check_arithmetic(tokenizer: Tokenizer, arithmetic: float, options: TextOptions) -> None:
    """Raises a `ValueError` for a share of problems outside 0 to 1, or for sequences that are too short for problems."""
    if not 0 <= arithmetic <= 1:
        raise ValueError(f"expected a share of arithmetic from 0 to 1, found {arithmetic}")
    longest = len(encode_problem(tokenizer, LONGEST)[0])
    if arithmetic and longest >= options.sequence_length:
        raise ValueError(f"expected sequences longer than a problem's {longest} tokens, found {options.sequence_length}")


def arithmetic_fingerprint(tokenizer: Tokenizer, arithmetic: float) -> dict[str, Any]:
    """Returns the fingerprint of the share of problems."""
    settings: dict[str, Any] = {"arithmetic": arithmetic}
    if arithmetic and tokenizer.num_special_tokens_to_add(False):  # earlier versions added special tokens to responses
        settings["problem"] = fingerprint((encode_problem(tokenizer, LONGEST)[0],))
    return settings


def draw_bounds(rng: np.random.Generator, ids: np.ndarray, begin: int, length: int) -> tuple[int, int, int]:
    """Draws the bounds of a `Batch`'s row: half of the rows are shorter than the window, so that the model learns every length.

    Args:
        rng: random generator.
        ids: tokens of the prompt and the response.
        begin: length of the prompt.
        length: tokens per window.
    """
    whole_row = rng.random() < 0.5 or len(ids) == length  # a truncated response has no end token
    size = length if whole_row else int(rng.integers(len(ids) + 1, length + 1))
    return begin, min(len(ids) + 1, length), size


@dataclass(frozen=True)
class Examples:
    """Batches of arithmetic problems and texts; see `text.Batches`.

    Attributes:
        tokenizer: tokenizer of the model.
        texts: training pairs.
        held_out: held-out pairs.
        arithmetic: share of rows with problems of `arithmetic.py`; the other rows are texts.
        end: end-of-text token, which pads rows.
        options: options of the training loop, with the seed of the order.
        rows: rows of each batch on the devices of this process; None for all rows.
    """

    tokenizer: Tokenizer
    texts: Pairs
    held_out: Pairs
    arithmetic: float
    end: int
    options: TextOptions
    rows: Int[np.ndarray, " R"] | None = None

    def __post_init__(self) -> None:
        check_arithmetic(self.tokenizer, self.arithmetic, self.options)
        for label, pairs in (("training", self.texts), ("held-out", self.held_out)):
            if self.arithmetic < 1 and not len(pairs.starts):
                length = self.options.sequence_length
                raise ValueError(f"expected a prompt and response within {length} tokens in the {label} text, found none")

    def batch(self, rng: np.random.Generator, held_out: bool) -> Batch:
        """Draws a batch."""
        rows = self.options.batch_size
        length = self.options.sequence_length
        tokens = np.full((rows, length), self.end, np.int32)
        bounds = np.empty((3, rows), np.int32)
        drawn = problems(rng, held_out)
        texts = self.held_out if held_out else self.texts
        for row in range(rows):
            solved = rng.random() < self.arithmetic
            pair = encode_problem(self.tokenizer, next(drawn)) if solved else texts[int(rng.integers(len(texts.starts)))]
            tokens[row, : len(pair[0])] = pair[0]
            bounds[:, row] = draw_bounds(rng, *pair, length)
        batch = Batch(tokens, *bounds)
        return batch if self.rows is None else Batch(*(array[self.rows] for array in batch))

    def batches(self, first: int) -> Iterator[Batch]:
        """Yields training batches from step `first` on; the rows depend on the seed and the step only."""
        return (self.batch(np.random.default_rng((self.options.seed, 0, step)), False) for step in count(first))

    def held_out_batches(self) -> list[Batch]:
        """Returns the held-out batches, the same ones at every evaluation."""
        each = (self.batch(np.random.default_rng((self.options.seed, 1, n)), True) for n in count())
        return list(islice(each, HELD_OUT_BATCHES))

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step."""
        return self.options.batch_size * self.options.sequence_length

    def run_fingerprint(self) -> dict[str, Any]:
        """Returns the fingerprint of the run, which a checkpoint must match."""
        text = fingerprint((self.texts.tokens, self.texts.starts))
        return {**self.options.run_fingerprint(), **arithmetic_fingerprint(self.tokenizer, self.arithmetic), "text": text}


def train_diffusion(
    model: Predictor,
    examples: Batches,
    out: Path,
    console: Console,
    start: DecoderParams | None = None,
    run_fingerprint: Mapping[str, Any] = MappingProxyType({}),
    placement: TrainingPlacement = ONE_DEVICE,
) -> TrainResult:
    """Trains a diffusion language model on examples of this process; see `lm.train_predictor` for the arguments."""
    return train_predictor("diffusion model", model, examples, out, console, start, run_fingerprint, placement)
