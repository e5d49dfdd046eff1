"""Replay page: a text token by token as speculative decoding generated it, beside plain decoding on the same clock."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from tilewright.report.page import asset, document, facts_html


@dataclass(frozen=True)
class ReplayToken:
    """A token.

    Attributes:
        id: id in the target's vocabulary.
        text: text that the token adds; possibly empty (part of a character, end of sequence).
        probability: the target's probability of the token, 0 to 1; None if unknown.
        margin: the target's largest logit minus the second largest at this position; None if unknown.
    """

    id: int
    text: str
    probability: float | None = None
    margin: float | None = None


@dataclass(frozen=True)
class ReplayStep:
    """One step of plain decoding: its token and its time."""

    token: ReplayToken
    seconds: float


@dataclass(frozen=True)
class ReplayRound:
    """One draft and one verification.

    Attributes:
        seconds: time of the round.
        drafted: drafted tokens, without the last committed token at the start of the block; empty without drafts.
        accepted: number of accepted drafts.
        emitted: tokens added to the text: the accepted drafts, then the target's own token. The last round may be cut short by
            the end of the text.
        drafter, width: drafter ("none" for a plain step) and tokens in the block, if rounds are chosen adaptively; None if all
            rounds are alike.
    """

    seconds: float
    drafted: Sequence[ReplayToken]
    accepted: int
    emitted: Sequence[ReplayToken]
    drafter: str | None = None
    width: int | None = None


@dataclass(frozen=True)
class Passage:
    """A prompt continued in both ways; `title` names the passage if there are several."""

    title: str
    prompt: str
    baseline: Sequence[ReplayStep]
    rounds: Sequence[ReplayRound]


@dataclass(frozen=True)
class Replay:
    """Data of a replay page. Plain data: `dataclasses.asdict` gives JSON.

    Attributes:
        title: title of the page.
        model, drafter: their names.
        block_size: tokens in a block, including the last committed token: the maximum that a round can add to the text.
        passages: at least one passage.
        about: other settings of the figures in display order: chip, dtype, kernels, sampling, versions, date.

    Raises:
        ValueError: A figure is impossible. The message names the prompt and the round or step.
    """

    title: str
    model: str
    drafter: str
    block_size: int
    passages: Sequence[Passage]
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"expected a block size of at least 1, found {self.block_size}")
        if not self.passages:
            raise ValueError("expected at least one prompt to replay, found none")
        for number, passage in enumerate(self.passages, 1):
            for problem in passage_problems(passage, self.block_size):
                raise ValueError(f"prompt {number} ({passage.title!r}), {problem}")


def passage_problems(passage: Passage, block_size: int) -> Iterator[str]:
    """Yields a message for each error in a passage."""
    if not passage.baseline or not passage.rounds:
        yield f"expected steps and rounds, found {len(passage.baseline)} steps and {len(passage.rounds)} rounds"
    for number, step in enumerate(passage.baseline, 1):
        for problem in (*seconds_problems(step.seconds), *token_problems(step.token)):
            yield f"step {number} of the baseline: {problem}"
    for number, played in enumerate(passage.rounds, 1):
        for problem in round_problems(played, block_size, last=number == len(passage.rounds)):
            yield f"round {number}: {problem}"


def round_problems(played: ReplayRound, block_size: int, last: bool) -> Iterator[str]:
    drafted = len(played.drafted)
    accepted = played.accepted
    emitted = len(played.emitted)
    yield from seconds_problems(played.seconds)
    widest = block_size if played.width is None else played.width
    if drafted >= widest:
        yield f"expected fewer drafted tokens than the block size {widest}, found {drafted}"
    if not 0 <= accepted <= drafted:
        yield f"expected from 0 to {drafted} accepted tokens, as many as were drafted, found {accepted}"
    if emitted != accepted + 1 and not (last and 1 <= emitted <= accepted):
        yield f"expected {accepted} accepted tokens and one from the target, found {emitted} emitted tokens"
    for draft, token in zip(played.drafted[:accepted], played.emitted, strict=False):
        if draft.id != token.id:
            yield f"expected accepted drafts to be emitted, found draft {draft.id} and token {token.id} in its place"
    for token in (*played.drafted, *played.emitted):
        yield from token_problems(token)


def seconds_problems(seconds: float) -> Iterator[str]:
    if not 0 < seconds < math.inf:
        yield f"expected a time above 0 seconds, found {seconds}"


def token_problems(token: ReplayToken) -> Iterator[str]:
    if token.id < 0:
        yield f"expected a token id of 0 or more, found {token.id}"
    if token.probability is not None and not 0 <= token.probability <= 1:
        yield f"token {token.id}: expected a probability from 0 to 1, found {token.probability}"
    if token.margin is not None and not 0 <= token.margin < math.inf:
        yield f"token {token.id}: expected a margin of 0 or more, found {token.margin}"


@dataclass(frozen=True)
class Words:
    """Labels of the player's page.

    Attributes:
        plain, fast: names of the two ways of generating; `plain_rate` and `fast_rate` label their speeds.
        per_round: label of tokens per round.
        round: name of one round.
        legend: HTML of the legend.
        denoising: True if texts are unmasked instead of generated from left to right.
    """

    plain: str
    fast: str
    per_round: str
    fast_rate: str
    plain_rate: str
    round: str
    legend: str
    denoising: bool = False


WORDS = Words(
    plain="Plain decoding",
    fast="Speculative decoding",
    per_round="Tokens per round, τ",
    fast_rate="Speculative",
    plain_rate="Plain",
    round="round",
    legend='<span><i class="swatch accepted"></i>accepted draft</span>'
    '<span><i class="swatch target"></i>from the target</span>'
    '<span><i class="swatch rejected"></i>rejected draft</span>',
)


def write_replay(path: str | Path, replay: Replay) -> None:
    """Writes the page as one HTML file that works offline.

    A link can name a position: `FILE.html#prompt=2&round=12`.

    Raises:
        ValueError: `about` holds values that JSON cannot represent.
    """
    lead = f"{replay.model} with {replay.drafter}, blocks of {replay.block_size}"
    facts = {"target": replay.model, "drafter": replay.drafter, "block size": replay.block_size, **replay.about}
    write_player(path, replay.title, lead, facts, WORDS, asdict(replay))


def write_player(path: str | Path, title: str, lead: str, facts: Mapping[str, Any], words: Words, data: Any) -> None:
    """Writes the player with its data, which the script reads."""
    of_one_kind = {
        "speculative_only": "hidden" if words.denoising else "",
        "denoising_only": "" if words.denoising else "hidden",
    }
    body = Template(asset("replay.html")).substitute(
        title=escape(title), lead=escape(lead), facts=facts_html(facts), **vars(words), **of_one_kind
    )
    page = document(title, body, styles=("page.css", "scripted.css", "replay.css"), scripts=("replay.js",), data=data)
    Path(path).write_text(page, encoding="utf-8")
