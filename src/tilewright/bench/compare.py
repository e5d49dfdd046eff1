"""Autoregressive and speculative decoding of the same prompts, side by side."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tilewright.bench.figures import acceptance_histogram, first_difference, mean_acceptance_length, mean_distinct_ngram_ratio
from tilewright.compiled.machine import chip_name
from tilewright.decode.language_model import Generation, LanguageModel
from tilewright.decode.sampling import Sampling


@dataclass(frozen=True)
class Comparison:
    """Both ways of decoding the same prompts. Rates: medians over alternating repetitions, in tokens a second of decoding."""

    autoregressive: Generation
    speculative: Generation
    autoregressive_tokens_per_s: float
    speculative_tokens_per_s: float
    repetitions: int

    @property
    def speedup(self) -> float:
        return self.speculative_tokens_per_s / self.autoregressive_tokens_per_s

    @property
    def round_steps(self) -> float:
        """What a round costs, in autoregressive steps: the acceptance length above which drafting pays."""
        per_round = self.speculative.rounds / sum(len(r.tokens) for r in self.speculative)
        per_step = self.autoregressive.rounds / sum(len(r.tokens) for r in self.autoregressive)
        return self.autoregressive_tokens_per_s * per_step / (self.speculative_tokens_per_s * per_round)

    @property
    def identical(self) -> bool:
        return all(a.tokens == b.tokens for a, b in zip(self.autoregressive, self.speculative, strict=True))

    @property
    def first_differences(self) -> list[int | None]:
        """For each prompt the first token at which the two differ."""
        pairs = zip(self.autoregressive, self.speculative, strict=True)
        return [first_difference(a.tokens, b.tokens) for a, b in pairs]


def compare(
    lm: LanguageModel,
    batches: Sequence[Sequence[str | Sequence[int]]],
    sampling: Sampling,
    repetitions: int = 5,
    on_run: Callable[[], None] = lambda: None,
) -> Comparison:
    """Decodes `batches` of prompts both ways, alternating, `repetitions` times each; `on_run` is called after every run.

    Each way runs once before it is timed, so that no compilation is in the figures.
    """
    runs: dict[bool, list[Generation]] = {False: [], True: []}
    for repetition in range(repetitions + 1):
        for speculative in (False, True):
            generation = joined([lm.generate(batch, sampling, speculative=speculative) for batch in batches])
            if repetition > 0:
                runs[speculative].append(generation)
            on_run()
    rates = {way: statistics.median(g.tokens_per_s for g in taken) for way, taken in runs.items()}
    return Comparison(runs[False][0], runs[True][0], rates[False], rates[True], repetitions)


def joined(parts: Sequence[Generation]) -> Generation:
    """Several generations as one."""
    return Generation(
        [result for part in parts for result in part],
        sum(part.prefill_seconds for part in parts),
        sum(part.decode_seconds for part in parts),
        sum(part.rounds for part in parts),
    )


def environment(lm: LanguageModel) -> dict[str, Any]:
    """What the figures were measured on and with."""
    drafter_dtype = None if lm.drafting is None else lm.drafting.dtype
    return {
        "chip": chip_name(),
        "dtype": lm.dtype,
        "drafter_dtype": drafter_dtype,
        "kernels": lm.kernels,
        "jax_version": jax.__version__,
    }


def acceptance_figures(lm: LanguageModel, generation: Generation) -> dict[str, Any]:
    """What the drafts gave; None where no drafter was used."""
    if lm.drafting is None:
        return {"mean_acceptance_length": None, "acceptance_histogram": None, "block_size": None}
    return {
        "mean_acceptance_length": mean_acceptance_length(generation.results),
        "acceptance_histogram": acceptance_histogram(generation.results, lm.drafting.block_size),
        "block_size": lm.drafting.block_size,
    }


def comparison_figures(lm: LanguageModel, comparison: Comparison) -> dict[str, Any]:
    """The figures of a comparison under the field names of `--json`."""
    return {
        "autoregressive_tokens_per_s": comparison.autoregressive_tokens_per_s,
        "speculative_tokens_per_s": comparison.speculative_tokens_per_s,
        "speedup": comparison.speedup,
        "round_cost_steps": comparison.round_steps,
        "identical": comparison.identical,
        "first_differences": comparison.first_differences,
        "repetitions": comparison.repetitions,
        "rounds": comparison.speculative.rounds,
        "distinct_4gram_ratio": mean_distinct_ngram_ratio(comparison.speculative.results),
        **acceptance_figures(lm, comparison.speculative),
    }
