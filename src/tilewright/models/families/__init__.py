"""Decoder families, one file for each or for a few similar ones; `registry.py` lists them."""
