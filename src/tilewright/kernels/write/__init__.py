"""Writes new keys and values into a contiguous or paged cache, at each row's own positions."""
