"""Drafters, all behind one interface (`base.Drafter`): what they propose, the same round verifies."""
