"""A projection becomes heads: normalised where the family does, rotated. (Su et al. 2021, RoFormer)"""
