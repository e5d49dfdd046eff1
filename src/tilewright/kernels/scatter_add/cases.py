"""The sizes that tests and benchmarks use: those of the gather, with the messages gathered."""

from tilewright.kernels.gather_reduce.cases import CASES as GATHER_CASES

CASES = {"trainium": GATHER_CASES["trainium"]}
