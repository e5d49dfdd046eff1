"""N-grams in the place of a drafter with weights: row by row what each of the two proposes, and no pass that nobody needs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.support import prompts, state_of, tokens_of
from reference.dflash_numpy import as_folders, random_pair
from reference.eagle3_numpy import as_folder, random_eagle3
from reference.mtp_numpy import add_head, random_head
from tilewright.llm import language_model
from tilewright.llm.language_model import LanguageModel, load
from tilewright.runtime.interfaces import Proposal
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.runtime.state import DecodeState, Models, Target
from tilewright.speculation.drafters.dflash import DFlash
from tilewright.speculation.drafters.load import DrafterOptions
from tilewright.speculation.drafters.ngram import NGram
from tilewright.speculation.drafters.ngrams_first import NGramsFirst, ngrams_first

NEW = 24
VOCAB = 16
BLOCK = 4
TABLE = ShapeTable(batches=(1, 4), capacities=(64,), chunks=(8,))
PAIR = random_pair(0, vocab_size=VOCAB, target_layers=2, drafter_layers=1, taps=[0], block_size=BLOCK)
EAGLE3 = random_eagle3(0, PAIR.target_config, taps=[1], draft_vocab_size=12)
GREEDY = Sampling(NEW)
REPEATED = [1, 2, 3, 9, 1, 2]
NEW_TEXT = [4, 5, 6, 7, 8]

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    target, dflash = as_folders(folder, PAIR)
    add_head(target, random_head(0, PAIR.target_config))
    return {"target": target, "dflash": dflash, "eagle3": as_folder(folder / "eagle3", *EAGLE3), "mtp": Path("mtp")}


def both(folders: dict[str, Path], kind: str, **options: Any) -> tuple[LanguageModel, Any, Any]:
    """A model with a drafter behind n-grams; and that drafter as it was loaded, with its parameters."""
    target = load(folders["target"], table=TABLE, **options)
    other, params = target.load_drafter(str(folders[kind]), DrafterOptions(block_size=BLOCK))
    return target.with_drafter(NGramsFirst(other, BLOCK, NGram(BLOCK)), params), other, params


@pytest.fixture(scope="module", params=["dflash", "eagle3", pytest.param("mtp", marks=pytest.mark.slow)])
def joined(folders: dict[str, Path], request: pytest.FixtureRequest) -> tuple[LanguageModel, Any, Any]:
    return both(folders, request.param)


def proposals(lm: LanguageModel, inputs: Sequence[Sequence[int]]) -> list[Proposal]:
    """What n-grams, the other drafter and both together propose behind some prompts."""
    drafter = lm.drafter
    assert isinstance(drafter, NGramsFirst)
    with lm.start(inputs, GREEDY) as stream:
        stream.prefill()
        state, numbers = state_of(stream)
        ways = drafter.ngram, drafter.other, drafter
        found = [jax.device_get(proposed(way, lm.model.target, lm.model.models, state)) for way in ways]
    return [jax.tree.map(lambda each: each[np.argsort(numbers)], one) for one in found]


@partial(jax.jit, static_argnums=(0, 1))
def proposed(drafter: Any, target: Target, models: Models, state: DecodeState) -> Proposal:
    return drafter.propose(target, models, state)


@settings(max_examples=12)
@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=20), min_size=4, max_size=4))
def test_each_row_has_the_drafts_of_one_of_them(joined: tuple[LanguageModel, Any, Any], inputs: list[list[int]]):
    ngram, other, first = proposals(joined[0], inputs)
    assert first.from_ngrams is not None
    for row in range(len(inputs)):
        wanted = ngram if ngram.drafts[row] else other
        assert first.from_ngrams[row] == (ngram.drafts[row] > 0)
        assert first.drafts[row] == wanted.drafts[row]
        np.testing.assert_array_equal(first.block[row], wanted.block[row])


def test_both_kinds_of_rows_in_one_round(joined: tuple[LanguageModel, Any, Any]):
    """Else the property above would say little."""
    (*_, first) = proposals(joined[0], [REPEATED, NEW_TEXT])
    assert first.from_ngrams is not None
    assert first.from_ngrams.tolist() == [True, False]
    assert first.block[0].tolist() == [2, 3, 9, 1]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(NEW, temperature=1.0, seed=3)], ids=["greedy", "drawn"])
def test_tokens_are_those_of_plain_decoding(joined: tuple[LanguageModel, Any, Any], sampling: Sampling):
    lm = joined[0]
    inputs = [REPEATED, NEW_TEXT, *prompts(0, [1, 14], vocab=VOCAB)]
    assert tokens_of(lm, inputs, sampling, speculative=True) == tokens_of(lm, inputs, sampling, speculative=False)


@dataclass(frozen=True)
class Counting(DFlash):
    """Counts the passes that it runs."""

    def propose(self, target: Target, models: Models, state: DecodeState) -> Proposal:
        def count(drafts: np.ndarray) -> np.ndarray:
            PASSES.append(None)
            return drafts

        proposal = super().propose(target, models, state)
        # Pure: XLA moves it as all else, out of a loop of one turn or none if it may.
        drafts = jax.pure_callback(count, jax.ShapeDtypeStruct(proposal.drafts.shape, proposal.drafts.dtype), proposal.drafts)
        return proposal._replace(drafts=drafts)


PASSES: list[None] = []


@pytest.fixture
def passes() -> Iterator[list[None]]:
    PASSES.clear()
    yield PASSES
    PASSES.clear()


def test_a_pass_that_no_row_needs_does_not_run(folders: dict[str, Path], passes: list[None]):
    lm, other, params = both(folders, "dflash")
    counting = Counting(**{name: getattr(other, name) for name in other.__dataclass_fields__})
    lm = lm.with_drafter(NGramsFirst(counting, BLOCK, NGram(BLOCK)), params)
    for inputs, runs in (([REPEATED], 0), ([REPEATED, REPEATED], 0), ([NEW_TEXT], 1), ([NEW_TEXT, REPEATED], 1)):
        with lm.start(inputs, GREEDY) as stream:
            stream.prefill()
            state, _ = state_of(stream)
            passes.clear()
            jax.block_until_ready(proposed(lm.drafter, lm.model.target, lm.model.models, state))
            jax.effects_barrier()
        assert len(passes) == runs, inputs


def test_without_loops_the_drafts_are_the_same(folders: dict[str, Path], joined: tuple[LanguageModel, Any, Any]):
    """A compiler that takes none gets both drafts in each round, and chooses."""
    lm, other, _ = joined
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_model, "takes_loops", lambda: False)
        stepping = both(folders, other.name)[0]
    assert not stepping.model.target.loops
    inputs = [REPEATED, NEW_TEXT, *prompts(1, [9, 14], vocab=4)]
    got, want = (each.generate(inputs, GREEDY) for each in (stepping, lm))
    assert [one.tokens for one in got] == [one.tokens for one in want]
    assert [one.acceptance_lengths for one in got] == [one.acceptance_lengths for one in want]


def test_drafters_with_weights_come_behind_ngrams(joined: tuple[LanguageModel, Any, Any]):
    other = joined[1]
    ngram = NGram(8, min_n=3)
    assert ngrams_first([other]) == (other,)
    assert ngrams_first([ngram]) == (ngram,)
    for order in ([ngram, other], [other, ngram]):
        behind = ngrams_first(order)
        assert behind == tuple(NGramsFirst(other, BLOCK, ngram) if one is other else one for one in order)
        assert {one.name for one in behind} == {"ngram", f"ngram+{other.name}"}
    narrow = replace(NGramsFirst(other, BLOCK, ngram), block_size=2)
    assert (narrow.tap_layers, narrow.dtype, narrow.block_size) == (other.tap_layers, other.dtype, 2)
