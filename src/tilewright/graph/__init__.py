"""Graphs in fixed shapes: neighbour tables, aggregation, attention, sampling, partitioning and data sets."""
