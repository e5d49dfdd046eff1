"""Public interface of the kernels: code outside this package imports operations from here, never from implementations.

Language models use a bundle that `operations` makes when a model is loaded. The reductions of graph networks dispatch on the
device that they run on. `implementations` reports what runs, from the same list that chooses it (`registry.py`). This file
imports XLA's implementations; other implementations are imported on first use.
"""

from dataclasses import replace
from typing import cast, get_args

import jax

from tilewright.kernels import native
from tilewright.kernels.attention.xla import MASKED as MASKED
from tilewright.kernels.attention.xla import QUERIES as QUERIES
from tilewright.kernels.attention.xla import KeyValues as KeyValues
from tilewright.kernels.attention.xla import attention as attention
from tilewright.kernels.attention.xla import attention_over as attention_over
from tilewright.kernels.attention.xla import by_blocks as by_blocks
from tilewright.kernels.attention.xla import group_rows as group_rows
from tilewright.kernels.attention.xla import ungroup_rows as ungroup_rows
from tilewright.kernels.bundles.xla import CPU_XLA, in_few_bits
from tilewright.kernels.bundles.xla import PLAIN as PLAIN
from tilewright.kernels.gather_reduce.reference import Reduce as Reduce
from tilewright.kernels.gather_reduce.reference import refuses_message_reduce as refuses_message_reduce
from tilewright.kernels.graph import attend_csr as attend_csr
from tilewright.kernels.graph import attend_csr_grad as attend_csr_grad
from tilewright.kernels.graph import edge_dot_csr as edge_dot_csr
from tilewright.kernels.graph import gather_reduce as gather_reduce
from tilewright.kernels.graph import gather_reduce_csr as gather_reduce_csr
from tilewright.kernels.graph import has_csr_kernels as has_csr_kernels
from tilewright.kernels.graph import message_kernel as message_kernel
from tilewright.kernels.graph import neighbour_sampler as neighbour_sampler
from tilewright.kernels.graph import scatter_add as scatter_add
from tilewright.kernels.head_argmax.xla import allowed as allowed
from tilewright.kernels.head_argmax.xla import argmax as argmax
from tilewright.kernels.head_top_k.xla import top_k as top_k
from tilewright.kernels.linear.scaled import ScaledFormat
from tilewright.kernels.operations import MatmulPrecision, Operations
from tilewright.kernels.operations import Weights as Weights
from tilewright.kernels.paged.xla import mapped_entries as mapped_entries
from tilewright.kernels.registry import DECODING as DECODING
from tilewright.kernels.registry import DENOISING as DENOISING
from tilewright.kernels.registry import Chip as Chip
from tilewright.kernels.registry import Kernels as Kernels
from tilewright.kernels.registry import Selection as Selection
from tilewright.kernels.registry import absent
from tilewright.kernels.registry import fallbacks as fallbacks
from tilewright.kernels.registry import implementations as implementations
from tilewright.kernels.registry import kernel_of as kernel_of
from tilewright.kernels.sparse_attention.reference import CARRIED as CARRIED
from tilewright.kernels.sparse_attention.reference import EXACT as EXACT
from tilewright.kernels.sparse_attention.reference import IDLE as IDLE
from tilewright.kernels.sparse_attention.reference import cosine as cosine
from tilewright.kernels.write.xla import write_buffer as write_buffer


def operations(chip: Chip | None = None, weights: Weights = "auto", kernels: Kernels = "auto") -> Operations:
    """Returns the bundle of operations for inference.

    Args:
        chip: chip to run on, which need not be present; by default JAX's default backend.
        weights: "auto" keeps the dtype of matrices and, with the CPU kernels, the blocks of a file. "dequantised" prepares
            matrices in their dtype, whatever the file has. "int8" quantises matrices to 8 bits: with a scale per block on CPUs,
            with a scale per output where XLA computes. "int4" quantises layers to blocks of 4 bits and the output head to 8
            bits, or keeps the blocks of a file. "fp8" quantises layers to 8-bit floats, or keeps those of a file, where XLA
            computes.
        kernels: "auto" uses this package's own kernels where they run, "xla" only XLA.

    Raises:
        ValueError: an unknown value, or FP8 where the CPU kernels run.
    """
    chip = cast(Chip, chip or jax.default_backend())
    for name, value, literal in (("chip", chip, Chip), ("weights", weights, Weights), ("kernels", kernels, Kernels)):
        if value not in get_args(literal):
            raise ValueError(f"expected {name} to be one of {', '.join(get_args(literal))}, found {value!r}")
    missing = absent("cpu", chip, kernels)
    if not missing:
        if weights == "fp8":
            raise ValueError("FP8 weights need XLA: expected kernels 'xla', or weights 'int8' or 'int4' on a CPU")
        from tilewright.kernels.bundles import cpu

        return cpu.cpu_operations(f"cpu {native.kernels().isa}", weights)
    found = PLAIN if chip != "cpu" else CPU_XLA
    if not absent("tpu", chip, kernels):
        from tilewright.kernels.bundles import tpu

        found = tpu.TPU
    if weights in ("auto", "dequantised"):
        return found if weights == "auto" else replace(found, weights=weights)
    return in_few_bits(found, weights)


def formats(kernels: Kernels) -> dict[Weights, Operations]:
    """Returns the bundle of each weight format that runs here."""
    packs = operations(kernels=kernels).packs
    return {each: operations(weights=each, kernels=kernels) for each in get_args(Weights) if not (packs and each == "fp8")}


def computes_bfloat16(ops: Operations) -> bool:
    """Returns True if bfloat16 is as fast as float32 here: everywhere except with XLA on a CPU."""
    return ops.packs or jax.default_backend() != "cpu"


def training_operations(products: str, compute_dtype: str = "float32", chip: Chip | None = None) -> Operations:
    """Returns the bundle for training (see also `with_quantised`).

    Args:
        products: precision of matmuls of float32 weights and activations: "float32"; "bfloat16", with float32 sums; or "auto",
            bfloat16 if the chip has instructions for it, else float32. On a CPU, matmuls use the CPU kernels if they run, else
            XLA in float32; elsewhere XLA.
        compute_dtype: dtype of weights and activations in the loss. In "bfloat16", XLA computes, except attention on TPUs and
            GPUs.
        chip: chip to run on, which need not be present; by default JAX's default backend.

    Raises:
        ValueError: an unknown precision, or bfloat16 products on a CPU without the CPU kernels.
    """
    from tilewright.kernels.bundles import training

    if products not in get_args(MatmulPrecision):
        raise ValueError(f"expected products in auto, float32 or bfloat16, found {products!r}")
    chip = chip or cast(Chip, jax.default_backend())
    in_float32 = compute_dtype == "float32"
    if chip != "cpu":
        return training.accelerator_operations(chip, in_float32 and products != "float32")
    isa = native.kernels().isa
    if isa is None and products == "bfloat16":
        raise ValueError(f"expected the CPU kernels for matmuls in bfloat16, found none: {native.kernels().reason}")
    if isa is None or not in_float32:
        return PLAIN
    return training.cpu_operations(products == "bfloat16" or (products == "auto" and isa in training.BFLOAT16_ISAS))


def with_quantised(ops: Operations, weights: Weights) -> Operations:
    """Returns a bundle for training beside frozen matrices in "int8", "int4" or "fp8"; `ops` unchanged for "dequantised".

    Raises:
        ValueError: another format.
    """
    from tilewright.kernels.bundles import training

    if weights == "dequantised":
        return ops
    if weights not in get_args(ScaledFormat):
        raise ValueError(f"expected frozen weights in dequantised, {', '.join(get_args(ScaledFormat))}, found {weights!r}")
    return training.with_quantised(ops, cast(ScaledFormat, weights))
