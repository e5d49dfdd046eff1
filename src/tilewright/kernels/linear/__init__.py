"""`x @ w`, and `silu(x @ gate) * (x @ up)`."""
