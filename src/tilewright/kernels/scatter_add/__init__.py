"""Sums gathered messages for each node, over the valid slots of its row."""
