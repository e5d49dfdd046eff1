"""Grammars that a text must follow, as constraints of the runtime: llguidance's matchers over a model's tokens."""
