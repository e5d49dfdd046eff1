"""A row of a batch is what it is alone, whatever its neighbours are, its program's shapes, and how steps are dispatched."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diffusion.support import BACKENDS, PLAIN, REPAIRED, TABLE, asking, build, changed, needs_native, together
from tilewright.llm.diffusion_model import DenoisingStream, DiffusionModel

PROMPTS = [[3, 17, 8, 25, 11], [4], [7, 7, 21, 2, 35, 9, 13], [31, 5], [8, 8], [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13], [20]]
REQUESTS = [
    asking(mode="sparse", saliency=PLAIN),
    asking(mode="dense", threshold=0.4),
    asking(mode="sparse", saliency=REPAIRED, new_tokens=5, block_length=None, temperature=0.9),
    asking(mode="prefix", new_tokens=8, block_length=2, remasking="topk_margin"),
    asking(mode="dual", steps=6, ignore_eos=False, temperature=1.2, seed=3),
    changed(asking(mode="sparse", saliency=REPAIRED, remasking="entropy", top_p=0.8), every=2, first_layer=True),
    asking(mode="sparse", saliency=PLAIN, new_tokens=1, block_length=1),
]
"""Rows of different lengths, modes and rules, which end one after the other."""


@pytest.fixture(scope="module", params=[BACKENDS[0], BACKENDS[3]])
def model(request: pytest.FixtureRequest) -> DiffusionModel:
    return build(*request.param)


@pytest.fixture(scope="module")
def whole(model: DiffusionModel) -> DenoisingStream:
    return together(model, PROMPTS, REQUESTS)


def history(session: DenoisingStream, row: int) -> tuple[list[int], list[int], list[list[int]]]:
    """A row's tokens, what each of its steps committed, and what these found salient."""
    reports = [report for report in session.reports if report.committed[row] >= 0]
    return session.tokens()[row], [int(r.committed[row]) for r in reports], [r.salient[row].tolist() for r in reports]


def test_each_row_is_what_it_is_alone(model: DiffusionModel, whole: DenoisingStream):
    for row in range(len(REQUESTS)):
        alone = together(model, [PROMPTS[row]], [REQUESTS[row]])
        assert history(alone, 0) == history(whole, row), f"{REQUESTS[row]}"


def test_the_order_of_rows_does_not_matter(model: DiffusionModel, whole: DenoisingStream):
    turned = together(model, PROMPTS[::-1], REQUESTS[::-1])
    for row in range(len(REQUESTS)):
        assert history(turned, len(REQUESTS) - 1 - row) == history(whole, row)


@pytest.mark.parametrize("steps", [1, 5])
def test_steps_may_be_dispatched_a_few_at_a_time(model: DiffusionModel, whole: DenoisingStream, steps: int):
    session = model.start([*PROMPTS, [1, 2, 3]], [*REQUESTS, whole.requests[-1]])
    while not session.finished:
        tokens = session.tokens()
        before = len(session.reports)
        session.advance(steps)
        reports = session.reports[before:]
        assert 1 <= len(reports) <= steps
        masked = [sum(token == model.config.mask_token_id for token in row) for row in tokens]
        left = [sum(token == model.config.mask_token_id for token in row) for row in session.tokens()]
        gone = np.sum([np.maximum(report.committed, 0) for report in reports], axis=0)
        assert (np.asarray(masked) - left == gone).all()
    for row in range(len(REQUESTS)):
        assert history(session, row) == history(whole, row)


def test_reports_say_what_was_looked_at(whole: DenoisingStream):
    """As much as the row that asks for most; rows that are done ask for nothing."""
    spans = [report.span for report in whole.reports]
    assert spans[0] == "whole"
    assert set(spans) <= {"whole", "response", "block"}
    last = max(n for n, report in enumerate(whole.reports) if (report.committed[:-1] >= 0).any())
    assert set(spans[last + 1 :]) <= {"whole", "block"}, "the filler alone: whole passes, and its block"
    assert "block" in spans[last + 1 :]


SHAPES: list[dict[str, Any]] = [{"batches": (1,)}, {"positions": (48,)}, {"responses": (24,)}, {"blocks": (13,)}]


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({name: sizes for each in SHAPES for name, sizes in each.items()}, id="all"),
        *(pytest.param(each, id=next(iter(each)), marks=pytest.mark.slow) for each in SHAPES),
    ],
)
def test_a_row_does_not_depend_on_the_shapes_of_its_program(changes: dict[str, Any]):
    asked = asking(mode="sparse", saliency=REPAIRED)
    one = together(build("llada"), [PROMPTS[2]], [asked])
    other = together(build("llada", table=replace(TABLE, **changes)), [PROMPTS[2]], [asked], filler=False)
    assert history(one, 0) == history(other, 0)


def test_generate_goes_through_as_many_batches_as_it_takes(model: DiffusionModel, whole: DenoisingStream):
    """Eight rows, and three more."""
    prompts = [*whole.prompts, *whole.prompts[-3:]]
    requests = [*whole.requests, *whole.requests[-3:]]
    results = whole.results()
    assert model.table.batches == (len(results),)
    assert model.generate(prompts, requests).results == [*results, *results[-3:]]
