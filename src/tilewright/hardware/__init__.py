"""Specifications of chips and links, and lower bounds on the time of work on them. Does not import JAX."""
