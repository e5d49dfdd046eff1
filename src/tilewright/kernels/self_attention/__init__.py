"""Self-attention of whole sequences from a joined projection, with its gradient, for training."""
