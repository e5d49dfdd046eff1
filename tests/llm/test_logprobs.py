"""Log-probabilities against NumPy's in float64, and under speculation against those of plain decoding."""

import re
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

from llm.support import build, prompts
from products import cases
from reference.dflash_numpy import Pair, Target, as_folders, oracle_like_pair
from runtime.support import Heard
from tilewright.kernels.operations import is_batch_invariant
from tilewright.llm.language_model import Kernels, LanguageModel, load
from tilewright.runtime.layout import rows_of
from tilewright.runtime.logprobs import MOST_ALTERNATIVES, Logprobs, logprobs_of
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.prefill import prefill
from tilewright.runtime.programs import ProgramKey, RowRequest, empty_state, request_rows
from tilewright.runtime.request import GenerateRequest, TokenLogprobs
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import Shape, ShapeTable
from tilewright.runtime.state import Reports, StepInfo
from tilewright.speculation.drafters.load import DrafterOptions
from tilewright.speculation.drafters.ngram import NGram

NEW = 20
VOCAB = 40
ROWS = 8
PROMPTS = prompts(0, [1, 7, 12, 5, 3, 9, 2])
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


def check_logprobs(found: Logprobs, logits: NDArray[Any], tokens: NDArray[Any], atol: float) -> None:
    """Of positions `[n]`. The order of ids is held where log-probabilities are further apart than `atol`."""
    want = log_softmax(logits)
    count = np.arange(len(tokens))[:, None]
    np.testing.assert_allclose(found.chosen, want[count[:, 0], tokens], atol=atol, rtol=1e-6)
    order = np.argsort(-want, axis=-1, kind="stable")[:, : found.ids.shape[-1]]
    np.testing.assert_allclose(found.logprobs, want[count, order], atol=atol, rtol=1e-6)
    np.testing.assert_allclose(want[count, found.ids], want[count, order], atol=2 * atol, rtol=1e-6)
    assert all(len(set(ids)) == len(ids) for ids in found.ids.tolist())


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
    tokens = rng.integers(0, vocab, (2, 3)).astype(np.int32)
    which = np.asarray(asking).reshape(2, 3)
    found = jax.tree.map(np.asarray, jax.jit(logprobs_of)(logits, tokens, which))
    assert found.ids.shape[-1] == min(vocab, MOST_ALTERNATIVES)
    assert all(not part[~which].any() for part in found)
    check_logprobs(Logprobs(*(part[which] for part in found)), logits[which], tokens[which], atol=1e-6)
    best = np.argsort(-logits[which], axis=-1, kind="stable")[:, : found.ids.shape[-1]]
    np.testing.assert_array_equal(found.ids[which], best)


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("looking_up", [False, True])
def test_reports_come_to_the_host_as_they_were(wanted: bool, looking_up: bool):
    """Log-probabilities only where somebody asks for them; of two steps of which one ran, that one."""
    rng = np.random.default_rng(0)
    shape = (2, 3, 5)
    k = 20
    committed, drafted, accepted = (rng.integers(1, 9, shape[:2]).astype(np.int32) for _ in range(3))
    tokens = rng.integers(0, 99, shape).astype(np.int32)
    ids = rng.integers(0, 99, (*shape, k)).astype(np.int32)
    chosen, logprobs = (rng.normal(size=size).astype(np.float32) for size in (shape, (*shape, k)))
    from_ngrams = rng.integers(0, 2, shape[:2]) > 0 if looking_up else None
    info = StepInfo(tokens, committed, drafted, accepted, Logprobs(chosen, ids, logprobs) if wanted else None, from_ngrams)
    packed = np.array(jax.vmap(lambda info: info.packed())(jax.tree.map(jnp.asarray, info)))
    info = info._replace(from_ngrams=np.zeros(shape[:2], bool) if from_ngrams is None else from_ngrams)
    reports = Reports(packed, Logprobs(chosen, ids, logprobs))
    jax.tree.map(np.testing.assert_array_equal, StepInfo.unpacked(reports, wanted), info)
    packed[1] = 0
    first = jax.tree.map(lambda each: each[:1], info)
    jax.tree.map(np.testing.assert_array_equal, StepInfo.unpacked(reports, wanted), first)


@pytest.fixture(scope="module")
def pair() -> Pair:
    """Its drafter knows some of the texts in part."""
    return oracle_like_pair(0, PROMPTS, length=NEW, block_size=16, target_layers=2, drafter_layers=1, taps=[0, 1])


class Outcome(NamedTuple):
    """What a row committed, and its log-probabilities; how many it committed in each round."""

    tokens: list[int]
    found: Logprobs
    rounds: list[int]


def decode(lm: LanguageModel, rows: Sequence[int] = range(len(PROMPTS))) -> list[Outcome]:
    """These requests at once through an engine, with log-probabilities for those that ask."""
    table = replace(TABLE, batches=(1,) if len(rows) == 1 else (ROWS,))
    engine = lm.engine(EngineOptions(table, 16, prefix_cache=False, guard="off", dispatch_s=1e-3))
    engine.runner.reset()
    engine.accept_requests()
    listeners = [Heard() for _ in rows]
    for n, listen in zip(rows, listeners, strict=True):
        engine.submit(GenerateRequest(PROMPTS[n], REQUESTS[n], MOST_ALTERNATIVES if ASKING[n] else None), listen)
    while engine.step():
        pass
    engine.stop()
    return [
        Outcome(one.tokens, received_logprobs(one), [each.tokens for update in one.updates for each in update.rounds])
        for one in listeners
    ]


def received_logprobs(listener: Heard) -> Logprobs:
    """What a request was told, as arrays; zeros where it did not ask."""
    each = [
        token.logprobs or TokenLogprobs(0.0, ((0, 0.0),) * MOST_ALTERNATIVES)
        for update in listener.updates
        for token in update.tokens
    ]
    tops = np.asarray([one.top for one in each])
    chosen = np.asarray([one.logprob for one in each], np.float32)
    return Logprobs(chosen, tops[..., 0].astype(np.int32), tops[..., 1].astype(np.float32))


def compare(got: Logprobs, want: Logprobs, exact: bool) -> None:
    """Bit for bit; or else to a tolerance that float32 sums of another order keep to, whatever the order of ids."""
    if exact:
        jax.tree.map(np.testing.assert_array_equal, got, want)
    else:
        np.testing.assert_allclose(got.chosen, want.chosen, atol=5e-5, rtol=0)
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=5e-5, rtol=0)


EVERY = list(
    cases(
        [("float32", "auto", 5)],
        ("float32", "bfloat16"),
        ("auto", "xla"),
        (2, 5, 16),
        fits=lambda dtype, kernels, width: (dtype, kernels) != ("bfloat16", "xla"),
    )
)
"""Numbers, kernels and widths. XLA's products of bfloat16 depend on the number of rows."""


@pytest.mark.parametrize(("dtype", "kernels", "width"), EVERY)
def test_under_speculation_they_are_those_of_plain_decoding(
    tmp_path: Path, pair: Pair, dtype: str, kernels: Kernels, width: int
):
    folder, drafter = as_folders(tmp_path, pair)
    lm = load(folder, dtype=dtype, kernels=kernels, table=TABLE)
    if kernels == "auto" and lm.kernels == "xla":
        pytest.skip("no CPU kernels here")
    exact = lm.kernels != "xla" and is_batch_invariant(lm.model.target.ops, dtype)
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
            compare(got.found, want.found, exact)
            assert got.found.chosen.any() == ASKING[row]
    if exact:
        for n in range(3):  # one row by itself
            (alone,) = decode(lm, [n])
            assert alone.tokens == plain[n].tokens
            compare(alone.found, plain[n].found, exact)


def test_they_are_of_the_target_s_raw_logits(tmp_path: Path, pair: Pair):
    """Worked out in float64 from the whole text, whatever temperature, filters and penalties a row has."""
    lm = build(tmp_path, pair, table=TABLE)
    for prompt, row, asks in zip(PROMPTS, decode(lm), ASKING[: len(PROMPTS)], strict=True):
        if asks:
            logits = Target(pair.target_config, pair.target_tensors).run([*prompt, *row.tokens])[0]
            check_logprobs(row.found, logits[len(prompt) - 1 : -1], np.asarray(row.tokens), atol=2e-4)


@pytest.mark.parametrize(("dtype", "kernels"), [("bfloat16", "auto"), ("float32", "xla")])
def test_prefill_scores_prompts(tmp_path: Path, pair: Pair, dtype: str, kernels: Kernels):
    """Texts that were decoded score as they did then; chunk by chunk, of different lengths, one of them without asking."""
    folder, drafter = as_folders(tmp_path, pair)
    lm = load(folder, drafter, block_size=4, dtype=dtype, kernels=kernels, table=TABLE)
    outcomes = decode(lm)
    chunk = 8
    texts = [[*prompt, *row.tokens] for prompt, row in zip(PROMPTS, outcomes, strict=True)] + [[5]]
    asking = np.arange(ROWS) != 2
    programs = lm.programs_for(lm.drafter, Shape(ROWS, 64))
    lengths = np.asarray([len(text) for text in texts], np.int32)
    rows = [RowRequest(np.resize(text, 64).astype(np.int32), len(text) - 1, 64, Sampling(1), 1, False) for text in texts]
    empty = empty_state(programs.layout, *programs.get(ProgramKey("allocate"))())
    empty = rows_of(empty, jnp.arange(ROWS), jnp.arange(programs.layout.pages, dtype=jnp.int32).reshape(1, ROWS, -1))
    state = replace(empty, **request_rows(rows, ()))
    models = lm.model.models
    both = [state, state]
    parts = []
    run = jax.jit(partial(prefill, lm.model.target, lm.drafter, chunk))
    for start in range(0, max(lengths) - 1, chunk):
        count = np.clip(lengths - 1 - start, 0, chunk).astype(np.int32)
        places = np.full(ROWS, start, np.int32), count
        after, prefilled = run(models, both[1], *places, asking)
        found = prefilled.logprobs
        both = [run(models, both[0], *places)[0], after]
        padding = ~asking[:, None] | (np.arange(chunk) >= count[:, None])
        assert all(not np.asarray(part)[padding].any() for part in found)
        parts.append(found)
    jax.tree.map(np.testing.assert_array_equal, *both)
    whole = Logprobs(*(np.concatenate([np.asarray(part) for part in each], axis=1) for each in zip(*parts, strict=True)))
    alike = lm.kernels != "xla" and is_batch_invariant(lm.model.target.ops, dtype)
    for n, text in enumerate(texts[:-1]):
        if asking[n]:
            found = Logprobs(*(part[n, : len(text) - 1] for part in whole))
            if dtype == "float32":
                logits = Target(pair.target_config, pair.target_tensors).run(text)[0]
                check_logprobs(found, logits[:-1], np.asarray(text[1:]), atol=2e-4)
            if ASKING[n]:
                generated = Logprobs(*(part[len(PROMPTS[n]) - 1 :] for part in found))
                compare(generated, outcomes[n].found, alike)


@pytest.mark.parametrize("kernels", ["auto", "xla"])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_prompts_that_ask_for_no_log_probabilities_cost_no_logits(tmp_path: Path, pair: Pair, rows: int, kernels: Kernels):
    """XLA takes the logits of a single row out of a loop, and computes them were it to have no turn."""
    lm = build(tmp_path, pair, table=TABLE, kernels=kernels)
    chunk = TABLE.chunks[0]
    hlo = lm.programs_for(None, Shape(ROWS, 64)).get(ProgramKey("prefill", rows, chunk=chunk, sampling="logprobs")).as_text()
    assert hlo is not None
    (entry,) = re.findall(r"^ENTRY .*?^\}", hlo, re.DOTALL | re.MULTILINE)
    logits = re.compile(rf"= f32\[(?:\d+,)*{chunk},{VOCAB}\]")
    assert logits.search(hlo), "a request that asks gets them"
    assert not logits.search(entry)
