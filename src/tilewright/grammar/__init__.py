"""Structured output: compiles grammars with llguidance into constraints that mask the tokens of a generation."""
