"""Replay page of a diffusion language model: a response step by step, in the player of `replay.py`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tilewright.report.replay import ReplayToken, Words, seconds_problems, token_problems, write_player

SPANS = {"block": "its block", "response": "the response", "whole": "everything"}
"""Names of the spans of a step, as on the page."""


@dataclass(frozen=True)
class Placed:
    """A token and its place in the response, from 0."""

    position: int
    token: ReplayToken


@dataclass(frozen=True)
class DenoisingStep:
    """One denoising step.

    Attributes:
        seconds: time of the step.
        span: computed part of the sequence, a key of `SPANS`.
        committed: tokens that replaced masks.
        salient: share of recomputed positions in each layer; empty if all positions are computed.
    """

    seconds: float
    span: str
    committed: Sequence[Placed]
    salient: Sequence[float] = ()


@dataclass(frozen=True)
class DenoisingPassage:
    """A prompt with two responses: by dense steps (`baseline`) and by the requested mode (`rounds`)."""

    title: str
    prompt: str
    baseline: Sequence[DenoisingStep]
    rounds: Sequence[DenoisingStep]


@dataclass(frozen=True)
class DenoisingReplay:
    """Data of the page. Plain data: `dataclasses.asdict` gives JSON.

    Attributes:
        title: title of the page.
        model: name of the model.
        mode: denoising mode.
        block_size: tokens in a block of the response, the maximum that a step can commit.
        passages: at least one passage.
        about: other settings of the measurement, in display order.
        kind: kind of page, for the player.

    Raises:
        ValueError: A figure is impossible. The message names the prompt and the step.
    """

    title: str
    model: str
    mode: str
    block_size: int
    passages: Sequence[DenoisingPassage]
    about: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "denoising"

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"expected a block size of at least 1, found {self.block_size}")
        if not self.passages:
            raise ValueError("expected at least one prompt to replay, found none")
        for number, passage in enumerate(self.passages, 1):
            for steps in (passage.baseline, passage.rounds):
                for problem in steps_problems(steps, self.block_size):
                    raise ValueError(f"prompt {number} ({passage.title!r}), {problem}")


def steps_problems(steps: Sequence[DenoisingStep], block_size: int) -> Iterator[str]:
    """Yields a message for each error in the steps of a response."""
    if not steps:
        yield "expected steps, found none"
    seen: set[int] = set()
    for number, step in enumerate(steps, 1):
        problems = [*seconds_problems(step.seconds)]
        if step.span not in SPANS:
            problems.append(f"expected a span among {', '.join(SPANS)}, found {step.span!r}")
        if len(step.committed) > block_size:
            problems.append(f"expected at most {block_size} committed tokens, found {len(step.committed)}")
        problems += [f"expected a salient share from 0 to 1, found {share}" for share in step.salient if not 0 <= share <= 1]
        for placed in step.committed:
            problems += token_problems(placed.token)
            if placed.position < 0 or placed.position in seen:
                problems.append(f"expected a place that was masked, found {placed.position}")
            seen.add(placed.position)
        yield from (f"step {number}: {problem}" for problem in problems)


WORDS = Words(
    plain="Dense steps",
    fast="As requested",
    per_round="Tokens a step",
    fast_rate="As requested",
    plain_rate="Dense",
    round="step",
    legend='<span><i class="swatch accepted"></i>committed in this step</span>'
    '<span><i class="t masked">▒</i>still a mask</span>'
    '<span><i class="t committed differs">x</i>not as in dense steps</span>'
    '<span><i class="swatch scale"></i>salient share, 0 to 100 %</span>',
    denoising=True,
)


def write_denoising(path: str | Path, replay: DenoisingReplay) -> None:
    """Writes the page as one HTML file that works offline. Links into the page are those of `write_replay`.

    Raises:
        ValueError: `about` holds values that JSON cannot represent.
    """
    lead = f"{replay.model}, {replay.mode} steps, blocks of {replay.block_size}"
    facts = {"model": replay.model, "mode": replay.mode, **replay.about}
    write_player(path, replay.title, lead, facts, WORDS, asdict(replay))
