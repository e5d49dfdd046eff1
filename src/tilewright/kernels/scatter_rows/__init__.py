"""Writes rows into a table."""
