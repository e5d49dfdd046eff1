"""Splits a projection into heads, normalised if the family does so, and rotated. (Su et al. 2021, RoFormer)"""
