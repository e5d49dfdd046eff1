"""What is asked of the engine, and what it tells in return."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, get_args, runtime_checkable

import numpy as np

from tilewright.runtime.constraints import Constraint, MaskSource
from tilewright.runtime.logprobs import MOST_ALTERNATIVES
from tilewright.runtime.output import Result
from tilewright.runtime.pooling import Pooling
from tilewright.runtime.sampling import Sampling

EndReason = Literal["eos", "stop", "length", "cancelled", "deadline", "error"]
"""Why a request ended: the end-of-sequence token, a stop string, its length limit; the client gave it up, its time was up, or
the engine failed on it."""


class Overloaded(Exception):
    """The queue is full.

    Attributes:
        retry_after_s: when it may be worth asking again.
    """

    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Stopped(Exception):
    """The engine takes no requests: it has not begun, or is ending."""


@dataclass(frozen=True)
class GenerateRequest:
    """One request, as the engine takes it.

    Attributes:
        prompt: token ids, at least one.
        sampling: what to draw, and when to stop.
        logprobs: with each token its log-probability and those of so many alternatives, from 0 to 20; None for neither. They
            are the target's, of its logits as they are: before temperature, filters and penalties.
        prompt_logprobs: the same for the prompt's tokens from the second one on; needs `logprobs`.
        deadline_s: seconds after which it is ended, waiting or not; None for never.
        constraint: what its text must be; None for anything. Log-probabilities are of the tokens that it allows. The text ends
            where the constraint is met: stop tokens do not come before (`stop_masks.py`), and stop strings do not count.
        lora: the name of the low-rank adapter that it runs with; None for the model as it is.
        pooling: the prompt's embedding is asked for, and no token: what is pooled for it. None for tokens. The prompt may fill
            the context, and its log-probabilities may be asked for, too.
    """

    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    logprobs: int | None = None
    prompt_logprobs: bool = False
    deadline_s: float | None = None
    constraint: Constraint | None = None
    lora: str | None = None
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        sampling = self.sampling
        if self.pooling not in (None, *get_args(Pooling)):
            raise ValueError(f"expected pooling to be one of {', '.join(get_args(Pooling))}, found {self.pooling!r}")
        generated_logprobs = self.logprobs is not None and not self.prompt_logprobs
        if self.pooling is not None and (generated_logprobs or self.constraint is not None):
            raise ValueError("expected neither logprobs nor a constraint with pooling, which generates no token")
        if self.constraint is not None and (sampling.ignore_eos or sampling.min_tokens):
            found = "ignore_eos" if sampling.ignore_eos else f"min_tokens {sampling.min_tokens}"
            raise ValueError(f"expected a constraint to end as it says, without ignore_eos or min_tokens, found {found}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_ALTERNATIVES:
            raise ValueError(f"expected logprobs from 0 to {MOST_ALTERNATIVES}, found {self.logprobs}")
        if self.prompt_logprobs and self.logprobs is None:
            raise ValueError("expected logprobs with prompt_logprobs, found none")
        check_deadline(self.deadline_s)


@runtime_checkable
class AnyRequest(Protocol):
    """Request to any engine, whatever model it serves."""

    @property
    def prompt(self) -> Sequence[int]: ...

    @property
    def sampling(self) -> Sampling: ...

    @property
    def logprobs(self) -> int | None: ...

    @property
    def deadline_s(self) -> float | None: ...


def check_deadline(deadline_s: float | None) -> None:
    if deadline_s is not None and not deadline_s > 0:
        raise ValueError(f"expected a deadline of more than 0 seconds, found {deadline_s}")


class TokenLogprobs(NamedTuple):
    """The target's log-probabilities at one position.

    Attributes:
        logprob: of the token that stands there.
        top: the most likely tokens with theirs, the likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class Token(NamedTuple):
    """One token that a request committed.

    Attributes:
        text: what can be shown since the token before; it may be empty, for a character may take several tokens, and what may
            turn out to begin a stop string is held back.
        drafted: a drafter had proposed it.
        logprobs: None where they were not asked for.
    """

    token: int
    text: str
    drafted: bool
    logprobs: TokenLogprobs | None = None


class Round(NamedTuple):
    """One round (a step, without a drafter) of a request.

    Attributes:
        tokens: how many it added.
        drafted, accepted: drafts that it ran, and how many of them the target agreed with.
        choice: what it did, where that was chosen: "plain", or the drafter and the block's width; else empty.
    """

    tokens: int
    drafted: int
    accepted: int
    choice: str


@dataclass(frozen=True)
class RequestOutput:
    """Tokens and rounds that one dispatch added to a request.

    Attributes:
        tokens: those that it committed, in order; none in an update that only ends the request.
        rounds: those that committed them.
        end: why the request ended; None while it goes on. Nothing comes after an update that has it.
        prompt_logprobs: of the prompt's tokens from the second one on, once, in the first update; None where nobody asked.
        error: what a client may be told of a failure; empty otherwise.
        embedding: of the prompt, float32 `[H]` of length 1, with the end of a request that asked for it; else None.
    """

    tokens: tuple[Token, ...] = ()
    rounds: tuple[Round, ...] = ()
    end: EndReason | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str = ""
    embedding: np.ndarray | None = None


Listener = Callable[[RequestOutput], None]
"""Called on the engine's thread with each update, in order; it must not block."""


@dataclass
class Times:
    """Times at which things happened to a request, by `time.monotonic()`; 0 where they did not yet."""

    asked: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0


@dataclass(eq=False)
class RequestHandle:
    """A request that the engine has taken.

    Attributes:
        number: its place in the order of arrival, from 0.
        cached_tokens: of the prompt, how many were found in the prefix cache.
        preemptions: how often it gave its pages to an older one and was computed anew.
        steps: that it took, of a model that commits many tokens over and over.
        masks: where those of its rounds came from, if it has a constraint.
        given_up: nobody waits for it any more; the engine ends it before the next dispatch.
    """

    request: AnyRequest
    number: int = 0
    times: Times = field(default_factory=Times)
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    masks: set[MaskSource] = field(default_factory=set)
    given_up: bool = False
    result: Result | None = None
    """All that came of it, once it has ended: tokens, text, acceptance lengths, drafts run and accepted, widths chosen."""


@dataclass
class EngineStats:
    """Counts of the engine since it began; a snapshot.

    Attributes:
        running, waiting: requests now.
        waiting_tokens: of their prompts.
        slots, pages, pages_used: pages that hold something for a running request; what the prefix cache alone keeps is free.
        pages_cached: pages that the prefix cache keeps and that can be given away.
        prompt_tokens, generated_tokens: of all requests.
        prefix_queries, prefix_hits: prompt tokens looked up in the prefix cache, and found.
        preemptions, rejected: requests computed anew, and turned away.
        ended: how many ended, for each reason.
        dispatches, rounds: of decoding; a round is counted once for all its rows.
        constrained_rounds: those of them that ran under masks made on the host, for the sake of one row or more.
        automaton_rounds: those that ran under masks made on the device.
        row_rounds, padding_rows: rows that rounds ran for requests, and beside them to fill a shape.
        prefill_tokens, prefill_padding: positions that prefill computed, and beside them to fill a chunk.
        drafts: rounds of a row in which something was drafted.
        drafted, accepted: drafts.
        accepted_at: of each position of a block, from the first draft on, how many were accepted.
        widths: rounds by "drafter, block width" ("plain").
        compilations: programs compiled since the engine was ready: 0, or something is wrong.
        warm_seconds: time that compiling took before; `programs` of them.
        step_age_s: since the engine last went round: with each dispatch and each piece of a prompt, and twice a second without
            any.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    slots: int = 0
    pages: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    rejected: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    dispatches: int = 0
    rounds: int = 0
    constrained_rounds: int = 0
    automaton_rounds: int = 0
    row_rounds: int = 0
    padding_rows: int = 0
    prefill_tokens: int = 0
    prefill_padding: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    widths: dict[str, int] = field(default_factory=dict)
    compilations: int = 0
    warm_seconds: float = 0.0
    programs: int = 0
    step_age_s: float = 0.0
