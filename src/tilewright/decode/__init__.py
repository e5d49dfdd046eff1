"""How tokens are produced: autoregressively, or speculatively with a drafter; sampling; the loop around both."""
