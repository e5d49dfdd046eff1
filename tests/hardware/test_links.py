"""Links: routes, rings of neighbours, and the α–β time of collectives, against counts by hand and by brute force."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.hardware.collectives import COLLECTIVES, ring_share
from tilewright.hardware.links import (
    Fabric,
    Place,
    Torus,
    least_seconds,
    ring_of,
    ring_seconds,
    slice_fabric,
    torus_of,
)
from tilewright.hardware.tpu import CHIPS

V5E = CHIPS["v5e"]
V5P = CHIPS["v5p"]
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


def chips(sizes: tuple[int, ...]) -> list[Place]:
    return list(product(*map(range, sizes)))


def apart(torus: Torus, a: Place, b: Place) -> int:
    """Hops between two chips, axis by axis."""
    ways = zip(torus.sizes, torus.wrapped, a, b, strict=True)
    return sum(min(abs(x - y), size - abs(x - y)) if wrap else abs(x - y) for size, wrap, x, y in ways)


@given(SIZES, st.booleans(), st.data())
def test_a_path_is_a_shortest_one_of_links(sizes: tuple[int, ...], wrap: bool, data: st.DataObject):
    torus = Torus(sizes, (wrap,) * len(sizes))
    start, end = (data.draw(st.sampled_from(chips(sizes))) for _ in range(2))
    path = torus.path(start, end)
    assert len(path) == apart(torus, start, end)
    assert [start, *(link[1] for link in path)] == [*(link[0] for link in path), end]
    assert all(apart(torus, *link) == 1 for link in path)


@given(SIZES)
def test_a_ring_visits_each_chip_once_and_its_neighbours_are_neighbours(sizes: tuple[int, ...]):
    ring = ring_of(chips(sizes))
    torus = Torus(sizes, (False,) * len(sizes))
    assert sorted(ring) == chips(sizes)
    if len(ring) % 2 == 0 and sum(size > 1 for size in sizes) > 1:
        assert all(apart(torus, ring[at - 1], chip) == 1 for at, chip in enumerate(ring))


def test_chips_that_fill_no_box_stay_in_order():
    assert ring_of([(1, 1), (0, 0), (0, 1)]) == [(0, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize(
    "kind, sizes, wrapped",
    [
        ("v5e", (4, 2), (False, False)),
        ("v5e", (16, 8), (True, False)),
        ("v6e", (16, 16), (True, True)),
        ("v5p", (2, 2, 4), (False, False, False)),  # no whole cube, so no optical switch
        ("v5p", (4, 4, 8), (True, True, True)),
    ],
)
def test_slices_wrap_where_their_kind_does(kind: str, sizes: tuple[int, ...], wrapped: tuple[bool, ...]):
    assert torus_of(CHIPS[kind], sizes).wrapped == wrapped


@pytest.mark.parametrize(
    "sizes, wrap, links",
    [((4, 2), False, 2), ((2, 2, 2), False, 3), ((4, 4, 4), True, 6), ((1, 1), False, 0), ((2, 1), True, 1)],
)
def test_links_of_the_chip_with_fewest(sizes: tuple[int, ...], wrap: bool, links: int):
    assert Torus(sizes, (wrap,) * len(sizes)).fewest_links == links


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("directions", [1, 2])
def test_the_share_of_an_all_to_all_is_that_of_all_its_pairs(size: int, directions: int):
    """Data that is equally far both ways goes half each way."""
    passed: Counter[int] = Counter()
    for chip, hops in product(range(size), range(1, size)):
        back = directions == 2 and 2 * hops > size
        both = directions == 2 and 2 * hops == size
        for hop in range(size - hops if back else hops):
            passed[(chip + hop) % size] += 0 if back else 1 if both else 2
    forward = max(passed.values()) / (2 * size)
    # Both directions of an odd ring carry the same; those of an even ring share the middle.
    assert ring_share("all-to-all", size, directions) == pytest.approx(forward)


def test_the_times_of_a_ring_of_eight():
    rate = 50e9
    whole = 64e6
    assert ring_seconds(V5E, "all-gather", whole, (8,), 1) == pytest.approx(whole * 7 / 8 / rate + 7e-6)
    assert ring_seconds(V5E, "reduce-scatter", whole, (8,), 2) == pytest.approx(whole * 7 / 16 / rate + 4e-6)
    assert ring_seconds(V5E, "all-reduce", whole, (8,), 2) == pytest.approx(whole * 7 / 8 / rate + 8e-6)
    assert ring_seconds(V5E, "all-to-all", whole, (8,), 2) == pytest.approx(whole / rate + 4e-6)
    # Two axes of four: twice the links, and sequential hops.
    assert ring_seconds(V5E, "all-gather", whole, (4, 4), 2, hop_us=0.5) == pytest.approx(whole * 15 / 16 / 4 / rate + 2e-6)
    assert ring_seconds(V5E, "all-gather", whole, (1,)) == 0
    with pytest.raises(ValueError, match=r"expected a collective of all-reduce, .*, found 'sum'"):
        ring_seconds(V5E, "sum", whole, (8,))


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("directions", [1, 2])
def test_the_links_of_a_torus_take_the_time_of_its_rings(kind: str, directions: int):
    whole = 1e9
    devices = (*range(16),)
    ring = Fabric(V5E, torus_of(V5E, (16, 1)), tuple(chips((16, 1))))
    assert ring.collective(kind, [devices], whole, directions).seconds == pytest.approx(
        ring_seconds(V5E, kind, whole, (16,), directions)
    )
    cube = Fabric(V5P, torus_of(V5P, (4, 4, 4)), tuple(chips((4, 4, 4))))
    along = cube.collective(kind, [tuple(range(64))], whole, directions, by_axis=True)
    assert along.seconds == pytest.approx(ring_seconds(V5P, kind, whole, (4, 4, 4), directions))


def test_a_row_that_does_not_wrap_takes_twice_as_long():
    row = Fabric(V5E, torus_of(V5E, (4, 1)), tuple(chips((4, 1))), hop_us=0)
    assert row.collective("all-gather", [range(4)], 1e9).seconds == pytest.approx(2 * 1e9 * 3 / 8 / 50e9)


def test_permutes_share_links_with_what_passes_through():
    fabric = Fabric(V5E, torus_of(V5E, (4, 1)), tuple(chips((4, 1))))
    ring = [(0, 1), (1, 2), (2, 3), (3, 0)]
    load = fabric.permute(ring, 50e6)
    assert load.seconds == pytest.approx(1e-3 + 3e-6)  # the hop from the last chip to the first passes three links
    assert len(load.busy_s) == 6
    far = fabric.permute([(0, 2), (1, 3)], 50e6)
    assert far.seconds == pytest.approx(2e-3 + 2e-6)  # both pass the link in the middle


@given(st.sampled_from([(4, 2), (2, 2), (8, 4), (16, 2)]), st.floats(1e3, 1e9), st.sampled_from(COLLECTIVES))
def test_no_ring_is_faster_than_all_links_of_a_chip(sizes: tuple[int, int], whole: float, kind: str):
    torus = torus_of(V5E, sizes)
    fabric = Fabric(V5E, torus, tuple(chips(sizes)), hop_us=0)
    ring = fabric.collective(kind, [range(len(fabric.places))], whole).seconds
    assert least_seconds(V5E, torus, kind, whole) <= ring * (1 + 1e-9)
    assert least_seconds(V5E, torus_of(V5E, (1, 1)), kind, whole) == 0


def test_a_slice_has_all_its_devices_in_a_ring():
    fabric = slice_fabric("v5p:2x2x1", hop_us=0.0)
    assert (fabric.chip, fabric.torus, fabric.hop_us) == (V5P, torus_of(V5P, (2, 2, 1)), 0)
    assert list(fabric.places) == ring_of(chips((2, 2, 1)))
    for wrong in ("v5p", "v5p:2x2", "v5p:0x2x2", "v9:2x2"):
        with pytest.raises(ValueError, match="expected a"):
            slice_fabric(wrong)
