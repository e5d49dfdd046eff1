"""Training loops: next-token training of a language model, and the DFlash recipe for its drafter."""
