"""Reference of grouped matmuls, in NumPy."""

import numpy as np


def grouped_linear(x: np.ndarray, w: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Multiplies each row `[R, I]` by its group's matrix of `w [G, I, O]`, in NumPy's result dtype.

    Args:
        sizes: rows per group `[G]`, in order. Rows behind the last group give zeros.
    """
    out = np.zeros((len(x), w.shape[2]), np.result_type(x, w))
    first = 0
    for matrix, size in zip(w, sizes, strict=True):
        out[first : first + size] = x[first : first + size] @ matrix
        first += size
    return out
