"""Autoregressive language model, with or without a drafter."""

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Float, Int
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.compiled.machine import cores, takes_loops
from tilewright.compiled.store import warm
from tilewright.diffusion.block_causal import BlockCausal, BlockPrograms, with_whole_blocks
from tilewright.diffusion.blocks import BlockDenoising
from tilewright.diffusion.canvas import CanvasDenoising, published_options
from tilewright.diffusion.canvas_decoding import CanvasDecoding, CanvasPrograms
from tilewright.grammar.grammar import Grammar
from tilewright.grammar.matcher import Compiler, Matcher
from tilewright.kernels.operations import is_batch_invariant
from tilewright.kernels.select import Kernels, Weights, operations
from tilewright.llm.conversation import check_messages, template_of
from tilewright.llm.embeddings import embeddings
from tilewright.llm.stream import Stream
from tilewright.models import checkpoint, decoder, hub, mtp
from tilewright.models.chat import ChatTemplate
from tilewright.models.config import Canvas, for_context
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.hub import DRAFT_ADAPTER
from tilewright.models.kinds import check_kind
from tilewright.models.lora import Adapters, operations_for_adapters
from tilewright.models.lora_files import read_adapters
from tilewright.models.params import AUTO as AUTO_DTYPE
from tilewright.models.params import DTYPES, check_dtype, spec_leaves
from tilewright.models.tokenizer import encode, load_tokenizer
from tilewright.parallel.mesh import broadcast_from_first
from tilewright.runtime.autoregressive import Autoregressive, fixed_rounds
from tilewright.runtime.cache import PAGE_MULTIPLE
from tilewright.runtime.constraints import Constraint
from tilewright.runtime.engine import Engine
from tilewright.runtime.interfaces import Drafter, RoundChooser
from tilewright.runtime.layout import Layout, look_ahead
from tilewright.runtime.memory import check_weights, held_bytes, is_quantised
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
from tilewright.speculation.drafters.load import AUTO, SELF, STORED, DrafterOptions, check_sources, load_drafter
from tilewright.speculation.drafters.mtp import MTP
from tilewright.speculation.drafters.ngrams_first import NGramsFirst, ngrams_first
from tilewright.speculation.drafters.self_diffusion import SelfDiffusion
from tilewright.speculation.pacer import CallPacer, EnginePacer
from tilewright.speculation.pacing import Pacing
from tilewright.speculation.suffix_index import SuffixIndex, read_corpus
from tilewright.speculation.team import Team

Way = Literal["tokens", "blocks"]
"""Ways of decoding: token by token, or block by block with denoising."""
AnyDenoising = BlockDenoising | CanvasDenoising
"""Options of models whose blocks, or canvases, are denoised."""
ANSWER_TOKENS = 512
"""Default length limit of a chat's answer."""
CALL = EngineOptions(prefix_cache=False, guard="off", dispatch_s=math.inf, constraints=True)
"""Options of the engine of a call, which serves only its own prompts and sizes dispatches for throughput."""


class LanguageModel:
    """Target, its tokenizer, and a drafter if one was loaded. `load` makes it.

    Attributes:
        target: configuration of the target.
        dtype: dtype of weights and activations.
        weights: the requested format of matrices; see `load`.
        quantised: some matrices of the target have at most 8 bits per weight.
        kv_dtype: "int8" keeps the target's KV cache in 8 bits, "auto" in `dtype`.
        ops: operations of the target; `kernels` is their name.
        placement: placement over several devices; None for the default device.
        drafter: the drafter; a `Team` if rounds are chosen during decoding, from the measurements in `pacing`.
        model: target, drafter and parameters, in the form of the runtime.
        programs: programs of calls, by use of the drafter and by shape.
        compiler: compiler of grammars; None before the first grammar.
        adapters: names of the low-rank adapters. Requests may use them, but not the one with which the target drafts.
        default_adapter: adapter of calls that name none.
        block_length: positions of a block, for a model whose blocks are denoised; None for a model that decodes token by token.
        denoising: options of calls that name none, for a model whose blocks are denoised.
        name, folder: name given to `load`, and folder of the files; None for a model made of parameters.
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
        """Args: `prepared`: whether the parameters are in the format of the operations, as from `load_decoder`."""
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
        self.block_length: int | None = None
        self.denoising: AnyDenoising = BlockDenoising()
        if target.canvas is not None:
            self.block_length = target.canvas.length
            self.denoising = CanvasDenoising()
        elif target.masked_blocks is not None and target.denoises_blocks:
            self.block_length = target.masked_blocks.length
            self.table = with_whole_blocks(self.table, self.block_length)
        self.drafter: Drafter | None = None
        self.pacing: Pacing | None = None
        self.cost_files: CostFiles | None = None
        if not prepared:
            ops = operations_for_adapters(self.ops, adapters)
            params = (decoder.prepare if placement is None else placement.prepared)(target, ops, params)
        if adapters is not None:
            params = adapters.apply(self.ops, decoder.declare(target), params, DTYPES[dtype])
        self.adapters = () if adapters is None else adapters.names
        self.default_adapter: str | None = None
        self.name: str | None = None
        self.folder: Path | None = None
        self.quantised = is_quantised(params)
        self.model = self.model_of(Models(params), None)
        self.programs: dict[tuple[bool, Shape], Programs] = {}
        self.compiler: Compiler | None = None

    def __repr__(self) -> str:
        """Describes the model: name, family, size, format of the weights, drafter and context."""
        members = self.drafter.members if isinstance(self.drafter, Team) else filter(None, (self.drafter,))
        drafters = ", ".join(member.name for member in members)
        parts = [
            f"{self.name}: {self.target.family}" if self.name else self.target.family,
            f"{self.parameters / 1e6:,.1f} M parameters",
            f"weights in {self.number_format}",
            f"drafter {drafters}" if drafters else "no drafter",
            f"context {self.target.max_position_embeddings:,}",
        ]
        return f"<LanguageModel {', '.join(parts)}>"

    @property
    def parameters(self) -> int:
        """Number of the target's parameters."""
        return sum(math.prod(spec.shape) for spec in spec_leaves(decoder.declare(self.target)))

    @property
    def number_format(self) -> str:
        """Format of the target's weights, with the dtype of activations where they differ."""
        if not self.quantised:
            return self.dtype
        if self.weights != "auto":
            return f"{self.weights} ({self.dtype})"
        bits = 8 * held_bytes(self.model.models.target) / self.parameters
        return f"the file's formats, {bits:.2f} bits a weight ({self.dtype})"

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """Chat template of the model.

        Raises:
            ValueError: the model has no template, like base models, or one that does not compile.
        """
        return template_of(self.folder, self.name)

    def model_of(self, models: Models, drafter: Drafter | None) -> Model:
        target = Target(self.target, self.ops, loops=takes_loops(), kv_dtype=self.kv_dtype, block_length=self.block_length)
        if self.placement is not None:
            target = self.placement.over(target)
        names = self.adapters
        members = drafter.members if isinstance(drafter, Team) else (drafter,)
        if names[-1:] == (DRAFT_ADAPTER,) and any(map(drafts_with_target, members)):
            names = names[:-1]  # an adapter for drafts, which requests must not decode with
        return Model(target, models, DTYPES[self.dtype], drafter, self.tokenizer, names)

    def with_drafter(self, drafter: Drafter | None, params: Any = None) -> "LanguageModel":
        """Returns a copy of the model with another drafter, or without one; the target's parameters are shared.

        Args:
            params: the drafter's parameters as loaded; for a team those of each member. The parameters of a suffix drafter are
                the index of its corpus.

        Raises:
            ValueError: the target drafts itself with an adapter that only `load` can add, or denoises blocks.
        """
        if self.block_length is not None:
            check_no_drafter(None if drafter is None else drafter.name)
        members, each = (drafter.members, params) if isinstance(drafter, Team) else ((drafter,), (params,))
        other = self.with_draft_adapter() if any(map(drafts_with_target, members)) else copy(self)
        target = other.model.models.target
        head = None
        members, each = zip(*[other.prepared(*pair) for pair in zip(members, each, strict=True)], strict=True)
        corpus = next((one for one in each if isinstance(one, SuffixIndex)), None)
        each = tuple(None if isinstance(one, SuffixIndex) else one for one in each)
        reading = [member for member in members if member is not None and member.reads_target_head and member.dtype is not None]
        if reading and reading[0].dtype != self.dtype and not is_quantised(decoder.output_head(target)):
            head = self.head_in(DTYPES[cast(str, reading[0].dtype)])
        other.drafter = members[0]
        drafter_params = each[0]
        if isinstance(drafter, Team):
            other.drafter = replace(drafter, members=members)
            drafter_params = each
        files = self.cost_files
        team = other.drafter if isinstance(other.drafter, Team) else None
        other.pacing = None if team is None else Pacing(team, self.number_format, files, corpus)
        other.model = other.model_of(Models(target, drafter_params, head, corpus), other.drafter)
        other.programs = {}
        return other

    def with_draft_adapter(self) -> "LanguageModel":
        """Returns a copy with the adapter for drafting that the model's folder may have; the weights are shared.

        Raises:
            ValueError: the adapter has to be loaded with the weights, or there are other adapters.
        """
        other = copy(self)
        if self.folder is None or DRAFT_ADAPTER in self.adapters or not (self.folder / DRAFT_ADAPTER).is_dir():
            return other
        devices = 1 if self.placement is None else self.placement.mesh.size
        adapters = read_adapters({DRAFT_ADAPTER: self.folder / DRAFT_ADAPTER}, devices)
        assert adapters is not None
        if self.adapters or adapters.change_gates:
            raise ValueError(f"expected a model loaded with the drafter {SELF}, which adds {DRAFT_ADAPTER}, found one without")
        target = adapters.apply(self.ops, decoder.declare(self.target), self.model.models.target, DTYPES[self.dtype])
        other.adapters = adapters.names
        other.model = other.model_of(Models(target), None)
        return other

    def with_blocks(self, length: int | None = None) -> "LanguageModel":
        """Returns a copy of the model that denoises blocks, without a drafter; the parameters are shared.

        Args:
            length: positions of a block; by default as in the configuration.

        Raises:
            ValueError: the model was not trained to denoise blocks, or a length of which no token would be denoised.
        """
        if self.target.canvas is not None:
            return self.with_canvas(self.target.canvas.length if length is None else length)
        if self.target.masked_blocks is None:
            raise ValueError(
                f"expected a model that was trained to denoise blocks, found one of the family {self.target.family}"
            )
        blocks = replace(self.target.masked_blocks, length=self.target.masked_blocks.length if length is None else length)
        if blocks.denoised < 1:
            raise ValueError(f"expected blocks of at least {blocks.length - blocks.denoised + 1} tokens, found {blocks.length}")
        other = copy(self)
        other.target = replace(self.target, masked_blocks=blocks)
        other.block_length = blocks.length
        other.table = self.table if blocks.causal else with_whole_blocks(self.table, blocks.length)
        other.drafter = None
        other.pacing = None
        other.model = other.model_of(Models(self.model.models.target), None)
        other.programs = {}
        return other

    def with_canvas(self, length: int) -> "LanguageModel":
        """Returns a copy of the model whose canvases have this many positions; the parameters are shared."""
        if length < 1:
            raise ValueError(f"expected a canvas of at least 1 token, found {length}")
        other = copy(self)
        other.target = replace(self.target, canvas=Canvas(length))
        other.block_length = length
        other.model = other.model_of(Models(self.model.models.target), None)
        other.programs = {}
        return other

    def prepared(self, drafter: Drafter | None, params: Any) -> tuple[Drafter | None, Any]:
        """Prepares a drafter and its parameters for this model's operations.

        With the CPU kernels, the drafter of a target in its file's quantised format gets blocks of 4 bits, as with "int4".
        """
        if isinstance(drafter, NGramsFirst):
            other, params = self.prepared(drafter.other, params)
            return replace(drafter, other=other), params
        if isinstance(params, SuffixIndex):
            return drafter, jax.device_put(params) if self.placement is None else self.placement.whole(params)
        if isinstance(drafter, SelfDiffusion) and DRAFT_ADAPTER in self.adapters:
            return replace(drafter, adapter=1 + self.adapters.index(DRAFT_ADAPTER)), params
        if drafter is None or drafter.dtype is None:
            return drafter, params
        if isinstance(drafter, DFlash) and self.placement is None:
            drafter, params = drafter.without_copies(params, self.model.models.target.embed, self.head_columns)
        if isinstance(drafter, DFlash | MTP):
            params = drafter.with_head(params, self.head_columns)
        in_blocks = self.weights == "auto" and self.quantised and self.ops.packs
        prepared = (operations(weights="int4") if in_blocks else self.ops).prepare(drafter.declared, params, threads=cores())
        return replace(cast(Any, drafter), ops=self.ops), prepared if self.placement is None else self.placement.whole(prepared)

    def load_drafter(
        self, source: str | Sequence[str] | None, options: DrafterOptions, console: Console | None = None
    ) -> tuple[Any, Any]:
        """Reads drafters for this target and `with_drafter`; several drafters, or chosen rounds, make a team.

        See `drafters.load.load_drafter`.
        """
        check_sources(source, options)
        if options.tree_nodes:
            self.check_trees()
        if source is None or (isinstance(source, str) and options.block_size not in AUTO):
            return self.load_one_drafter(source, options, console)
        sources = [source] if isinstance(source, str) else list(source)
        fixed = isinstance(options.block_size, int)
        member_options = replace(options, block_size=options.block_size if fixed else None, tree_nodes=())
        loaded = [self.load_one_drafter(each, member_options.fitting(each), console) for each in sources]
        drafters, params = zip(*loaded, strict=True)
        # With another number of rows, partial sums are added in another order.
        rounds = self.kv_dtype != "auto" or (self.quantised and self.ops.packs)
        alike = self.dtype == "float32" and not rounds
        if self.placement is None:
            alike = is_batch_invariant(self.ops, self.dtype, self.kv_dtype, self.target.needs_xla, self.quantised)
        masked = options.block_size != AUTO[1] and not alike
        if options.tree_nodes and options.block_size != AUTO[1] and (masked or not self.rounds_alike_in_trees):
            raise ValueError(f"expected no trees, or a block size of {AUTO[1]}, since the target rounds otherwise in a tree")
        return Team(ngrams_first(drafters), () if fixed else self.table.widths, masked, options.tree_nodes), params

    @property
    def rounds_alike_in_trees(self) -> bool:
        """True if attention adds up the same numbers for a node of a tree as for a token of a chain, or only in another order.

        8-bit keys and values are rounded before tree attention reads them. AMX sums values in pairs of neighbouring keys.
        """
        return self.kv_dtype == "auto" and not (self.ops.name == "cpu amx" and self.dtype == "bfloat16")

    def check_trees(self) -> None:
        """Raises a `ValueError` if the target cannot run trees."""
        if self.target.delta is not None:
            raise ValueError(
                "expected no trees, since layers of linear attention have one state for a row, not one for a branch"
            )
        if self.placement is not None:
            raise ValueError("expected no trees, since the target is sharded over a mesh")

    def load_one_drafter(self, source: str | None, options: DrafterOptions, console: Console | None) -> tuple[Any, Any]:
        """Reads one drafter, and its corpus if it has one."""
        drafter, params = load_drafter(source, self.target, self.dtype, options, console, self.folder)
        corpus = options.suffix_corpus
        return drafter, params if corpus is None else read_corpus(corpus, self.tokenizer)

    def keep_costs(self, files: CostFiles) -> "LanguageModel":
        """Keeps measured costs of rounds in files for later processes, with any drafter. Returns the model.

        Over several processes nothing is kept, since each process might find different files.
        """
        if self.placement is not None and self.placement.mesh.is_multi_process:
            return self
        self.cost_files = files
        if self.pacing is not None:
            self.pacing.files = files
        return self

    def head_in(self, dtype: DTypeLike) -> Any:
        """Returns the target's output head in another dtype, prepared.

        Raises:
            ValueError: the head is sharded over a mesh.
        """
        if self.placement is not None:
            raise ValueError(f"expected a drafter in {self.dtype}, the dtype of the output head over a mesh, found another")
        return self.ops.prepare_matrix(self.whole_head().astype(dtype), "lm_head")

    def head_columns(self, ids: Int[Array, " W"]) -> Float[Array, "H W"]:
        """Returns the columns of the target's output head for some tokens, unprepared.

        Raises:
            ValueError: the head is sharded over a mesh.
        """
        if self.placement is not None:
            raise ValueError("expected a drafter over the whole vocabulary, since the output head is sharded over a mesh")
        return self.ops.restore(decoder.output_head(self.model.models.target), ids)[: self.target.hidden_size]

    def whole_head(self) -> Float[Array, "H V"]:
        """Returns the target's output head before its preparation."""
        return self.ops.restore(decoder.output_head(self.model.models.target))[: self.target.hidden_size]

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Returns the tokens of a prompt, which may be token ids already. Raises the `ValueError` of `Model.encode`."""
        return self.model.encode(prompt)

    def check_length(self, tokens: Sequence[int], sampling: Sampling) -> None:
        context = self.target.max_position_embeddings
        if len(tokens) >= context:
            raise ValueError(f"expected a prompt shorter than the model's context of {context} tokens, found {len(tokens)}")
        if len(tokens) + sampling.max_new_tokens > context:
            room = f"leaves room for {context - len(tokens)} in the model's context of {context}"
            raise ValueError(f"a prompt of {len(tokens)} tokens {room}; max_new_tokens is {sampling.max_new_tokens}")

    def positions_of(self, tokens: Sequence[int], sampling: Sampling) -> int:
        """Returns the positions of a call's row. Blocks that begin behind the prompt are whole, if there is room for them."""
        blocks = self.model.target.blocks
        new = sampling.max_new_tokens
        if blocks is None or not blocks.causal:
            return len(tokens) + new
        return min(len(tokens) + -(-new // blocks.length) * blocks.length, self.table.capacities[-1])

    @staticmethod
    def each_sampling(prompts: Sequence[object], sampling: Sampling | Sequence[Sampling] | None) -> list[Sampling]:
        """Returns a sampling for each prompt, with a seed where it draws.

        Raises:
            ValueError: there is no prompt, or a list of samplings has another length.
        """
        return [one.seeded() for one in one_each(len(prompts), Sampling() if sampling is None else sampling, "sampling")]

    def agreed_sampling(self, each: Sequence[Sampling]) -> list[Sampling]:
        """Returns samplings with the first process's seeds, since each process has drawn seeds of its own."""
        mesh = None if self.placement is None else self.placement.mesh
        words = broadcast_from_first(mesh, np.array([seed_words(one.seed or 0) for one in each], np.uint32))
        return [one if one.seed is None else replace(one, seed=seed_of(word)) for one, word in zip(each, words, strict=True)]

    def drafter_for(self, speculative: bool | None) -> Drafter | None:
        """Returns the drafter of a generation; None for plain decoding.

        Raises:
            ValueError: speculative decoding was requested, and there is no drafter.
        """
        if speculative and self.drafter is None:
            raise ValueError("expected a drafter for speculative decoding, found none")
        return None if speculative is False else self.drafter

    def programs_for(self, drafter: Drafter | None, shape: Shape) -> Programs:
        """Returns the programs of calls of a shape. They are compiled on demand."""
        key = drafter is not None, shape
        if key in self.programs:
            return self.programs[key]
        whole = math.lcm(PAGE_MULTIPLE, self.table.chunks[-1])
        capacity = -(-shape.capacity // whole) * whole
        table = replace(self.table, batches=(shape.batch,), capacities=(capacity,))
        widest, beyond = (1, 0) if drafter is None else (drafter.block_size, drafter.beyond_windows)
        ahead = look_ahead(table.chunks[-1], widest) + beyond
        layout = Layout.full(shape.batch, capacity, self.model.target.config.windows, ahead)
        model = self.model
        # If several threads make the programs at once, all use the first one's.
        kind = Programs if self.block_length is None else BlockPrograms if self.target.canvas is None else CanvasPrograms
        return self.programs.setdefault(key, kind(model.target, model.models, model.dtype, drafter, table, layout))

    def decoding(self, drafter: Drafter | None, options: EngineOptions, **settings: Any) -> Autoregressive:
        """Returns the decoding of this model.

        Args:
            settings: see `Autoregressive`.
        """
        model = replace(self.model, drafter=drafter)
        if isinstance(self.denoising, CanvasDenoising):
            return CanvasDecoding(model, options, **settings, defaults=self.denoising)
        if self.block_length is not None:
            return BlockCausal(model, options, **settings, defaults=self.denoising)
        return Autoregressive(model, options, **settings)

    def constrain(self, grammar: Grammar, seconds: float | None = None) -> Matcher:
        """Compiles a grammar over this model's tokens, for requests to an engine. Thread-safe.

        Args:
            seconds: limit of the processor time of the compilation, for grammars from untrusted clients.

        Raises:
            ValueError: the extra `grammar` is not installed, the grammar is invalid or too large, or no text satisfies it.
        """
        if self.compiler is None:
            self.compiler = Compiler(self.tokenizer, self.target.vocab_size, self.target.eos_token_ids)
        return self.compiler.compile(grammar, seconds)

    def each_constraint(
        self, prompts: Sequence[object], grammar: Grammar | Sequence[Grammar | None] | None
    ) -> list[Constraint | None]:
        """Returns a constraint or None for each prompt. Raises the errors of `constrain` and `one_each`."""
        return [None if one is None else self.constrain(one) for one in one_each(len(prompts), grammar, "grammar")]

    def start(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        speculative: bool | None = None,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        lora: str | Sequence[str | None] | None = None,
        denoising: AnyDenoising | Sequence[AnyDenoising] | None = None,
    ) -> Stream:
        """Begins a generation, for callers that stream; `generate` is simpler.

        Args:
            prompts: texts, or lists of token ids. Prompts beyond the table's largest batch wait.
            sampling: one for all prompts, or one each. Rows with the same `Sampling` share its seed, if it has one, so equal
                prompts give equal texts.
            speculative: False decodes without the drafter; by default the drafter is used if there is one.
            grammar: grammar of the texts, one for all or one each; None for free text. Needs the extra `grammar`.
            lora: names of adapters (see `load`), one for all or one each (None for the base model); by default
                `default_adapter`.
            denoising: options of a model whose blocks or canvases are denoised, one for all or one each; by default
                `self.denoising`.
        """
        items = listed(prompts)
        each = self.agreed_sampling(self.each_sampling(items, sampling))
        drafter = self.drafter_for(speculative)
        encoded = [self.encode(prompt) for prompt in items]
        constraints = self.each_constraint(items, grammar)
        for tokens, one in zip(encoded, each, strict=True):
            self.check_length(tokens, one)
        positions = max(self.positions_of(tokens, one) for tokens, one in zip(encoded, each, strict=True))
        if drafter is not None:
            positions = max(positions, drafter.block_size)  # a block is written as a whole
        programs = self.programs_for(drafter, self.table.shape(min(len(encoded), self.table.batches[-1]), positions))
        mode = sampling_mode(programs, each)
        pacing = self.pacing

        def make_chooser(runner: ModelRunner, dispatch_s: float) -> RoundChooser:
            if pacing is None or not isinstance(drafter, Team) or None not in constraints:
                return fixed_rounds(runner, dispatch_s)
            return CallPacer(drafter, pacing, runner, any(one.temperature > 0 for one in each))

        adapters = one_each(len(items), lora or self.default_adapter, "adapter")
        denoised = one_each(len(items), denoising, "denoising")
        rows = zip(encoded, each, constraints, adapters, denoised, strict=True)
        requests = [
            GenerateRequest(tokens, one, constraint=constraint, lora=name, denoising=options)
            for tokens, one, constraint, name, options in rows
        ]
        decoding = self.decoding(drafter, CALL, make_chooser=make_chooser, programs=programs, sampling=mode)
        return Stream(Engine(decoding, CALL, recovers=False), requests)

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        speculative: bool | None = None,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        lora: str | Sequence[str | None] | None = None,
        denoising: AnyDenoising | Sequence[AnyDenoising] | None = None,
    ) -> Generation[Result]:
        """Generates a text for every prompt; arguments as for `start`."""
        with self.start(prompts, sampling, speculative, grammar, lora, denoising) as stream:
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

        The stream yields the pieces of the text:

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
        """Answers a conversation, rendered with the model's chat template.

            lm.chat([{"role": "user", "content": "Why is the sky blue?"}]).text

        Args:
            messages: each with a `role` ("system", "user", "assistant", "tool") and its `content`, as in OpenAI's API.
            sampling: by default greedy, with at most 512 tokens, or the room in the context.
            tools: functions that the model may call, each as in OpenAI's API. Calls are part of the answer's text, in the
                model's own form; a server parses them.
            template_values: further values for the template, such as `enable_thinking`.
            speculative, grammar, lora: as for `start`.

        Raises:
            ValueError: the model has no chat template, the template rejects the conversation or ignores tools, a message is
                invalid, or the conversation does not fit the context.
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
        """Returns embeddings of texts, or of lists of token ids: vectors of length 1 of the target's hidden states.

        Args:
            pooling: "last" takes the last token's hidden state behind the final norm, "mean" the mean of all.
            lora: as for `start`.
        """
        items = listed(prompts)
        adapters = one_each(len(items), lora or self.default_adapter, "adapter")
        pairs = zip(map(self.encode, items), adapters, strict=True)
        requests = [GenerateRequest(tokens, lora=name, pooling=pooling) for tokens, name in pairs]
        positions = max(len(request.prompt) for request in requests)
        if positions > (context := self.target.max_position_embeddings):
            raise ValueError(f"expected prompts of at most the model's context of {context} tokens, found {positions}")
        programs = self.programs_for(None, self.table.shape(min(len(items), self.table.batches[-1]), positions))
        decoding = self.decoding(None, CALL, programs=programs)
        return embeddings(Engine(decoding, CALL, recovers=False), requests)

    def warm(self, speculative: bool | None = None, console: Console | None = None, constraints: bool = False) -> None:
        """Compiles every program of the table that the model's context can use, so that no later `generate` compiles.

        Args:
            speculative: as for `start`.
            console: console of a progress bar.
            constraints: also compiles the programs of calls with a grammar.
        """
        drafter = self.drafter_for(speculative)
        shapes = self.table.shapes(self.target.max_position_embeddings)
        each = [self.programs_for(drafter, shape) for shape in shapes]
        warm(((programs, key) for programs in each for key in programs.declared("any", constraints)), console)

    def engine(self, options: EngineOptions = EngineOptions()) -> Engine[Autoregressive]:
        """Returns an engine that serves many requests at once. Raises a `ValueError` for options that do not fit the model."""
        drafter = self.drafter
        pacing = self.pacing
        if not isinstance(drafter, Team):
            return Engine(self.decoding(drafter, options), options)
        if drafter.widths:
            drafter = replace(drafter, widths=options.widths)
        make_chooser = partial(EnginePacer, drafter, pacing or Pacing(drafter, self.weights, self.cost_files))
        return Engine(self.decoding(drafter, options, make_chooser=make_chooser), options)


def check_no_drafter(drafter: str | Sequence[str] | None) -> None:
    """Raises a `ValueError` if a drafter is named where blocks are denoised."""
    if drafter is not None:
        name = drafter if isinstance(drafter, str) else ", ".join(drafter)
        raise ValueError(f"expected no drafter where blocks are denoised, found {name}: use a drafter or denoising, not both")


def check_decoding(decoding: str | None, config: DecoderConfig) -> None:
    """Raises a `ValueError` for an unknown way of decoding, or one that the model was not trained for."""
    if decoding not in (None, *get_args(Way)):
        raise ValueError(f"expected decoding among {', '.join(get_args(Way))}, found {decoding!r}")
    if decoding == "blocks" and config.masked_blocks is None and config.canvas is None:
        raise ValueError(f"expected a model that was trained to denoise blocks, found one of the family {config.family}")
    if decoding == "tokens" and config.denoises_blocks:
        raise ValueError(f"expected a model that decodes token by token, found one of the family {config.family}")


def drafts_with_target(drafter: Drafter | None) -> bool:
    """Returns True for a drafter that runs the target's layers, alone or beside n-grams."""
    return isinstance(drafter.other if isinstance(drafter, NGramsFirst) else drafter, SelfDiffusion)


def listed(prompts: object) -> list[Any]:
    """Returns prompts as a list; a single text is a list of one. Raises a `ValueError` for anything else."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        raise ValueError("expected prompts, found a chat message; use `chat` with a list of messages")
    try:
        return list(cast(Iterable[Any], prompts))
    except TypeError:
        raise ValueError(f"expected a prompt or a list of prompts, found {reprlib.repr(prompts)}") from None


def one_each(count: int, values: Any, kind: str) -> list[Any]:
    """Returns one value for each of `count` prompts, from a single value or a list. Raises a `ValueError` for a wrong count."""
    if count == 0:
        raise ValueError("expected at least one prompt, found none")
    each = list(values) if isinstance(values, Sequence) and not isinstance(values, str) else [values] * count
    if len(each) != count:
        raise ValueError(f"expected one {kind} for each of {count} prompts, found {len(each)}")
    return each


def sampling_mode(programs: Programs, each: Sequence[Sampling]) -> SamplingMode:
    """Returns the simplest sampling mode for a call's requests; if more general programs are compiled already, that mode."""
    general = any(key.sampling == "any" for key in programs.compiled)
    return "greedy" if all(one.is_greedy for one in each) and not general else "any"


def chosen_block_size(drafter: object, block_size: int | str | None) -> int | str | None:
    """Returns the block size for `load`: "auto" by default with a drafter. Raises a `ValueError` for another word."""
    size = AUTO[0] if drafter is not None and block_size is None else block_size
    if isinstance(size, str) and size != AUTO[0]:
        raise ValueError(f"expected a block size or {AUTO[0]}, found {size!r}")
    return size


def target_folder(model: str, revision: str | None, console: Console | None) -> Path:
    """Returns the folder of a target. Raises a `ValueError` for a model of another kind."""

    def check(folder: Path) -> None:
        check_kind(model, folder, "target")
        load_tokenizer(folder)

    folder = hub.resolve(model, revision, console, check, hub.NAMED_TARGETS)
    check_kind(model, folder, "target")
    return folder


def check_kv_dtype(kv_dtype: str) -> None:
    """Raises a `ValueError` for an unknown dtype of KV caches."""
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
    """Reads the model in a folder, without a drafter. Checks the free memory before it reads the weights."""
    ops = operations(weights=weights, kernels=kernels)
    config = checkpoint.decoder_config(folder)
    dtype = checkpoint.running_dtype(dtype, folder, ops)
    shard, ops = (None, ops) if placement is None else (placement.shardings, placement.operations(ops))
    native_formats = checkpoint.native_formats(folder)
    check_weights(name, partial(decoder.declare, config), shard, dtype, weights, kernels, native_formats)
    with ThreadPoolExecutor(1) as pool:
        tokenizer = pool.submit(load_tokenizer, folder)  # a large vocabulary takes as long as the weights
        config, params = checkpoint.load_decoder(folder, DTYPES[dtype], console, shard, operations_for_adapters(ops, adapters))
    lm = LanguageModel(
        for_context(config, context),
        params,
        tokenizer.result(),
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
    if config.canvas is not None:
        lm.denoising = published_options(checkpoint.read_generation_config(folder), str(folder / checkpoint.GENERATION_CONFIG))
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
    suffix_corpus: str | Path | None = None,
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
    decoding: Way | None = None,
    tree_nodes: Sequence[int] = (),
) -> LanguageModel:
    """Loads a target and, optionally, a drafter.

    Args:
        model, drafter: a folder or a Hugging Face id, with `config.json`, safetensors and (for the target) `tokenizer.json`.
            The target may be a GGUF file or a folder with one (extra `gguf`): its tensors are dequantised, or kept quantised. A
            drafter may be of any kind in `drafters/load.py`; "ngram" or "suffix", which have no weights; "mtp", the head for
            multi-token prediction in the target's own folder; or "self": the target itself, if it was trained to denoise
            blocks, with the adapter in its folder `linear_spec_lora` if it has one. Several make a team.
        dtype: dtype of weights and activations, "float32", "bfloat16" or "auto": the checkpoint's dtype, but bfloat16 for
            float16, and float32 on a CPU without this package's kernels.
        weights: format of matrices. "auto" keeps the quantised formats of a file that the CPU kernels read, and `dtype`
            elsewhere; "dequantised" converts all matrices to `dtype`. "int8" quantises them to 8 bits, "int4" those of layers
            to blocks of 4 bits and the output head to 8, unless the file has blocks; "fp8" quantises to, or keeps, 8-bit
            floats, with XLA only.
        block_size: length of the blocks of a model whose blocks are denoised; by default as in its configuration. For others
            tokens of a block, the last committed one included. "auto", the default, chooses the most promising width
            each round, plain decoding included (`speculation/policy.py`); if the number of rows changes the target's rounding,
            all rounds run at the widest. Without a drafter: plain decoding through a program of that width.
        draft_window: keeps only this many last positions in the drafter's context.
        drafter_dtype: dtype of the drafter's weights and activations; by default the target's. The output does not depend on
            it.
        suffix_corpus: a text file, or JSONL with "text", "messages" or answers, which the drafter "suffix" searches besides the
            row's own text.
        revision, drafter_revision: a branch, tag or commit on the hub.
        table: declared shapes; by default up to the model's context.
        kernels: "auto" uses this package's own kernels where they run, "xla" uses XLA only.
        mesh: mesh of one axis (`parallel.mesh.make_mesh`) over which the target is sharded: each device reads its part of the
            files only. Drafters are replicated. None for the default device.
        schedule: tensor-parallel strategy over the mesh: "sync" (the default), another of `parallel.auto.STRATEGIES`, or
            "auto".
        compiler_options: starts transfers between several TPUs earlier (`parallel/compiling.py`); predicted by a model of time,
            not measured on TPUs.
        kv_dtype: "int8" keeps the target's KV cache in 8 bits, about half of bfloat16's memory; "auto" keeps it in `dtype`.
        lora: folders of low-rank adapters in PEFT's format, by name; for one device only.
        console: console for progress.
        context: the most positions of later requests. They select LongRoPE's factors for a Phi model.
        decoding: "blocks" denoises blocks, for a model that also decodes token by token, such as Nemotron-Labs-Diffusion;
            "tokens" decodes token by token, the default for such a model.
        tree_nodes: numbers of nodes of trees of drafts, the last token included, for drafters that draft trees: with a block
            size of "auto" each is one more kind of round to choose from; with a number, one tree as deep as the block.

    Raises:
        ValueError: invalid files, a drafter that does not fit the target, sizes that the mesh does not divide, or a way of
            decoding that the model was not trained for.
    """
    check_dtype(dtype, (AUTO_DTYPE, *DTYPES))
    check_kv_dtype(kv_dtype)
    check_schedule(mesh, schedule, compiler_options)
    operations(weights=weights, kernels=kernels)  # refuses unavailable kernels before any file is read
    source = drafter if drafter is None else str(drafter) if isinstance(drafter, str | Path) else [str(one) for one in drafter]
    size = chosen_block_size(drafter, block_size)
    corpus = None if suffix_corpus is None else Path(suffix_corpus)
    trees = tuple(tree_nodes)
    options = DrafterOptions(
        size, draft_window, drafter_dtype, revision=drafter_revision, suffix_corpus=corpus, tree_nodes=trees
    )
    check_sources(source, options)
    folder = target_folder(str(model), revision, console)
    config = checkpoint.decoder_config(folder)
    check_decoding(decoding, config)
    denoises = config.denoises_blocks or decoding == "blocks"
    if denoises:
        check_no_drafter(source)
        options = replace(options, block_size=None)
    placement = placement_over(config, mesh, schedule, compiler_options)
    folders = dict(lora or {})
    sources = [source] if isinstance(source, str) else source or []
    if STORED in sources:
        mtp.check_stored(folder)  # before the target's weights are read
    if SELF in sources and (folder / DRAFT_ADAPTER).is_dir():
        folders.setdefault(DRAFT_ADAPTER, folder / DRAFT_ADAPTER)
    adapters = read_adapters(folders, 1 if mesh is None else mesh.size)
    lm = read_target(str(model), folder, dtype, weights, kernels, table, placement, console, kv_dtype, context, adapters)
    if denoises:
        return lm.with_blocks(size if isinstance(size, int) else None)
    return lm.with_drafter(*lm.load_drafter(source, options, console))
