"""Interface between an engine and a decoding, which generates tokens with one model.

An engine has one decoding. The engine owns the queue, the slots and their pages, the dispatches in flight and the thread. The
decoding knows the model: valid requests, programs, the plan of the next dispatch, and the tokens of each dispatch.
`runtime/autoregressive.py` decodes token by token, with drafts or without. `diffusion/decoding.py` denoises.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from rich.console import Console
from tokenizers import Tokenizer

from tilewright.runtime.constraints import MaskSource
from tilewright.runtime.request import EngineStats, Listener, RequestOutput
from tilewright.runtime.runner import ProgramRunner
from tilewright.runtime.scheduler import Chunk, RunningSequence, Scheduler, TokenSequence


class Plan(NamedTuple):
    """Plan of the next dispatch.

    Attributes:
        kind: kind of its steps, in the decoding's own terms; it selects a program.
        steps: the most steps; a round of speculative decoding is a step.
        width: the most tokens that a step commits for a row, for which the row needs pages; 0 if rows have all pages from the
            start.
        masks: source of the constraints' masks.
    """

    kind: Any
    steps: int
    width: int
    masks: MaskSource = "none"


@runtime_checkable
class Sent(Protocol):
    """Dispatch in flight: its rows, and bounds of their new tokens."""

    @property
    def batch(self) -> Sequence[RunningSequence]: ...

    @property
    def least(self) -> int:
        """Lower bound of each row's new tokens, unless the row ends."""
        ...

    @property
    def most(self) -> int:
        """Upper bound of a row's new tokens."""
        ...


@runtime_checkable
class Report(Protocol):
    """Results of a dispatch, on the host.

    Attributes:
        committed: number of new tokens of each row of the batch.
        drafter: name of the drafter whose context the dispatch extended; None if there is none.
    """

    @property
    def committed(self) -> Sequence[int]: ...

    @property
    def drafter(self) -> str | None: ...


class Prefilling(NamedTuple):
    """Prefill chunks that were dispatched.

    Attributes:
        end: an array that is ready once the chunks are computed.
        positions: number of positions that the program computes.
        logprobs, pooled: results of each row that wants them; None if the programs report none.
    """

    end: Any
    positions: int
    logprobs: Any = None
    pooled: Any = None


@runtime_checkable
class Decoding(Protocol):
    """Decoding of one model: its requests, its programs, and the tokens of each dispatch."""

    @property
    def context(self) -> int:
        """The most positions of a request, prompt and new tokens."""
        ...

    @property
    def scheduler(self) -> Scheduler:
        """Queue, slots and pages; only the engine changes them."""
        ...

    @property
    def runner(self) -> ProgramRunner:
        """Device runner with the model's programs."""
        ...

    @property
    def denoising(self) -> Any:
        """Default `diffusion.options.Denoising` of requests that denoise; None if requests are `request.GenerateRequest`."""
        ...

    @property
    def blocks(self) -> Any:
        """Default `diffusion.blocks.BlockDenoising` of requests to a model whose blocks are denoised; None for other models."""
        ...

    @property
    def advanced_dispatch(self) -> Any:
        """Dispatch in flight whose tokens constraints have taken in, before its delivery; None if there is none."""
        ...

    # The model.

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def num_spec_tokens(self) -> int:
        """The most drafts in a round; 0 without a drafter."""
        ...

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the low-rank adapters that requests may use."""
        ...

    @property
    def embeds(self) -> bool:
        """True if requests may ask for embeddings of prompts."""
        ...

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Returns the tokens of a prompt, which may be token ids already. Raises a `ValueError` for an invalid prompt."""
        ...

    # Before the first request.

    def program_keys(self) -> Sequence[Any]:
        """Returns the keys of all programs that serving needs, the most useful first, in the same order in every process."""
        ...

    def first_keys(self) -> Sequence[Any]:
        """Returns the keys of a few programs with which every request can be served, except those that are not `servable`."""
        ...

    def use(self, keys: Collection[Any]) -> None:
        """Limits the next dispatches to these programs, `first_keys` among them, until the next call."""
        ...

    def servable(self, sequence: TokenSequence) -> bool:
        """True if the programs that a sequence needs exist."""
        ...

    def needed_keys(self, sequences: Sequence[TokenSequence]) -> Sequence[Any]:
        """Returns the keys of the programs that these sequences surely need, for a call that compiles nothing else."""
        ...

    def measure(self, console: Console | None) -> None:
        """Measures the costs that the choice of dispatches depends on, once all programs are compiled."""
        ...

    # A request.

    def check(self, request: Any) -> None:
        """Raises a `ValueError` if a request with valid tokens can never be served. It is fast."""
        ...

    def sequence(self, request: Any, listener: Listener) -> TokenSequence:
        """Returns a new sequence for a checked request; called on any thread."""
        ...

    def begin(self, sequence: TokenSequence) -> Any:
        """Returns the decoding's state of a sequence for its time in a slot (`RunningSequence.row`)."""
        ...

    # A dispatch.

    def prefill(self, chunks: Sequence[Chunk]) -> Prefilling:
        """Dispatches prefill chunks, all of one size."""
        ...

    def prepare_plan(
        self, flight: Sequence[Any], batch: Sequence[RunningSequence]
    ) -> tuple[bool, Sequence[tuple[TokenSequence, str]]]:
        """Updates the state that the next plan depends on.

        Args:
            flight: dispatches that were sent and not read yet.
            batch: sequences that the next dispatch may run.

        Returns:
            True if all dispatches in flight must be read first; and sequences that have failed, each with an error.
        """
        ...

    def plan(self, batch: Sequence[RunningSequence], most: int | None = None) -> Plan:
        """Plans the next dispatch for these sequences.

        Args:
            most: the most steps; None for the decoding's choice.
        """
        ...

    def send(self, batch: Sequence[RunningSequence], plan: Plan, reach: int) -> Sent:
        """Dispatches a plan.

        Args:
            reach: the most positions that the dispatch attends to.

        Raises:
            ConstraintError: the constraint of a row cannot make its mask.
        """
        ...

    def read(self, sent: Any) -> Report:
        """Waits for a dispatch. Returns its report."""
        ...

    def collect(self, sent: Any, report: Any, row: int) -> RequestOutput | None:
        """Collects a row's tokens from a report, once; None if there is nothing to deliver.

        Raises:
            NotFinite: the row's logits were not finite.
            ConstraintError: the row's constraint failed.
        """
        ...

    def count(self, sent: Any, report: Any, counted: EngineStats) -> None:
        """Adds a dispatch to the statistics, before its rows are collected: answers that end with it are counted then."""
        ...

    def observe(self, sent: Any, report: Any, began: float, ended: float) -> None:
        """Records the duration of a dispatch whose rows were collected.

        Args:
            began, ended: when the engine began to wait for the dispatch, and received it, by `time.perf_counter()`.
        """
        ...
