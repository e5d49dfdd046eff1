"""Drafters that take turns: whatever the rounds do, the tokens are those of plain decoding, and no context falls behind."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.support import prompts, tokens_of
from reference.dflash_numpy import as_folders, random_pair
from reference.dspark_numpy import as_dspark
from reference.eagle3_numpy import as_folder, random_eagle3
from reference.lilicorr_numpy import as_lilicorr
from tilewright.bench.replay import propose
from tilewright.kernels import native
from tilewright.llm import language_model
from tilewright.llm.language_model import LanguageModel, load
from tilewright.llm.stream import Stream
from tilewright.runtime.interfaces import PLAIN, Choice
from tilewright.runtime.programs import allocate_caches
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.speculation.counterfactual import CounterfactualNGram
from tilewright.speculation.drafters.load import DrafterOptions
from tilewright.speculation.drafters.ngram import NGram
from tilewright.speculation.drafters.ngrams_first import ngrams_first
from tilewright.speculation.team import Team, TeamVariant

NEW = 24
VOCAB = 16
BLOCK = 4
TABLE = ShapeTable(batches=(1, 4), capacities=(64,), chunks=(8,), widths=(2,))
PAIR = random_pair(0, vocab_size=VOCAB, target_layers=2, drafter_layers=1, taps=[0], block_size=BLOCK)
"""With so few tokens even random drafts are accepted now and then."""
EAGLE3 = random_eagle3(0, PAIR.target_config, taps=[1], draft_vocab_size=12)
DSPARK = as_dspark(PAIR)
LILICORR = as_lilicorr(PAIR)
PROMPTS = prompts(0, [1, 3, 14, 21], vocab=VOCAB)
REQUESTS = [Sampling(NEW), Sampling(NEW, temperature=1.0, seed=1), Sampling(NEW - 7), Sampling(NEW, temperature=0.7, seed=2)]
GREEDY = Sampling(NEW)
CHOICES = [PLAIN, *(Choice(name, width) for name in ("ngram", "dflash", "eagle3") for width in (2, BLOCK))]
RUNS = st.lists(st.tuples(st.sampled_from(CHOICES), st.integers(1, 5)), min_size=1, max_size=12)
"""What the dispatches of a session do, and how many rounds each has."""

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    target, dflash = as_folders(folder, PAIR)
    walkers = {name: as_folders(folder / name, made)[1] for name, made in (("dspark", DSPARK), ("lilicorr", LILICORR))}
    return {"target": target, "dflash": dflash, "eagle3": as_folder(folder / "eagle3", *EAGLE3), **walkers}


def team_of(
    sources: dict[str, Path],
    masked: bool = False,
    names: Sequence[str] = ("ngram", "dflash", "eagle3"),
    joined: bool = False,
    **options: Any,
) -> LanguageModel:
    """A model with these drafters, with blocks of `BLOCK` tokens at most; those with weights behind n-grams if `joined`."""
    target = load(sources["target"], table=options.pop("table", TABLE), **options)
    default_options = DrafterOptions(block_size=BLOCK)
    loaded = [target.load_drafter(str(sources.get(name, name)), default_options) for name in names]
    members, params = zip(*loaded, strict=True)
    members = ngrams_first(members) if joined else members
    return target.with_drafter(Team(members, TABLE.widths, masked), params)


@pytest.fixture(scope="module")
def lm(sources: dict[str, Path]) -> LanguageModel:
    return team_of(sources)


@pytest.fixture(scope="module")
def joined(sources: dict[str, Path]) -> LanguageModel:
    return team_of(sources, joined=True)


def forced(lm: LanguageModel, runs: Sequence[tuple[Choice, int]], inputs: Sequence[Any], each: Sequence[Sampling]) -> Stream:
    """A session in which the dispatches do what `runs` say, over and over."""
    session = lm.start(inputs, each)
    number = 0
    while not session.finished:
        choice, rounds = runs[number % len(runs)]
        session.advance(rounds, choice)
        number += 1
    return session


def check_rounds(session: Stream) -> None:
    for result in session.results():
        assert len(result.choices) == len(result.acceptance_lengths)
        for choice, added, drafted in zip(result.choices, result.acceptance_lengths, result.drafted, strict=True):
            assert 1 <= added <= drafted + 1 <= choice.width


@pytest.mark.slow
@settings(max_examples=12)
@given(RUNS)
def test_any_sequence_of_choices_gives_the_tokens_of_plain_decoding(lm: LanguageModel, runs: list[tuple[Choice, int]]):
    want = tokens_of(lm, PROMPTS, REQUESTS, speculative=False)
    session = forced(lm, runs, PROMPTS, REQUESTS)
    assert [result.tokens for result in session.results()] == want
    check_rounds(session)


@pytest.mark.slow
@settings(max_examples=12)
@given(RUNS)
def test_ngrams_in_the_place_of_each_give_the_same_tokens(joined: LanguageModel, runs: list[tuple[Choice, int]]):
    """In any sequence of choices."""
    session = forced(joined, [(behind_ngrams(choice), rounds) for choice, rounds in runs], PROMPTS, REQUESTS)
    assert [result.tokens for result in session.results()] == tokens_of(joined, PROMPTS, REQUESTS, speculative=False)
    check_rounds(session)


def behind_ngrams(choice: Choice) -> Choice:
    return choice if choice.drafter in ("none", "ngram") else replace(choice, drafter=f"ngram+{choice.drafter}")


def test_contexts_behind_ngrams_keep_up(joined: LanguageModel, lm: LanguageModel):
    """Where n-grams draft in a drafter's place it still proposes what it proposes behind the same text as a prompt."""
    session = joined.start(PROMPTS[2:], REQUESTS[2:])
    session.prefill()
    for choice in CHOICES[3:]:
        session.advance(1, behind_ngrams(choice))
    assert any(drafted < BLOCK - 1 for row in session.rows for drafted in row.drafted), "n-grams drafted, too"
    fresh = lm.start([[*row.prompt, *row.tokens] for row in session.rows], Sampling(5))
    fresh.prefill()
    for choice in CHOICES[4::2]:
        got, want = (proposed(lm, each, choice) for each in (session, fresh))
        np.testing.assert_array_equal(got, want, str(choice))


def test_every_choice_drafts(lm: LanguageModel):
    """Else the sequences above would say little."""
    for choice in CHOICES[1:]:
        session = forced(lm, [(choice, 64)], PROMPTS, REQUESTS)
        assert max(max(result.acceptance_lengths) for result in session.results()) > 1, choice


@settings(max_examples=12)
@given(RUNS)
def test_contexts_keep_up(lm: LanguageModel, runs: list[tuple[Choice, int]]):
    """After any rounds each drafter proposes what it proposes behind the same text as a prompt."""
    session = lm.start(PROMPTS[2:], REQUESTS[2:])
    session.prefill()
    for choice, rounds in runs:
        if any(row.finish_reason is not None for row in session.rows):
            break
        before = [(row.prompt, list(row.tokens)) for row in session.rows]
        if min(NEW - 7 - len(tokens) for _, tokens in before) <= rounds * BLOCK:
            break
        session.advance(rounds, choice)
    inputs = [[*row.prompt, *row.tokens] for row in session.rows]
    fresh = lm.start(inputs, [replace(each, max_new_tokens=5) for each in REQUESTS[2:]])  # drafts follow the noise of draws
    fresh.prefill()
    for choice in CHOICES[2::2]:
        got, want = (proposed(lm, each, choice) for each in (session, fresh))
        np.testing.assert_array_equal(got, want, str(choice))


def test_walkers_take_turns(sources: dict[str, Path]):
    """After any rounds each proposes what it proposes behind the same text as a prompt: the anchor of a lattice, too."""
    lm = team_of(sources, names=("dspark", "lilicorr", "ngram"))
    choices = [Choice(name, width) for name in ("dspark", "lilicorr") for width in (2, BLOCK)]
    want = tokens_of(lm, PROMPTS, REQUESTS, speculative=False)
    runs = [(choices[3], 1), (PLAIN, 2), (choices[0], 2), (choices[2], 1), (choices[1], 3), (Choice("ngram", BLOCK), 2)]
    session = forced(lm, runs, PROMPTS, REQUESTS)
    assert [result.tokens for result in session.results()] == want
    check_rounds(session)
    session = lm.start(PROMPTS[2:], GREEDY)
    session.prefill()
    for choice, rounds in ((choices[1], 1), (choices[3], 1), (PLAIN, 2), (choices[0], 1)):
        session.advance(rounds, choice)
        fresh = lm.start([[*row.prompt, *row.tokens] for row in session.rows], Sampling(5))
        fresh.prefill()
        for other in (choices[1], choices[3]):
            got, want = (proposed(lm, each, other) for each in (session, fresh))
            np.testing.assert_array_equal(got, want, str(other))


def proposed(lm: LanguageModel, session: Stream, choice: Choice) -> np.ndarray:
    """The blocks that a choice's drafter proposes now."""
    proposal = session.apply(partial(propose, cast(Team, lm.drafter).variant(choice), lm.model.target))
    return np.asarray(proposal.block)[:2]


@pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
@pytest.mark.parametrize("joined", [False, True], ids=["apart", "behind n-grams"])
def test_rounds_move_no_whole_cache(sources: dict[str, Path], joined: bool):
    """XLA:CPU would copy caches for a branch, and convert all of what is bfloat16 to write a few entries of it.

    It would also copy the buffer of hidden states to write a single one.
    """
    table = ShapeTable(batches=(1, 4), capacities=(2048,), chunks=(8,), widths=(2,))
    lm = team_of(sources, joined=joined, table=table, dtype="bfloat16")
    programs = lm.start(PROMPTS, GREEDY).engine.decoding.programs
    caches = jax.eval_shape(lambda: allocate_caches(lm.model.target, programs.layout, lm.drafter, jnp.bfloat16))
    pages = programs.layout.pages
    smallest = min(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches) if leaf.shape[0] == pages)
    for choice, rows in product(cast(Team, lm.drafter).choices, table.batches):
        memory = programs.get(programs.round_key(choice, rows, 2048, "any")).memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < smallest, (choice, rows)


@pytest.mark.slow
def test_single_steps_keep_contexts_too(sources: dict[str, Path], lm: LanguageModel):
    """Where a dispatch is a single round, without a loop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_model, "takes_loops", lambda: False)
        stepping = team_of(sources)
    runs = [(PLAIN, 2), (CHOICES[-1], 1), (CHOICES[1], 3), (CHOICES[4], 1)]
    got, want = (forced(each, runs, PROMPTS[1:], REQUESTS[1:]).results() for each in (stepping, lm))
    assert got == want


@pytest.mark.slow
def test_masked_rounds_all_run_the_widest_block(sources: dict[str, Path]):
    """In bfloat16 by XLA, where narrower programs may round differently: any choice gives the block-wide program's tokens."""
    masked = team_of(sources, masked=True, dtype="bfloat16", kernels="xla")
    team = cast(Team, masked.drafter)
    assert {team.variant(choice).block_size for choice in team.choices} == {BLOCK}
    assert not any(team.variant(choice).may_be_idle for choice in team.choices)
    wide = masked.with_drafter(*masked.load_drafter(None, DrafterOptions(block_size=BLOCK)))
    want = tokens_of(wide, PROMPTS, REQUESTS, speculative=True)
    for runs in ([(choice, 3)] for choice in (PLAIN, CHOICES[1], CHOICES[3])):
        session = forced(masked, runs, PROMPTS, REQUESTS)
        assert [result.tokens for result in session.results()] == want
        check_rounds(session)


@pytest.mark.parametrize(
    ("dtype", "kernels", "block_size", "masked"),
    [
        ("float32", "xla", "auto", False),
        ("bfloat16", "xla", "auto", True),
        ("bfloat16", "xla", "auto-inexact", False),
        ("bfloat16", "xla", None, True),
    ],
)
def test_what_rounds_run_masked(sources: dict[str, Path], dtype: str, kernels: Any, block_size: Any, masked: bool):
    plain = load(sources["target"], dtype=dtype, kernels=kernels, table=TABLE)
    loaded = plain.with_drafter(*plain.load_drafter([str(sources["dflash"])], DrafterOptions(block_size)))
    team = loaded.drafter
    assert isinstance(team, Team)
    assert team.masked == masked
    assert team.choices == (PLAIN, Choice("dflash", 2), Choice("dflash", BLOCK))
    assert loaded.pacing is not None


def test_the_cpu_kernels_need_no_mask(sources: dict[str, Path]):
    loaded = load(sources["target"], "ngram", dtype="bfloat16", table=TABLE)
    if loaded.kernels == "xla":
        pytest.skip("no CPU kernels here")
    assert isinstance(loaded.drafter, Team)
    assert not loaded.drafter.masked


def test_several_drafters_of_one_block_size(sources: dict[str, Path]):
    loaded = load(sources["target"], ["ngram", sources["dflash"]], block_size=3, table=TABLE)
    assert isinstance(loaded.drafter, Team)
    assert loaded.drafter.choices == (PLAIN, Choice("ngram", 3), Choice("ngram+dflash", 3))


def test_errors(sources: dict[str, Path], lm: LanguageModel):
    with pytest.raises(ValueError, match="expected drafters of different kinds, found ngram, ngram"):
        Team((NGram(), NGram(4)), (2,))
    with pytest.raises(ValueError, match="expected at least one drafter, found none"):
        load(sources["target"], [])
    with pytest.raises(ValueError, match="expected a block size or auto, found 'wide'"):
        load(sources["target"], "ngram", block_size="wide")
    with pytest.raises(ValueError, match="a block size of auto needs a drafter; no drafter was named"):
        load(sources["target"], block_size="auto")
    with pytest.raises(ValueError, match=r"expected one of plain; ngram, block 2;.* found ngram, block 3"):
        lm.start([[1]], GREEDY).advance(1, Choice("ngram", 3))
    with pytest.raises(ValueError, match="expected plain decoding, since there is no drafter, found rounds of ngram, block 4"):
        lm.start([[1]], GREEDY, speculative=False).advance(1, Choice("ngram", 4))


@pytest.mark.parametrize("block", [2, 4, 16])
def test_a_shadow_knows_the_rounds_that_n_grams_would_have(sources: dict[str, Path], block: int):
    """Told from the text, in pieces of any size, against rounds that ran."""
    drafting = load(sources["target"], "ngram", block_size=block, table=TABLE)
    assert isinstance(drafting.drafter, NGram)
    found = []
    for prompt, result in zip(PROMPTS, drafting.generate(PROMPTS, GREEDY), strict=True):
        counterfactual = CounterfactualNGram(drafting.drafter, prompt, (block, 7))
        rounds = []
        tokens = list(result.tokens)
        while tokens:
            rounds += counterfactual.push(tokens[:5])[block]
            tokens = tokens[5:]
        ran = list(zip(result.drafted, result.accepted, strict=True))
        assert rounds[: len(ran) - 1] == ran[:-1]  # of the last one the end is not in the text
        found += rounds
    assert any(accepted for _, accepted in found)
    assert any(drafted == 0 for drafted, _ in found)


def test_a_turn_is_a_drafter(lm: LanguageModel):
    team = cast(Team, lm.drafter)
    turns = [team.variant(choice) for choice in team.choices]
    assert [(turn.name, turn.block_size) for turn in turns] == [(choice.drafter, choice.width) for choice in CHOICES]
    assert [turn.stale_members for turn in turns[::2]] == [(1, 2), (1, 2), (2,), (1,)]
    assert isinstance(turns[0], TeamVariant)


def test_a_dispatch_hands_over_what_its_turn_reads(lm: LanguageModel):
    """Every array that it does makes it longer."""
    team = cast(Team, lm.drafter)
    models = lm.model.models
    arrays_of = [len(jax.tree.leaves(params)) for params in (*models.drafter, ())]
    of_target = len(jax.tree.leaves((models.target, models.draft_head)))
    programs = lm.start(PROMPTS, GREEDY).engine.decoding.programs
    for choice in team.choices:
        (read, *_), _ = programs.get(programs.round_key(choice, programs.layout.batch, 64, "greedy")).args_info
        place = team.place(choice)
        assert len(jax.tree.leaves(read)) == of_target + arrays_of[-1 if place is None else place], choice
    assert sum(arrays_of) > max(arrays_of) > 0
