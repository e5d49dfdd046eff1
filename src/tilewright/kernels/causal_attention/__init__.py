"""Causal self-attention of whole sequences, for training: with its gradient."""
