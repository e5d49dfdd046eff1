"""As many products of 8-bit numbers as all threads add up in a time; the kernel itself is `cpu.cc`."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import UInt32

PIECE = 2**24
"""Products of a piece."""


ISAS = ("avx2", "avx512", "avx512vnni", "avx512bf16", "amx")
"""Instruction sets that have such products."""


def count_products(pieces: int) -> UInt32[Array, ""]:
    """The number of products of so many pieces modulo 2**32, by adding up products of ones in registers."""
    return jax.ffi.ffi_call("tilewright_count_products", jax.ShapeDtypeStruct((), jnp.uint32))(pieces=pieces)
