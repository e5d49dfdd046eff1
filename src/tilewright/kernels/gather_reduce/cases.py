"""Sizes for tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GatherCase:
    """A graph of `nodes` nodes and as many rows, with up to `slots` neighbours per row and `features` per node."""

    nodes: int
    slots: int
    features: int


CASES = {
    "trainium": GatherCase(2048, 64, 128),
    "narrow": GatherCase(10_000, 16, 128),
    "wide": GatherCase(10_000, 64, 128),
}
"""The size of published kernels for Trainium2, and two uniform graphs whose features fit a CPU's cache."""
