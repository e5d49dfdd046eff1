"""Gathers and reduces neighbours' features in one operation: the aggregation of a graph neural network."""
