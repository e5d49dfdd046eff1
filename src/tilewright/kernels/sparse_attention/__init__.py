"""Sparse denoising attention: a window of rows over a whole sequence, with a measure of how much each row's context changed."""
