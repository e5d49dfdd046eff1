"""Speculative decoding: drafters, teams of drafters, and the policy that chooses rounds by cost and acceptance."""
