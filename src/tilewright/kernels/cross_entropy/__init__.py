"""Cross-entropy of labels under an output head, with its gradient."""
