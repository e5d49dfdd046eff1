"""Diffusion language model with its tokenizer and programs: `load`, then `generate`, or `start` to follow each step."""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.compiled.store import warm
from tilewright.diffusion.decoding import MaskedDenoising
from tilewright.diffusion.engine_options import DiffusionEngineOptions
from tilewright.diffusion.options import Denoising
from tilewright.diffusion.programs import DenoisingPrograms, DiffusionShape, DiffusionTable, RequestKinds
from tilewright.diffusion.request import DenoisingRequest, check_room, encoded
from tilewright.diffusion.state import SPANS
from tilewright.diffusion.steps import NO_STEP
from tilewright.grammar.grammar import Grammar
from tilewright.grammar.matcher import Compiler, Matcher
from tilewright.kernels.select import Kernels, Weights, operations
from tilewright.llm.conversation import check_messages, template_of
from tilewright.llm.language_model import one_each
from tilewright.llm.stream import Stream
from tilewright.models import checkpoint, decoder, diffusion, hub
from tilewright.models.chat import ChatTemplate
from tilewright.models.diffusion import DiffusionConfig
from tilewright.models.kinds import check_kind
from tilewright.models.params import AUTO, DTYPES, check_dtype
from tilewright.models.tokenizer import decode_after, encode, load_tokenizer
from tilewright.runtime.engine import Engine
from tilewright.runtime.layout import LARGEST_PAGE
from tilewright.runtime.memory import check_weights
from tilewright.runtime.output import FinishReason, Generation, Result
from tilewright.runtime.placement import Placement, check_schedule, placement_over
from tilewright.runtime.state import Target

CALL = DiffusionEngineOptions(guard="off", dispatch_s=math.inf)
"""Options of the engine of a call, which serves only its own prompts and sizes dispatches for throughput."""


@dataclass(frozen=True)
class Denoised(Result):
    """Response to one prompt, and its denoising steps.

    Attributes:
        tokens: tokens of the response, without the token that ended it.
        acceptance_lengths: number of tokens that each step committed, including tokens behind an end.
        finish_reason: "eos", "stop" at one of `stop_token_ids`, "length", or "interrupted" while masks are left.
    """

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.acceptance_lengths)

    @property
    def committed(self) -> list[int]:
        """Number of tokens that each step committed."""
        return self.acceptance_lengths


class StepReport(NamedTuple):
    """Report of a step of a batch.

    Attributes:
        span: span of the positions that the step computed, of `state.SPANS`.
        committed: number of committed tokens of each row, `[B]`; -1 for a row without a step.
        salient: number of salient positions, `[B, layers]`.
    """

    span: str
    committed: np.ndarray
    salient: np.ndarray


class DiffusionModel:
    """Diffusion language model.

    Attributes:
        config, tokenizer: the model's configuration and tokenizer.
        placement: placement over several devices; None for the default device.
        programs: programs, compiled on demand, or all at once by `warm`.
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
        """Args: `prepared`: whether the parameters are in the format of the operations, as from `load_diffusion`."""
        self.config = config
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.placement = placement
        self.table = table or DiffusionTable()
        self.name: str | None = None
        self.folder: Path | None = None
        self.compiler: Compiler | None = None
        ops = operations(weights=weights, kernels=kernels)
        if not prepared:
            params = (decoder.prepare if placement is None else placement.prepared)(config.decoder, ops, params)
        self.params = params
        target = Target(config.decoder, ops, loops=True)
        self.target = target if placement is None else placement.over(target)
        self.programs: dict[Any, DenoisingPrograms] = {}

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """Chat template of the model. Raises a `ValueError` without a valid template."""
        return template_of(self.folder, self.name)

    def with_table(self, table: DiffusionTable) -> "DiffusionModel":
        """Returns a copy of the model with other declared shapes; the arrays are shared."""
        other = copy(self)
        other.table = table
        other.programs = {}
        return other

    def programs_of(self, shape: DiffusionShape) -> DenoisingPrograms:
        """Returns the programs of calls of one shape."""
        sizes = {"batches": shape.batch, "positions": shape.positions, "responses": shape.response, "blocks": shape.block}
        table = replace(self.table, **{name: (size,) for name, size in sizes.items()})
        return self.programs_for(table, RequestKinds(shape.dense, shape.narrow, shape.guided), shape.positions)

    def programs_for(
        self, table: DiffusionTable, kinds: RequestKinds, context: int, pages: int | None = None, page_size: int = LARGEST_PAGE
    ) -> DenoisingPrograms:
        """Returns the programs of a table for some kinds of requests. They are compiled on demand."""
        sizes = table, kinds, context, pages, page_size
        # If several threads make the programs at once, all use the first one's.
        made = DenoisingPrograms(self.config, self.target, self.params, DTYPES[self.dtype], *sizes)
        return self.programs.setdefault(sizes, made)

    @property
    def context(self) -> int:
        """The most positions of prompt and response together."""
        return min(self.config.decoder.max_position_embeddings, self.table.positions[-1])

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Returns the tokens of a prompt, which may be token ids already. Raises the `ValueError` of `request.encoded`."""
        return encoded(self.config, self.tokenizer, prompt)

    def check(self, tokens: Sequence[int], request: Denoising) -> None:
        """Raises a `ValueError` if a request does not fit the model's context."""
        check_room(tokens, request, self.context)

    def constrain(self, grammar: Grammar, seconds: float | None = None) -> Matcher:
        """Compiles a grammar over this model's tokens; arguments and errors as for `LanguageModel.constrain`."""
        if self.compiler is None:
            self.compiler = Compiler(self.tokenizer, self.config.decoder.vocab_size, self.config.eos_token_ids)
        return self.compiler.compile(grammar, seconds)

    def engine(self, options: DiffusionEngineOptions = DiffusionEngineOptions()) -> Engine[MaskedDenoising]:
        """Returns an engine that serves many requests at once. Raises a `ValueError` for options that do not fit the model."""
        longest = self.config.decoder.max_position_embeddings
        table = options.shapes(longest)
        kinds = RequestKinds(dense={*options.modes} == {"dense"}, narrow="dual" in options.modes, logprobs=True)
        programs = self.programs_for(table, kinds, min(longest, table.positions[-1]), options.pages, options.page_size)
        return Engine(MaskedDenoising(programs, self.tokenizer, options), options)

    def start(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        requests: Denoising | Sequence[Denoising] = Denoising(),
        grammar: Grammar | Sequence[Grammar | None] | None = None,
    ) -> "DenoisingStream":
        """Begins to denoise, for callers that follow each step; `generate` is simpler.

        Args:
            prompts: texts, or lists of token ids. Prompts beyond the table's largest batch wait.
            requests: options for all prompts, or one each.
            grammar: grammar of the responses, one for all or one each; None for free text. Needs the extra `grammar`. Such a
                response is denoised from left to right, a token per step.

        Raises:
            ValueError: a prompt or an option that does not fit the model.
        """
        listed, each = paired(prompts, requests)
        grammars = one_each(len(listed), grammar, "grammar")
        rows = [
            DenoisingRequest(self.encode(prompt), request.seeded(), constraint=None if one is None else self.constrain(one))
            for prompt, request, one in zip(listed, each, grammars, strict=True)
        ]
        for row in rows:
            self.check(row.prompt, row.denoising)
        batch = min(len(rows), self.table.batches[-1])
        programs = self.programs_of(self.table.shape(batch, [len(row.prompt) for row in rows], each))
        return DenoisingStream(Engine(MaskedDenoising(programs, self.tokenizer, CALL), CALL, recovers=False), rows)

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        requests: Denoising | Sequence[Denoising] = Denoising(),
        grammar: Grammar | Sequence[Grammar | None] | None = None,
    ) -> Generation[Denoised]:
        """Denoises a response to every prompt; arguments as for `start`. The results are `Denoised`."""
        with self.start(prompts, requests, grammar) as stream:
            while not stream.finished:
                stream.advance()
            return stream.generation()

    def start_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        request: Denoising | None = None,
        *,
        template_values: Mapping[str, Any] | None = None,
    ) -> "DenoisingStream":
        """Begins an answer to a conversation, for callers that follow each step; arguments as for `chat`."""
        check_messages(messages)
        text = self.chat_template.render(messages, values=template_values)
        tokens = self.encode(encode(self.tokenizer, text, add_special_tokens=False))
        return self.start([tokens], Denoising() if request is None else request)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        request: Denoising | None = None,
        *,
        template_values: Mapping[str, Any] | None = None,
    ) -> Denoised:
        """Answers a conversation, rendered with the model's chat template.

        Args:
            messages: each with a `role` ("system", "user", "assistant") and its `content`.
            request: denoising options; by default `Denoising()`, 128 tokens.
            template_values: further values for the template.

        Raises:
            ValueError: the model has no chat template, the template rejects the conversation, or the context is too short.
        """
        with self.start_chat(messages, request, template_values=template_values) as stream:
            while not stream.finished:
                stream.advance()
            return stream.results()[0]

    def warm(
        self,
        modes: Sequence[str] = ("sparse",),
        guided: bool = False,
        console: Console | None = None,
        suffix_window: bool = False,
    ) -> None:
        """Compiles every program of the table that requests of these modes can use, so that no later call compiles.

        Args:
            guided, suffix_window: whether some requests may have guidance, or a suffix window.
        """
        shapes = list(self.table.shapes(self.context, modes, guided, suffix_window))
        each = [self.programs_of(shape) for shape in shapes]
        warm(((programs, key) for programs in each for key in programs.keys), console)


class DenoisingStream(Stream):
    """Denoises prompts: call `advance` until `finished`; `results` may be read at any time.

    Attributes:
        prompts, requests: prompt and options of each row.
        reports: reports of the steps so far.
        responses: each row's response after the last dispatch, masks included.
    """

    def __init__(self, engine: Engine, requests: Sequence[DenoisingRequest]):
        super().__init__(engine, requests)
        self.prompts = [list(request.prompt) for request in requests]
        self.requests = [request.denoising for request in requests]
        self.reports: list[StepReport] = []
        mask = engine.decoding.config.mask_token_id
        self.responses = [[mask] * request.denoising.new_tokens for request in requests]

    @property
    def shape(self) -> DiffusionShape:
        """The largest shape of a dispatch."""
        return self.engine.decoding.programs.shapes[-1]

    def observe(self, sent: Any, report: Any, began: float, ended: float) -> None:
        """Records the steps of a dispatch, and the state of the responses."""
        super().observe(sent, report, began, ended)
        rows = [self.sequences.index(running.sequence) for running in sent.batch]
        count = len(rows)
        for step in report.steps:
            committed = np.full(len(self.requests), NO_STEP, np.int32)
            salient = np.zeros((len(self.requests), step.shape[1] - 3), np.int32)
            committed[rows] = step[:count, 0]
            salient[rows] = step[:count, 3:]
            self.reports.append(StepReport(SPANS[int(step[0, 1])], committed, salient))
        for place, row in enumerate(rows):
            first = len(self.prompts[row])
            self.responses[row] = report.outputs.tokens[place, first : first + len(self.responses[row])].tolist()

    def tokens(self) -> list[list[int]]:
        """Returns each row's response so far, masks included."""
        return [list(row) for row in self.responses]

    def results(self) -> list[Denoised]:
        """Returns the response of each row so far."""
        return [self.result(row, tokens) for row, tokens in enumerate(self.responses)]

    def result(self, row: int, tokens: list[int]) -> Denoised:
        """Returns the response of a row with these tokens."""
        config = self.engine.decoding.config
        request = self.requests[row]
        mask = config.mask_token_id
        eos = () if request.ignore_eos else config.eos_token_ids
        kept = tokens[: tokens.index(mask)] if mask in tokens else tokens
        stops = (
            () if self.sequences[row].constraint is not None else request.stop_token_ids
        )  # a constraint ends the text itself
        end = next((n for n, token in enumerate(kept) if token in (*eos, *stops)), None)
        committed = [int(each) for report in self.reports if (each := report.committed[row]) >= 0]
        last = None if end is None else kept[end]
        kept = tokens if end is None else kept[:end]
        text = decode_after(self.engine.tokenizer, self.prompts[row], [token for token in kept if token != mask])
        unfinished = end is None and mask in tokens
        reason: FinishReason = "interrupted" if unfinished else "length" if end is None else "eos" if last in eos else "stop"
        stopped = last if reason == "stop" else None
        rest = (reason, len(self.prompts[row]))
        return Denoised(text, kept, committed, *rest, seed=request.seed, stop_reason=stopped, passes=len(committed))


def paired(
    prompts: str | Sequence[str | Sequence[int]], requests: Denoising | Sequence[Denoising]
) -> tuple[list[str | Sequence[int]], list[Denoising]]:
    """Pairs each prompt with a request. Raises a `ValueError` for no prompts or a wrong number of requests."""
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
    """Loads a LLaDA or Dream model from a folder or the hub; arguments as for `language_model.load`.

    Args:
        mesh: mesh of one axis over which each layer is sharded: each device reads its part of the files only. None for the
            default device.
        schedule: tensor-parallel schedule of steps that compute all positions, "sync" (the default), another of
            `parallel.auto.STRATEGIES`, or "auto". Steps over a window have few rows, and always use plain sums, except that
            under "exact" they sum in its order, too.

    Raises:
        ValueError: invalid files, or sizes that the mesh does not divide.
    """
    check_dtype(dtype, (AUTO, *DTYPES))
    check_schedule(mesh, schedule, compiler_options)
    ops = operations(weights=weights, kernels=kernels)  # refuses unavailable kernels before any file is read

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
    found = DiffusionModel(config, params, tokenizer, dtype, weights, kernels, table, placement, prepared=True)
    found.name = str(model)
    found.folder = folder
    return found
