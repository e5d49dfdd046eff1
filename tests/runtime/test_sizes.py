"""The pages and the context of an engine follow from the free memory, and every request within the context has its pages."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm.support import build
from reference.dflash_numpy import random_pair
from runtime.support import Heard
from tilewright.kernels.select import operations
from tilewright.llm.language_model import LanguageModel
from tilewright.runtime import sizes
from tilewright.runtime.automaton_table import AutomatonTables
from tilewright.runtime.memory import amount
from tilewright.runtime.options import EngineOptions, batches_for
from tilewright.runtime.programs import FORCED
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.runtime.sizes import engine_sizes, pages_within, served_context, sizes_line, state_bytes, temporary_bytes
from tilewright.speculation.drafters.load import DrafterOptions

PAIR = random_pair(0, vocab_size=24, target_layers=2, drafter_layers=1, taps=[0], block_size=4)
CONTEXT = PAIR.target_config["max_position_embeddings"]

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return build(tmp_path_factory.mktemp("pair"), PAIR).with_drafter(None)


@given(
    longest=st.integers(2, 5000),
    capacity=st.integers(1, 80),
    pages=st.integers(1, 200),
    page_size=st.sampled_from([16, 64]),
    widest=st.integers(1, 16),
)
def test_whatever_the_context_allows_has_its_pages(longest: int, capacity: int, pages: int, page_size: int, widest: int):
    slot = capacity * page_size
    held = pages * page_size
    try:
        context = served_context(longest, slot, held, widest)
    except ValueError:
        assert held < slot
        assert held - widest < 2
        return
    needed = -(-min(context + widest, slot) // page_size)
    assert needed <= pages
    assert context <= min(longest, slot)
    more = context + 1
    assert more > min(longest, slot) or -(-min(more + widest, slot) // page_size) > pages or held < slot


@pytest.mark.parametrize(
    ("budget", "page", "most", "pages"), [(1000, 10, 50, 50), (1000, 10, 200, 100), (9, 10, 5, 0), (-5, 10, 5, 0)]
)
def test_pages_are_those_that_there_is_memory_for(budget: int, page: int, most: int, pages: int):
    assert pages_within(budget, page, most) == pages


def sized(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch, free: int, **options: object) -> sizes.EngineSizes:
    monkeypatch.setattr(sizes, "free_bytes", lambda devices: free)
    return engine_sizes(lm.model.target, None, lm.model.dtype, EngineOptions(**options))  # type: ignore[arg-type]


def test_memory_bounds_the_pool_and_the_pool_the_context(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    full = sized(lm, monkeypatch, 0)
    assert (full.pages, full.context, full.free) == (full.full, CONTEXT, None)
    assert sized(lm, monkeypatch, 10**12, memory_fraction=0.9).pages == full.full
    layout = full.layout
    one, two = (state_bytes(lm.model.target, None, replace(layout, pages=n), lm.model.dtype) for n in (1, 2))
    assert two - one == full.page_bytes
    besides = 2 * one - two + temporary_bytes(lm.model.target, full.table, 1)
    free = 2 * (besides + 3 * full.page_bytes)
    found = sized(lm, monkeypatch, free, memory_fraction=0.5)
    assert (found.pages, found.context, found.free) == (3, 3 * 64 - 1, free)
    assert found.table.capacities == (256,)
    with pytest.raises(ValueError, match="too little memory for the KV cache: "):
        sized(lm, monkeypatch, 2 * besides, memory_fraction=0.5)


def test_tables_of_automata_are_counted(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    engine = lm.engine(EngineOptions(pages=4, constraints=True))
    tables = AutomatonTables(engine.decoding.programs.layout.batch, engine.vocab_size, jnp.asarray)
    table, _ = tables.placed([])
    assert engine.decoding.sizes is not None
    found = engine.decoding.sizes.automata_bytes
    assert found == 2 * sum(each.nbytes for each in table)
    assert f"automata of grammars {amount(found)} (--compile structured_output)" in engine.decoding.sizes_line
    plain = sized(lm, monkeypatch, 0)
    assert plain.automata_bytes == 0
    fixed = state_bytes(lm.model.target, None, replace(plain.layout, pages=1), lm.model.dtype) - plain.page_bytes
    needed = fixed + temporary_bytes(lm.model.target, plain.table, 1) + found + 3 * plain.page_bytes
    assert sized(lm, monkeypatch, 2 * needed, memory_fraction=0.5, constraints=True).pages == 3
    assert sized(lm, monkeypatch, 2 * needed, memory_fraction=0.5).pages > 3


def test_a_shorter_context_makes_shorter_slots(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    found = sized(lm, monkeypatch, 0, context=300)
    assert (found.context, found.table.capacities) == (300, (512,))
    with pytest.raises(ValueError, match=f"a context of at most {CONTEXT}, the model's, found {CONTEXT + 1}"):
        sized(lm, monkeypatch, 0, context=CONTEXT + 1)


def test_the_line_says_all_three_and_what_would_change_them(lm: LanguageModel):
    line = lm.engine(EngineOptions(pages=4)).decoding.sizes_line
    for said in (
        "weights",
        "of which a plain step reads",
        "float32",
        "--dtype",
        "4 pages of 64",
        "--memory pages",
        "--memory fraction",
        "--slots",
    ):
        assert said in line
    assert f"context 255, limited by the pages, the model's is {CONTEXT:,} (--context)" in line


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("auto", " in float32 (--dtype, --weights), of which a plain step reads"),
        (
            "int4",
            "with matrices in 4 bits or those of their file (--weights int4), the rest in float32 (--dtype), of which",
        ),
        ("int8", "with matrices in 8 bits (--weights int8), the rest in float32 (--dtype), of which a plain step reads"),
    ],
)
def test_the_line_says_what_the_weights_are_held_in(lm: LanguageModel, weights: Any, said: str):
    engine = lm.engine(EngineOptions(pages=4))
    assert engine.decoding.sizes is not None
    target = replace(engine.decoding.model.target, ops=operations(weights=weights, kernels="xla"))
    assert said in sizes_line(engine.decoding.sizes, engine.decoding.model.models, target, "float32", "float32", CONTEXT)


@given(st.integers(1, 40), st.integers(2, 9000))
def test_capacities_are_whole_pages_and_whole_chunks(pages: int, context: int):
    table = EngineOptions(page_size=16 * pages).shapes(context)
    (capacity,) = table.capacities
    assert (capacity % (16 * pages), capacity % table.chunks[-1]) == (0, 0)
    assert capacity >= context


def test_a_small_pool_leaves_room_for_a_block_under_masks(lm: LanguageModel):
    table = ShapeTable(batches=(1,), capacities=(64,), chunks=(16,))
    engine = lm.engine(EngineOptions(pages=2, page_size=16, table=table, constraints=True))
    width = engine.decoding.programs.width(None, masked=True)
    assert (width, engine.context) == (FORCED, 32 - FORCED)
    assert engine.scheduler.pages_for(engine.context + width) == engine.scheduler.pages.count


def test_a_small_pool_takes_whatever_fits_into_its_context(lm: LanguageModel):
    engine = lm.engine(EngineOptions(pages=2, page_size=16, table=ShapeTable(batches=(1,), capacities=(64,), chunks=(16,))))
    assert engine.context == 31
    engine.check(GenerateRequest([1] * 5, Sampling(engine.context - 5)))
    with pytest.raises(ValueError, match="leaves room for 26 in the context of 31"):
        engine.check(GenerateRequest([1] * 5, Sampling(engine.context - 4)))
    engine.warm()
    engine.accept_requests()
    listener = Heard()
    handle = engine.submit(GenerateRequest([1] * 5, Sampling(26, ignore_eos=True)), listener)
    while handle.result is None:
        engine.step()
    engine.stop()
    assert (len(handle.result.tokens), handle.result.finish_reason) == (26, "length")


@pytest.mark.parametrize(
    ("slots", "rows"),
    [
        (None, (1, 2, 4, 8)),
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (12, (1, 2, 4, 8, 12)),
        (64, (1, 2, 4, 8, 16, 32, 64)),
    ],
)
def test_no_request_pays_for_more_than_twice_the_rows_that_run(slots: int | None, rows: tuple[int, ...]):
    assert EngineOptions(slots=slots).shapes(256).batches == batches_for(slots, (1, 2, 4, 8)) == rows


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"memory_fraction": 0.0}, "a memory fraction above 0 and at most 1, found 0"),
        ({"memory_fraction": 1.5}, "found 1.5"),
        ({"context": 0}, "context of at least 1, found 0"),
        ({"slots": 0}, "slots of at least 1, found 0"),
    ],
)
def test_wrong_options_are_said(wrong: dict[str, float], said: str):
    with pytest.raises(ValueError, match=said):
        EngineOptions(**wrong)  # type: ignore[arg-type]


def test_a_pool_too_small_for_a_token_is_said(lm: LanguageModel):
    table = ShapeTable(batches=(1,), capacities=(256,), chunks=(16,))
    drafting = lm.with_drafter(*lm.load_drafter("ngram", DrafterOptions(block_size=16)))
    with pytest.raises(ValueError, match="pages for at least 18 positions, found pages for 16"):
        drafting.engine(EngineOptions(pages=1, page_size=16, table=table))
