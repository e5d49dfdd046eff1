"""`tilewright bench speculative`: the same prompts decoded by several drafters and by none, in one run."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
from jax import Array

from tilewright.bench.compare import decode_in_turns
from tilewright.bench.datasets import NOT_THINKING, Example, prompt
from tilewright.bench.speculative_figures import BASELINE, DecodingRun
from tilewright.compiled.store import warm
from tilewright.compiled.timing import alternate
from tilewright.llm.language_model import LanguageModel
from tilewright.models.chat import ChatTemplate
from tilewright.models.tokenizer import encode
from tilewright.runtime.interfaces import Variant
from tilewright.runtime.layout import rows_of, with_rows
from tilewright.runtime.model import Model
from tilewright.runtime.rounds import verify_and_extend
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.state import DecodeState, Models, Target, verify
from tilewright.speculation.team import Team

PARTS = ("draft", "verify", "other")
"""The parts of a round, in order: drafting; the target's pass over the block; accepting and extending the drafter's context."""


@dataclass
class DatasetPrompts:
    """The prompts of one dataset, as tokens, one for each turn that fits.

    Attributes:
        categories: of each prompt.
        skipped: turns that do not fit the model's context, and the turns after them.
    """

    name: str
    prompts: list[list[int]] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)
    skipped: int = 0


def ask(
    lm: LanguageModel,
    name: str,
    examples: Sequence[Example],
    template: ChatTemplate | None,
    sampling: Sampling,
    on_answer: Callable[[], None] = lambda: None,
) -> DatasetPrompts:
    """Makes the prompts of a dataset. A turn after the first is asked after what plain decoding answered to the one before."""
    asked = DatasetPrompts(name)
    room = lm.target.max_position_embeddings - sampling.max_new_tokens
    for example in examples:
        answers: list[str] = []
        for turn in range(len(example.turns)):
            text = prompt(example, answers, template, NOT_THINKING)
            tokens = encoded(lm, text, template)
            if len(tokens) > room:
                asked.skipped += len(example.turns) - turn
                break
            asked.prompts.append(tokens)
            asked.categories.append(example.category)
            if turn + 1 < len(example.turns):
                answers.append(lm.generate([tokens], sampling, speculative=False)[0].text)
        on_answer()
    return asked


def encoded(lm: LanguageModel | Model, text: str, template: ChatTemplate | None) -> list[int]:
    """The tokens of a prompt. What a chat template made holds its special tokens already."""
    return lm.encode(text if template is None else encode(lm.tokenizer, text, add_special_tokens=False))


def measure(
    ways: Mapping[str, LanguageModel],
    asked: DatasetPrompts,
    sampling: Sampling,
    batch_size: int,
    repetitions: int,
    on_run: Callable[[], None] = lambda: None,
) -> list[DecodingRun]:
    """Decodes a dataset every way, in turns; the way named `BASELINE` without a drafter. A run for each way.

    Args:
        on_run: called for each way `repetitions + 2` times: at every run, the first of which is not timed, and at the end.
    """
    batches = [asked.prompts[i : i + batch_size] for i in range(0, len(asked.prompts), batch_size)]
    for name, lm in ways.items():
        streams = [lm.start(batch, sampling, name != BASELINE) for batch in batches]
        warm((stream.engine.programs, key) for stream in streams for key in stream.keys)
    about: dict[str, Any] = {"dataset": asked.name, "categories": asked.categories, "skipped": asked.skipped}
    runs = []
    for run in decode_in_turns(ways, batches, sampling, repetitions, on_run):
        lm = ways[run.drafter]
        drafter = None if run.drafter == BASELINE else lm.drafter
        # Of a team there is no one round.
        alike = None if drafter is None or isinstance(drafter, Team) else drafter.turn(None)
        seconds = None if alike is None else part_seconds(lm, alike, batches[0], sampling)
        runs.append(replace(run, **about, batch_size=batch_size, part_seconds=seconds))
        on_run()
    return runs


def part_seconds(
    lm: LanguageModel, drafter: Variant, prompts: Sequence[Sequence[int]], sampling: Sampling, repetitions: int = 30
) -> dict[str, float]:
    """Seconds that each of `PARTS` takes of a round that drafts, behind the given prompts.

    A part's time is that of the round up to its end less that of the round up to its beginning, each a program of its own and
    each the fastest of `repetitions` runs in turns: what disturbs a run only makes it longer. So the parts add up to the whole
    round, less what it costs to dispatch any program, which is no part of a round: many rounds run in one dispatch. A part that
    takes next to nothing may come out below 0, by the uncertainty of both its ends.
    """
    with lm.start(prompts, sampling) as stream:
        stream.prefill()

        def timed(part: str | None) -> float:
            began = time.perf_counter()
            jax.block_until_ready(stream.apply(partial(round_up_to, part, drafter, lm.model.target)))
            return time.perf_counter() - began

        taken = alternate({part: partial(timed, part) for part in (None, *PARTS)}, repetitions, warm=True)
    ends = [min(seconds) for seconds in taken.values()]
    return {part: after - before for part, before, after in zip(PARTS, ends, ends[1:], strict=False)}


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def round_up_to(
    part: str | None, drafter: Variant, target: Target, models: Models, state: DecodeState, slots: Array, table: Array
) -> tuple[DecodeState, Any]:
    """A round of some slots up to the end of a part; None is its beginning. DONATES state; in the one returned the round is
    still to come."""
    some = rows_of(state, slots, table)
    if part is None:
        return state, some.known + 1
    proposal = drafter.propose(target, models, some)
    if part == "draft":
        return state, proposal
    if part == "verify":
        verified = verify(target, models.target, some, proposal.block, drafter.tap_layers)
        return with_rows(state, verified.state, slots), (verified.tokens, verified.taps)
    after, info = verify_and_extend(drafter, target, models, some, proposal)
    return with_rows(state, replace(after, known=some.known, done=some.done), slots), info
