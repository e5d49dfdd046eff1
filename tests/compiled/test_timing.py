"""Alternating runs: their order, the discarded warm-up, and the statistics of the results."""

from collections.abc import Callable, Sequence

from tilewright.compiled.timing import Spread, alternate, medians, quotients, spread


def runs(order: list[str], **values: Sequence[float]) -> dict[str, Callable[[], float]]:
    """Makes one run per name, which logs its name and returns its values in order."""

    def run(name: str, waiting: Sequence[float]) -> Callable[[], float]:
        given = iter(waiting)
        return lambda: order.append(name) or next(given)

    return {name: run(name, waiting) for name, waiting in values.items()}


def test_runs_alternate_and_every_second_repetition_is_reversed():
    order: list[str] = []
    done: list[int] = []
    seconds = alternate(runs(order, a=[5, 1, 2], b=[7, 9, 8], c=[0, 0, 0]), 3, lambda: done.append(len(order)))
    assert "".join(order) == "abccbaabc"
    assert seconds == {"a": [5, 1, 2], "b": [7, 9, 8], "c": [0, 0, 0]}
    assert done == list(range(1, 10))
    assert medians(seconds) == {"a": 2, "b": 8, "c": 0}


def test_a_warm_up_is_an_extra_repetition_whose_results_are_discarded():
    order: list[str] = []
    done: list[int] = []
    seconds = alternate(runs(order, a=[99, 1, 2], b=[99, 3, 4]), 2, lambda: done.append(1), warm=True)
    assert "".join(order) == "baabba"
    assert seconds == {"a": [1, 2], "b": [3, 4]}
    assert len(done) == 6


def test_a_spread_keeps_the_range():
    assert spread([3, 1, 2, 9]) == Spread(2.5, 1, 9)
    assert spread([3, 1, 2, 9]).range == (1, 9)


def test_quotients_are_of_the_same_repetition():
    """Quotients do not change if the machine slows down by half after the first repetition."""
    assert quotients([4, 8, 8], [2, 4, 4]) == Spread(2, 2, 2)
    assert quotients([1, 6, 8], [2, 2, 2]) == Spread(3, 0.5, 4)
