"""The door to the kernels: everything outside of this package takes operations from here, and imports no implementation.

Language models take a bundle that `operations` makes once, when a model is loaded. The reductions of graph networks dispatch
by the device that they run on. `implementations` says what runs, and why not a faster one, by the list that chooses it
(`registry.py`). Importing this file imports what XLA computes with; other implementations come with the first use of them.
"""

from typing import cast, get_args

import jax

from tilewright.kernels import native
from tilewright.kernels.append.xla import write as write
from tilewright.kernels.attention.xla import MASKED as MASKED
from tilewright.kernels.attention.xla import KeyValues as KeyValues
from tilewright.kernels.attention.xla import attention as attention
from tilewright.kernels.attention.xla import attention_over as attention_over
from tilewright.kernels.attention.xla import group_rows as group_rows
from tilewright.kernels.attention.xla import ungroup_rows as ungroup_rows
from tilewright.kernels.bundles.xla import CPU_XLA, in_few_bits
from tilewright.kernels.bundles.xla import PLAIN as PLAIN
from tilewright.kernels.gather_reduce.reference import Reduce as Reduce
from tilewright.kernels.graph import attend_csr as attend_csr
from tilewright.kernels.graph import attend_csr_grad as attend_csr_grad
from tilewright.kernels.graph import edge_dot_csr as edge_dot_csr
from tilewright.kernels.graph import gather_reduce as gather_reduce
from tilewright.kernels.graph import gather_reduce_csr as gather_reduce_csr
from tilewright.kernels.graph import reduces_lists as reduces_lists
from tilewright.kernels.graph import scatter_add as scatter_add
from tilewright.kernels.head_argmax.xla import allowed as allowed
from tilewright.kernels.head_argmax.xla import argmax as argmax
from tilewright.kernels.head_top_k.xla import top_k as top_k
from tilewright.kernels.operations import Operations, Products
from tilewright.kernels.operations import Weights as Weights
from tilewright.kernels.paged.xla import held as held
from tilewright.kernels.registry import DECODING as DECODING
from tilewright.kernels.registry import DENOISING as DENOISING
from tilewright.kernels.registry import Chip as Chip
from tilewright.kernels.registry import Kernels as Kernels
from tilewright.kernels.registry import Selection as Selection
from tilewright.kernels.registry import absent
from tilewright.kernels.registry import fallbacks as fallbacks
from tilewright.kernels.registry import implementations as implementations
from tilewright.kernels.registry import kernel_of as kernel_of
from tilewright.kernels.window_attention.reference import CARRIED as CARRIED
from tilewright.kernels.window_attention.reference import EXACT as EXACT
from tilewright.kernels.window_attention.reference import IDLE as IDLE
from tilewright.kernels.window_attention.reference import cosine as cosine


def operations(chip: Chip | None = None, weights: Weights = "auto", kernels: Kernels = "auto") -> Operations:
    """The bundle that computes a model.

    Args:
        chip: that it will run on, which need not be here; by default what JAX runs on.
        weights: "int8" keeps matrices in 8 bits, on CPUs in blocks with a scale each, where XLA computes with one for each
            output; "int4" keeps those of layers in blocks of 4 bits and the output head in 8, or what blocks a file has; "fp8"
            keeps those of layers as floats of 8 bits, a file's as they are, where XLA computes; "auto" keeps the dtype that
            they have.
        kernels: "auto" takes this package's own kernels where they run, "xla" leaves everything to XLA.

    Raises:
        ValueError: one of them is none of these, or FP8 is asked for where the CPU kernels run.
    """
    chip = cast(Chip, chip or jax.default_backend())
    for name, value, known in (("chip", chip, Chip), ("weights", weights, Weights), ("kernels", kernels, Kernels)):
        if value not in get_args(known):
            raise ValueError(f"expected {name} to be one of {', '.join(get_args(known))}, found {value!r}")
    missing = absent("cpu", chip, kernels)
    if not missing:
        if weights == "fp8":
            raise ValueError("FP8 weights are XLA's: expected kernels 'xla' beside them on a CPU, or weights 'int8' or 'int4'")
        from tilewright.kernels.bundles import cpu

        return cpu.cpu_operations(f"cpu {native.kernels().isa}", weights)
    found = PLAIN if chip != "cpu" else CPU_XLA
    if not absent("tpu", chip, kernels):
        from tilewright.kernels.bundles import tpu

        found = tpu.TPU
    return found if weights == "auto" else in_few_bits(found, weights)


def formats(kernels: Kernels) -> dict[Weights, Operations]:
    """The bundle of each format of weights that runs here."""
    packs = operations(kernels=kernels).packs
    return {each: operations(weights=each, kernels=kernels) for each in get_args(Weights) if not (packs and each == "fp8")}


def computes_bfloat16(ops: Operations) -> bool:
    """True if these operations compute in bfloat16 here as fast as in float32: not if XLA does, on a CPU."""
    return ops.packs or jax.default_backend() != "cpu"


def training_operations(products: str) -> Operations:
    """The bundle for training, on weights as they are, which stay float32 as the residual stream does.

    Args:
        products: "float32"; "bfloat16", with float32 sums; or "auto": bfloat16 where the chip has instructions for it, else
            float32. On a CPU they are the CPU kernels' where these run, else XLA's in float32; elsewhere XLA's.

    Raises:
        ValueError: other products, or bfloat16 on a CPU where the CPU kernels do not run.
    """
    from tilewright.kernels.bundles import training

    if products not in get_args(Products):
        raise ValueError(f"expected products in auto, float32 or bfloat16, found {products!r}")
    if jax.default_backend() != "cpu":
        return PLAIN if products == "float32" else training.MIXED
    isa = native.kernels().isa
    if isa is None and products == "bfloat16":
        raise ValueError(f"products in bfloat16 need the CPU kernels: {native.kernels().reason}")
    if isa is None:
        return PLAIN
    return training.cpu_operations(products == "bfloat16" or (products == "auto" and isa in training.BFLOAT16_ISAS))
