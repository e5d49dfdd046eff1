"""Decodes the same prompts with several drafters and without one, in alternation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tilewright.bench.speculative_figures import BASELINE, DecodingRun, Row, benchmark_row
from tilewright.compiled.machine import chip_name
from tilewright.compiled.timing import REPETITIONS, alternate
from tilewright.llm.acceptance import num_spec_tokens
from tilewright.llm.chosen import chosen_figures
from tilewright.llm.language_model import Generation, LanguageModel
from tilewright.runtime.sampling import Sampling


def decode_in_turns(
    variants: Mapping[str, LanguageModel],
    batches: Sequence[Sequence[str | Sequence[int]]],
    sampling: Sampling | Sequence[Sampling],
    repetitions: int = REPETITIONS,
    on_run: Callable[[], None] = lambda: None,
) -> list[DecodingRun]:
    """Decodes batches of prompts in every variant, in alternation; the variant named `BASELINE` without a drafter.

    Where rounds are chosen adaptively, all promising programs are compiled first, however long that takes.

    Args:
        sampling: one for all prompts, or one for each prompt of a batch. All variants use the same seeds.
        on_run: called `repetitions + 1` times for each variant. The first, untimed run includes compilation.

    Returns:
        A run for each variant.
    """
    for lm in variants.values():
        if lm.pacing is not None:
            lm.pacing.patient = True
    requests = [(batch, LanguageModel.each_sampling(batch, sampling)) for batch in batches]

    def decoded(name: str, lm: LanguageModel) -> Callable[[], Generation]:
        return lambda: Generation.joined([lm.generate(batch, each, speculative=name != BASELINE) for batch, each in requests])

    generations = alternate({name: decoded(name, lm) for name, lm in variants.items()}, repetitions, on_run, warm=True)
    return [
        DecodingRun(
            dataset="",
            drafter=name,
            num_spec_tokens=0 if name == BASELINE else num_spec_tokens(lm),
            responses=generations[name][0].results,
            tokens_per_s=[each.tokens_per_s for each in generations[name]],
            seconds_per_round=[each.decode_seconds / each.rounds for each in generations[name]],
            chosen=None if name == BASELINE else chosen_figures(lm, generations[name][-1].results),
        )
        for name, lm in variants.items()
    ]


def compare(
    lm: LanguageModel,
    batches: Sequence[Sequence[str | Sequence[int]]],
    sampling: Sampling | Sequence[Sampling],
    repetitions: int = REPETITIONS,
    on_run: Callable[[], None] = lambda: None,
) -> Row:
    """Returns the figures of decoding with the drafter compared with decoding without; see `decode_in_turns`."""
    plain, drafted = decode_in_turns({BASELINE: lm, "drafter": lm}, batches, sampling, repetitions, on_run)
    return benchmark_row(drafted, plain)


def environment(lm: LanguageModel) -> dict[str, Any]:
    """Returns chip, devices, dtypes, kernels and versions of a measurement."""
    return {
        "chip": chip_name(),
        "devices": 1 if lm.placement is None else lm.placement.mesh.size,
        "schedule": "single_device" if lm.placement is None else lm.placement.name,
        "dtype": lm.dtype,
        "kv_dtype": lm.kv_dtype,
        "weights": lm.weights,
        "lora": lm.default_adapter,
        "drafter_dtype": None if lm.drafter is None else lm.drafter.dtype,
        "kernels": lm.kernels,
        "jax_version": jax.__version__,
    }
