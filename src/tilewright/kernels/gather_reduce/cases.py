"""The sizes that tests and benchmarks use."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GatherCase:
    """Rows of up to `slots` neighbours among as many `nodes`, with `features` each."""

    nodes: int
    slots: int
    features: int


CASES = {
    "trainium": GatherCase(2048, 64, 128),
    "narrow": GatherCase(10_000, 16, 128),
    "wide": GatherCase(10_000, 64, 128),
}
"""The shape of published kernels for Trainium2, and two uniform graphs whose features fit a CPU's cache."""
