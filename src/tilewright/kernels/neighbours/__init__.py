"""Sampling of neighbours on the host: draws, row numbers of drawn nodes, and grouping of edges.

`reference.py` has the functions in NumPy, `cpu.py` in C++ with the same results. Neither uses XLA: batches are sampled by
threads of their own while programs run.
"""
