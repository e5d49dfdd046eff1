"""Several ways of decoding the same prompts, side by side in one run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tilewright.bench import figures
from tilewright.bench.figures import first_difference, mean_distinct_ngram_ratio, respond
from tilewright.compiled.machine import chip_name
from tilewright.compiled.timing import REPETITIONS, alternate, spread
from tilewright.decode.language_model import Generation, LanguageModel
from tilewright.decode.sampling import Sampling


@dataclass(frozen=True)
class Timed:
    """What one way gave, and its rate: the median over repetitions of generated tokens for each second of decoding."""

    generation: Generation
    tokens_per_s: float


def timed(
    ways: Mapping[str, Callable[[], Generation]], repetitions: int, on_run: Callable[[], None] = lambda: None
) -> dict[str, Timed]:
    """Runs all ways in turns, `repetitions` times and once before, for their compilation; `on_run` is called after each run."""
    taken = alternate(ways, repetitions, on_run, warm=True)
    return {name: Timed(runs[0], spread([run.tokens_per_s for run in runs]).median) for name, runs in taken.items()}


def joined(parts: Sequence[Generation]) -> Generation:
    """Several generations as one."""
    return Generation(
        [result for part in parts for result in part],
        sum(part.prefill_seconds for part in parts),
        sum(part.decode_seconds for part in parts),
        sum(part.rounds for part in parts),
    )


@dataclass(frozen=True)
class Comparison:
    """Decoding with a drafter and without."""

    autoregressive: Timed
    speculative: Timed
    repetitions: int

    @property
    def speedup(self) -> float:
        return self.speculative.tokens_per_s / self.autoregressive.tokens_per_s

    @property
    def round_cost_steps(self) -> float:
        """What a round costs, in autoregressive steps: the acceptance length above which drafting pays."""
        steps, rounds = self.autoregressive.generation, self.speculative.generation
        tokens_a_step = sum(len(r.tokens) for r in steps) / steps.rounds
        tokens_a_round = sum(len(r.tokens) for r in rounds) / rounds.rounds
        return tokens_a_round / tokens_a_step / self.speedup

    @property
    def first_differences(self) -> list[int | None]:
        """For each prompt the first token at which the two differ."""
        pairs = zip(self.autoregressive.generation, self.speculative.generation, strict=True)
        return [first_difference(a.tokens, b.tokens) for a, b in pairs]


def compare(
    lm: LanguageModel,
    batches: Sequence[Sequence[str | Sequence[int]]],
    sampling: Sampling,
    repetitions: int = REPETITIONS,
    on_run: Callable[[], None] = lambda: None,
) -> Comparison:
    """Decodes `batches` of prompts with and without the drafter, alternating, `repetitions` times each."""

    def decoded(speculative: bool) -> Callable[[], Generation]:
        return lambda: joined([lm.generate(batch, sampling, speculative=speculative) for batch in batches])

    both = timed({"autoregressive": decoded(False), "speculative": decoded(True)}, repetitions, on_run)
    return Comparison(both["autoregressive"], both["speculative"], repetitions)


def environment(lm: LanguageModel) -> dict[str, Any]:
    """What the figures were measured on and with."""
    return {
        "chip": chip_name(),
        "dtype": lm.dtype,
        "weights": lm.numerics.weights,
        "drafter_dtype": None if lm.drafter is None else lm.drafter.dtype,
        "kernels": lm.kernels,
        "jax_version": jax.__version__,
    }


def acceptance_figures(lm: LanguageModel, generation: Generation) -> dict[str, Any]:
    """What the drafts gave, with the fields and meanings of vLLM's `metrics.speculative_decoding`; None without a drafter."""
    if lm.drafter is None:
        return {"block_size": None, "tau": None, "speculative_decoding": None}
    drafts = lm.drafter.block_size - 1
    responses = [respond(r, drafts, "", r.drafted, r.accepted) for r in generation]
    return {
        "block_size": lm.drafter.block_size,
        "tau": figures.tau(responses),
        "speculative_decoding": figures.speculative_decoding(responses, drafts),
    }


def comparison_figures(lm: LanguageModel, comparison: Comparison) -> dict[str, Any]:
    """The figures of a comparison under the field names of `--json`."""
    differences = comparison.first_differences
    return {
        "autoregressive_tokens_per_s": comparison.autoregressive.tokens_per_s,
        "speculative_tokens_per_s": comparison.speculative.tokens_per_s,
        "speedup": comparison.speedup,
        "round_cost_steps": comparison.round_cost_steps,
        "identical": all(at is None for at in differences),
        "first_differences": differences,
        "repetitions": comparison.repetitions,
        "rounds": comparison.speculative.generation.rounds,
        "distinct_4gram_ratio": mean_distinct_ngram_ratio(comparison.speculative.generation.results),
        **acceptance_figures(lm, comparison.speculative.generation),
    }
