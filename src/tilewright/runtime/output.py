"""The text of one request on the host: from tokens to characters, stop strings, ends, and what becomes of it."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from tilewright.models.tokenizer import StreamDecoder
from tilewright.runtime.interfaces import Choice
from tilewright.runtime.sampling import Sampling

FinishReason = Literal["eos", "stop", "length", "interrupted"]


@dataclass(frozen=True)
class Piece:
    """The text that one token added to a row; `drafted` if the drafter had proposed it. A token may add no text yet."""

    row: int
    text: str
    token: int
    drafted: bool


@dataclass(frozen=True)
class Result:
    """Generated text and tokens of one request.

    Attributes:
        text: the generated text, without the stop string or the token that ended it, unless `include_stop` asks for them.
        tokens: the generated tokens, with the one that ended them if one came; at a stop string they end with the token that
            completed it.
        acceptance_lengths: how many tokens each round (each step, without a drafter) added to `tokens`. A round's last token is
            the target's, those before it are accepted drafts; only the last round may be cut short, by an end.
        drafted, accepted: how many drafts each round ran and how many of them the target agreed with, in a round that was cut
            short also those behind the end. Zeros without a drafter.
        finish_reason: "eos", "stop", "length" or "interrupted".
        prompt_tokens: length of the prompt.
        seed: what it was drawn with; None where nothing was drawn and no seed was given.
        choices: what each round did, where that was chosen as decoding went; else empty.
        from_ngrams: true for each round whose drafts n-grams made, where a model drafts the other rounds.
        stop_reason: the stop string, or the token of `stop_token_ids`, at which it ended; None for any other end.
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

    @staticmethod
    def joined(parts: Sequence["Generation"]) -> "Generation":
        """Several as one."""
        return Generation(
            [result for part in parts for result in part],
            sum(part.prefill_seconds for part in parts),
            sum(part.decode_seconds for part in parts),
            sum(part.rounds for part in parts),
        )


@dataclass
class OutputProcessor:
    """One request on the host: what it asks for, and its text so far.

    Attributes:
        index: what its pieces are numbered with.
        sampling: with the seed that it draws with.
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
        """Takes the tokens that a round committed, up to a stop string. Returns what they add to the text."""
        pieces = []
        self.from_ngrams.append(from_ngrams)
        if choice is not None:
            self.choices.append(choice)
        self.drafted.append(drafted)
        self.accepted.append(accepted)
        taken = 0
        for slot, token in enumerate(tokens):
            self.tokens.append(token)
            taken += 1
            self.add_text(token, eos)
            pieces.append(Piece(self.index, self.newly_shown(), token, drafted=slot < accepted))
            if self.finish_reason is not None:
                break
        self.acceptance_lengths.append(taken)
        return pieces

    def add_text(self, token: int, eos: Sequence[int]) -> None:
        """Adds a token's text, and sees whether the text ends there."""
        asked = self.sampling
        before = len(self.text)
        if token in eos and not asked.ignore_eos:
            self.finish_reason = "eos"
        elif token in asked.stop_token_ids:
            self.finish_reason = "stop"
            self.stop_reason = token
        if self.finish_reason is None or asked.include_stop:
            self.text += self.decoder.push([token])
        if self.finish_reason is None and len(self.prompt) + len(self.tokens) >= self.end:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            self.text += self.decoder.flush()
        at = find_stop(self.text, asked.stop, before) if len(self.tokens) > asked.min_tokens else None
        if at is not None:
            found = next(stop for stop in asked.stop if place_of(self.text, stop, before) == at)
            self.text = self.text[: at + len(found) if asked.include_stop else at]
            self.finish_reason = "stop"
            self.stop_reason = found

    @property
    def end(self) -> int:
        return len(self.prompt) + self.sampling.max_new_tokens

    def newly_shown(self) -> str:
        """Text that can be shown now: all of it, less a tail that may turn out to begin a stop string."""
        shows_stop = self.finish_reason is not None or self.sampling.include_stop
        hold = 0 if shows_stop else beginning_of_stop(self.text, self.sampling.stop)
        until = max(len(self.text) - hold, self.shown)
        text = self.text[self.shown : until]
        self.shown = until
        return text

    def result(self) -> Result:
        # A copy is flushed: decoding may go on after this.
        text = self.text if self.finish_reason else self.text + copy(self.decoder).flush()
        reason = self.finish_reason or "interrupted"
        rounds = (list(self.acceptance_lengths), reason, len(self.prompt), list(self.drafted), list(self.accepted))
        return Result(
            text, list(self.tokens), *rounds, self.sampling.seed, list(self.choices), self.stop_reason, list(self.from_ngrams)
        )


def find_stop(text: str, stops: Sequence[str], searched: int = 0) -> int | None:
    """Index at which the earliest stop string begins; None if there is none.

    Args:
        searched: none that ends within so many of the first characters counts.
    """
    return min((at for stop in stops if (at := place_of(text, stop, searched)) >= 0), default=None)


def place_of(text: str, stop: str, searched: int) -> int:
    """Index at which a stop string begins that ends behind the first `searched` characters; -1 if it is not there."""
    return text.find(stop, max(0, searched - len(stop) + 1))


def beginning_of_stop(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning of a stop string."""
    if not stops:
        return 0
    ordered = in_order(tuple(stops))
    longest = min(max(map(len, stops)) - 1, len(text))
    for length in range(longest, 0, -1):
        end = text[len(text) - length :]
        at = bisect_right(ordered, end)  # those that begin with it, and go on, come right behind it
        if at < len(ordered) and ordered[at].startswith(end):
            return length
    return 0


@lru_cache
def in_order(stops: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(stops))
