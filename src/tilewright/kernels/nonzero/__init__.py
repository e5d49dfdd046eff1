"""Indices of the true elements of a mask."""
