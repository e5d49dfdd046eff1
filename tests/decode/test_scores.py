"""Log-probabilities against NumPy's in float64, and under speculation against those of plain decoding."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from decode.support import build, prompts
from reference.dflash_numpy import Pair, Target, as_folders, oracle_like_pair
from tilewright.decode.batch import Batch
from tilewright.decode.drafters.load import DrafterOptions
from tilewright.decode.drafters.ngram import NGram
from tilewright.decode.language_model import Kernels, LanguageModel, load
from tilewright.decode.prefill import prefill, scored_prefill
from tilewright.decode.request import Request
from tilewright.decode.sampling import Sampling, row_sampling
from tilewright.decode.scores import MOST_ALTERNATIVES, Scores, alternatives, score_each
from tilewright.decode.shapes import Shape, ShapeTable
from tilewright.decode.state import StepInfo
from tilewright.decode.team import rows_alike
from tilewright.models.tokenizer import StreamDecoder

NEW, VOCAB, ROWS = 20, 40, 8
ASKED = prompts(0, [1, 7, 12, 5, 3, 9, 2])
"""Seven rows: one of the eight is padding."""
REQUESTS = [
    Sampling(NEW),
    Sampling(NEW, temperature=1.0, seed=1),
    Sampling(NEW, repetition_penalty=1.3, frequency_penalty=0.2),
    Sampling(NEW - 7, temperature=0.8, top_p=0.9, seed=2),
    Sampling(NEW),
    Sampling(NEW, temperature=1.2, presence_penalty=0.5, min_p=0.02, seed=3),
    Sampling(NEW, temperature=1.0, seed=4),
]
ASKING = [True, True, True, True, True, True, False, False]
TABLE = ShapeTable(batches=(1, ROWS), capacities=(64,), chunks=(8, 16))


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def check_scores(scores: Scores, logits: NDArray[Any], tokens: NDArray[Any], atol: float) -> None:
    """Of positions `[n]`. The order of ids is held where log-probabilities are further apart than `atol`."""
    want, count = log_softmax(logits), np.arange(len(tokens))[:, None]
    np.testing.assert_allclose(scores.chosen, want[count[:, 0], tokens], atol=atol, rtol=1e-6)
    order = np.argsort(-want, axis=-1, kind="stable")[:, : scores.ids.shape[-1]]
    np.testing.assert_allclose(scores.logprobs, want[count, order], atol=atol, rtol=1e-6)
    np.testing.assert_allclose(want[count, scores.ids], want[count, order], atol=2 * atol, rtol=1e-6)
    assert all(len(set(ids)) == len(ids) for ids in scores.ids.tolist())


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 7, 20, 40, 300, 2600]),
    st.booleans(),
    st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_scores_of_positions_that_ask(seed: int, vocab: int, coarse: bool, asking: list[bool]):
    """Coarse logits are often equal: then the lower id goes first."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 4, (2, 3, vocab)).astype(np.float32)
    logits = np.round(logits) if coarse else logits
    tokens, which = rng.integers(0, vocab, (2, 3)).astype(np.int32), np.asarray(asking).reshape(2, 3)
    scores = jax.tree.map(np.asarray, jax.jit(score_each)(logits, tokens, which))
    assert scores.ids.shape[-1] == min(vocab, MOST_ALTERNATIVES) == alternatives("scored", vocab)
    assert all(not part[~which].any() for part in scores)
    check_scores(Scores(*(part[which] for part in scores)), logits[which], tokens[which], atol=1e-6)
    best = np.argsort(-logits[which], axis=-1, kind="stable")[:, : scores.ids.shape[-1]]
    np.testing.assert_array_equal(scores.ids[which], best)


@pytest.mark.parametrize("k", [0, 1, 20])
def test_one_array_takes_all_to_the_host(k: int):
    rng, shape = np.random.default_rng(k), (2, 3, 5)
    settled, drafted, accepted = (rng.integers(1, 9, shape[:2]).astype(np.int32) for _ in range(3))
    tokens, ids = rng.integers(0, 99, shape).astype(np.int32), rng.integers(0, 99, (*shape, k)).astype(np.int32)
    chosen, logprobs = (rng.normal(size=size).astype(np.float32) for size in (shape, (*shape, k)))
    chosen[0, 0, :2] = -np.inf, np.nan
    scores = Scores(chosen, ids, logprobs) if k else None
    info = StepInfo(tokens, settled, drafted, accepted, scores)
    packed = np.array(jax.vmap(lambda info: info.packed())(jax.tree.map(jnp.asarray, info)))
    assert packed.dtype == np.int32
    assert packed.shape == (2, 3, StepInfo.packed_size(5, k))
    jax.tree.map(np.testing.assert_array_equal, StepInfo.unpacked(packed, k), info)
    packed[1] = 0
    assert len(StepInfo.unpacked(packed, k).tokens) == 1


@pytest.fixture(scope="module")
def pair() -> Pair:
    """Its drafter knows some of the texts in part."""
    return oracle_like_pair(0, ASKED, length=NEW, block_size=16, target_layers=2, drafter_layers=1, taps=[0, 1])


class Told(NamedTuple):
    """What a row settled, and the scores of it; how many it settled in each round."""

    tokens: list[int]
    scores: Scores
    rounds: list[int]


def decode(lm: LanguageModel, rows: Sequence[int] = range(len(ASKED)), steps: int = 5) -> list[Told]:
    """These requests in the program that scores."""
    shape = Shape(1 if len(rows) == 1 else ROWS, 64, "scored")
    batch = Batch(lm.programs, shape, lm.drafter)
    batch.admit({at: Request(n, ASKED[n], REQUESTS[n], StreamDecoder(lm.tokenizer)) for at, n in enumerate(rows)})
    assert batch.device_state is not None
    asking = np.resize([ASKING[n] for n in rows], shape.batch)
    sampling = replace(batch.device_state.sampling, scored=asking)
    batch.device_state = replace(batch.device_state, sampling=sampling)
    told: list[list[tuple[Any, ...]]] = [[] for _ in rows]
    while not batch.done.all():
        infos = batch.advance(steps)
        assert infos.scores is not None
        for tokens, settled, scores in zip(infos.tokens, infos.settled, zip(*infos.scores, strict=True), strict=True):
            for at, mine in enumerate(told):
                count = settled[at]
                assert all(not part[at, count:].any() for part in scores)
                mine.append((tokens[at, :count], Scores(*(part[at, :count] for part in scores))))
    return [
        Told(
            np.concatenate([tokens for tokens, _ in mine]).tolist(),
            Scores(*(np.concatenate(parts) for parts in zip(*(scores for _, scores in mine), strict=True))),
            [len(tokens) for tokens, _ in mine],
        )
        for mine in told
    ]


REST = [
    *(("bfloat16", "auto", width) for width in (2, 16)),
    *(("float32", "auto", width) for width in (2, 16)),
    *(("float32", "xla", width) for width in (2, 5, 16)),
]


def compare(got: Scores, want: Scores, exact: bool) -> None:
    """Bit for bit; or else to a tolerance that float32 sums of another order keep to, whatever the order of ids."""
    if exact:
        jax.tree.map(np.testing.assert_array_equal, got, want)
    else:
        np.testing.assert_allclose(got.chosen, want.chosen, atol=5e-5, rtol=0)
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=5e-5, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "kernels", "width"),
    [
        ("float32", "auto", 5),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("bfloat16", "auto", 5), *REST)),
    ],
)  # fmt: skip
def test_under_speculation_they_are_those_of_plain_decoding(
    tmp_path: Path, pair: Pair, dtype: str, kernels: Kernels, width: int
):
    folder, drafter = as_folders(tmp_path, pair)
    lm = load(folder, dtype=dtype, kernels=kernels, table=TABLE)
    if kernels == "auto" and lm.kernels == "xla":
        pytest.skip("no CPU kernels here")
    exact = lm.kernels != "xla" and rows_alike(lm.programs.target.ops, dtype)
    plain = decode(lm)
    assert [len(row.tokens) for row in plain] == [request.max_new_tokens for request in REQUESTS]
    for other in (
        lm.with_drafter(*lm.load_drafter(str(drafter), DrafterOptions(block_size=width))),
        lm.with_drafter(NGram(width)),
    ):
        drafted = decode(other)
        assert max(count for row in drafted for count in row.rounds) > 1
        for row, (got, want) in enumerate(zip(drafted, plain, strict=True)):
            assert got.tokens == want.tokens
            compare(got.scores, want.scores, exact)
            assert got.scores.chosen.any() == ASKING[row]
    if exact:
        for n in range(3):  # one row by itself
            (alone,) = decode(lm, [n])
            assert alone.tokens == plain[n].tokens
            compare(alone.scores, plain[n].scores, exact)


def test_they_are_of_the_target_s_raw_logits(tmp_path: Path, pair: Pair):
    """Worked out in float64 from the whole text, whatever temperature, filters and penalties a row has."""
    lm = build(tmp_path, pair, table=TABLE)
    for prompt, row, asks in zip(ASKED, decode(lm), ASKING[: len(ASKED)], strict=True):
        if asks:
            logits = Target(pair.target_config, pair.target_tensors).run([*prompt, *row.tokens])[0]
            check_scores(row.scores, logits[len(prompt) - 1 : -1], np.asarray(row.tokens), atol=2e-4)


@pytest.mark.parametrize(("dtype", "kernels"), [("bfloat16", "auto"), ("float32", "xla")])
def test_prefill_scores_prompts(tmp_path: Path, pair: Pair, dtype: str, kernels: Kernels):
    """Texts that were decoded score as they did then; chunk by chunk, of different lengths, one of them without asking."""
    folder, drafter = as_folders(tmp_path, pair)
    lm = load(folder, drafter, block_size=4, dtype=dtype, kernels=kernels, table=TABLE)
    told, chunk = decode(lm), 8
    texts = [[*prompt, *row.tokens] for prompt, row in zip(ASKED, told, strict=True)] + [[5]]
    asking = np.arange(ROWS) != 2
    batch = Batch(lm.programs, Shape(ROWS, 64, "scored"), lm.drafter)
    empty = lm.programs.empty_state(batch.shape, *lm.programs.get(batch.key("allocate"))())
    asked = [Request(n, text, Sampling(1), StreamDecoder(lm.tokenizer)) for n, text in enumerate(texts)]
    state = batch.with_requests(empty, list(range(ROWS)), asked)
    lengths = np.asarray([len(text) for text in texts], np.int32)
    state = replace(state, sampling=row_sampling([Sampling(1)] * ROWS, lengths, asking))
    both, parts = [state, state], []
    plain, scoring = (jax.jit(partial(f, lm.programs.target, lm.drafter, chunk)) for f in (prefill, scored_prefill))
    for start in range(0, max(lengths) - 1, chunk):
        count = np.clip(lengths - 1 - start, 0, chunk).astype(np.int32)
        places = np.full(ROWS, start, np.int32), count
        after, scores = scoring(batch.models, both[1], *places)
        both = [plain(batch.models, both[0], *places), after]
        padding = ~asking[:, None] | (np.arange(chunk) >= count[:, None])
        assert all(not np.asarray(part)[padding].any() for part in scores)
        parts.append(scores)
    jax.tree.map(np.testing.assert_array_equal, *both)
    whole = Scores(*(np.concatenate([np.asarray(part) for part in each], axis=1) for each in zip(*parts, strict=True)))
    alike = lm.kernels != "xla" and rows_alike(lm.programs.target.ops, dtype)
    for n, text in enumerate(texts[:-1]):
        if asking[n]:
            found = Scores(*(part[n, : len(text) - 1] for part in whole))
            if dtype == "float32":
                logits = Target(pair.target_config, pair.target_tensors).run(text)[0]
                check_scores(found, logits[:-1], np.asarray(text[1:]), atol=2e-4)
            if ASKING[n]:
                generated = Scores(*(part[len(ASKED[n]) - 1 :] for part in found))
                compare(generated, told[n].scores, alike)
