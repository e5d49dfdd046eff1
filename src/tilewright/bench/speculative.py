"""Measurement of `tilewright bench speculative`: the same prompts decoded with several drafters and without one."""

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
from tilewright.llm.diffusion_model import DiffusionModel
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
"""Parts of a round in order: drafting; the target's pass over the block; acceptance and extension of the drafter's context."""


@dataclass
class DatasetPrompts:
    """Prompts of one dataset as token ids, one for each turn that fits.

    Attributes:
        categories: category of each prompt.
        skipped: number of turns that do not fit the model's context, and of the turns after them.
    """

    name: str
    prompts: list[list[int]] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)
    skipped: int = 0


def build_prompts(
    lm: LanguageModel,
    name: str,
    examples: Sequence[Example],
    template: ChatTemplate | None,
    sampling: Sampling,
    on_answer: Callable[[], None] = lambda: None,
) -> DatasetPrompts:
    """Builds the prompts of a dataset. A later turn follows plain decoding's answer to the previous turn."""
    dataset = DatasetPrompts(name)
    room = lm.target.max_position_embeddings - sampling.max_new_tokens
    for example in examples:
        answers: list[str] = []
        for turn in range(len(example.turns)):
            text = prompt(example, answers, template, NOT_THINKING)
            tokens = encoded(lm, text, template)
            if len(tokens) > room:
                dataset.skipped += len(example.turns) - turn
                break
            dataset.prompts.append(tokens)
            dataset.categories.append(example.category)
            if turn + 1 < len(example.turns):
                answers.append(lm.generate([tokens], sampling, speculative=False)[0].text)
        on_answer()
    return dataset


def encoded(lm: LanguageModel | DiffusionModel | Model, text: str, template: ChatTemplate | None) -> list[int]:
    """Returns the tokens of a prompt. A rendered chat template already contains its special tokens."""
    return lm.encode(text if template is None else encode(lm.tokenizer, text, add_special_tokens=False))


def measure(
    variants: Mapping[str, LanguageModel],
    dataset: DatasetPrompts,
    sampling: Sampling,
    batch_size: int,
    repetitions: int,
    on_run: Callable[[], None] = lambda: None,
) -> list[DecodingRun]:
    """Decodes a dataset in every variant, in alternation; the variant named `BASELINE` without a drafter.

    Args:
        on_run: called `repetitions + 2` times for each variant: after every run, the first of which is not timed, and at the
            end.

    Returns:
        A run for each variant.
    """
    batches = [dataset.prompts[i : i + batch_size] for i in range(0, len(dataset.prompts), batch_size)]
    for name, lm in variants.items():
        streams = [lm.start(batch, sampling, name != BASELINE) for batch in batches]
        warm((stream.engine.decoding.programs, key) for stream in streams for key in stream.keys)
    about: dict[str, Any] = {"dataset": dataset.name, "categories": dataset.categories, "skipped": dataset.skipped}
    runs = []
    for run in decode_in_turns(variants, batches, sampling, repetitions, on_run):
        lm = variants[run.drafter]
        drafter = None if run.drafter == BASELINE else lm.drafter
        # A team's rounds differ, so there is no single breakdown.
        variant = None if drafter is None or isinstance(drafter, Team) else drafter.variant(None)
        seconds = None if variant is None else part_seconds(lm, variant, batches[0], sampling)
        runs.append(replace(run, **about, batch_size=batch_size, part_seconds=seconds))
        on_run()
    return runs


def part_seconds(
    lm: LanguageModel, drafter: Variant, prompts: Sequence[Sequence[int]], sampling: Sampling, repetitions: int = 30
) -> dict[str, float]:
    """Returns the seconds that each of `PARTS` takes in a drafting round after the given prompts.

    A part's time is the time of the round up to the part's end minus the time up to its start. Each prefix of the round is a
    separate program, and the fastest of `repetitions` alternating runs counts, since disturbances only add time. The parts add
    up to the whole round without its dispatch cost (in decoding, one dispatch runs many rounds). A very short part may come out
    below 0.
    """
    with lm.start(prompts, sampling) as stream:
        stream.prefill()

        def timed(part: str | None) -> float:
            start = time.perf_counter()
            jax.block_until_ready(stream.apply(partial(round_up_to, part, drafter, lm.model.target)))
            return time.perf_counter() - start

        timings = alternate({part: partial(timed, part) for part in (None, *PARTS)}, repetitions, warm=True)
    ends = [min(seconds) for seconds in timings.values()]
    return {part: after - before for part, before, after in zip(PARTS, ends, ends[1:], strict=False)}


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def round_up_to(
    part: str | None, drafter: Variant, target: Target, models: Models, state: DecodeState, slots: Array, table: Array
) -> tuple[DecodeState, Any]:
    """Runs a round of some slots up to the end of a part; None runs nothing. DONATES state. The returned state is from before
    the round."""
    some = rows_of(state, slots, table)
    if part is None:
        return state, some.last_position + 1
    proposal = drafter.propose(target, models, some)
    if part == "draft":
        return state, proposal
    if part == "verify":
        verified = verify(target, models.target, some, proposal.block, drafter.tap_layers)
        return with_rows(state, verified.state, slots), (verified.tokens, verified.taps)
    after, info = verify_and_extend(drafter, target, models, some, proposal)
    return with_rows(state, replace(after, last_position=some.last_position, done=some.done), slots), info
