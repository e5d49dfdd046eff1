"""What the compiler's estimates leave out: kernels, by what they declare."""

import pytest

from tilewright.hardware.tpu import CHIPS
from tilewright.perfmodel.compiler_estimate import kernel_cycles

CALL = """HloModule one, is_scheduled=true

ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %call = f32[8,128]{1,0:T(8,128)} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={COST}
}
"""


def test_a_kernel_counts_by_the_roofline_of_what_it_declares():
    chip = CHIPS["v5e"]
    declared = '{"custom_call_config":{"cost_estimate":{"flops":"12","transcendentals":"0","bytes_accessed":"819000000"}}}'
    assert kernel_cycles(chip, CALL.replace("{COST}", declared)) == pytest.approx(1e6 * chip.clock_ghz)
    with pytest.raises(ValueError, match="with a cost estimate, found call without"):
        kernel_cycles(chip, CALL.replace("{COST}", "{}"))
