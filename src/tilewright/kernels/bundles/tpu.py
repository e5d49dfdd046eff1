"""Bundle for TPUs: Pallas kernels where they support the operands, else XLA."""

from dataclasses import replace

from tilewright.kernels.bundles.xla import PLAIN
from tilewright.kernels.registry import operations_for
from tilewright.kernels.sparse_attention.pallas_tpu import LANES

TPU = replace(PLAIN, name="tpu", **operations_for("tpu"), sparse_multiple=LANES)
