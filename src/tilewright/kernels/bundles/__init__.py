"""Bundles of operations, one file per kind, for `select.operations` and `select.training_operations`."""
