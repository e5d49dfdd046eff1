"""Speculative decoding: drafters, teams of them, and who chooses their rounds by what these cost and give."""
