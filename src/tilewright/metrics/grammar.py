"""Figures of `tilewright inspect grammar`."""

from tilewright.metrics.metric import Metric

GRAMMAR = (
    Metric(
        "masks",
        "",
        "who makes the masks of what may come next: the `device`, inside its loop, or the `host`, for each round anew",
        head="masks by",
        words=True,
    ),
    Metric(
        "brackets",
        "",
        "within one another that the automaton describes where the grammar sets no bound, as in values of any kind: as many as "
        "the table on the device has room for. Behind one more the host makes the masks. Null where the grammar sets bounds",
        head="brackets",
    ),
    Metric("states", "", "of the automaton over tokens, at most 4,096", head="states", form=","),
    Metric(
        "classes",
        "",
        "of tokens: those of one class lead to the same states wherever they may come. States × classes are at most 262,144",
        head="classes of tokens",
        short="classes",
        form=",",
    ),
    Metric("different_masks", "", "of all states, at most 256", head="masks", form=","),
    Metric(
        "automaton_bytes", "bytes", "masks and the table of states, as a device has them", head="kB", form=",.0f", factor=1e-3
    ),
    Metric(
        "processor_seconds",
        "s",
        "that making it took, which the first request with the grammar waits for",
        head="s",
        form=".2f",
    ),
    Metric("why", "", "the host makes the masks; null where the device does", head="why not the device", words=True),
)
"""Of a grammar with a model's tokens. Null where there is no automaton, but for `masks` and `why`."""
