"""Bytes and operations of Pallas kernels in a compiled program, from what they declare; of splash attention from its shapes."""

import re
from math import isqrt

from tilewright.compiled.hlo import Computation, HloOp, Module
from tilewright.compiled.traffic import op_bytes

KERNEL = "tpu_custom_call"
"""Custom-call target of a Pallas kernel."""
PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
"""Matmuls of each block of scores in a phase of splash attention."""


def kernel_cost(module: Module, computation: Computation, op: HloOp) -> tuple[int, int] | None:
    """Returns bytes to and from device memory and floating-point operations of a kernel; None if they are unknown."""
    moved = op.number("bytes_accessed")
    flops = op.number("flops")
    if moved is not None and flops is not None:
        return moved, flops
    return splash_cost(module, computation, op)


def splash_cost(module: Module, computation: Computation, op: HloOp) -> tuple[int, int] | None:
    """Returns the cost of a phase of splash attention; None for other kernels.

    Only visible blocks of scores are computed, and each reads two more blocks of rows, of keys and values or of queries and
    gradients. The numbers of blocks are in the name of the operation (`kernels/self_attention/splash.py`).
    """
    phase = re.search(r"splash_m[hq]a_(fwd|dq|dkv)", op.op_name)
    blocks = re.search(r"splash_(\d+)_of_(\d+)", op.op_name)
    if phase is None or blocks is None:
        return None
    visible, every = map(int, blocks.groups())
    arrays = [array for name in op.operands for array in computation.by_name[name].outputs]
    queries = next(array for array in arrays if array.dtype in ("bf16", "f32") and len(array.dims) > 2)
    length = queries.dims[-2]
    flops = PRODUCTS[phase[1]] * 2 * queries.elements * length * visible // every
    rows_of_a_block = length // isqrt(every)
    block_bytes = queries.bytes // length * rows_of_a_block
    return sum(op_bytes(module, computation, op)) + 2 * visible * block_bytes, flops
