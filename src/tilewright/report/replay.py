"""The replay page: a text token by token as speculative decoding made it, beside plain decoding on the same clock."""

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
        id: in the target's vocabulary.
        text: what it adds to the text, possibly nothing: half of a character, an end of sequence.
        probability: what the target gave it in its place, 0 to 1; None where that is not known.
        margin: the target's largest logit less its second largest in that place; None where that is not known.
    """

    id: int
    text: str
    probability: float | None = None
    margin: float | None = None


@dataclass(frozen=True)
class ReplayStep:
    """One step of plain decoding: its token, and how long it took."""

    token: ReplayToken
    seconds: float


@dataclass(frozen=True)
class ReplayRound:
    """One draft and one verification.

    Attributes:
        seconds: how long the round took.
        drafted: the proposals, without the known token that the block begins with; empty where nothing was proposed.
        accepted: how many of them the target accepted.
        emitted: what the round added to the text: the accepted drafts, then the target's own token. Shorter only in the last
            round, if the text ended within it.
        drafter, width: whose proposals they are, "none" in a plain step, and the tokens in its block, where rounds were chosen
            as decoding went; None where all are alike.
    """

    seconds: float
    drafted: Sequence[ReplayToken]
    accepted: int
    emitted: Sequence[ReplayToken]
    drafter: str | None = None
    width: int | None = None


@dataclass(frozen=True)
class Passage:
    """A prompt and both ways of continuing it; `title` names it where there are several."""

    title: str
    prompt: str
    baseline: Sequence[ReplayStep]
    rounds: Sequence[ReplayRound]


@dataclass(frozen=True)
class Replay:
    """All that a replay page shows. Plain data: `dataclasses.asdict` of it is JSON.

    Attributes:
        title: of the page.
        model, drafter: their names.
        block_size: tokens in a block, the known one included: the most that a round can add to the text.
        passages: at least one.
        about: what else the figures depend on, in the order shown: chip, dtype, kernels, sampling settings, versions, date.

    Raises:
        ValueError: a figure cannot be, with the prompt and the round or step that it stands in.
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
    """Errors in a passage, each in words."""
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
    """Words of the player's page.

    Attributes:
        plain, fast: the two ways of making a text; `plain_rate` and `fast_rate` where their speeds stand.
        per_round: the figure of tokens over rounds.
        round: one of them.
        legend: HTML.
        denoising: whether texts are unmasked, and not written from left to right.
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

    A link may name a place in it: `FILE.html#prompt=2&round=12`.

    Raises:
        ValueError: `about` holds something that JSON cannot.
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
