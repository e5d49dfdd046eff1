"""Operations with several implementations, one folder each with the same file names; `select` chooses among them."""
