"""A loaded model, with or without a drafter: the object that users hold."""

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Float, Int
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.compiled.machine import takes_loops
from tilewright.compiled.store import warm
from tilewright.grammar.grammar import Grammar
from tilewright.grammar.matcher import Compiler, Matcher
from tilewright.kernels.operations import is_batch_invariant
from tilewright.kernels.select import Kernels, Weights, operations
from tilewright.llm.embeddings import embeddings
from tilewright.llm.stream import Stream
from tilewright.models import checkpoint, decoder, hub
from tilewright.models.chat import ChatTemplate
from tilewright.models.config import within
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.kinds import check_kind
from tilewright.models.lora import Adapters, preparing
from tilewright.models.lora_files import read_adapters
from tilewright.models.params import AUTO as AUTO_DTYPE
from tilewright.models.params import DTYPES, check_dtype, spec_leaves
from tilewright.models.tokenizer import encode, load_tokenizer
from tilewright.parallel.mesh import agreed
from tilewright.runtime.cache import PAGE_MULTIPLE
from tilewright.runtime.constraints import Constraint
from tilewright.runtime.engine import Engine, fixed_rounds
from tilewright.runtime.interfaces import Drafter, RoundChooser
from tilewright.runtime.layout import Layout, look_ahead
from tilewright.runtime.memory import check_weights
from tilewright.runtime.model import Model
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.output import Generation, Result
from tilewright.runtime.placement import Placement, check_schedule, placement_over
from tilewright.runtime.pooling import Pooling
from tilewright.runtime.programs import Programs
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.runner import ModelRunner
from tilewright.runtime.sampling import Sampling, SamplingMode, seed_of, seed_words
from tilewright.runtime.shapes import Shape, ShapeTable
from tilewright.runtime.state import KvDtype, Models, Target
from tilewright.speculation.costs import CostFiles
from tilewright.speculation.drafters.dflash import DFlash
from tilewright.speculation.drafters.load import AUTO, DrafterOptions, check_sources, load_drafter
from tilewright.speculation.drafters.ngrams_first import NGramsFirst, ngrams_first
from tilewright.speculation.pacer import CallPacer, measured_pacer
from tilewright.speculation.pacing import Pacing
from tilewright.speculation.team import Team

ANSWER_TOKENS = 512
"""Length limit of a chat's answer where none is given."""
CALL = EngineOptions(prefix_cache=False, guard="off", dispatch_s=math.inf, constraints=True)
"""Of the engine of a call: it serves its own prompts alone, and nobody waits for the end of a dispatch."""


class LanguageModel:
    """A target, its tokenizer, and a drafter if one was loaded. Made by `load`.

    Attributes:
        target: its configuration.
        dtype: of weights and activations.
        weights: "int8" keeps matrices in 8 bits, "int4" in blocks of 4; "auto" keeps them in `dtype`.
        kv_dtype: "int8" keeps the target's keys and values in 8 bits, "auto" in `dtype`.
        ops: what computes; `kernels` is its name.
        placement: over which devices it lies; None for the default one.
        drafter: what drafts; a team where rounds are chosen as decoding goes, by what `pacing` has seen.
        model: all of it, as the runtime has it.
        programs: of calls without the drafter, or with it, and their shapes.
        compiler: of grammars, once one was asked for.
        adapters: names of the low-rank adapters that requests may ask for.
        default_adapter: that of calls which name none.
        name, folder: model as it was asked for, and where its files are; None where it was made of parameters.
    """

    def __init__(
        self,
        target: DecoderConfig,
        params: DecoderParams,
        tokenizer: Tokenizer,
        dtype: str = "float32",
        weights: Weights = "auto",
        kernels: Kernels = "auto",
        table: ShapeTable | None = None,
        placement: Placement | None = None,
        prepared: bool = False,
        kv_dtype: KvDtype = "auto",
        adapters: Adapters | None = None,
    ):
        """Args: `prepared`: the parameters are as the operations want them, as `load_decoder` may give them."""
        check_dtype(dtype)
        self.target = target
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.weights = weights
        self.kv_dtype: KvDtype = kv_dtype
        self.ops = operations(weights=weights, kernels=kernels)
        self.kernels = self.ops.name
        self.placement = placement
        self.table = table or ShapeTable().reaching(target.max_position_embeddings)
        self.drafter: Drafter | None = None
        self.pacing: Pacing | None = None
        self.cost_files: CostFiles | None = None
        if not prepared:
            ops = preparing(self.ops, adapters)
            params = (decoder.prepare if placement is None else placement.prepared)(target, ops, params)
        if adapters is not None:
            params = adapters.applied(self.ops, decoder.declare(target), params, DTYPES[dtype])
        self.adapters = () if adapters is None else adapters.names
        self.default_adapter: str | None = None
        self.name: str | None = None
        self.folder: Path | None = None
        self.model = self.model_of(Models(params), None)
        self.programs: dict[tuple[bool, Shape], Programs] = {}
        self.compiler: Compiler | None = None

    def __repr__(self) -> str:
        """Name, family, size, format of the weights, drafter and context."""
        parameters = sum(math.prod(spec.shape) for spec in spec_leaves(decoder.declare(self.target)))
        members = self.drafter.members if isinstance(self.drafter, Team) else filter(None, (self.drafter,))
        drafters = ", ".join(member.name for member in members)
        weights = self.dtype if self.weights == "auto" else f"{self.weights} ({self.dtype})"
        parts = [
            f"{self.name}: {self.target.family}" if self.name else self.target.family,
            f"{parameters / 1e6:,.1f} M parameters",
            f"weights in {weights}",
            f"drafter {drafters}" if drafters else "no drafter",
            f"context {self.target.max_position_embeddings:,}",
        ]
        return f"<LanguageModel {', '.join(parts)}>"

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """Chat template of the model.

        Raises:
            ValueError: it has none, as base models do, or one that does not compile.
        """
        template = None if self.folder is None else ChatTemplate.load(self.folder)
        if template is None:
            raise ValueError(f"expected a model with a chat template; {self.name or 'this model'} has none, so use `generate`")
        return template

    def model_of(self, models: Models, drafter: Drafter | None) -> Model:
        target = Target(self.target, self.ops, loops=takes_loops(), kv_dtype=self.kv_dtype)
        if self.placement is not None:
            placement = self.placement
            target = replace(
                target,
                ops=placement.running(self.ops),
                schedule=placement.schedule,
                mesh=placement.mesh,
                compiler_options=placement.compiler_options,
            )
        return Model(target, models, DTYPES[self.dtype], drafter, self.tokenizer, self.adapters)

    def with_drafter(self, drafter: Drafter | None, params: Any = None) -> "LanguageModel":
        """Copy of the model with another drafter, None for none; the target's parameters are shared.

        Args:
            params: the drafter's parameters as they were loaded; of a team those of each member.
        """
        other = copy(self)
        target = self.model.models.target
        head = None
        members, each = (drafter.members, params) if isinstance(drafter, Team) else ((drafter,), (params,))
        members, each = zip(*[self.prepared(*one) for one in zip(members, each, strict=True)], strict=True)
        reading = [one for one in members if one is not None and one.reads_target_head and one.dtype is not None]
        if reading and reading[0].dtype != self.dtype and self.weights == "auto":
            head = self.head_in(DTYPES[cast(str, reading[0].dtype)])
        other.drafter = members[0]
        own = each[0]
        if isinstance(drafter, Team):
            other.drafter = replace(drafter, members=members)
            own = each
        other.pacing = Pacing(other.drafter, self.weights, self.cost_files) if isinstance(other.drafter, Team) else None
        other.model = self.model_of(Models(target, own, head), other.drafter)
        other.programs = {}
        return other

    def prepared(self, drafter: Drafter | None, params: Any) -> tuple[Drafter | None, Any]:
        """A drafter and its parameters as this model's operations want them."""
        if drafter is None or drafter.dtype is None:
            return drafter, params
        if isinstance(drafter, NGramsFirst):
            other, params = self.prepared(drafter.other, params)
            return replace(drafter, other=other), params
        if isinstance(drafter, DFlash):
            if self.placement is None:
                drafter, params = drafter.without_copies(params, self.model.models.target.embed, self.head_columns)
            params = drafter.with_head(params, self.head_columns)
        prepared = self.ops.prepare(drafter.declared, params)
        return replace(cast(Any, drafter), ops=self.ops), prepared if self.placement is None else self.placement.whole(prepared)

    def load_drafter(
        self, source: str | Sequence[str] | None, options: DrafterOptions, console: Console | None = None
    ) -> tuple[Any, Any]:
        """Reads drafters for this target, as `with_drafter` takes them: a team if they are several or rounds are chosen.

        See `drafters.load.load_drafter`.
        """
        check_sources(source, options)
        if source is None or (isinstance(source, str) and options.block_size not in AUTO):
            return load_drafter(source, self.target, self.dtype, options, console)
        sources = [source] if isinstance(source, str) else list(source)
        fixed = isinstance(options.block_size, int)
        own = options if fixed else replace(options, block_size=None)
        loaded = [load_drafter(each, self.target, self.dtype, own.fitting(each), console) for each in sources]
        drafters, params = zip(*loaded, strict=True)
        # Partial sums of other numbers of rows are added up in other ways.
        exact = self.dtype == "float32" and self.kv_dtype == "auto"
        by_xla = self.target.needs_xla
        alike = is_batch_invariant(self.ops, self.dtype, self.kv_dtype, by_xla) if self.placement is None else exact
        masked = options.block_size != AUTO[1] and not alike
        return Team(ngrams_first(drafters), () if fixed else self.table.widths, masked), params

    def keep_costs(self, files: CostFiles) -> "LanguageModel":
        """Has what rounds cost kept in files for the next process, whatever drafter the model is given. Returns the model.

        Over several processes nothing is kept: each might find other files.
        """
        if self.placement is not None and self.placement.mesh.is_multi_process:
            return self
        self.cost_files = files
        if self.pacing is not None:
            self.pacing.files = files
        return self

    def head_in(self, dtype: DTypeLike) -> Any:
        """The target's output head in another dtype, prepared.

        Raises:
            ValueError: no device holds all of it.
        """
        if self.placement is not None:
            raise ValueError(
                f"expected a drafter in {self.dtype}, as the model whose output head lies over a mesh, found another"
            )
        return self.ops.prepare_matrix(self.whole_head().astype(dtype), "lm_head")

    def head_columns(self, ids: Int[Array, " W"]) -> Float[Array, "H W"]:
        """The target's output head for some tokens alone, not prepared.

        Raises:
            ValueError: no device holds all of it.
        """
        if self.placement is not None:
            raise ValueError("expected a drafter that can propose any token, for the output head lies over a mesh")
        return self.whole_head()[:, ids]

    def whole_head(self) -> Float[Array, "H V"]:
        """The target's output head as it was before it was prepared."""
        return self.ops.restore(decoder.output_head(self.model.models.target))[: self.target.hidden_size]

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """The tokens of a prompt, which may be tokens already. Raises a `ValueError`, as `Model.encode` does."""
        return self.model.encode(prompt)

    def check_length(self, tokens: Sequence[int], sampling: Sampling) -> None:
        context = self.target.max_position_embeddings
        if len(tokens) >= context:
            raise ValueError(f"the prompt has {len(tokens)} tokens; the model's context is {context}")
        if len(tokens) + sampling.max_new_tokens > context:
            room = f"leaves room for {context - len(tokens)} in the model's context of {context}"
            raise ValueError(f"a prompt of {len(tokens)} tokens {room}; max_new_tokens is {sampling.max_new_tokens}")

    @staticmethod
    def each_sampling(prompts: Sequence[object], sampling: Sampling | Sequence[Sampling] | None) -> list[Sampling]:
        """One sampling for each prompt; one that draws has a seed.

        Raises:
            ValueError: there is no prompt, or a list of samplings has another length.
        """
        return [one.seeded() for one in one_each(len(prompts), Sampling() if sampling is None else sampling, "sampling")]

    def agreed_sampling(self, each: Sequence[Sampling]) -> list[Sampling]:
        """Samplings with the first process's seeds: each process has drawn fresh ones."""
        mesh = None if self.placement is None else self.placement.mesh
        words = agreed(mesh, np.array([seed_words(one.seed or 0) for one in each], np.uint32))
        return [one if one.seed is None else replace(one, seed=seed_of(own)) for one, own in zip(each, words, strict=True)]

    def drafter_for(self, speculative: bool | None) -> Drafter | None:
        """Drafter of a generation; None for plain decoding.

        Raises:
            ValueError: nothing can, and something must.
        """
        if speculative and self.drafter is None:
            raise ValueError("speculative decoding needs a drafter; none was loaded")
        return None if speculative is False else self.drafter

    def programs_for(self, drafter: Drafter | None, shape: Shape) -> Programs:
        """The programs of calls of a shape, compiled as far as they were needed."""
        kept = drafter is not None, shape
        if kept in self.programs:
            return self.programs[kept]
        whole = math.lcm(PAGE_MULTIPLE, self.table.chunks[-1])
        capacity = -(-shape.capacity // whole) * whole
        table = replace(self.table, batches=(shape.batch,), capacities=(capacity,))
        ahead = look_ahead(table.chunks[-1], 1 if drafter is None else drafter.block_size)
        layout = Layout.full(shape.batch, capacity, self.model.target.config.windows, ahead)
        model = self.model
        # Of several threads that come here at once, all go on with the first one's.
        return self.programs.setdefault(kept, Programs(model.target, model.models, model.dtype, drafter, table, layout))

    def constrain(self, grammar: Grammar, seconds: float | None = None) -> Matcher:
        """A grammar over this model's tokens, for requests to an engine; safe to call from any thread.

        Args:
            seconds: of a processor that compiling it may take, where it comes from somebody who is not trusted.

        Raises:
            ValueError: the extra `grammar` is not installed, the grammar is none or asks for too much, or nothing satisfies it.
        """
        if self.compiler is None:
            self.compiler = Compiler(self.tokenizer, self.target.vocab_size, self.target.eos_token_ids)
        return self.compiler.compile(grammar, seconds)

    def each_constraint(
        self, prompts: Sequence[object], grammar: Grammar | Sequence[Grammar | None] | None
    ) -> list[Constraint | None]:
        """One constraint for each prompt, or None. Raises a `ValueError` where a list has another length, or as `constrain`."""
        return [None if one is None else self.constrain(one) for one in one_each(len(prompts), grammar, "grammar")]

    def start(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        speculative: bool | None = None,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> Stream:
        """Begins a generation, for callers that stream; `generate` is the simpler way.

        Args:
            prompts: texts, or lists of token ids. More than the table's largest batch wait for one another.
            sampling: one for all, or one each. Rows of one `Sampling` share its seed, if it has one, so that equal prompts give
                equal texts.
            speculative: False decodes without the drafter; by default a drafter is used if there is one.
            grammar: what texts must be, one for all or one each; None for anything. Needs the extra `grammar`.
            lora: names of adapters (`load`), one for all or one each (None: the model as it is); by default `default_adapter`.
        """
        given = listed(prompts)
        each = self.agreed_sampling(self.each_sampling(given, sampling))
        drafter = self.drafter_for(speculative)
        encoded = [self.encode(prompt) for prompt in given]
        constraints = self.each_constraint(given, grammar)
        for tokens, one in zip(encoded, each, strict=True):
            self.check_length(tokens, one)
        positions = max(len(tokens) + one.max_new_tokens for tokens, one in zip(encoded, each, strict=True))
        if drafter is not None:
            positions = max(positions, drafter.block_size)  # a block is written in one piece
        programs = self.programs_for(drafter, self.table.shape(min(len(encoded), self.table.batches[-1]), positions))
        mode = sampling_mode(programs, each)
        pacing = self.pacing

        def chooses(runner: ModelRunner, dispatch_s: float, console: Console | None) -> RoundChooser:
            if pacing is None or not isinstance(drafter, Team) or None not in constraints:
                return fixed_rounds(runner, dispatch_s)
            pacer = CallPacer(drafter, pacing, runner, any(one.temperature > 0 for one in each))
            pacer.policy(programs.layout.batch)  # compiles and measures before anything is timed
            return pacer

        asked = zip(encoded, each, constraints, one_each(len(given), lora or self.default_adapter, "adapter"), strict=True)
        requests = [GenerateRequest(tokens, one, constraint=own, lora=name) for tokens, one, own, name in asked]
        return Stream(Engine(replace(self.model, drafter=drafter), CALL, chooses, programs, mode), requests)

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        speculative: bool | None = None,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> Generation:
        """Generates for every prompt; arguments as for `start`."""
        with self.start(prompts, sampling, speculative, grammar, lora) as stream:
            while not stream.finished:
                stream.advance()
            return stream.generation()

    def start_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_values: Mapping[str, Any] | None = None,
        speculative: bool | None = None,
        grammar: Grammar | None = None,
        lora: str | None = None,
    ) -> Stream:
        """Begins an answer to a conversation, for callers that stream; arguments as for `chat`.

        Iterate over the stream for the pieces of the text:

            with lm.start_chat([{"role": "user", "content": "Why is the sky blue?"}]) as stream:
                for piece in stream:
                    print(piece.text, end="", flush=True)
        """
        check_messages(messages)
        text = self.chat_template.render(messages, values=template_values, tools=tools)
        tokens = self.encode(encode(self.tokenizer, text, add_special_tokens=False))
        if sampling is None:
            room = min(self.target.max_position_embeddings, self.table.capacities[-1]) - len(tokens)
            sampling = Sampling(max_new_tokens=max(1, min(ANSWER_TOKENS, room)))
        return self.start([tokens], sampling, speculative, grammar, lora)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_values: Mapping[str, Any] | None = None,
        speculative: bool | None = None,
        grammar: Grammar | None = None,
        lora: str | None = None,
    ) -> Result:
        """Answers a conversation, put to the model in its own chat template.

            lm.chat([{"role": "user", "content": "Why is the sky blue?"}]).text

        Args:
            messages: each with a `role` ("system", "user", "assistant", "tool") and its `content`, as OpenAI has them.
            sampling: by default greedy, of at most 512 tokens, or what the context leaves.
            tools: functions that the model may call, each as OpenAI describes it. Calls stand in the answer's text, in the
                model's own form: a server parses them.
            template_values: values that the template reads besides, such as `enable_thinking`.
            speculative, grammar, lora: as for `start`.

        Raises:
            ValueError: the model has no chat template, the template refuses the conversation or reads no tools, a message is
                not one, or the conversation does not fit the context.
        """
        more: Any = {"tools": tools, "template_values": template_values, "speculative": speculative}
        with self.start_chat(messages, sampling, **more, grammar=grammar, lora=lora) as stream:
            while not stream.finished:
                stream.advance()
            return stream.results()[0]

    def embed(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        pooling: Pooling = "last",
        lora: str | Sequence[str | None] | None = None,
    ) -> Float[np.ndarray, "N H"]:
        """Embeddings of texts, or of lists of token ids: vectors of length 1 of what the target makes of them.

        Args:
            pooling: "last" takes the last token's hidden state behind the final norm, "mean" the mean of all.
            lora: as for `start`.
        """
        given = listed(prompts)
        asked = zip(map(self.encode, given), one_each(len(given), lora or self.default_adapter, "adapter"), strict=True)
        requests = [GenerateRequest(tokens, lora=name, pooling=pooling) for tokens, name in asked]
        positions = max(len(request.prompt) for request in requests)
        if positions > (context := self.target.max_position_embeddings):
            raise ValueError(f"a prompt has {positions} tokens; the model's context is {context}")
        programs = self.programs_for(None, self.table.shape(min(len(given), self.table.batches[-1]), positions))
        return embeddings(Engine(replace(self.model, drafter=None), CALL, programs=programs), requests)

    def warm(self, speculative: bool | None = None, console: Console | None = None, constraints: bool = False) -> None:
        """Compiles every program of the table that the model's context can use, so that no `generate` compiles any more.

        Args:
            speculative: as for `start`.
            console: where a progress bar is shown.
            constraints: calls may have a grammar, for which there are further programs.
        """
        drafter = self.drafter_for(speculative)
        shapes = self.table.shapes(self.target.max_position_embeddings)
        each = [self.programs_for(drafter, shape) for shape in shapes]
        warm(((programs, key) for programs in each for key in programs.declared("any", constraints)), console)

    def engine(self, options: EngineOptions = EngineOptions()) -> Engine:
        """An engine that serves many requests at once. Raises a `ValueError` for options that do not go with the model."""
        drafter = self.drafter
        pacing = self.pacing
        if not isinstance(drafter, Team):
            return Engine(self.model, options)
        if drafter.widths:
            drafter = replace(drafter, widths=options.widths)
        shared = pacing or Pacing(drafter, self.weights, self.cost_files)
        return Engine(replace(self.model, drafter=drafter), options, partial(measured_pacer, shared))


def check_messages(messages: object) -> None:
    """Raises a `ValueError` for what is no conversation."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        found = "a message alone" if isinstance(messages, Mapping) else reprlib.repr(messages)
        raise ValueError(f'expected a list of messages, as [{{"role": "user", "content": "..."}}], found {found}')
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number}: expected an object with a role, found {reprlib.repr(message)}")
        if "content" not in message and "tool_calls" not in message:
            raise ValueError(f"message {number}: expected content, or tool_calls, found {', '.join(map(repr, message))}")


def listed(prompts: object) -> list[Any]:
    """Prompts as a list; a text alone is one. Raises a `ValueError` for what is no list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        raise ValueError("expected prompts, found a message of a chat: `chat` takes a list of them")
    try:
        return list(cast(Iterable[Any], prompts))
    except TypeError:
        raise ValueError(f"expected a prompt or a list of them, found {reprlib.repr(prompts)}") from None


def one_each(count: int, given: Any, what: str) -> list[Any]:
    """One value for each of so many prompts, of one for all or a list; another number, or no prompt, is a `ValueError`."""
    if count == 0:
        raise ValueError("expected at least one prompt, found none")
    each = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given] * count
    if len(each) != count:
        raise ValueError(f"expected one {what} for each of {count} prompts, found {len(each)}")
    return each


def sampling_mode(programs: Programs, each: Sequence[Sampling]) -> SamplingMode:
    """Sampling that a call's programs are for: no more than its requests ask, unless there are programs for more already."""
    there = any(key.sampling == "any" for key in programs.compiled)
    return "greedy" if all(one.is_greedy for one in each) and not there else "any"


def chosen_block_size(drafter: object, block_size: int | str | None) -> int | str | None:
    """The block size that `load` is asked for: "auto" by default, with a drafter. Raises a `ValueError` for another word."""
    size = AUTO[0] if drafter is not None and block_size is None else block_size
    if isinstance(size, str) and size != AUTO[0]:
        raise ValueError(f"expected a block size or {AUTO[0]}, found {size!r}")
    return size


def target_folder(model: str, revision: str | None, console: Console | None) -> Path:
    """The folder of a target. Raises a `ValueError` for a model of another kind."""

    def check(folder: Path) -> None:
        check_kind(model, folder, "target")
        load_tokenizer(folder)

    folder = hub.resolve(model, revision, console, check, hub.NAMED_TARGETS)
    check_kind(model, folder, "target")
    return folder


def check_kv_dtype(kv_dtype: str) -> None:
    """Raises a `ValueError` for a dtype of keys and values that there is not."""
    if kv_dtype not in get_args(KvDtype):
        raise ValueError(f"expected a kv_dtype among {', '.join(get_args(KvDtype))}, found {kv_dtype!r}")


def read_target(
    name: str,
    folder: Path,
    dtype: str,
    weights: Weights,
    kernels: Kernels,
    table: ShapeTable | None,
    placement: Placement | None,
    console: Console | None,
    kv_dtype: KvDtype,
    context: int | None,
    adapters: Adapters | None,
) -> LanguageModel:
    """The model of a folder, without a drafter. One for whose weights there is no memory is refused before these are read."""
    ops = operations(weights=weights, kernels=kernels)
    config = checkpoint.decoder_config(folder)
    tokenizer = load_tokenizer(folder)
    dtype = checkpoint.running_dtype(dtype, folder, ops)
    shard, ops = (None, ops) if placement is None else (placement.shardings, placement.operations(ops))
    kept = checkpoint.kept_formats(folder)
    check_weights(name, partial(decoder.declare, config), shard, dtype, weights, kernels, kept)
    config, params = checkpoint.load_decoder(folder, DTYPES[dtype], console, shard, preparing(ops, adapters))
    lm = LanguageModel(
        within(config, context),
        params,
        tokenizer,
        dtype,
        weights,
        kernels,
        table,
        placement,
        prepared=True,
        kv_dtype=kv_dtype,
        adapters=adapters,
    )
    lm.name = name
    lm.folder = folder
    return lm


def load(
    model: str | Path,
    drafter: str | Path | Sequence[str | Path] | None = None,
    *,
    dtype: str = AUTO_DTYPE,
    weights: Weights = "auto",
    block_size: int | str | None = None,
    draft_window: int | None = None,
    drafter_dtype: str | None = None,
    revision: str | None = None,
    drafter_revision: str | None = None,
    table: ShapeTable | None = None,
    kernels: Kernels = "auto",
    mesh: Mesh | None = None,
    schedule: str | None = None,
    compiler_options: bool = False,
    console: Console | None = None,
    kv_dtype: KvDtype = "auto",
    context: int | None = None,
    lora: Mapping[str, str | Path] | None = None,
) -> LanguageModel:
    """Loads a target and, if one is named, its drafter.

    Args:
        model, drafter: a folder or a Hugging Face id, with `config.json`, safetensors and (the target) `tokenizer.json`. The
            target may be a GGUF file or a folder that holds one (the extra `gguf`): its tensors are dequantised, or kept. A
            drafter may be of any kind in `drafters/load.py`, or "ngram", which has no weights; several take turns.
        dtype: of the weights and activations, "float32", "bfloat16" or "auto": the checkpoint's, bfloat16 for float16, float32
            on a CPU without this package's kernels.
        weights: "int8" keeps matrices in 8 bits, "int4" those of layers in blocks of 4 and the output head in 8, or what a file
            has in blocks, bit by bit; "fp8" as floats of 8 bits, where XLA computes; "auto" as `dtype`.
        block_size: tokens drafted at once, the known one included. "auto", the default, takes what promises most each round,
            plain decoding included (`speculation/policy.py`); where the number of rows changes how the target rounds, it runs
            all rounds at the widest. Without a drafter: plain decoding through a program of that width.
        draft_window: keep only this many last positions in the drafter's context.
        drafter_dtype: of the drafter's weights and activations; by default the target's. The output is the same either way.
        revision, drafter_revision: a branch, tag or commit on the hub.
        table: the declared shapes; by default as far as the model's context goes.
        kernels: "auto" takes this package's own kernels where they run, "xla" leaves everything to XLA.
        mesh: of one axis (`parallel.mesh.make_mesh`), whose devices divide the target among them: each reads its part of the
            files alone. Drafters are whole on every device. None for the default device.
        schedule: how sums travel over the mesh, "sync" (the default), another of `parallel.auto.SCHEDULES`, or "auto".
        compiler_options: several TPUs begin transfers earlier (`parallel/compiling.py`): by a model of time, tried on no TPU.
        kv_dtype: "int8" keeps the target's keys and values in 8 bits, about half of bfloat16's memory; "auto" as `dtype`.
        lora: PEFT's folders of low-rank adapters by the names of these, for one device. `console` shows progress.
        context: the most positions that will be asked for: they decide by which of LongRoPE's factors a model of Phi rotates.

    Raises:
        ValueError: what is wrong with the files, how the drafter misfits the target, or which sizes the mesh does not divide.
    """
    check_dtype(dtype, (AUTO_DTYPE, *DTYPES))
    check_kv_dtype(kv_dtype)
    check_schedule(mesh, schedule, compiler_options)
    operations(weights=weights, kernels=kernels)  # what cannot run here is said before anything is read
    source = drafter if drafter is None else str(drafter) if isinstance(drafter, str | Path) else [str(one) for one in drafter]
    size = chosen_block_size(drafter, block_size)
    options = DrafterOptions(size, draft_window, drafter_dtype, revision=drafter_revision)
    check_sources(source, options)
    folder = target_folder(str(model), revision, console)
    placement = placement_over(checkpoint.decoder_config(folder), mesh, schedule, compiler_options)
    adapters = read_adapters(lora or {}, 1 if mesh is None else mesh.size)
    lm = read_target(str(model), folder, dtype, weights, kernels, table, placement, console, kv_dtype, context, adapters)
    return lm.with_drafter(*lm.load_drafter(source, options, console))
