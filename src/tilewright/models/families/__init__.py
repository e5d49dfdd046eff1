"""A file for each family of decoders, or for a few that are nearly alike; `registry.py` lists them."""
