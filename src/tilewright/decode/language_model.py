"""A loaded model, with or without a drafter: the object that users hold."""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.decode.costs import CostFiles
from tilewright.decode.division import Division, check_schedule, divide
from tilewright.decode.drafters.base import Drafter
from tilewright.decode.drafters.load import AUTO, NGRAM, DrafterOptions, load_drafter
from tilewright.decode.pacing import Pacing
from tilewright.decode.programs import Programs
from tilewright.decode.request import Generation
from tilewright.decode.sampling import Sampling, Warp
from tilewright.decode.session import Session
from tilewright.decode.shapes import ShapeTable
from tilewright.decode.state import Models, Target
from tilewright.decode.team import Team, rows_alike
from tilewright.kernels.select import Kernels, Weights, operations
from tilewright.models import checkpoint, decoder, hub
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.diffusion import is_diffusion
from tilewright.models.params import DTYPES
from tilewright.models.tokenizer import load_tokenizer
from tilewright.parallel.mesh import agreed


class LanguageModel:
    """A target, its tokenizer, and a drafter if one was loaded. Made by `load`.

    Attributes:
        target: its configuration.
        dtype: of weights and activations.
        weights: "int8" keeps matrices in 8 bits; "auto" keeps them in `dtype`.
        ops: what computes; `kernels` is its name.
        division: over which devices it lies; None for the default one.
        drafter: what drafts; a team where rounds are chosen as decoding goes, which `pacing` then does.
    """

    def __init__(
        self, target: DecoderConfig, params: DecoderParams, tokenizer: Tokenizer, dtype: str = "float32",
        weights: Weights = "auto", kernels: Kernels = "auto", table: ShapeTable | None = None,
        division: Division | None = None,
    ):  # fmt: skip
        check_dtype(dtype)
        self.target, self.tokenizer, self.dtype, self.weights = target, tokenizer, dtype, weights
        self.ops = operations(weights=weights, kernels=kernels)
        self.kernels, self.table, self.division = self.ops.name, table or ShapeTable(), division
        self.drafter: Drafter | Team | None = None
        self.pacing: Pacing | None = None
        self.cost_files: CostFiles | None = None
        prepare = decoder.prepare if division is None else division.prepared
        self.programs = self.programs_of(Models(prepare(target, self.ops, params)))

    def programs_of(self, models: Models) -> Programs:
        target = Target(self.target, self.ops)
        if self.division is not None:
            target = replace(target, schedule=self.division.schedule, mesh=self.division.mesh)
        return Programs(target, models, DTYPES[self.dtype], self.table)

    def with_drafter(self, drafter: Drafter | Team | None, params: Any = None) -> "LanguageModel":
        """The same target, whose parameters are shared, with another drafter; None for none.

        Args:
            params: the drafter's parameters as they were loaded; of a team those of each member.
        """
        other, target, head = copy(self), self.programs.models.target, None
        members, each = (drafter.members, params) if isinstance(drafter, Team) else ((drafter,), (params,))
        prepared = [self.prepared(*one) for one in zip(members, each, strict=True)]
        reading = [one for one in members if one is not None and one.reads_target_head and one.dtype is not None]
        if reading and reading[0].dtype != self.dtype and self.weights == "auto":
            head = self.head_in(DTYPES[cast(str, reading[0].dtype)])
        members, each = zip(*prepared, strict=True)
        if isinstance(drafter, Team):
            other.drafter, other.programs = replace(drafter, members=members), self.programs_of(Models(target, each, head))
            other.pacing = Pacing(other.drafter, other.programs, self.dtype, self.weights, self.cost_files)
        else:
            other.drafter, other.programs, other.pacing = members[0], self.programs_of(Models(target, each[0], head)), None
        return other

    def prepared(self, drafter: Drafter | None, params: Any) -> tuple[Drafter | None, Any]:
        """A drafter and its parameters as this model's operations want them."""
        if drafter is None or drafter.dtype is None:
            return drafter, params
        prepared = self.ops.prepare(drafter.declared, params)
        return replace(cast(Any, drafter), ops=self.ops), prepared if self.division is None else self.division.whole(prepared)

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
        alike = rows_alike(self.ops, self.dtype) if self.division is None else self.dtype == "float32"
        masked = options.block_size != AUTO[1] and not alike
        return Team(drafters, () if fixed else self.table.widths, masked), params

    def keep_costs(self, files: CostFiles) -> "LanguageModel":
        """The same model, which keeps what rounds cost in files for the next process; for any drafter that it is given.

        Over several processes nothing is kept: each might find other files.
        """
        if self.division is not None and self.division.mesh.is_multi_process:
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
        if self.division is not None:
            raise ValueError(
                f"expected a drafter in {self.dtype}, as the model whose output head lies over a mesh, found another"
            )
        head = self.ops.restore(decoder.output_head(self.programs.models.target))
        return self.ops.prepare_matrix(head[: self.target.hidden_size].astype(dtype), "lm_head")

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """The tokens of a prompt, which may be tokens already.

        Raises:
            ValueError: it is empty, or holds an id outside the vocabulary.
        """
        tokens = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else [int(t) for t in prompt]
        if not tokens:
            raise ValueError("expected a prompt of at least one token, found an empty one")
        outside = [t for t in tokens if not 0 <= t < self.target.vocab_size]
        if outside:
            raise ValueError(f"expected token ids below the vocabulary size {self.target.vocab_size}, found {outside[0]}")
        return tokens

    def check_length(self, tokens: Sequence[int], sampling: Sampling) -> None:
        context = self.target.max_position_embeddings
        if len(tokens) >= context:
            raise ValueError(f"the prompt has {len(tokens)} tokens; the model's context is {context}")
        if len(tokens) + sampling.max_new_tokens > context:
            room = context - len(tokens)
            raise ValueError(
                f"a prompt of {len(tokens)} tokens leaves room for {room} in the model's context of {context}; "
                f"max_new_tokens is {sampling.max_new_tokens}"
            )

    @staticmethod
    def each_sampling(prompts: Sequence[object], sampling: Sampling | Sequence[Sampling] | None) -> list[Sampling]:
        """One sampling for each prompt; one that draws has a seed.

        Raises:
            ValueError: there is no prompt, or a list of samplings has another length.
        """
        if not prompts:
            raise ValueError("expected at least one prompt, found none")
        each = [sampling or Sampling()] * len(prompts) if not isinstance(sampling, Sequence) else list(sampling)
        if len(each) != len(prompts):
            raise ValueError(f"expected one sampling for each of {len(prompts)} prompts, found {len(each)}")
        return [one.seeded() for one in each]

    def agreed_sampling(self, each: Sequence[Sampling]) -> list[Sampling]:
        """The same with the first process's seeds: each process has drawn fresh ones."""
        mesh = None if self.division is None else self.division.mesh
        seeds = agreed(mesh, np.array([one.seed or 0 for one in each], np.uint32))
        return [one if one.seed is None else replace(one, seed=int(seed)) for one, seed in zip(each, seeds, strict=True)]

    def drafter_for(self, speculative: bool | None) -> Drafter | Team | None:
        """What drafts, if anything does.

        Raises:
            ValueError: nothing can, and something must.
        """
        if speculative and self.drafter is None:
            raise ValueError("speculative decoding needs a drafter; none was loaded")
        return None if speculative is False else self.drafter

    def start(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        speculative: bool | None = None,
    ) -> Session:
        """Begins one batch, for callers that stream; `generate` is the simpler way.

        Args:
            prompts: texts, or lists of token ids; at most as many as the table's largest batch.
            sampling: one for all, or one each. Rows of one `Sampling` share its seed, if it has one, so that equal prompts give
                equal texts.
            speculative: False decodes without the drafter; by default a drafter is used if there is one.
        """
        listed = [prompts] if isinstance(prompts, str) else list(prompts)
        each = self.agreed_sampling(self.each_sampling(listed, sampling))
        drafter = self.drafter_for(speculative)
        encoded = [self.encode(prompt) for prompt in listed]
        for tokens, one in zip(encoded, each, strict=True):
            self.check_length(tokens, one)
        pacing = None if drafter is None else self.pacing
        return Session(self.programs, self.tokenizer, encoded, each, drafter, pacing)

    def batches(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        speculative: bool | None = None,
    ) -> list[Session]:
        """Begins as many batches as it takes, to run one after another; arguments as for `start`, but any number of prompts."""
        listed = [prompts] if isinstance(prompts, str) else list(prompts)
        each, most = self.each_sampling(listed, sampling), self.table.batches[-1]
        groups = [slice(i, i + most) for i in range(0, len(listed), most)]
        return [self.start(listed[group], each[group], speculative) for group in groups]

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        speculative: bool | None = None,
    ) -> Generation:
        """Generates for every prompt; arguments as for `batches`."""
        sessions = self.batches(prompts, sampling, speculative)
        for session in sessions:
            while not session.finished:
                session.advance()
        return Generation.joined([session.generation() for session in sessions])

    def warm(
        self, warps: Iterable[Warp] = ("greedy",), speculative: bool | None = None, console: Console | None = None
    ) -> None:
        """Compiles every program of the table that the model's context can use, so that no call compiles any more.

        Args:
            warps: the kinds of sampling to be ready for (`decode.sampling.Warp`).
            speculative: as for `start`.
            console: where a progress bar is shown.
        """
        drafter = self.drafter_for(speculative)
        shapes = self.table.shapes(warps, self.target.max_position_embeddings)
        self.programs.warm((key for shape in shapes for key in self.programs.keys(shape, drafter)), console)


def check_sources(source: str | Sequence[str] | None, options: DrafterOptions) -> None:
    """Raises a `ValueError` if options do not go with the drafter, or of several drafters with none."""
    if source is None or isinstance(source, str):
        options.check(source)
        return
    if not source:
        raise ValueError("expected at least one drafter, found none")
    if set(source) == {NGRAM}:
        options.check(NGRAM)
    for each in source:
        options.fitting(each).check(each)


def check_dtype(dtype: str) -> None:
    """Raises a `ValueError` if models do not run in it."""
    if dtype not in DTYPES:
        raise ValueError(f"expected dtype to be one of {', '.join(DTYPES)}, found {dtype!r}")


def target_folder(model: str, revision: str | None, console: Console | None) -> Path:
    """The folder of a target. Raises a `ValueError` for a model of another kind."""
    folder = hub.resolve(model, revision, console)
    if is_diffusion(folder):
        raise ValueError(f"{model} is a diffusion language model: `tilewright diffuse`, `bench diffusion` and `serve` take it")
    return folder


def load(
    model: str | Path, drafter: str | Path | Sequence[str | Path] | None = None, *, dtype: str = "float32",
    weights: Weights = "auto", block_size: int | str | None = None, draft_window: int | None = None,
    drafter_dtype: str | None = None, refine: int = 0, walk: str | None = None, revision: str | None = None,
    drafter_revision: str | None = None, table: ShapeTable | None = None, kernels: Kernels = "auto", mesh: Mesh | None = None,
    schedule: str | None = None, console: Console | None = None,
) -> LanguageModel:  # fmt: skip
    """Loads a target and, if one is named, its drafter.

    Args:
        model, drafter: a folder or a Hugging Face id, with `config.json`, safetensors and (the target) `tokenizer.json`. A
            drafter may be a DFlash, DFlash 2 or EAGLE-3 one, or "ngram", which has no weights; several take turns.
        dtype: of the weights and activations, "float32" or "bfloat16".
        weights: "int8" keeps all matrices but the embedding in 8 bits, with a scale for each output; "auto" as `dtype`.
        block_size: tokens drafted at once, the known one included. "auto", the default, takes what promises most each round,
            plain decoding included (see `decode/policy.py`); where the number of rows changes how the target rounds, it runs
            all rounds at the widest, and "auto-inexact" does not. Without a drafter: plain decoding through a program of that
            width (see `decode/drafters/blockwise.py`).
        draft_window: keep only this many last positions in the drafter's context.
        drafter_dtype: of the drafter's weights and activations; by default the target's. The output is the same either way.
        refine: further passes of a DFlash drafter over each block that it drafted.
        walk: a DFlash 2 drafter's, "greedy" or "sampled" (the default; see `drafters/dflash2.py`); the output is the same.
        revision, drafter_revision: a branch, tag or commit on the hub.
        table: the declared shapes.
        kernels: "auto" takes this package's own kernels where they run, "xla" leaves everything to XLA.
        mesh: of one axis (`parallel.mesh.make_mesh`), whose devices divide the target among them: each reads its part of the
            files alone. Drafters are whole on every device. None for the default device.
        schedule: how sums travel over the mesh, "sync" (the default) or another of `parallel.auto.SCHEDULES`, or
            "auto".
        console: where progress is shown.

    Raises:
        ValueError: what is wrong with the files, how the drafter fails to fit the target, or which sizes the mesh does not
            divide.
    """
    check_dtype(dtype)
    check_schedule(mesh, schedule)
    operations(weights=weights, kernels=kernels)  # what cannot run here is said before anything is read
    source = drafter if drafter is None else str(drafter) if isinstance(drafter, str | Path) else [str(one) for one in drafter]
    size = AUTO[0] if drafter is not None and block_size is None else block_size
    options = DrafterOptions(size, draft_window, drafter_dtype, refine, walk, drafter_revision)
    check_sources(source, options)
    folder = target_folder(str(model), revision, console)
    division = divide(checkpoint.decoder_config(folder), mesh, schedule)
    tokenizer = load_tokenizer(folder)
    target = checkpoint.load_decoder(folder, DTYPES[dtype], console, None if division is None else division.shardings)
    lm = LanguageModel(*target, tokenizer, dtype, weights, kernels, table, division)
    return lm.with_drafter(*lm.load_drafter(source, options, console))
