"""Decoding of models whose blocks are denoised one after the other, on the pages and prefills of autoregressive decoding.

A round is a pass over the current block of every row (`blocks.py`). Prompts are prefilled up to the first block that runs
(`MaskedBlocks.first_block`). Finished blocks are delivered as a whole; their pages serve later requests with the same prefix.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tilewright.diffusion.blocks import BlockDenoising, PassInfo, block_rows, denoise_pass, least_share
from tilewright.models.config import MaskedBlocks
from tilewright.runtime.autoregressive import Autoregressive, ChooserFactory, fixed_rounds
from tilewright.runtime.collect import NotFinite, token_logprobs
from tilewright.runtime.constraints import MaskSource
from tilewright.runtime.interfaces import Choice, Variant
from tilewright.runtime.model import Model
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.pace import FixedRounds, kind_of
from tilewright.runtime.programs import Programs, RowRequest
from tilewright.runtime.request import EngineStats, GenerateRequest, Listener, RequestOutput, Round, Token
from tilewright.runtime.rounds import RowMasks
from tilewright.runtime.runner import ModelRunner, SentRounds
from tilewright.runtime.sampling import SamplingMode
from tilewright.runtime.scheduler import RunningSequence, TokenSequence
from tilewright.runtime.shapes import ShapeTable
from tilewright.runtime.state import NOT_FINITE, DecodeState, Step, Target


def blocks_of(target: Target) -> MaskedBlocks:
    """Returns the blocks of a model that denoises them."""
    blocks = target.blocks
    assert blocks is not None, "only a model with blocks is decoded block by block"
    return blocks


def with_whole_blocks(table: ShapeTable, length: int) -> ShapeTable:
    """Returns a table with the prefill chunks that hold whole blocks of this length. Raises a `ValueError` without any."""
    chunks = tuple(size for size in table.chunks if size % length == 0)
    if not chunks:
        found = ", ".join(map(str, table.chunks))
        raise ValueError(f"expected a prefill chunk that is a multiple of the block length {length}, found {found}")
    return replace(table, chunks=chunks)


def check_supported(request: GenerateRequest) -> None:
    """Raises a `ValueError` for a request that needs decoding token by token."""
    for name, wrong in (
        ("prompt_logprobs", request.prompt_logprobs),
        ("pooling", request.pooling is not None),
        ("lora", request.lora is not None),
    ):
        if wrong:
            raise ValueError(f"expected no {name}, which is not supported for a model whose blocks are denoised")


class BlockPrograms(Programs):
    """Programs whose rounds are passes over blocks."""

    @property
    def vocab(self) -> int | None:
        """Size of the vocabulary, if rows may want log-probabilities."""
        return self.target.config.vocab_size if self.target.loops else None

    def step(self, variant: Variant | None, target: Target, masks: RowMasks | None) -> Step:
        allowed = None if masks is None else jnp.asarray(masks.blocks.masks)[:, 0]
        return partial(denoise_pass, target, blocks_of(target), allowed)

    def mask_width(self, choice: Choice | None) -> int:
        return 1  # a row with a constraint commits the first mask of its block alone

    def request_rows(self, rows: Sequence[RowRequest], eos: Sequence[int] = ()) -> dict[str, Any]:
        options = [row.denoising or BlockDenoising() for row in rows]
        lengths = [row.last_position + 1 for row in rows]
        return super().request_rows(rows, eos) | {"denoising": block_rows(options, lengths, blocks_of(self.target), self.vocab)}

    def empty_state(self, target_cache: Any, draft_cache: Any) -> DecodeState:
        rows = self.layout.batch
        empty = block_rows([BlockDenoising()] * rows, [1] * rows, blocks_of(self.target), self.vocab)
        return replace(super().empty_state(target_cache, draft_cache), denoising=empty)


class BlockRunner(ModelRunner):
    """Runner of passes over blocks."""

    def row(self, running: RunningSequence) -> RowRequest:
        row = super().row(running)
        row.tokens[running.sequence.length :] = blocks_of(self.programs.target).mask_token_id
        return row

    def bounds(self, rounds: int, width: int) -> tuple[int, int]:
        target = self.programs.target
        if least_share(target, blocks_of(target), 1) is not None:
            return 0, rounds * width
        # Behind each finished block, a pass stores its keys and values.
        return 0, -(-rounds // 2) * width


class PassesReport(NamedTuple):
    """Results of passes, on the host.

    Attributes:
        infos: report of each pass.
        committed: number of new tokens of each row.
        drafter: None.
    """

    infos: PassInfo
    committed: Sequence[int]
    drafter: None = None


class BlockDecoding(Autoregressive):
    """Decoding in rounds that are passes over a block of positions of every row.

    Attributes:
        block_length: positions of a block.
        blocks: options of requests that name none.
    """

    block_length: int
    blocks: Any

    def masks_of(self, batch: Sequence[RunningSequence]) -> MaskSource:
        return "none" if all(running.sequence.constraint is None for running in batch) else "host"

    def prepare_plan(
        self, flight: Sequence[Any], batch: Sequence[RunningSequence]
    ) -> tuple[bool, Sequence[tuple[TokenSequence, str]]]:
        # Behind a pass under masks, the host has to know the token before it makes the next ones.
        return "host" in (self.last_masks, self.masks_of(batch)), ()

    def read(self, sent: SentRounds) -> PassesReport:  # type: ignore[override]
        infos = PassInfo.unpacked(sent.reports, sent.wants_logprobs)
        return PassesReport(infos, infos.committed.sum(axis=0)[: len(sent.batch)].tolist())

    def collect(self, sent: SentRounds, report: PassesReport, row: int) -> RequestOutput | None:  # type: ignore[override]
        sequence = sent.batch[row].sequence
        infos = report.infos
        processor = sequence.processor
        if sequence.constraint is not None:
            sequence.handle.masks.add(sent.masks)
        if processor.finish_reason is not None or sequence.handle.result is not None:
            return None
        tokens: list[Token] = []
        rounds: list[Round] = []
        for n in np.flatnonzero(infos.ran[:, row]).tolist():
            sequence.handle.steps += int(infos.ran[n, row])
            new = infos.tokens[n, row, : infos.committed[n, row]].tolist()
            if NOT_FINITE in new:
                raise NotFinite("the model's logits are not finite")
            if not new:
                continue
            pieces = processor.add_round(new, 0, 0, self.eos_token_ids)
            rounds.append(Round(len(pieces), 0, 0, f"{self.block_length} positions"))
            logprobs: list[Any] = [None] * len(pieces)
            if sequence.wants_logprobs:
                logprobs = token_logprobs(infos.logprobs, (n, row), len(pieces), sequence.alternatives)
            tokens += [Token(one.token, one.text, one.drafted, each) for one, each in zip(pieces, logprobs, strict=True)]
            if processor.finish_reason is not None:
                break
        reason = processor.finish_reason
        if not tokens and reason is None:
            return None
        if reason is None and sequence.constraint is not None:
            sequence.constraint.advance([token.token for token in tokens])
        return RequestOutput(tuple(tokens), tuple(rounds), None if reason == "interrupted" else reason)

    def count(self, sent: SentRounds, report: PassesReport, counted: EngineStats) -> None:  # type: ignore[override]
        ran = report.infos.ran > 0
        counted.dispatches += 1
        counted.rounds += len(ran)
        counted.row_rounds += int(ran.sum())
        counted.padding_rows += ran.size - int(ran.sum())
        name = f"{self.block_length} positions"
        counted.widths[name] = counted.widths.get(name, 0) + len(ran)

    def observe(self, sent: SentRounds, report: PassesReport, began: float, ended: float) -> None:  # type: ignore[override]
        assert isinstance(self.chooser, FixedRounds), "passes are all of one kind"
        self.chooser.time(kind_of(sent), len(report.infos.ran), sent.at, sent.alone, began, ended)


class BlockCausal(BlockDecoding):
    """Decoding of a model whose blocks are denoised."""

    programs_type = BlockPrograms
    runner_type = BlockRunner

    def __init__(
        self,
        model: Model,
        options: EngineOptions = EngineOptions(),
        make_chooser: ChooserFactory = fixed_rounds,
        programs: Programs | None = None,
        sampling: SamplingMode = "logprobs",
        defaults: BlockDenoising = BlockDenoising(),
    ):
        """Args: `defaults`: options of requests that name none; for the others see `Autoregressive`.

        Raises:
            ValueError: pages or prefill chunks that do not hold whole blocks, or see `Autoregressive`.
        """
        blocks = blocks_of(model.target)
        length = blocks.length
        defaults.check(blocks)
        self.block_length = length
        self.blocks = defaults
        if options.page_size % length and not blocks.causal:
            found = options.page_size
            raise ValueError(f"expected a page size that is a multiple of the block length {length}, found {found}")
        if programs is None and not blocks.causal:
            longest = model.target.config.max_position_embeddings
            table = options.shapes(min(longest, options.context or longest))
            options = replace(options, table=with_whole_blocks(table, length))
        super().__init__(model, options, make_chooser, programs, sampling)

    def check(self, request: GenerateRequest) -> None:
        check_supported(request)
        options = request.denoising or self.blocks
        if not isinstance(options, BlockDenoising):
            raise ValueError(f"expected denoising options as BlockDenoising, found {type(options).__name__}")
        blocks = blocks_of(self.model.target)
        options.check(blocks)
        mask = blocks.mask_token_id
        if mask in request.prompt:
            raise ValueError(f"expected a prompt without the mask token {mask}, found one")
        super().check(request)

    def sequence(self, request: GenerateRequest, listener: Listener) -> TokenSequence:
        sequence = super().sequence(request, listener)
        options = request.denoising or self.blocks
        sequence.denoising = replace(options, left_to_right=options.left_to_right or request.constraint is not None)
        return sequence
