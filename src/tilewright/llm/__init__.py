"""Language models as a library: load, generate, stream, serve."""
