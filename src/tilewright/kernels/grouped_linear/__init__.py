"""Matmuls of consecutive groups of rows, each group with its own matrix: the experts of a mixture.

Legend: R rows, G groups, I inputs, O outputs.
"""
