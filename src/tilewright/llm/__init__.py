"""A language model as a library's user holds it: load, generate, stream, serve."""
