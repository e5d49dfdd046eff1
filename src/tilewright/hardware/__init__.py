"""Specifications of chips and the links between them, and the least time that these allow for a piece of work. No JAX."""
