"""Costs of a step and of a whole transfer, and their effect on the closed form of a layer."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.hardware.collectives import CollectiveCosts, CollectiveStep, ring_chunks, touched_share
from tilewright.hardware.layers import ESTIMATES, StrategyCosts, sharded_layer
from tilewright.hardware.links import Fabric, ring_of, torus_of
from tilewright.hardware.tpu import CHIPS

LAYER = sharded_layer(4096, 32, 8, 128, 14336, 8)


def fabric(chip: str, **costs: float) -> Fabric:
    """Eight chips in a ring of neighbours."""
    torus = torus_of(CHIPS[chip], (4, 2))
    return Fabric(CHIPS[chip], torus, tuple(ring_of((x, y) for x in range(4) for y in range(2))), **costs)


def test_a_transfer_takes_its_start_its_steps_and_its_completion():
    costs = CollectiveCosts(start_us=1, completion_us=2, hop_us=3, pass_us=0.5, skew_us=4)
    step = CollectiveStep(1e6, 3, (1e-9, 0.5e-9), 3, True)
    by_link = 1e6 * 0.5e-9 + 1e-6 * (3 + 2 * 0.5)
    assert costs.seconds([step, step], channels=2) == pytest.approx(1e-6 * (1 + 4 + 2) + 2 * by_link)
    by_memory = 1e6 * 3 / 1e9 + 1e-6 * (3 + 2 * 0.5)
    assert costs.seconds([step], channels=2, hbm_bytes_per_s=1e9) == pytest.approx(1e-6 * (1 + 4 + 2) + by_memory)
    assert costs.seconds([]) == 0
    with pytest.raises(ValueError, match="expected skew_us of 0 or more, found -1"):
        CollectiveCosts(skew_us=-1)


def test_a_ring_both_ways_takes_half_the_steps_for_the_same_chunks():
    assert ring_chunks(8) == (1,) * 7
    assert ring_chunks(8, 2) == (2, 2, 2, 1)
    assert ring_chunks(1, 2) == ()
    with pytest.raises(ValueError, match="in 1 or 2 directions, found 8 in 3"):
        ring_chunks(8, 3)


def test_slow_memory_bounds_collectives_and_permutes():
    slow = replace(CHIPS["v5e"], hbm_gb_per_s=1.0)
    links = replace(fabric("v5e"), chip=slow, hop_us=0.0)
    assert links.collective("all-reduce", [range(8)], 1e9).seconds == pytest.approx(touched_share("all-reduce", 8))
    assert links.permute([(0, 1), (1, 0)], 1e9).seconds == pytest.approx(2)


@settings(max_examples=30)
@given(
    chip=st.sampled_from(["v5e", "v6e"]),
    name=st.sampled_from(sorted(ESTIMATES)),
    rows=st.sampled_from([16, 128, 4096, 16384]),
    cost=st.sampled_from(["start_us", "completion_us", "hop_us", "skew_us"]),
    more=st.floats(0, 50),
)
def test_no_schedule_escapes_what_transfers_cost(chip: str, name: str, rows: int, cost: str, more: float):
    plain = fabric(chip)
    dear = replace(plain, **{cost: getattr(plain, cost) + more})  # type: ignore[arg-type]
    before, after = (ESTIMATES[name](StrategyCosts(links), rows, LAYER) for links in (plain, dear))
    assert after.total_s >= before.total_s - 1e-12


@settings(max_examples=30)
@given(chip=st.sampled_from(["v5e", "v6e"]), rows=st.sampled_from([8, 128, 4096]), start=st.floats(0, 20))
def test_hops_that_nothing_hides_are_no_cheaper_than_a_collective(chip: str, rows: int, start: float):
    costs = StrategyCosts(fabric(chip, start_us=start))
    size = 2.0 * rows * LAYER.hidden
    assert costs.hops * costs.hop_s(rows, LAYER) >= costs.fabric.collective("all-gather", [range(8)], size).seconds - 1e-12
