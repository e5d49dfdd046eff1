"""Both ways of decoding side by side: what is alternated, what is timed, and what counts as identical."""

from collections.abc import Sequence
from typing import Any

import jax
import pytest

from tilewright.bench.compare import Comparison, acceptance_figures, compare, comparison_figures, environment, joined
from tilewright.decode.language_model import Generation, LanguageModel
from tilewright.decode.sampling import Sampling
from tilewright.decode.session import Result
from tilewright.decode.speculative import Drafting
from tilewright.models.dflash import DFlashConfig

DRAFTING = Drafting(DFlashConfig(8, 4, 4, 1, 1, 1, 4, 6, 7, (0,), 1), block_size=4)


def result(tokens: Sequence[int], lengths: Sequence[int]) -> Result:
    return Result("", list(tokens), list(lengths), "length", 1)


def generation(*rows: Sequence[int], seconds: float = 1.0, rounds: int = 1) -> Generation:
    return Generation([result(row, [len(row)]) for row in rows], 0.5, seconds, rounds)


def comparison(autoregressive: Generation, speculative: Generation) -> Comparison:
    return Comparison(autoregressive, speculative, 20.0, 50.0, 5)


class FakeModel(LanguageModel):
    """Gives what it is told: `seconds[speculative]` for each run after the other. Results depend on the way."""

    def __init__(self, seconds: dict[bool, list[float]], drafting: Drafting | None = DRAFTING):
        self.seconds, self.drafting = {way: iter(each) for way, each in seconds.items()}, drafting
        self.dtype, self.kernels = "float32", "xla"
        self.calls: list[tuple[list[Any], bool | None]] = []

    def generate(self, prompts: str | Sequence[Any], sampling: Any = None, speculative: bool | None = None) -> Generation:
        assert speculative is not None
        self.calls.append((list(prompts), speculative))
        rows = [result(range(8), [4, 1, 3] if speculative else [1] * 8) for _ in prompts]
        return Generation(rows, 0.1, next(self.seconds[speculative]), 3 if speculative else 8)


def test_runs_alternate_and_the_first_of_each_way_is_not_timed():
    lm = FakeModel({False: [99, 4, 2, 1], True: [99, 1, 0.5, 8]})
    done: list[int] = []
    both = compare(lm, [["a"]], Sampling(8), 3, lambda: done.append(1))
    assert [speculative for _, speculative in lm.calls] == [False, True] * 4
    assert len(done) == 8
    assert both.autoregressive_tokens_per_s == 8 / 2, "the median of 2, 4 and 8 tokens a second"
    assert both.speculative_tokens_per_s == 8 / 1
    assert both.speedup == 2
    assert both.repetitions == 3


def test_batches_are_summed():
    lm = FakeModel({False: [9, 9, 1, 3], True: [9, 9, 1, 1]})
    both = compare(lm, [["a", "b"], ["c"]], Sampling(8), 1)
    assert [prompts for prompts, _ in lm.calls[:2]] == [["a", "b"], ["c"]]
    assert both.autoregressive_tokens_per_s == 24 / 4
    assert both.speculative_tokens_per_s == 24 / 2
    assert both.speculative.rounds == 6
    assert len(both.speculative) == 3


def test_joined_adds_up():
    parts = [generation([1], [2, 3], seconds=2.0, rounds=4), generation([4], seconds=3.0, rounds=5)]
    whole = joined(parts)
    assert [r.tokens for r in whole] == [[1], [2, 3], [4]]
    assert (whole.prefill_seconds, whole.decode_seconds, whole.rounds) == (1.0, 5.0, 9)


def test_identical_and_where_not():
    same = comparison(generation([1, 2], [3]), generation([1, 2], [3]))
    assert same.identical
    assert same.first_differences == [None, None]
    other = comparison(generation([1, 2], [3, 4, 5]), generation([1, 2], [3, 9, 5]))
    assert not other.identical
    assert other.first_differences == [None, 1]
    shorter = comparison(generation([1, 2]), generation([1]))
    assert not shorter.identical
    assert shorter.first_differences == [1]


def test_figures_of_a_comparison():
    lm = FakeModel({False: [1, 1], True: [1, 0.25]})
    figures = comparison_figures(lm, compare(lm, [["a"]], Sampling(8), 1))
    assert figures == {
        "autoregressive_tokens_per_s": 8,
        "speculative_tokens_per_s": 32,
        "speedup": 4,
        "round_cost_steps": pytest.approx((0.25 / 3) / (1 / 8)),
        "identical": True,
        "first_differences": [None],
        "repetitions": 1,
        "rounds": 3,
        "distinct_4gram_ratio": 1,
        "mean_acceptance_length": 8 / 3,
        "acceptance_histogram": [1, 0, 1, 1],
        "block_size": 4,
    }


def test_without_a_drafter_nothing_is_said_of_drafts():
    assert acceptance_figures(FakeModel({}, drafting=None), generation([1])) == {
        "mean_acceptance_length": None, "acceptance_histogram": None, "block_size": None,
    }  # fmt: skip


def test_environment_names_chip_and_versions():
    told = environment(FakeModel({}))
    assert (told["dtype"], told["kernels"], told["jax_version"]) == ("float32", "xla", jax.__version__)
    assert told["chip"]
