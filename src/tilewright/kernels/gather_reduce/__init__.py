"""Neighbours' features, gathered and reduced at once: the aggregation of a graph neural network over rows of fixed shape."""
