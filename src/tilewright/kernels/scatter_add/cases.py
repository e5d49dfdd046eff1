"""Sizes for tests and benchmarks: those of the gather, with gathered messages."""

from tilewright.kernels.gather_reduce.cases import CASES as GATHER_CASES

CASES = {"trainium": GATHER_CASES["trainium"]}
