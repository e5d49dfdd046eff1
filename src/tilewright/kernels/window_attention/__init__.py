"""Attention of a window of rows over a whole sequence, with what tells how far each row's context moved."""
