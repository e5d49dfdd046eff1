"""A loaded model, with or without a drafter: the object that users hold."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import jax
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.decode.programs import Programs
from tilewright.decode.sampling import Sampling
from tilewright.decode.session import Result, Session
from tilewright.decode.shapes import ShapeTable
from tilewright.decode.speculative import Drafting
from tilewright.decode.state import Models
from tilewright.kernels import native
from tilewright.kernels.linear.cpu import pack
from tilewright.models import checkpoint, decoder, dflash, hub
from tilewright.models.decoder import DecoderConfig
from tilewright.models.dflash import DFlashConfig, DFlashParams
from tilewright.models.params import DTYPES, Dtype
from tilewright.models.tokenizer import load_tokenizer

Kernels = Literal["auto", "xla"]


@dataclass(frozen=True)
class Generation:
    """The results of one call, in the order of its prompts, with the times of the whole call.

    Attributes:
        prefill_seconds, decode_seconds: compilation excluded.
        rounds: rounds (steps, without a drafter), counted once for each batch.
    """

    results: list[Result]
    prefill_seconds: float
    decode_seconds: float
    rounds: int

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, index: int) -> Result:
        return self.results[index]

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all rows for each second of decoding."""
        return sum(len(r.tokens) for r in self.results) / self.decode_seconds


def prepare_models(models: Models, drafting: Drafting | None, kernels: Kernels) -> tuple[Models, str]:
    """Makes loaded parameters ready for the device. Returns them, and the name of what will multiply them."""
    isa = native.kernels().isa if kernels == "auto" else None
    target, drafter, draft_head = models.target, models.drafter, None
    if drafting is not None and drafter is not None:
        head = target.embed.T if target.head is None else target.head
        draft_head = head.astype(DTYPES[drafting.dtype])
        if isa is not None:
            drafter, draft_head = dflash.pack_drafter(drafter), pack(draft_head)
    if isa is not None:
        target = decoder.pack_decoder(target)
    elif jax.default_backend() == "cpu":
        target = decoder.untie_head(target)
    return Models(target, drafter, draft_head), f"cpu {isa}" if isa else "xla"


class LanguageModel:
    """A target, its tokenizer, and a drafter if one was loaded. Made by `load`."""

    def __init__(
        self, target: DecoderConfig, models: Models, tokenizer: Tokenizer, drafting: Drafting | None, dtype: str,
        table: ShapeTable | None = None, kernels: Kernels = "auto",
    ):  # fmt: skip
        self.target, self.tokenizer, self.drafting, self.dtype = target, tokenizer, drafting, dtype
        self.table = table or ShapeTable()
        models, self.kernels = prepare_models(models, drafting, kernels)
        self.programs = Programs(target, models, DTYPES[dtype], self.table)

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
        """One sampling for each prompt.

        Raises:
            ValueError: there is no prompt, or a list of samplings has another length.
        """
        if not prompts:
            raise ValueError("expected at least one prompt, found none")
        each = [sampling or Sampling()] * len(prompts) if not isinstance(sampling, Sequence) else list(sampling)
        if len(each) != len(prompts):
            raise ValueError(f"expected one sampling for each of {len(prompts)} prompts, found {len(each)}")
        return each

    def start(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        speculative: bool | None = None,
    ) -> Session:
        """Begins one batch, for callers that stream; `generate` is the simpler way.

        Args:
            prompts: texts, or lists of token ids; at most as many as the table's largest batch.
            sampling: one for all, or one each. Rows of one `Sampling` share its seed, so that equal prompts give equal texts.
            speculative: False decodes without the drafter; by default a drafter is used if there is one.
        """
        listed = [prompts] if isinstance(prompts, str) else list(prompts)
        each = self.each_sampling(listed, sampling)
        if speculative and self.drafting is None:
            raise ValueError("speculative decoding needs a drafter; none was loaded")
        encoded = [self.encode(prompt) for prompt in listed]
        for tokens, one in zip(encoded, each, strict=True):
            self.check_length(tokens, one)
        drafting = None if speculative is False else self.drafting
        return Session(self.programs, self.tokenizer, encoded, each, drafting)

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        speculative: bool | None = None,
    ) -> Generation:
        """Generates for every prompt; arguments as for `start`, but any number of prompts.

        More prompts than the largest batch run as several batches, one after another.
        """
        listed = [prompts] if isinstance(prompts, str) else list(prompts)
        each = self.each_sampling(listed, sampling)
        most = self.table.batches[-1]
        groups = [slice(i, i + most) for i in range(0, max(len(listed), 1), most)]
        sessions = [self.start(listed[g], each[g], speculative) for g in groups]
        for session in sessions:
            while not session.finished:
                session.advance()
            session.state = None  # its caches are free for the next batch
        return Generation(
            [result for session in sessions for result in session.results()],
            sum(session.prefill_seconds for session in sessions),
            sum(session.decode_seconds for session in sessions),
            sum(session.rounds for session in sessions),
        )


def load_drafter(
    source: str | Path, target: DecoderConfig, dtype: str, revision: str | None, console: Console | None
) -> tuple[DFlashConfig, DFlashParams]:
    """Reads a DFlash drafter, whose tensors may carry a `model.` prefix, and checks that it fits the target."""
    folder = hub.resolve(str(source), revision, console)
    config = dflash.config_from_hf(checkpoint.read_config(folder), str(folder / "config.json"))
    dflash.check_fits(config, target)
    params = checkpoint.load_params(
        folder, dflash.declare(config), DTYPES[dtype], rename=lambda name: name.removeprefix("model."), console=console
    )
    return config, params


def load(
    model: str | Path,
    drafter: str | Path | None = None,
    *,
    dtype: str = "float32",
    block_size: int | None = None,
    draft_window: int | None = None,
    drafter_dtype: str | None = None,
    revision: str | None = None,
    drafter_revision: str | None = None,
    table: ShapeTable | None = None,
    kernels: Kernels = "auto",
    console: Console | None = None,
) -> LanguageModel:
    """Loads a target and, if one is named, its drafter.

    Args:
        model, drafter: a folder or a Hugging Face id, with `config.json`, safetensors and (the target) `tokenizer.json`.
        dtype: of the weights and activations, "float32" or "bfloat16".
        block_size: tokens drafted at once, the known one included; by default what the drafter was trained for.
        draft_window: keep only this many last positions in the drafter's context.
        drafter_dtype: of the drafter's weights and activations; by default the target's. The output is the same either way.
        revision, drafter_revision: a branch, tag or commit on the hub.
        table: the declared shapes.
        kernels: "auto" takes this package's own kernels where they run, "xla" leaves everything to XLA.
        console: where progress is shown.

    Raises:
        ValueError: what is wrong with the files, or how the drafter fails to fit the target.
    """
    if kernels not in get_args(Kernels):
        raise ValueError(f"expected kernels to be one of {', '.join(get_args(Kernels))}, found {kernels!r}")
    draft_dtype = dtype if drafter_dtype is None else drafter_dtype
    for name in (dtype, draft_dtype):
        if name not in DTYPES:
            raise ValueError(f"expected a dtype among {', '.join(DTYPES)}, found {name!r}")
    if drafter is None and any(option is not None for option in (block_size, draft_window, drafter_dtype)):
        raise ValueError("a block size, draft window or drafter dtype needs a drafter; none was named")
    folder = hub.resolve(str(model), revision, console)
    tokenizer = load_tokenizer(folder)
    target, target_params = checkpoint.load_decoder(folder, DTYPES[dtype], console)
    if drafter is None:
        return LanguageModel(target, Models(target_params), tokenizer, None, dtype, table, kernels)
    config, drafter_tree = load_drafter(drafter, target, draft_dtype, drafter_revision, console)
    size = config.block_size if block_size is None else block_size
    drafting = Drafting(config, size, draft_window, cast(Dtype, draft_dtype))
    return LanguageModel(target, Models(target_params, drafter_tree), tokenizer, drafting, dtype, table, kernels)
