"""Which cases of a product are run."""

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from products import cases

PARTS = st.lists(st.integers(1, 4).map(lambda count: tuple(range(count))), min_size=2, max_size=4)


@given(PARTS, st.booleans(), st.data())
def test_every_two_values_meet_in_few_cases(parts: list[tuple[int, ...]], all_fit: bool, data: st.DataObject):
    """But for those that no case has."""
    there = [each for each in product(*parts) if all_fit or sum(each) % 3 != 1]
    quick = set(data.draw(st.lists(st.sampled_from(there), max_size=3)))
    found = list(cases(quick, *parts, fits=None if all_fit else lambda *each: sum(each) % 3 != 1))
    assert [each.values for each in found] == there
    marks = {each.values: {mark.name for mark in each.marks} for each in found}
    assert {each for each in there if not marks[each]} == quick
    run = [each for each in there if "product" not in marks[each]]
    for one, other in combinations(range(len(parts)), 2):
        assert {(each[one], each[other]) for each in run} == {(each[one], each[other]) for each in there}
    pairs = {each: set(combinations(enumerate(each), 2)) for each in run}
    for each in set(run) - quick:
        assert pairs[each] - set[object]().union(*(pairs[other] for other in run if other != each)), "none is needless"
    largest = sorted(map(len, parts))[-2:]
    assert len(run) - len(quick) <= 2 * largest[0] * largest[1] + 2
