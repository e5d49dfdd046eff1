"""Interfaces of drafters, and of choosers of rounds, which plug into the runtime.

The runtime knows drafters by these protocols only. A drafter is a frozen, hashable description. Its arrays are in
`Models.drafter`, and its context of each row is in `DecodeState.draft_cache`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Int
from rich.console import Console

from tilewright.runtime import trees
from tilewright.runtime.layout import Layout
from tilewright.runtime.state import DecodeState, Models, StepInfo, Target

if TYPE_CHECKING:
    from tilewright.runtime.runner import SentRounds
    from tilewright.runtime.scheduler import TokenSequence


@dataclass(frozen=True, order=True)
class Choice:
    """Kind of a round: its drafter and its width.

    Attributes:
        drafter: the drafter's name; "none" for plain decoding.
        width: the most tokens that a round commits: those of its block, the last committed token included, or of the longest
            path of its tree; 1 for plain decoding.
        nodes: nodes of its tree, the last committed token included; 0 for a chain.
    """

    drafter: str
    width: int
    nodes: int = 0

    @property
    def verified(self) -> int:
        """Tokens of a row that the target runs in a round."""
        return self.nodes or self.width

    @property
    def kind(self) -> str:
        """The drafter's name, and for a tree its number of nodes: blocks of all widths are of one kind."""
        return f"{self.drafter} tree {self.nodes}" if self.nodes else self.drafter

    def differs_in_width(self, other: "Choice") -> bool:
        """True for chains of one drafter, and for trees of one drafter."""
        return self.drafter == other.drafter and bool(self.nodes) == bool(other.nodes)

    def __str__(self) -> str:
        if self == PLAIN:
            return "plain"
        return f"{self.drafter}, tree {self.nodes}" if self.nodes else f"{self.drafter}, block {self.width}"


PLAIN = Choice("none", 1)


class Proposal(NamedTuple):
    """Drafts for every row.

    Attributes:
        block: the last committed token, then the drafts, `[B, T]`; entries behind the last draft are run and never accepted.
        drafts: number of drafts of each row, from 0 to T - 1, `[B]`.
        from_ngrams: true for a row whose drafts n-grams made in place of a model, bool `[B]`; None if n-grams make none.
    """

    block: Array
    drafts: Array
    from_ngrams: Array | None = None


@runtime_checkable
class Drafter(Protocol):
    """Proposes blocks, and extends its context by the accepted tokens.

    A drafter with arrays also has a field `ops`: the operations that the arrays were prepared for.
    """

    @property
    def block_size(self) -> int:
        """Tokens in its widest block, the last committed token included."""
        ...

    @property
    def nodes(self) -> int:
        """Nodes of its largest tree, the last committed token included; 0 if it drafts chains only."""
        ...

    @property
    def name(self) -> str:
        """The drafter's kind."""
        ...

    @property
    def dtype(self) -> str | None:
        """Dtype of its weights and activations; None if it has no weights."""
        ...

    @property
    def declared(self) -> Any:
        """Declaration of its arrays (`models.params.ArraySpec`); None if it has none."""
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
    def beyond_windows(self) -> int:
        """Positions before the windows of the target's own queries that it reads in the target's cache."""
        ...

    @property
    def choices(self) -> tuple[Choice | None, ...]:
        """Kinds of rounds, each with a program of its own; a single None if all rounds are alike."""
        ...

    @property
    def contexts(self) -> tuple[str, ...]:
        """Names of contexts that may lag behind the committed tokens, since not every round extends them."""
        ...

    def variant(self, choice: Choice | None) -> "Variant":
        """Returns the drafter of one kind of rounds. Raises a `ValueError` for an unknown kind."""
        ...

    def allocate(self, layout: Layout, target: Target, dtype: DTypeLike) -> Any:
        """Returns an empty context for the rows of a layout."""
        ...

    def on_prefill(self, context: Any, start: Int[Array, " B"], admitted: Bool[Array, " B"]) -> Any:
        """Prepares the context of the `admitted` rows for a prefill from position `start` on."""
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
        """Adds positions `start` to `stop - 1` to the context, from the target's hidden states from `start` on.

        Tokens up to `stop` are committed in `state.tokens`. A row whose `stop` equals its `start` keeps its context.
        """
        ...


@runtime_checkable
class Variant(Drafter, Protocol):
    """Drafter in rounds of one kind."""

    @property
    def branches(self) -> bool:
        """True if the drafter can draft trees."""
        ...

    @property
    def expected_acceptance(self) -> tuple[float, ...]:
        """Acceptance rate of each draft behind accepted ones, as measured in training; empty if unknown."""
        ...

    @property
    def may_be_idle(self) -> bool:
        """True if a round without any draft runs as a plain step of one token a row."""
        ...

    def params_for(self, models: Models) -> Models:
        """Parameters that its rounds read. Every array that a dispatch passes costs time."""
        ...

    def complete_context(self, target: Target, models: Models, state: DecodeState) -> DecodeState:
        """Completes the context, so that rounds may begin with the state."""
        ...

    def propose(self, target: Target, models: Models, state: DecodeState) -> Proposal:
        """Drafts the tokens behind the last committed token."""
        ...

    def propose_tree(self, target: Target, models: Models, state: DecodeState) -> trees.Proposal:
        """Drafts trees of `nodes` nodes behind the last committed token; only called if `nodes` is not 0."""
        ...


class OneKind:
    """Base of drafters whose rounds are all of one kind and leave a complete context.

    Attributes:
        branches: True if the drafter can draft trees.
        nodes: nodes of its trees; 0 for chains.
    """

    branches = False
    nodes = 0
    beyond_windows = 0

    @property
    def expected_acceptance(self) -> tuple[float, ...]:
        return ()

    @property
    def choices(self) -> tuple[Choice | None, ...]:
        return (None,)

    @property
    def contexts(self) -> tuple[str, ...]:
        return ()

    def variant(self, choice: Choice | None) -> Any:
        if choice is not None:
            raise ValueError(f"expected no kind of round, since this drafter has only one, found {choice}")
        return self

    def params_for(self, models: Models) -> Models:
        return models

    def on_prefill(self, context: Any, start: Int[Array, " B"], admitted: Bool[Array, " B"]) -> Any:
        return context

    def complete_context(self, target: Target, models: Models, state: DecodeState) -> DecodeState:
        return state

    def propose_tree(self, target: Target, models: Models, state: DecodeState) -> trees.Proposal:
        raise ValueError("expected a drafter that drafts trees, found one that drafts chains only")


@runtime_checkable
class RoundChooser(Protocol):
    """Chooses the rounds of the next dispatch, and observes the results."""

    def follow(self, prompt: Sequence[int]) -> Any:
        """Begins to track a request's text, on any thread; the result is kept in `TokenSequence.chooser_state`."""
        ...

    def begin_request(self, rows: int) -> None:
        """Prepares for the rounds of a new request, which is one of `rows` requests in slots."""
        ...

    def next(self, rows: int, most: int, hurried: bool, left: int) -> tuple[Choice | None, int]:
        """Returns the kind of the next rounds for a number of rows, and how many rounds the dispatch runs.

        Args:
            most: the most rounds of a dispatch.
            hurried: whether a request waits for the end of the dispatch.
            left: the most tokens that any row still generates.
        """
        ...

    def measure(self, console: Console | None) -> None:
        """Measures the costs of rounds, once all programs are compiled; without it they are learnt from dispatches."""
        ...

    def under_masks(self, rows: int, choice: Choice | None, most: int, hurried: bool) -> int:
        """Returns the number of rounds of a dispatch under masks that the device makes; arguments as for `next`."""
        ...

    def observe(
        self,
        sent: "SentRounds",
        infos: StepInfo,
        sequences: Sequence["TokenSequence"],
        tokens_before: Sequence[int],
        began: float,
        ended: float,
    ) -> None:
        """Records the result of a dispatch.

        Args:
            sequences: the sequences of its rows, in order.
            tokens_before: number of tokens that each sequence had before the dispatch.
            began, ended: when the engine began to wait for the dispatch, and received it, by `time.perf_counter()`.
        """
        ...
