"""Grouped-query attention over the first keys of a cache, and over keys of the queries' own."""
