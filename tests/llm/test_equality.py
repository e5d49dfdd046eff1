"""Speculative decoding gives the tokens of autoregressive decoding, greedy and sampled; a row gives what it gives alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from llm.support import build, check_same_as_autoregressive, prompts, share_programs, tokens_of
from reference.dflash_numpy import Pair, oracle_like_pair, random_pair
from tilewright.llm.language_model import LanguageModel
from tilewright.runtime.interfaces import Proposal
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import Shape, ShapeTable
from tilewright.runtime.state import DecodeState, Models, Target, last_token
from tilewright.speculation.drafters.dflash import DFlash

NEW = 32
BLOCK = 16
TABLE = ShapeTable(batches=(1, 8), capacities=(128,), chunks=(16, 64))
PROMPTS = prompts(0, [*range(1, 61), *range(2, 42)])
"""100 prompts."""
KNOWN = (8, 30, 70)
SOME = sorted({*KNOWN, *range(2, 10), *range(20, 28), 59})
SIZES: dict[str, Any] = {
    "block_size": BLOCK,
    "target_layers": 2,
    "drafter_layers": 1,
    "taps": [0, 1],
    "drafter_intermediate_size": 1024,
}
GREEDY = Sampling(max_new_tokens=NEW)
REQUESTS = [
    Sampling(NEW, temperature=1.0, top_p=0.9, seed=3),
    Sampling(NEW),
    Sampling(NEW, temperature=1.0, seed=4),
    Sampling(NEW, temperature=0.7, top_k=5, seed=5),
    Sampling(NEW, temperature=1.0, top_p=0.9, min_p=0.05, repetition_penalty=1.2, presence_penalty=0.5, seed=6),
    Sampling(NEW - 9, temperature=1.5, top_p=0.8, top_k=12, seed=2**32 - 1),
    Sampling(NEW, temperature=1e-3, seed=1),
]
"""Seven rows: one of the eight in their shape is padding."""


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """With a drafter of random weights."""
    return build(tmp_path_factory.mktemp("guessing"), random_pair(0, **SIZES), table=TABLE)


@pytest.fixture(scope="module")
def skilled(tmp_path_factory: pytest.TempPathFactory, guessing: LanguageModel) -> LanguageModel:
    """The same target with a drafter that knows three of the texts in part."""
    pair = oracle_like_pair(0, [PROMPTS[n] for n in KNOWN], length=NEW, **SIZES)
    assert same_target(pair, random_pair(0, **SIZES))
    lm = build(tmp_path_factory.mktemp("skilled"), pair, table=TABLE)
    assert lm.drafter == guessing.drafter
    share_programs(lm, guessing)
    return lm


def same_target(a: Pair, b: Pair) -> bool:
    return a.target_config == b.target_config and all(
        np.array_equal(tensor, b.target_tensors[name]) for name, tensor in a.target_tensors.items()
    )


@pytest.fixture(
    scope="module", params=[pytest.param(SOME, id="some"), pytest.param(range(100), id="all", marks=pytest.mark.slow)]
)
def which(request: pytest.FixtureRequest) -> Sequence[int]:
    """Which prompts are asked."""
    return request.param


@pytest.fixture(scope="module")
def alone(guessing: LanguageModel, which: Sequence[int]) -> dict[int, list[int]]:
    """What each prompt gives by itself, greedy and autoregressive."""
    inputs = [PROMPTS[n] for n in which]
    return dict(zip(which, tokens_of(guessing, inputs, GREEDY, speculative=False, batch=1), strict=True))


def check(lm: LanguageModel, alone: dict[int, list[int]], batch: int, sampling: Sampling = GREEDY) -> list[int]:
    """See `check_same_as_autoregressive`."""
    return check_same_as_autoregressive(lm, [PROMPTS[n] for n in alone], sampling, batch, list(alone.values()))


def test_batch_rows_give_what_they_give_alone(guessing: LanguageModel, alone: dict[int, list[int]]):
    assert tokens_of(guessing, [PROMPTS[n] for n in alone], GREEDY, speculative=False, batch=8) == list(alone.values())
    assert len({len(prompt) for prompt in PROMPTS}) == 60
    assert {len(tokens) for tokens in alone.values()} == {NEW}
    assert len({tuple(tokens) for tokens in alone.values()}) == len(alone)


@pytest.mark.parametrize("batch", [1, 8])
def test_random_drafter(guessing: LanguageModel, alone: dict[int, list[int]], batch: int):
    assert 1 <= np.mean(check(guessing, alone, batch)) < 1.2


def test_drafter_that_knows_some_texts(skilled: LanguageModel, alone: dict[int, list[int]]):
    assert {1, BLOCK} < set(check(skilled, alone, 8))
    assert 3 < np.mean(check(skilled, {n: alone[n] for n in KNOWN}, 1)) < BLOCK


@pytest.fixture(scope="module")
def informed(tmp_path_factory: pytest.TempPathFactory, alone: dict[int, list[int]]) -> LanguageModel:
    """With a drafter that looks each row's text up among the right ones; in rows that ignore EOS it makes mistakes.

    (The target has no EOS token, so that the flag is free to tell the two apart.)
    """
    texts = np.zeros((len(alone), 128), np.int32)
    ends = np.zeros(len(alone), np.int32)
    for row, (n, tokens) in enumerate(alone.items()):
        ends[row] = len(PROMPTS[n]) + NEW
        texts[row, : ends[row]] = PROMPTS[n] + tokens
    mistakes = np.random.default_rng(0).random(texts.shape) < 0.15

    def look_up(drafter: DFlash, target: Target, models: Models, state: DecodeState) -> Proposal:
        later = jnp.arange(128)[None, None] > state.last_position[:, None, None]
        fits = jnp.all((state.tokens[:, None] == texts[None]) | later, axis=2) & (state.end[:, None] == ends[None])
        row = jnp.argmax(fits, axis=1)
        wrong = jnp.take(jnp.asarray(mistakes), row, axis=0) & state.ignore_eos[:, None]
        text = (jnp.take(jnp.asarray(texts), row, axis=0) + wrong.astype(jnp.int32)) % target.config.vocab_size
        slots = state.last_position[:, None] + jnp.arange(1, drafter.block_size)[None]
        block = jnp.concatenate([last_token(state), jnp.take_along_axis(text, slots, axis=1)], axis=1)
        return Proposal(block, jnp.full(state.last_position.shape, drafter.block_size - 1))

    lm = build(tmp_path_factory.mktemp("informed"), random_pair(0, **SIZES), table=TABLE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DFlash, "propose", look_up)
        for batch in TABLE.batches:
            programs = lm.programs_for(lm.drafter, Shape(batch, 128))
            for sampling in ("greedy", "any"):
                programs.get(programs.round_key(None, batch, 128, sampling))
    return lm


@pytest.mark.parametrize("batch", [1, 8])
def test_drafter_that_is_always_right(informed: LanguageModel, alone: dict[int, list[int]], batch: int):
    """Every round commits a whole block: tau is the block size."""
    assert set(check(informed, alone, batch)) == {BLOCK}


@pytest.mark.parametrize("batch", [1, 8])
def test_drafter_that_is_right_in_part(informed: LanguageModel, alone: dict[int, list[int]], batch: int):
    lengths = check(informed, alone, batch, replace(GREEDY, ignore_eos=True))
    assert {1, BLOCK} < set(lengths) <= set(range(1, BLOCK + 1))
    assert len(set(lengths)) == BLOCK or len(alone) < len(PROMPTS)
    assert 3 < np.mean(lengths) < 9


@pytest.mark.slow
def test_without_the_packages_own_kernels(tmp_path: Path, alone: dict[int, list[int]]):
    lm = build(tmp_path, random_pair(0, **SIZES), table=TABLE, kernels="xla")
    some = {n: alone[n] for n in range(2, 10)}
    assert tokens_of(lm, [PROMPTS[n] for n in some], GREEDY, speculative=False) == list(some.values())
    check(lm, some, 8)


def each_alone(lm: LanguageModel, inputs: Sequence[list[int]], speculative: bool) -> list[list[int]]:
    return [lm.generate([p], [s], speculative)[0].tokens for p, s in zip(inputs, REQUESTS, strict=True)]


@pytest.mark.slow
def test_sampled_rows_of_a_mixed_batch(guessing: LanguageModel, skilled: LanguageModel):
    """Every row has its own sampling; the programs differ too (a greedy row alone runs in one that cannot draw)."""
    inputs = [PROMPTS[n] for n in (4, 8, 0, 12, 15, 16, 2)]
    want = each_alone(guessing, inputs, speculative=False)
    assert [len(tokens) for tokens in want] == [request.max_new_tokens for request in REQUESTS]
    assert tokens_of(guessing, inputs, REQUESTS, speculative=False) == want
    for lm in (guessing, skilled):
        assert each_alone(lm, inputs, speculative=True) == want
        check_same_as_autoregressive(lm, inputs, REQUESTS, 8, want)
    greedy = tokens_of(guessing, inputs, GREEDY, speculative=False)
    differ = [a[: len(b)] != b for a, b in zip(greedy, want, strict=True)]
    # At a temperature of 1/1000 a draw is the argmax, unless the best two are very close.
    assert differ == [True, False, True, True, True, True, False]


def test_rows_get_together_what_they_get_alone(guessing: LanguageModel, skilled: LanguageModel):
    """Rows of every kind in one batch, also those that would run without logits if they were alone."""
    inputs = [PROMPTS[n] for n in (4, 8, 0, 12, 15, 16, 2)]
    want = [tokens_of(guessing, [prompt], [one], speculative=False)[0] for prompt, one in zip(inputs, REQUESTS, strict=True)]
    for lm, speculative_too in ((guessing, False), (skilled, True)):
        assert tokens_of(lm, inputs, REQUESTS, speculative=speculative_too) == want


def test_rows_of_one_prompt_differ_by_seed_alone(skilled: LanguageModel):
    inputs = [PROMPTS[8]] * 8
    seeds = [0, 1, 2, 3, 0, 1, 2, 3]
    requests = [Sampling(NEW, temperature=1.0, top_p=0.9, seed=seed) for seed in seeds]
    for speculative_too in (False, True):
        got = tokens_of(skilled, inputs, requests, speculative=speculative_too)
        assert got[:4] == got[4:]
        assert len({tuple(tokens) for tokens in got}) == 4


def test_a_row_is_not_changed_by_the_limits_of_others(skilled: LanguageModel, alone: dict[int, list[int]]):
    """Rows end at different rounds; those that are done stand still while the rest go on."""
    limits = [1, 2, 15, 16, 17, NEW, 5, 31]
    requests = [replace(GREEDY, max_new_tokens=limit) for limit in limits]
    want = [alone[n][:limit] for n, limit in zip(range(20, 28), limits, strict=True)]
    assert tokens_of(skilled, PROMPTS[20:28], requests, speculative=False) == want
    check_same_as_autoregressive(skilled, PROMPTS[20:28], requests, 8, want)
