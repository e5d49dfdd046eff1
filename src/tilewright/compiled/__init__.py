"""Compiled programs: compiling for absent TPUs, HLO text, memory traffic, the compile ledger and the no-compile guard."""
