"""Costs of kernels: what they declare, and splash attention's from its shapes and its numbers of blocks."""

import pytest

from tilewright.compiled.hlo import Computation, HloOp, Module, read_module
from tilewright.hardware.tpu import CHIPS
from tilewright.perfmodel.compiler_estimate import kernel_cycles
from tilewright.perfmodel.kernel_cost import kernel_cost
from tilewright.perfmodel.schedule import read_schedule

ARRAY = "bf16[2,4,1024,128]{3,2,1,0}"
BYTES = 2 * 4 * 1024 * 128 * 2


def program(phase: str, name: str = "splash_3_of_4", attributes: str = "") -> str:
    """A kernel whose metadata are on lines of their own, as libtpu prints them."""
    return f"""HloModule step, is_scheduled=true

ENTRY %main (q: bf16[2,4,1024,128]) -> bf16[2,4,1024,128] {{
  %q = {ARRAY} parameter(0)
  ROOT %kernel = {ARRAY} custom-call(%q), custom_call_target="tpu_custom_call", frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{\\"block_q\\": 512}}"
}}}}, metadata={{op_name="jit(f)/{name}/splash_mha_{phase}_residuals/pallas_call"}}{attributes}
}}
"""


def kernel(text: str) -> tuple[Module, Computation, HloOp]:
    module = read_module(text)
    return module, module.entry, module.entry.root


@pytest.mark.parametrize("phase, products", [("fwd", 2), ("dq", 3), ("dkv", 4)])
def test_splash_attention_counts_visible_blocks(phase: str, products: int):
    """Three of four blocks of 512 × 512 scores, each of which reads two blocks of rows of every head."""
    flops = products * 2 * (2 * 4 * 1024 * 128) * 1024 * 3 // 4
    assert kernel_cost(*kernel(program(phase))) == (2 * BYTES + 2 * 3 * BYTES // 2, flops)


def test_a_declared_cost_counts():
    text = program("fwd", attributes=', backend_config={"cost_estimate":{"flops":"70","bytes_accessed":"30"}}')
    assert kernel_cost(*kernel(text)) == (30, 70)


def test_a_schedule_has_its_roofline():
    chip = CHIPS["v5e"]
    (cost,) = [node for node in read_schedule(program("dkv"), chip).nodes if node.role == "run"]
    expected = chip.roofline_cycles(*(kernel_cost(*kernel(program("dkv"))) or (0, 0)))
    assert (cost.cycles, cost.estimated) == (expected, False)
    assert kernel_cycles(chip, program("dkv")) == expected


def test_a_kernel_without_a_known_cost_is_refused():
    assert kernel_cost(*kernel(program("fwd", name="other"))) is None
    with pytest.raises(ValueError, match="expected a Pallas kernel with a cost estimate, found kernel without one"):
        kernel_cycles(CHIPS["v5e"], program("fwd", name="other"))
