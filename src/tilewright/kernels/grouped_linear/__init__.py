"""Products of rows in groups that follow each other, each group with a matrix of its own: the experts of a mixture.

Legend: R rows, G groups, I inputs, O outputs.
"""
