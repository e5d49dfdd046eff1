"""The sizes that tests and benchmarks use: the heads of real models, and as many candidates as published drafters take."""

from tilewright.kernels.head_argmax.cases import CASES as CASES

TOP_K = 16
"""`selector_top_k` of the published DFlash 2 checkpoints."""
