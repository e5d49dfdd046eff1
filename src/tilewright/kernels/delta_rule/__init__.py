"""The gated delta rule: a linear attention whose state forgets, and writes what it did not predict."""
