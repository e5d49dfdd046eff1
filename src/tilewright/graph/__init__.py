"""Graphs in fixed shapes: neighbour tables, aggregation and attention over them, data, and training."""
