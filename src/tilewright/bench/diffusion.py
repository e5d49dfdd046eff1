"""Measurement of `tilewright bench diffusion`: the same prompts denoised in several modes."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import numpy as np

from tilewright.bench.diffusion_quality import Quality, compare_with_dense, token_agreement
from tilewright.compiled.ledger import Ledger
from tilewright.compiled.machine import chip_name
from tilewright.compiled.timing import REPETITIONS, alternate, mean, quotients, spread
from tilewright.diffusion.options import Denoising, Mode
from tilewright.diffusion.programs import DiffusionKey, DiffusionTable
from tilewright.llm.diffusion_model import Denoised, DiffusionModel, StepReport
from tilewright.metrics.tables import csv_text

Row = dict[str, Any]

PADDED = 16
"""Sequence lengths are rounded up to a multiple of this. Padding costs plain dense steps most."""


def make_variants(
    base: Denoising,
    modes: Sequence[Mode],
    taus: Sequence[float] = (),
    thresholds: Sequence[float] = (),
    suffixes: Sequence[int] = (),
) -> dict[str, Denoising]:
    """Returns all variants by name: every mode (sparse once per tau), first with a quota per step, then with each threshold,
    and all of these again with each suffix window.

    The first variant is always plain dense denoising, the baseline of all comparisons.
    """
    found = {"dense": replace(base, mode="dense")}
    for suffix_window, threshold in product((None, *suffixes), (None, *thresholds)):
        suffix = ("" if threshold is None else f" p≥{threshold:g}") + ("" if suffix_window is None else f" +{suffix_window}")
        steps = base.steps if threshold is None else None
        commits = replace(base, threshold=threshold, steps=steps, suffix_window=suffix_window)
        for mode in modes:
            if mode == "sparse":
                for tau in taus:
                    saliency = replace(base.saliency, tau=tau)
                    found[f"sparse τ{tau:g}{suffix}"] = replace(commits, mode=mode, saliency=saliency)
            else:
                found[f"{mode}{suffix}"] = replace(commits, mode=mode)
    return found


def fitted_table(prompts: Sequence[Sequence[int]], base: Denoising, batch_size: int) -> DiffusionTable:
    """Returns the smallest shape that holds all prompts with their responses."""
    longest = max(len(prompt) for prompt in prompts) + base.new_tokens
    positions = -(-longest // PADDED) * PADDED
    return DiffusionTable((batch_size,), (positions,), (base.new_tokens,), (base.block,))


@dataclass
class DenoisingRun:
    """One pass of denoising over the prompts.

    Attributes:
        results: result of each prompt.
        reports: step reports of each batch.
        positions: number of prompt and response positions of each row, for each batch.
        seconds: time in the denoising loop.
        dispatches: number of dispatched programs; the host reads the result of each.
        computed_all: True if every step computed every position (`Denoising.computes_all`).
    """

    results: list[Denoised]
    reports: list[list[StepReport]]
    positions: list[list[int]]
    seconds: float
    dispatches: int
    computed_all: bool

    @property
    def steps(self) -> int:
        """Number of forward passes of a batch."""
        return sum(map(len, self.reports))

    @property
    def tokens(self) -> int:
        return sum(len(result.tokens) for result in self.results)

    def salient(self) -> list[np.ndarray]:
        """Returns, for each row, the share of positions whose MLP was computed, `[steps, layers]`."""
        found = []
        for reports, positions in zip(self.reports, self.positions, strict=True):
            for row, size in enumerate(positions):
                counts = np.asarray([report.salient[row] for report in reports if report.committed[row] >= 0])
                found.append(np.ones(counts.shape) if self.computed_all else counts / size)
        return found


def denoise(
    model: DiffusionModel, prompts: Sequence[Sequence[int]], request: Denoising, batch_size: int, on_row: Callable[[int], None]
) -> DenoisingRun:
    """Denoises all prompts. The time excludes work before the first step of each batch.

    Args:
        on_row: called after each batch with the number of finished rows.
    """
    run = DenoisingRun([], [], [], 0.0, 0, request.computes_all)
    for first in range(0, len(prompts), batch_size):
        session = model.start(prompts[first : first + batch_size], request)
        session.prefill()
        start = time.perf_counter()
        while not session.finished:
            session.advance()
            run.dispatches += 1
        run.seconds += time.perf_counter() - start
        run.results += session.results()
        run.reports.append(session.reports)
        run.positions.append([len(prompt) + request.new_tokens for prompt in session.prompts])
        on_row(len(session.prompts))
    return run


def mean_by_step(rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the mean of the rows' entries at each step, over the rows with that step."""
    return [np.mean([row[step] for row in rows if step < len(row)], axis=0) for step in range(max(map(len, rows), default=0))]


def run_figures(run: DenoisingRun) -> Row:
    """Returns the figures of one run."""
    shares = run.salient()
    committed = [n for result in run.results for n in result.committed]
    each = np.concatenate(shares) if shares else np.zeros((0, 1))
    return {
        "responses": len(run.results),
        "tokens": run.tokens,
        "committed_tokens": sum(committed),
        "steps": run.steps,
        "tokens_per_forward": mean(committed),
        "tokens_per_forward_by_step": [x.item() for x in mean_by_step([np.asarray([r.committed]).T for r in run.results])],
        "spans": dict(Counter(report.span for reports in run.reports for report in reports)),
        "salient_share": float(each.mean()) if each.size else None,
        "salient_share_by_layer": each.mean(axis=0).tolist() if each.size else [],
        "salient_share_by_step": [float(x.mean()) for x in mean_by_step(shares)],
        "salient_share_by_step_and_layer": [x.tolist() for x in mean_by_step(shares)],
        "host_synchronisations": run.dispatches,
        "host_synchronisations_per_step": run.dispatches / run.steps if run.steps else None,
    }


@dataclass(frozen=True)
class MeasuredWay:
    """Measurements of one variant.

    Attributes:
        name: name of the variant.
        whole: one run over all prompts, source of the token and step figures.
        timed: repeated runs over the first prompts, in alternation with the other variants.
        compiled: result of `program_figures`.
    """

    name: str
    request: Denoising
    whole: DenoisingRun
    timed: Sequence[DenoisingRun]
    quality: Quality
    compiled: Row
    compilations_while_timed: int


def program_figures(model: DiffusionModel, prompts: Sequence[Sequence[int]], request: Denoising, batch_size: int) -> Row:
    """Compiles a variant's programs and returns compile figures and memory. Programs of earlier variants are reused."""
    batch = prompts[:batch_size]
    shape = model.table.shape(len(batch), [len(prompt) for prompt in batch], [request] * len(batch))
    programs = model.programs_of(shape)
    with Ledger() as ledger:
        programs.warm(programs.keys)
    memory = programs.get(DiffusionKey("steps", shape)).memory_analysis()
    peak_bytes = None
    if memory is not None:
        peak_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        peak_bytes += memory.temp_size_in_bytes
    return {**ledger.figures(), "peak_bytes": peak_bytes, "positions": shape.positions}


def measure(
    model: DiffusionModel,
    variants: Mapping[str, Denoising],
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int = 1,
    timed: int = 8,
    compared: int = 4,
    repetitions: int = REPETITIONS,
    on_row: Callable[[int], None] = lambda _: None,
) -> list[MeasuredWay]:
    """Denoises the prompts in every variant.

    Args:
        timed: number of prompts that are denoised `repetitions` more times, all variants in alternation.
        compared: number of prompts whose steps are compared with dense passes.
        on_row: called with numbers of finished prompts, `rows_in_all` in total.
    """
    whole = {}
    compiled = {}
    for name, request in variants.items():
        compiled[name] = program_figures(model, prompts, request, batch_size)
        whole[name] = denoise(model, prompts, request, batch_size, on_row)
    runs = {name: partial(denoise, model, prompts[:timed], request, batch_size, on_row) for name, request in variants.items()}
    with Ledger() as ledger:
        runs_by_name = alternate(runs, repetitions)
    found = []
    for name, request in variants.items():
        quality = compare_with_dense(model, prompts[:compared], request, batch_size)
        found.append(MeasuredWay(name, request, whole[name], runs_by_name[name], quality, compiled[name], ledger.compilations))
        on_row(min(compared, len(prompts)))
    return found


def rows_in_all(variants: int, prompts: int, timed: int, compared: int, repetitions: int) -> int:
    """Returns the number of prompts that `measure` reports in total."""
    return variants * (prompts + min(timed, prompts) * repetitions + min(compared, prompts))


def figures(one: MeasuredWay, baseline: MeasuredWay, right: Callable[[int, str], bool] | None = None) -> Row:
    """Returns one variant's row under the field names of `--json` (docs/metrics.md); ratios are to the baseline's.

    Args:
        right: returns True if a text answers the prompt of this number; None if unknown.
    """
    request = one.request
    rates = [run.tokens / run.seconds for run in one.timed]
    steps = [run.seconds / run.steps for run in one.timed]
    plain_steps = [run.seconds / run.steps for run in baseline.timed]
    responses, plain = ([result.tokens for result in each.whole.results] for each in (one, baseline))
    answered = None if right is None else [right(n, result.text) for n, result in enumerate(one.whole.results)]
    speedups = quotients([run.seconds for run in baseline.timed], [run.seconds for run in one.timed])
    return {
        "name": one.name,
        "mode": request.mode,
        "threshold": request.threshold,
        "tau": request.saliency.tau if request.mode == "sparse" else None,
        "correct": None if answered is None else sum(answered),
        "accuracy": None if answered is None else mean(map(float, answered)),
        **run_figures(one.whole),
        "token_agreement": None if one is baseline else token_agreement(plain, responses),
        "identical_responses": None if one is baseline else sum(a == b for a, b in zip(plain, responses, strict=True)),
        **one.quality.figures(),
        "tokens_per_s": spread(rates).median,
        "tokens_per_s_range": spread(rates).range,
        "speedup": speedups.median,
        "speedup_range": speedups.range,
        "seconds_per_step": spread(steps).median,
        "seconds_per_step_range": spread(steps).range,
        "step_speedup": quotients(plain_steps, steps).median,
        **one.compiled,
        "compilations_while_timed": one.compilations_while_timed,
    }


def rows(measured: Sequence[MeasuredWay], right: Callable[[int, str], bool] | None = None) -> list[Row]:
    """Returns a row of figures for each variant."""
    return [figures(one, measured[0], right) for one in measured]


def environment(model: DiffusionModel) -> Row:
    """Returns chip, dtype, kernels, model and versions of a measurement."""
    return {
        "chip": chip_name(),
        "dtype": model.dtype,
        "kernels": model.target.ops.name,
        "devices": 1 if model.placement is None else model.placement.mesh.size,
        "schedule": "single_device" if model.placement is None else model.placement.name,
        "jax_version": jax.__version__,
        "family": model.config.family,
        "layers": model.config.decoder.num_layers,
    }


def scalars_as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rows as CSV with all single-valued figures."""
    return csv_text([name for name in rows[0] if not any(isinstance(row[name], (list, tuple, dict)) for row in rows)], rows)
