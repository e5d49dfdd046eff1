"""Looks up rows of a table, such as token embeddings."""
