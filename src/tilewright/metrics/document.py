"""Generates the tables of docs/metrics.md: `python -m tilewright.metrics.document docs/metrics.md`."""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tilewright.metrics import (
    chips,
    denoising,
    diff,
    exactness,
    grammar,
    neuron,
    overlap,
    programs,
    prometheus,
    ranges,
    serving,
    speculative,
    traced,
    training,
)
from tilewright.metrics.metric import Metric

TABLES: dict[str, tuple[Metric, ...]] = {
    "tau": speculative.TAU,
    "speculative": speculative.FIGURES,
    "vllm": speculative.VLLM,
    "positions": speculative.POSITIONS,
    "chosen": speculative.CHOSEN,
    "programs": programs.PROGRAMS,
    "graph": programs.GRAPH,
    "grammar": grammar.GRAMMAR,
    "latencies": serving.LATENCIES,
    "serving": serving.SERVING,
    "exactness": exactness.EXACTNESS,
    "denoising": denoising.DENOISING,
    "layer": overlap.LAYER,
    "diff": (*diff.DIFF, *diff.CHANGES),
    "traced": traced.TRACED,
    "traced-parts": traced.PARTS,
    "traced-operations": traced.OPERATIONS,
    "training-step": overlap.TRAINING_STEP,
    "transfers": overlap.TRANSFERS,
    "times": overlap.TIMES,
    "micro": overlap.MICRO,
    "ranges": ranges.RANGES,
    "calibration": ranges.CALIBRATION,
    "neuron": neuron.NEURON,
    "chips": chips.CHIPS,
    "training": training.TRAINING,
    "plan": training.PLAN,
    "accuracy": training.ACCURACY,
    "training-log": training.LOG,
    "gauges": prometheus.GAUGES,
    "counters": prometheus.COUNTERS,
    "histograms": prometheus.HISTOGRAMS,
}
"""Tables of the document, by the name in the comment above each."""

HEAD = ("field", "unit", "definition")
PLACE = re.compile(r"<!-- metrics: ([\w-]+) -->\n\n(?:\|.*\n)*\n*")


def table(metrics: Sequence[Metric]) -> str:
    """Returns a Markdown table with a line for each definition, without empty columns."""
    rows = list(map(cells, defined_together(metrics)))
    columns = [n for n in range(len(HEAD)) if any(row[n] for row in rows)]
    lines = [[row[n] for n in columns] for row in (HEAD, *rows)]
    texts = ["|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in lines]
    return "\n".join([texts[0], "|---" * len(columns) + "|", *texts[1:], ""])


def defined_together(metrics: Sequence[Metric]) -> Iterator[list[Metric]]:
    """Yields each metric with the following metrics that have no definition of their own."""
    starts = [n for n, metric in enumerate(metrics) if metric.definition]
    for start, end in zip(starts, [*starts[1:], len(metrics)], strict=True):
        yield list(metrics[start:end])


def cells(metrics: Sequence[Metric]) -> tuple[str, str, str]:
    """Returns the cells of a table line."""
    names = ", ".join(f"`{metric.name}{f'{{{metric.label}}}' if metric.label else ''}`" for metric in metrics)
    units = [metric.unit for metric in metrics]
    unit = units[0] if len(set(units)) == 1 else ", ".join(units).rstrip()
    return names, unit, metrics[0].definition


def with_tables(text: str) -> str:
    """Returns the document with generated tables.

    Raises:
        ValueError: A declared table has no place or several places in the document, or a place has no declared table.
    """
    names = PLACE.findall(text)
    if sorted(names) != sorted(TABLES):
        wrong = sorted(set(names) ^ set(TABLES)) or sorted(name for name in set(names) if names.count(name) > 1)
        raise ValueError(f"expected each declared table once, found otherwise: {', '.join(wrong)}")
    return PLACE.sub(lambda found: f"<!-- metrics: {found[1]} -->\n\n{table(TABLES[found[1]])}\n", text).rstrip("\n") + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
