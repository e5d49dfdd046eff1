"""Heads on a TPU: XLA's, with the rotation as a matmul."""

from functools import partial

from tilewright.kernels.heads.xla import heads as by_xla
from tilewright.kernels.heads.xla import rotate_by_product

heads = partial(by_xla, rotate=rotate_by_product)
