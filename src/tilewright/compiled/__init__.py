"""What the compiler made: the compile ledger and the no-compile guard."""
