"""The operations that are worth a kernel: one folder each, with the same file names; `select` picks among them."""
