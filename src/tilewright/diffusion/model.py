"""A diffusion language model with its tokenizer and programs: `load`, then `generate`, or `start` to follow each step."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.diffusion.options import Denoising
from tilewright.diffusion.programs import DiffusionKey, DiffusionPrograms, DiffusionTable
from tilewright.diffusion.state import SPANS
from tilewright.diffusion.steps import NO_STEP, NOT_FINITE, STEPS_PER_DISPATCH
from tilewright.kernels.select import Kernels, Weights, operations
from tilewright.models import checkpoint, decoder, diffusion, hub
from tilewright.models.diffusion import DiffusionConfig
from tilewright.models.kinds import check_kind
from tilewright.models.params import AUTO, DTYPES, check_dtype
from tilewright.models.tokenizer import decode_after, encode, load_tokenizer
from tilewright.runtime.collect import NotFinite
from tilewright.runtime.memory import check_weights
from tilewright.runtime.placement import Placement, check_schedule, placement_over


@dataclass
class Denoised:
    """Response of one prompt, and the steps that made it.

    Attributes:
        tokens: the response; up to its end-of-sequence token, which is left out, if that ended it.
        text: of these tokens.
        finish_reason: "stop" for an end-of-sequence token, else "length".
        steps: how many it took.
        committed: tokens that each step committed.
        seed: with which its tokens were drawn; None where nothing was.
    """

    tokens: list[int]
    text: str
    finish_reason: str
    steps: int
    committed: list[int]
    seed: int | None = None


class StepReport(NamedTuple):
    """A step of a batch: what it looked at (`state.SPANS`), tokens committed `[B]` (-1: the row took no step), and how many
    positions were salient `[B, layers]`."""

    span: str
    committed: np.ndarray
    salient: np.ndarray


@dataclass
class DiffusionSession:
    """One batch under way.

    Attributes:
        prompts, requests: of each row.
        reports: of the steps so far.
    """

    model: "DiffusionModel"
    prompts: list[list[int]]
    requests: list[Denoising]
    reports: list[StepReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        programs = self.model.programs
        lengths = [len(prompt) for prompt in self.prompts]
        self.shape = programs.table.shape(len(self.prompts), lengths, self.requests)
        caches = programs.get(DiffusionKey("allocate", self.shape))()
        self.state = programs.state(self.shape, self.prompts, self.requests, caches)
        self.finished = False

    def advance(self, steps: int = STEPS_PER_DISPATCH) -> list[StepReport]:
        """Runs up to so many steps on the device, with one read at the end. Returns their reports, none once all rows are done.

        Raises:
            ValueError: less than one step is asked for.
            ArithmeticError: the model's logits are not finite, which ends the row; the others may go on.
        """
        if steps < 1:
            raise ValueError(f"expected at least 1 step, found {steps}")
        run = self.model.programs.get(DiffusionKey("denoise", self.shape))
        self.state, packed = run(self.model.programs.params, self.state, np.int32(steps))
        rows = len(self.prompts)
        told = np.asarray(packed)[:, :rows]
        ran = told[: int(np.count_nonzero((told[..., 0] != NO_STEP).any(axis=1)))]
        new = [StepReport(SPANS[int(one[0, 1])], one[:, 0], one[:, 3:]) for one in ran]
        self.reports += new
        self.finished = not new or bool(ran[-1, :, 2].all())
        if (ran[..., 0] == NOT_FINITE).any():
            raise NotFinite("the model's logits are not finite")
        return new

    def tokens(self) -> list[list[int]]:
        """Each row's response as it stands, masks included."""
        told = np.asarray(self.state.tokens)
        ends = [len(prompt) + request.new_tokens for prompt, request in zip(self.prompts, self.requests, strict=True)]
        return [told[n, len(prompt) : end].tolist() for n, (prompt, end) in enumerate(zip(self.prompts, ends, strict=True))]

    def results(self) -> list[Denoised]:
        """Response of each row, so far."""
        return [self.result(n, tokens) for n, tokens in enumerate(self.tokens())]

    def result(self, row: int, tokens: list[int]) -> Denoised:
        config = self.model.config
        request = self.requests[row]
        mask = config.mask_token_id
        eos = () if request.ignore_eos else config.eos_token_ids
        kept = tokens[: tokens.index(mask)] if mask in tokens else tokens
        end = next((n for n, token in enumerate(kept) if token in eos), None)
        committed = [int(each) for report in self.reports if (each := report.committed[row]) >= 0]
        kept = tokens if end is None else kept[:end]
        text = decode_after(self.model.tokenizer, self.prompts[row], [token for token in kept if token != mask])
        return Denoised(kept, text, "length" if end is None else "stop", len(committed), committed, request.seed)


class DiffusionModel:
    """A diffusion language model.

    Attributes:
        config, tokenizer: its own.
        placement: over which devices it lies; None for the default one.
        programs: compiled as they are needed, or all at once by `warm`.
    """

    def __init__(
        self,
        config: DiffusionConfig,
        params: Any,
        tokenizer: Tokenizer,
        dtype: str = "float32",
        weights: Weights = "auto",
        kernels: Kernels = "auto",
        table: DiffusionTable | None = None,
        placement: Placement | None = None,
        prepared: bool = False,
    ):
        """Args: `prepared`: the parameters are as the operations want them, as `load_diffusion` may give them."""
        self.config = config
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.placement = placement
        ops = operations(weights=weights, kernels=kernels)
        if not prepared:
            params = (decoder.prepare if placement is None else placement.prepared)(config.decoder, ops, params)
        self.programs = DiffusionPrograms(config, ops, params, DTYPES[dtype], table or DiffusionTable(), placement)

    def with_table(self, table: DiffusionTable) -> "DiffusionModel":
        """Copy of the model with other declared shapes; the arrays are shared."""
        other = copy(self)
        old = self.programs
        other.programs = DiffusionPrograms(self.config, old.ops, old.params, old.dtype, table, old.placement)
        return other

    @property
    def table(self) -> DiffusionTable:
        return self.programs.table

    @property
    def context(self) -> int:
        """The most positions of prompt and response together."""
        return min(self.config.decoder.max_position_embeddings, self.table.positions[-1])

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """The tokens of a prompt, which may be tokens already.

        Raises:
            ValueError: it is empty, holds an id outside the vocabulary, or a mask.
        """
        tokens = encode(self.tokenizer, prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not tokens:
            raise ValueError("expected a prompt of at least one token, found an empty one")
        vocab = self.config.decoder.vocab_size
        mask = self.config.mask_token_id
        if outside := [token for token in tokens if not 0 <= token < vocab]:
            raise ValueError(f"expected token ids below the vocabulary size {vocab}, found {outside[0]}")
        if mask in tokens:
            raise ValueError(f"expected a prompt without the mask token {mask}, found one")
        return tokens

    def check(self, tokens: Sequence[int], request: Denoising) -> None:
        """Raises a `ValueError` if a request does not fit the model's context."""
        check_room(tokens, request, self.context)

    def start(
        self, prompts: str | Sequence[str | Sequence[int]], requests: Denoising | Sequence[Denoising] = Denoising()
    ) -> DiffusionSession:
        """Begins one batch: texts, or lists of token ids, at most as many as the table's largest batch.

        Raises:
            ValueError: what does not fit, and why.
        """
        listed, each = paired(prompts, requests)
        encoded = [self.encode(prompt) for prompt in listed]
        for tokens, request in zip(encoded, each, strict=True):
            self.check(tokens, request)
        return DiffusionSession(self, encoded, [request.seeded() for request in each])

    def generate(
        self, prompts: str | Sequence[str | Sequence[int]], requests: Denoising | Sequence[Denoising] = Denoising()
    ) -> list[Denoised]:
        """Denoises a response to every prompt, in as many batches as it takes; arguments as for `start`."""
        listed, each = paired(prompts, requests)
        most = self.table.batches[-1]
        found = []
        for first in range(0, len(listed), most):
            session = self.start(listed[first : first + most], each[first : first + most])
            while not session.finished:
                session.advance()
            found += session.results()
        return found

    def warm(
        self,
        modes: Sequence[str] = ("sparse",),
        guided: bool = False,
        console: Console | None = None,
        suffix_window: bool = False,
    ) -> None:
        """Compiles every program of the table that requests of these modes can use, so that no call compiles any more.

        Args:
            guided, suffix_window: some requests may have guidance, or a suffix window.
        """
        shapes = self.table.shapes(self.context, modes, guided, suffix_window)
        self.programs.warm((key for shape in shapes for key in self.programs.keys(shape)), console)


def check_room(tokens: Sequence[int], request: Denoising, context: int) -> None:
    """Raises a `ValueError` if a prompt and its response do not fit a context."""
    if len(tokens) + request.new_tokens > context:
        raise ValueError(
            f"a prompt of {len(tokens)} tokens leaves room for {max(0, context - len(tokens))} in the context of {context}; "
            f"new_tokens is {request.new_tokens}, in blocks of {request.block}"
        )


def paired(
    prompts: str | Sequence[str | Sequence[int]], requests: Denoising | Sequence[Denoising]
) -> tuple[list[str | Sequence[int]], list[Denoising]]:
    """Each prompt with a request. Raises a `ValueError` for none, or for as many others."""
    listed: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
    each = [requests] * len(listed) if isinstance(requests, Denoising) else list(requests)
    if not listed or len(each) != len(listed):
        raise ValueError(f"expected prompts and a request for each, found {len(listed)} and {len(each)}")
    return listed, each


def load(
    model: str | Path,
    *,
    dtype: str = AUTO,
    weights: Weights = "auto",
    kernels: Kernels = "auto",
    table: DiffusionTable | None = None,
    revision: str | None = None,
    mesh: Mesh | None = None,
    schedule: str | None = None,
    compiler_options: bool = False,
    console: Console | None = None,
) -> DiffusionModel:
    """Loads a LLaDA or Dream from a folder or the hub; arguments as for `language_model.load`.

    Args:
        mesh: of one axis, whose devices share each layer: each reads its part of the files alone. None for the default device.
        schedule: how sums travel over the mesh in steps that compute everything, "sync" (the default) or another of
            `parallel.auto.SCHEDULES`, or "auto". Steps over a window have few rows, and plain sums under all of them but
            "exact", whose sums have its order there too.

    Raises:
        ValueError: what is wrong with the files, or which sizes the mesh does not divide.
    """
    check_dtype(dtype, (AUTO, *DTYPES))
    check_schedule(mesh, schedule, compiler_options)
    ops = operations(weights=weights, kernels=kernels)  # what cannot run here is said before anything is read

    def check(folder: Path) -> None:
        check_kind(str(model), folder, "diffusion")
        load_tokenizer(folder)

    folder = hub.resolve(str(model), revision, console, check, ("demo-diffusion",))
    check_kind(str(model), folder, "diffusion")
    config = diffusion.read_diffusion(folder)
    placement = placement_over(config.decoder, mesh, schedule, compiler_options)
    tokenizer = load_tokenizer(folder)
    dtype = checkpoint.running_dtype(dtype, folder, ops)
    shard, ops = (None, ops) if placement is None else (placement.shardings, placement.operations(ops))
    check_weights(str(model), partial(diffusion.declare, config), shard, dtype, weights, kernels, {})
    config, params = diffusion.load_diffusion(folder, DTYPES[dtype], console, shard, ops)
    return DiffusionModel(config, params, tokenizer, dtype, weights, kernels, table, placement, prepared=True)
