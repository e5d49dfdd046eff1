"""Sizes for tests and benchmarks: the heads of real models, and the number of candidates of published drafters."""

from tilewright.kernels.head_argmax.cases import CASES as CASES

TOP_K = 16
"""`selector_top_k` of the published DFlash 2 checkpoints."""
