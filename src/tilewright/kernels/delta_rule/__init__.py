"""Gated delta rule: linear attention with a decaying state that is corrected by its prediction error."""
