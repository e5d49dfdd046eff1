"""Requests to the engine, and the outputs that it gives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import numpy as np

from tilewright.runtime.constraints import Constraint, MaskSource
from tilewright.runtime.logprobs import MOST_ALTERNATIVES
from tilewright.runtime.output import Result
from tilewright.runtime.pooling import Pooling
from tilewright.runtime.sampling import Sampling

EndReason = Literal["eos", "stop", "length", "cancelled", "deadline", "error"]
"""Reason for the end of a request: an end-of-sequence token, a stop string or token, the length limit, a cancellation, the
deadline, or a failure of the engine."""


class Overloaded(Exception):
    """The queue is full.

    Attributes:
        retry_after_s: seconds after which a retry may succeed.
    """

    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Stopped(Exception):
    """The engine accepts no requests: it has not started, or is stopping."""


@dataclass(frozen=True)
class GenerateRequest:
    """Request for tokens, or for an embedding.

    Attributes:
        prompt: token ids, at least one.
        sampling: sampling options, length limit and stop conditions.
        logprobs: number of alternatives, from 0 to 20, whose log-probabilities come with those of each token; None for no
            log-probabilities. They are computed from the target's raw logits, before temperature, filters and penalties.
        prompt_logprobs: also returns log-probabilities of the prompt's tokens from the second one on; needs `logprobs`.
        deadline_s: seconds after which the request is ended, waiting or running; None for no deadline.
        constraint: rule that the text must follow; None for free text. Log-probabilities are those of the allowed tokens. The
            text ends where the constraint is met: stop tokens are masked before (`stop_masks.py`), stop strings are ignored.
        lora: name of the low-rank adapter; None for the base model.
        pooling: returns an embedding of the prompt, pooled in this way, and no tokens; None for tokens. The prompt may fill
            the context. `prompt_logprobs` may be combined with pooling.
        denoising: for a model whose blocks are denoised, their options (`diffusion.blocks.BlockDenoising`); None for the
            model's defaults.
    """

    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    logprobs: int | None = None
    prompt_logprobs: bool = False
    deadline_s: float | None = None
    constraint: Constraint | None = None
    lora: str | None = None
    pooling: Pooling | None = None
    denoising: Any = None

    def __post_init__(self) -> None:
        sampling = self.sampling
        if self.pooling not in (None, *get_args(Pooling)):
            raise ValueError(f"expected pooling to be one of {', '.join(get_args(Pooling))}, found {self.pooling!r}")
        generated_logprobs = self.logprobs is not None and not self.prompt_logprobs
        if self.pooling is not None and (generated_logprobs or self.constraint is not None):
            raise ValueError("expected neither logprobs nor a constraint with pooling, which generates no tokens")
        if self.constraint is not None and (sampling.ignore_eos or sampling.min_tokens):
            found = "ignore_eos" if sampling.ignore_eos else f"min_tokens {sampling.min_tokens}"
            raise ValueError(f"expected neither ignore_eos nor min_tokens with a constraint, found {found}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_ALTERNATIVES:
            raise ValueError(f"expected logprobs from 0 to {MOST_ALTERNATIVES}, found {self.logprobs}")
        if self.prompt_logprobs and self.logprobs is None:
            raise ValueError("expected logprobs with prompt_logprobs, found none")
        check_deadline(self.deadline_s)


@runtime_checkable
class AnyRequest(Protocol):
    """Interface of a request to any engine."""

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
        logprob: log-probability of the token at the position.
        top: the most likely tokens and their log-probabilities, the most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class Token(NamedTuple):
    """Token that a request committed.

    Attributes:
        text: text that can be shown since the token before. It may be empty: a character may take several tokens, and a
            possible beginning of a stop string is held back.
        drafted: whether a drafter proposed the token.
        logprobs: None if the request wants none.
    """

    token: int
    text: str
    drafted: bool
    logprobs: TokenLogprobs | None = None


class Round(NamedTuple):
    """Round (or step, without a drafter) of a request.

    Attributes:
        tokens: number of tokens that it added.
        drafted, accepted: number of drafts that it ran, and number of these that the target agreed with.
        choice: "plain", or the drafter and the block's width; empty if all rounds are alike.
    """

    tokens: int
    drafted: int
    accepted: int
    choice: str


@dataclass(frozen=True)
class RequestOutput:
    """Tokens and rounds that one dispatch added to a request.

    Attributes:
        tokens: committed tokens, in order; none in an update that only ends the request.
        rounds: the rounds that committed them.
        end: reason for the end; None while the request runs. An update with an end is the last one.
        prompt_logprobs: log-probabilities of the prompt's tokens from the second one on, once, in the first update; None if the
            request wants none.
        error: error message that a client may see; empty without a failure.
        embedding: embedding of the prompt, float32 `[H]` of length 1, in the last update of a request with pooling; else None.
    """

    tokens: tuple[Token, ...] = ()
    rounds: tuple[Round, ...] = ()
    end: EndReason | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str = ""
    embedding: np.ndarray | None = None


Listener = Callable[[RequestOutput], None]
"""Callback that the engine's thread calls with each update, in order; it must not block."""


@dataclass
class Times:
    """Timestamps of a request, by `time.monotonic()`; 0 until the event happens."""

    submitted_at: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0


@dataclass(eq=False)
class RequestHandle:
    """Request that the engine has accepted.

    Attributes:
        number: position in the order of arrival, from 0.
        cached_tokens: number of prompt tokens found in the prefix cache.
        preemptions: how often the request lost its pages to an older one and was computed again.
        steps: number of denoising steps that the request took.
        masks: sources of the masks of its rounds, if it has a constraint.
        cancelled: whether it was cancelled; the engine ends it before the next dispatch.
    """

    request: AnyRequest
    number: int = 0
    times: Times = field(default_factory=Times)
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    masks: set[MaskSource] = field(default_factory=set)
    cancelled: bool = False
    result: Result | None = None
    """Result once the request has ended: tokens, text, acceptance lengths, numbers of drafts, and widths."""


@dataclass
class EngineStats:
    """Counters of the engine since it started; a snapshot.

    Attributes:
        running, waiting: number of requests now.
        waiting_tokens: prompt tokens of the waiting requests.
        slots, pages: sizes of the engine.
        pages_used: pages that running requests hold; pages that only the prefix cache keeps count as free.
        pages_cached: evictable pages of the prefix cache.
        prompt_tokens, generated_tokens: of all requests.
        prefix_queries, prefix_hits: prompt tokens looked up in the prefix cache, and found there.
        preemptions: number of preempted requests.
        rejected: number of requests refused because the queue was full.
        ended: number of ended requests, for each reason.
        dispatches, rounds: dispatches and rounds of decoding; a round counts once for all its rows.
        constrained_rounds: rounds under masks that the host made, for at least one row.
        automaton_rounds: rounds under masks that the device made.
        row_rounds, padding_rows: rows that rounds ran for requests, and rows that filled a shape.
        prefill_tokens, prefill_padding: positions that prefill computed for prompts, and positions that filled a chunk.
        drafts: row rounds with at least one draft.
        drafted, accepted: number of drafts, and of accepted drafts.
        accepted_at: number of accepted drafts at each position of a block, from the first draft on.
        widths: number of rounds of each "drafter, block width" (or "plain").
        compilations: programs compiled since the engine was ready; anything but 0 is a fault.
        warm_seconds: time of compiling programs before the engine was ready.
        programs, programs_declared: number of programs that exist, and of all that serving may use.
        step_age_s: seconds since the engine's last step. A step runs with each dispatch and each prefill chunk, and twice a
            second when idle.
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
    programs_declared: int = 0
    step_age_s: float = 0.0
