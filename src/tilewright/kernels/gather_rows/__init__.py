"""Rows of a table, such as the embeddings of tokens."""
