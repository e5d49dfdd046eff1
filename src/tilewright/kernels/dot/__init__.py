"""Dot products of 8-bit numbers and nothing else: what bounds products with weights in few bits when rows are many."""
