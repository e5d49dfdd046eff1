"""Measures how many 8-bit multiply-adds all threads can do; the kernel is `cpu.cc`."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import UInt32

PIECE = 2**24
"""Multiply-adds per piece."""


ISAS = ("avx2", "avx512", "avx512vnni", "avx512bf16", "amx")
"""Instruction sets with 8-bit multiply-adds."""


def count_products(pieces: int) -> UInt32[Array, ""]:
    """Returns the number of multiply-adds of `pieces` pieces modulo 2**32, computed by summing products of ones in
    registers."""
    return jax.ffi.ffi_call("tilewright_count_products", jax.ShapeDtypeStruct((), jnp.uint32))(pieces=pieces)
