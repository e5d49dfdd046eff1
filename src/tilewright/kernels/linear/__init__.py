"""Linear layers, `x @ w`, and gated ones, `silu(x @ gate) * (x @ up)`."""
