"""Interfaces of what plugs into the runtime: drafters, and choosers of rounds.

The runtime knows drafters by these protocols alone. A drafter is a frozen, hashable description; its arrays are in
`Models.drafter`, and what it keeps of the rows in `DecodeState.draft_cache`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Int

from tilewright.runtime.layout import Layout
from tilewright.runtime.state import DecodeState, Models, StepInfo, Target

if TYPE_CHECKING:
    from tilewright.runtime.runner import SentRounds
    from tilewright.runtime.scheduler import TokenSequence


@dataclass(frozen=True, order=True)
class Choice:
    """Kind of a round: its drafter and its width.

    Attributes:
        drafter: the name of the one that drafts; "none" for plain decoding.
        width: tokens in its block, the known one included; 1 for plain decoding.
    """

    drafter: str
    width: int

    def __str__(self) -> str:
        return "plain" if self == PLAIN else f"{self.drafter}, block {self.width}"


PLAIN = Choice("none", 1)


class Proposal(NamedTuple):
    """Drafts for every row.

    Attributes:
        block: the known token, then the drafts, `[B, T]`; what lies behind the last draft is run and never accepted.
        drafts: how many drafts each row has, from 0 to T - 1, `[B]`.
        from_ngrams: true for a row whose drafts n-grams made in place of a model, bool `[B]`; None if that cannot be.
    """

    block: Array
    drafts: Array
    from_ngrams: Array | None = None


@runtime_checkable
class Drafter(Protocol):
    """Proposes blocks, and extends its context by what was accepted.

    One with arrays has a field `ops` besides: the operations that they were prepared for.
    """

    @property
    def block_size(self) -> int:
        """Tokens in its widest block, the known one included."""
        ...

    @property
    def name(self) -> str:
        """The drafter's kind."""
        ...

    @property
    def dtype(self) -> str | None:
        """Of its weights and activations; None if it has none."""
        ...

    @property
    def declared(self) -> Any:
        """Its arrays as they are declared (`models.params.ArraySpec`); None if it has none."""
        ...

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The target's layers, from 0, whose outputs `extend` reads."""
        ...

    @property
    def reads_target_head(self) -> bool:
        """True if the drafter drafts through the target's output head."""
        ...

    @property
    def choices(self) -> tuple[Choice | None, ...]:
        """The kinds of rounds that it has, each a program of its own; a single None where all are alike."""
        ...

    @property
    def contexts(self) -> tuple[str, ...]:
        """Names of contexts that may fall behind what is committed, since not every round extends them."""
        ...

    def turn(self, choice: Choice | None) -> "Variant":
        """The drafter of one kind of rounds. Raises a `ValueError` for a kind that it has not."""
        ...

    def allocate(self, layout: Layout, target: Target, dtype: DTypeLike) -> Any:
        """An empty context for the rows of a layout."""
        ...

    def on_prefill(self, context: Any, start: Int[Array, " B"], admitted: Bool[Array, " B"]) -> Any:
        """The context of rows of which positions from `start` on are about to be prefilled, those that are `admitted`."""
        ...

    def extend(
        self,
        target: Target,
        models: Models,
        state: DecodeState,
        taps: tuple[Array, ...],
        start: Int[Array, " B"],
        stop: Int[Array, " B"],
    ) -> DecodeState:
        """Adds positions `start` to `stop - 1` to the context, from the target's hidden states at `start` onwards.

        Tokens up to `stop` are committed in `state.tokens`. A row whose `stop` is its `start` keeps its context as it is.
        """
        ...


@runtime_checkable
class Variant(Drafter, Protocol):
    """A drafter in rounds of one kind."""

    @property
    def expected_acceptance(self) -> tuple[float, ...]:
        """The share of each draft that is accepted where those before it were, as training measured; empty if nobody did."""
        ...

    @property
    def may_be_idle(self) -> bool:
        """True if a round without any proposal is run as a plain step of one row."""
        ...

    def params_for(self, models: Models) -> Models:
        """The parameters that its rounds read: every array that a dispatch hands over takes time."""
        ...

    def open(self, target: Target, models: Models, state: DecodeState) -> DecodeState:
        """The state as rounds may begin with it: with a context that is complete."""
        ...

    def propose(self, target: Target, models: Models, state: DecodeState) -> Proposal:
        """Drafts what follows the known token."""
        ...


class OneKind:
    """Base of drafters whose rounds are all of one kind, and whose context is complete after each."""

    @property
    def expected_acceptance(self) -> tuple[float, ...]:
        return ()

    @property
    def choices(self) -> tuple[Choice | None, ...]:
        return (None,)

    @property
    def contexts(self) -> tuple[str, ...]:
        return ()

    def turn(self, choice: Choice | None) -> Any:
        if choice is not None:
            raise ValueError(f"expected rounds of the one kind that there is, found {choice}")
        return self

    def params_for(self, models: Models) -> Models:
        return models

    def on_prefill(self, context: Any, start: Int[Array, " B"], admitted: Bool[Array, " B"]) -> Any:
        return context

    def open(self, target: Target, models: Models, state: DecodeState) -> DecodeState:
        return state


@runtime_checkable
class RoundChooser(Protocol):
    """Says what the next dispatch runs, and hears what came of it."""

    def follow(self, prompt: Sequence[int]) -> Any:
        """Begins to follow a request's text, on any thread; the result is kept in `TokenSequence.followed`."""
        ...

    def next(self, rows: int, most: int, hurried: bool, left: int) -> tuple[Choice | None, int]:
        """The kind of the next rounds of so many rows, and how many of them a dispatch runs.

        Args:
            most: rounds that a dispatch may have.
            hurried: whether somebody waits for its end.
            left: tokens that the one with the most has still to get.
        """
        ...

    def under_masks(self, rows: int, choice: Choice | None, most: int, hurried: bool) -> int:
        """How many rounds of a kind, under masks that the device makes, a dispatch runs; arguments as of `next`."""
        ...

    def observe(
        self,
        sent: "SentRounds",
        infos: StepInfo,
        sequences: Sequence["TokenSequence"],
        heard: Sequence[int],
        began: float,
        ended: float,
    ) -> None:
        """Takes in what came of a dispatch.

        Args:
            sequences: whose rows it ran, in their order.
            heard: how many tokens each of them had before.
            began, ended: when somebody began to wait for it, and had it, by `time.perf_counter()`.
        """
        ...
