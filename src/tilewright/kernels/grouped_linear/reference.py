"""The operation as it is defined, in NumPy."""

import numpy as np


def grouped_linear(x: np.ndarray, w: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The product of each row `[R, I]` with the matrix of its group, of `w [G, I, O]`, in the dtype that NumPy gives.

    Args:
        sizes: how many rows each group has, `[G]`; the first has the first rows. Rows behind the last group's give zeros.
    """
    out = np.zeros((len(x), w.shape[2]), np.result_type(x, w))
    first = 0
    for matrix, size in zip(w, sizes, strict=True):
        out[first : first + size] = x[first : first + size] @ matrix
        first += size
    return out
