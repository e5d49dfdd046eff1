"""Output processing of one request on the host: detokenising, stop strings, ends, and the result."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, Literal, TypeVar

from tilewright.models.tokenizer import StreamDecoder
from tilewright.runtime.interfaces import Choice
from tilewright.runtime.sampling import Sampling

FinishReason = Literal["eos", "stop", "length", "interrupted"]


@dataclass(frozen=True)
class Piece:
    """Text that one token added to a row; `drafted` if a drafter had proposed the token. A token may add no text yet."""

    row: int
    text: str
    token: int
    drafted: bool


@dataclass(frozen=True)
class Result:
    """Generated text and tokens of one request.

    Attributes:
        text: generated text, without the stop string or the token that ended it, unless `include_stop` is set.
        tokens: generated tokens, including a token that ended them; at a stop string they end with the token that completed the
            string.
        acceptance_lengths: number of tokens that each round (each step, without a drafter) added to `tokens`. A round's last
            token is the target's, those before it are accepted drafts. Only the last round may be cut short by an end.
        drafted, accepted: number of drafts of each round, and number of accepted ones; drafts behind an end count, too. Zeros
            without a drafter.
        finish_reason: "eos", "stop", "length" or "interrupted".
        prompt_tokens: length of the prompt.
        seed: seed of the draws; None if nothing was drawn and no seed was given.
        choices: kind of each round, if a chooser chose it; else empty.
        from_ngrams: true for each round whose drafts n-grams made in place of a model.
        stop_reason: the stop string or the token of `stop_token_ids` that ended the text; None for any other end.
        passes: number of passes (or steps) that denoised it or stored its blocks; 0 for a model that decodes token by token.
    """

    text: str
    tokens: list[int]
    acceptance_lengths: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    seed: int | None = None
    choices: list[Choice] = field(default_factory=list)
    stop_reason: int | str | None = None
    from_ngrams: list[bool] = field(default_factory=list)
    passes: int = 0

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens over passes; None for a model that decodes token by token."""
        return len(self.tokens) / self.passes if self.passes else None


AnyResult = TypeVar("AnyResult", bound=Result)


@dataclass(frozen=True)
class Generation(Generic[AnyResult]):
    """Results of one call, in the order of its prompts, with the times of the whole call.

    Attributes:
        prefill_seconds, decode_seconds: times without compilation.
        rounds: rounds (steps, without a drafter), counted once for each batch.
    """

    results: list[AnyResult]
    prefill_seconds: float
    decode_seconds: float
    rounds: int

    def __iter__(self) -> Iterator[AnyResult]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, index: int) -> AnyResult:
        return self.results[index]

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all rows per second of decoding."""
        return sum(len(r.tokens) for r in self.results) / self.decode_seconds

    @staticmethod
    def joined(parts: "Sequence[Generation[Any]]") -> "Generation[Any]":
        """Joins several generations."""
        return Generation(
            [result for part in parts for result in part],
            sum(part.prefill_seconds for part in parts),
            sum(part.decode_seconds for part in parts),
            sum(part.rounds for part in parts),
        )


@dataclass
class OutputProcessor:
    """Output of one request on the host: its options, and its text so far.

    Attributes:
        index: row number of its pieces.
        sampling: sampling options, with the seed of the draws.
    """

    index: int
    prompt: list[int]
    sampling: Sampling
    decoder: StreamDecoder
    tokens: list[int] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    from_ngrams: list[bool] = field(default_factory=list)
    text: str = ""
    shown: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def add_round(
        self,
        tokens: Sequence[int],
        drafted: int,
        accepted: int,
        eos: Sequence[int],
        choice: Choice | None = None,
        from_ngrams: bool = False,
    ) -> list[Piece]:
        """Adds the tokens that a round committed, up to an end. Returns the pieces that they add to the text."""
        pieces = []
        self.from_ngrams.append(from_ngrams)
        if choice is not None:
            self.choices.append(choice)
        self.drafted.append(drafted)
        self.accepted.append(accepted)
        count = 0
        for slot, token in enumerate(tokens):
            self.tokens.append(token)
            count += 1
            self.add_text(token, eos)
            pieces.append(Piece(self.index, self.newly_shown(), token, drafted=slot < accepted))
            if self.finish_reason is not None:
                break
        self.acceptance_lengths.append(count)
        return pieces

    def add_text(self, token: int, eos: Sequence[int]) -> None:
        """Adds a token's text, and detects the end of the text."""
        options = self.sampling
        before = len(self.text)
        if token in eos and not options.ignore_eos:
            self.finish_reason = "eos"
        elif token in options.stop_token_ids:
            self.finish_reason = "stop"
            self.stop_reason = token
        if self.finish_reason is None or options.include_stop:
            self.text += self.decoder.push([token])
        if self.finish_reason is None and len(self.prompt) + len(self.tokens) >= self.end:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            self.text += self.decoder.flush()
        at = find_stop(self.text, options.stop, before) if len(self.tokens) > options.min_tokens else None
        if at is not None:
            found = next(stop for stop in options.stop if place_of(self.text, stop, before) == at)
            self.text = self.text[: at + len(found) if options.include_stop else at]
            self.finish_reason = "stop"
            self.stop_reason = found

    @property
    def end(self) -> int:
        return len(self.prompt) + self.sampling.max_new_tokens

    def newly_shown(self) -> str:
        """Returns the text that can be shown now: the new text without a possible beginning of a stop string at its end."""
        shows_stop = self.finish_reason is not None or self.sampling.include_stop
        hold = 0 if shows_stop else beginning_of_stop(self.text, self.sampling.stop)
        until = max(len(self.text) - hold, self.shown)
        text = self.text[self.shown : until]
        self.shown = until
        return text

    def result(self) -> Result:
        # Flushes a copy, since decoding may go on.
        text = self.text if self.finish_reason else self.text + copy(self.decoder).flush()
        reason = self.finish_reason or "interrupted"
        rounds = (list(self.acceptance_lengths), reason, len(self.prompt), list(self.drafted), list(self.accepted))
        return Result(
            text, list(self.tokens), *rounds, self.sampling.seed, list(self.choices), self.stop_reason, list(self.from_ngrams)
        )


def find_stop(text: str, stops: Sequence[str], searched: int = 0) -> int | None:
    """Returns the index of the earliest stop string; None if there is none.

    Args:
        searched: number of first characters; stop strings that end within them are ignored.
    """
    return min((at for stop in stops if (at := place_of(text, stop, searched)) >= 0), default=None)


def place_of(text: str, stop: str, searched: int) -> int:
    """Returns the index of a stop string that ends behind the first `searched` characters; -1 if there is none."""
    return text.find(stop, max(0, searched - len(stop) + 1))


def beginning_of_stop(text: str, stops: Sequence[str]) -> int:
    """Returns the length of the longest end of `text` that is the beginning of a stop string."""
    if not stops:
        return 0
    ordered = sorted_stops(tuple(stops))
    longest = min(max(map(len, stops)) - 1, len(text))
    for length in range(longest, 0, -1):
        end = text[len(text) - length :]
        at = bisect_right(ordered, end)  # longer strings that begin with `end` follow at once
        if at < len(ordered) and ordered[at].startswith(end):
            return length
    return 0


@lru_cache
def sorted_stops(stops: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(stops))
