"""Grouped-query attention over a KV cache and over keys of the current block."""
