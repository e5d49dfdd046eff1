"""Figures of `tilewright inspect grammar`."""

from tilewright.metrics.metric import Metric

GRAMMAR = (
    Metric(
        "masks",
        "",
        "masks made on the `device` (inside the loop) or by the `host` (each round)",
        head="masks by",
        words=True,
    ),
    Metric(
        "brackets",
        "",
        "nesting depth in the automaton if the grammar has no bound; deeper text uses host masks",
        head="brackets",
    ),
    Metric("states", "", "states of the token automaton, at most 4,096", head="states", form=","),
    Metric(
        "classes",
        "",
        "token classes with equal transitions; states × classes are at most 262,144",
        head="classes of tokens",
        short="classes",
        form=",",
    ),
    Metric("different_masks", "", "at most 256", head="masks", form=","),
    Metric("automaton_bytes", "bytes", "masks and state table on the device", head="kB", form=",.0f", factor=1e-3),
    Metric(
        "processor_seconds",
        "s",
        "construction time, which the first request waits for",
        head="s",
        form=".2f",
    ),
    Metric("why", "", "reason for host masks", head="why not the device", words=True),
)
"""Figures of a grammar with a model's tokens. Without an automaton, all but `masks` and `why` are null."""
