"""The bundles of operations that `select.operations` and `select.training_operations` choose from, a file for each kind."""
