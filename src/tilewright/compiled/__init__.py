"""Compiled programs: compilation for absent TPUs, HLO parsing, memory traffic, the compile ledger and the no-compile guard."""
