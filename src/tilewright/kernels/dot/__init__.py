"""Dot products of 8-bit numbers alone, a bound on the speed of quantised matmuls with many rows."""
