"""Paged KV cache: writes keys and values into pages of a shared pool, and reads them."""
