"""The engine's rounds, one by one, against the NumPy reference, in batches whose rows differ in length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llm.support import build, prompts, state_of
from reference.dflash2_numpy import as_dflash2, build2, with_draft_vocab
from reference.dflash_numpy import Drafter, Pair, Round, Target, as_folders, oracle_like_pair, random_pair, speculative_greedy
from reference.dspark_numpy import as_dspark, build_dspark
from reference.lilicorr_numpy import as_lilicorr, build_lilicorr
from tilewright.llm.language_model import LanguageModel
from tilewright.models import decoder, dflash
from tilewright.models.checkpoint import load_decoder, read_config
from tilewright.models.stack import SingleDevice
from tilewright.runtime.layout import Layout
from tilewright.runtime.programs import allocate_caches
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.state import Span, run_target
from tilewright.runtime.state import Target as Decoding
from tilewright.speculation.drafters.dflash import DFlash
from tilewright.speculation.drafters.lilicorr import LiLiCorr
from tilewright.speculation.drafters.load import load_dflash

pytestmark = pytest.mark.usefixtures("quick_compiles")

NEW = 24
PROMPTS = prompts(0, [1, 7, 12])
"""Three rows, so that the batch of four has one of padding."""
SMALL: dict[str, Any] = {"target_layers": 3, "taps": [0, 2]}
TINY: dict[str, Any] = {"target_layers": 1, "taps": [0], "drafter_layers": 1}
BUILD: dict[str, Callable[[Pair], tuple[Target, Drafter]]] = {
    "DFlashDraftModel": Pair.build,
    "DFlash2DraftModel": build2,
    "Qwen3DSparkModel": build_dspark,
    "LiLiCorrDraftModel": build_lilicorr,
}
"""The reference of each kind of drafter."""


@dataclass(frozen=True, eq=False)
class Recording(SingleDevice):
    """A schedule that keeps the logits that are asked for."""

    seen: list[Any]

    def logits(self, ops: Any, x: Any, head: Any, norm: Any = None) -> Any:
        self.seen.append(super().logits(ops, x, head, norm))
        return self.seen[-1]


def observer(lm: LanguageModel) -> Callable[..., Any]:
    """A function of (models, state) that gives the next round's block, its draft logits and its target logits."""
    drafter = lm.drafter
    assert isinstance(drafter, DFlash)

    def observe(models: Any, state: Any) -> tuple[Any, Any, Any]:
        seen: list[Any] = []

        def record(x: Any, head: Any, norm: Any = None, masks: Any = None) -> Any:
            seen.append(lm.ops.linear(x, head, jnp.float32, norm))
            return lm.ops.head_argmax(x, head, norm, masks)

        def record_top(x: Any, head: Any, k: int) -> Any:
            seen.append(lm.ops.linear(x, head, jnp.float32))
            return lm.ops.head_top_k(x, head, k)

        target = Decoding(lm.target, replace(lm.ops, head_argmax=record, head_top_k=record_top), Recording(seen))
        block = drafter.propose(target, models, state).block
        span = Span(state.last_position, jnp.full_like(state.last_position, block.shape[1]))
        ran = run_target(target, models.target, state, block, span, ())
        (draft_logits,) = seen
        return block, draft_logits, decoder.logits(lm.target, lm.ops, models.target, ran.hidden)

    return jax.jit(observe)


def tolerance(pair: Pair, logits: np.ndarray) -> float:
    """Float32 rounding of a sum of K terms grows like sqrt(K) on average; a few of those sums in each half of each layer."""
    longest = max(pair.drafter_config["intermediate_size"], pair.drafter_tensors["fc.weight"].shape[1])
    layers = pair.target_config["num_hidden_layers"] + pair.drafter_config["num_hidden_layers"]
    return float(8 * layers * np.sqrt(longest) * np.finfo(np.float32).eps * np.abs(logits).max())


@dataclass
class Seen:
    """What the comparison met: accepted drafts of each round, and the deepest position of a known token."""

    accepted: list[int]
    last_start: int


def compare(lm: LanguageModel, pair: Pair, inputs: Sequence[list[int]], window: int | None, block_size: int) -> Seen:
    """Holds every round of every row against the reference's."""
    target, drafter = BUILD[pair.drafter_config["architectures"][0]](pair)
    want = [speculative_greedy(target, drafter, prompt, NEW, block_size, window) for prompt in inputs]
    session = lm.start(inputs, Sampling(max_new_tokens=NEW))
    session.prefill()
    observe = observer(lm)
    number = 0
    while not session.finished:
        state, numbers = state_of(session)
        at = {number: place for place, number in enumerate(numbers)}
        known = np.asarray(state.last_position)
        blocks, draft_logits, target_logits = (np.asarray(x) for x in observe(lm.model.models, state))
        pieces = session.advance(1)
        for i, generation in enumerate(want):
            committed = [piece.token for piece in pieces if piece.row == i]
            if number >= len(generation.rounds):
                assert not committed
                continue
            r: Round = generation.rounds[number]
            close = tolerance(pair, r.draft_logits)
            # Rounding must not be able to turn a choice, or the comparison would mean nothing.
            assert r.margin > 2 * close
            assert known[at[i]] == r.start
            assert blocks[at[i]].tolist() == r.block
            np.testing.assert_allclose(draft_logits[at[i]], r.draft_logits, rtol=0, atol=close)
            np.testing.assert_allclose(target_logits[at[i]], r.target_logits, rtol=0, atol=close)
            assert committed == r.emitted
            assert session.rows[i].acceptance_lengths[-1] == len(r.emitted)
        number += 1
    assert number == max(len(generation.rounds) for generation in want)
    assert [result.tokens for result in session.results()] == [generation.output for generation in want]
    rounds = [r for generation in want for r in generation.rounds]
    return Seen([r.accepted for r in rounds], max(r.start for r in rounds))


@pytest.mark.parametrize(
    ("window", "block_size", "sizes"),
    [
        (None, 6, {}),
        (5, 6, {}),  # the block is longer than the ring
        (7, 4, {}),
        (None, 3, {"taps": [2, 0], "tie_word_embeddings": True, "head_dim": 8, "num_kv_heads": 1}),
    ],
)
def test_rounds_equal_the_reference(tmp_path: Path, window: int | None, block_size: int, sizes: dict[str, Any]):
    fitted = {"length": NEW, "window": window, "drafter_intermediate_size": 320, "block_size": block_size}
    pair = oracle_like_pair(2, PROMPTS, **{**SMALL, **fitted, **sizes})
    # The drafter says that it was trained for 6, whatever it was fitted for, so that shorter blocks are a choice of the user.
    pair.drafter_config["block_size"] = 6
    lm = build(tmp_path, pair, draft_window=window, block_size=block_size)
    seen = compare(lm, pair, PROMPTS, window, block_size)
    assert seen.last_start >= 30
    assert {0, block_size - 1} <= set(seen.accepted)
    assert any(0 < accepted < block_size - 1 for accepted in seen.accepted)


@pytest.mark.parametrize(
    ("window", "block_size", "second"),
    [
        (None, 4, {"window": 8, "sliding": [0], "output_multiplier": 0.5, "final_logit_softcapping": 20.0, "kernel": 3}),
        (5, 6, {"window": 9, "sliding": [0, 1], "input_embedding_scale": 0.9, "top_k": 2}),
        (None, 6, {"window": 100, "sliding": [1], "strength": 1.0}),
    ],
)
def test_dflash2_rounds_equal_the_reference(tmp_path: Path, window: int | None, block_size: int, second: dict[str, Any]):
    """The context passes the windows; each row of a block sees another part of it."""
    fitted = {"length": NEW, "window": window, "drafter_intermediate_size": 320, "block_size": block_size}
    pair = as_dflash2(oracle_like_pair(2, PROMPTS, **{**SMALL, **fitted}), **{"strength": 0.2, **second})
    pair.drafter_config["block_size"] = 6
    lm = build(tmp_path, pair, draft_window=window, block_size=block_size)
    seen = compare(lm, pair, PROMPTS, window, block_size)
    assert seen.last_start >= 30
    assert second.get("strength") or max(seen.accepted) >= 1


@pytest.mark.parametrize(
    ("window", "block_size", "fields"),
    [(None, 6, {"strength": 0.2}), (5, 4, {"strength": 0.2, "top_k": 2, "plain_names": True}), (None, 5, {"strength": 2.0})],
)
def test_dspark_rounds_equal_the_reference(tmp_path: Path, window: int | None, block_size: int, fields: dict[str, Any]):
    """Its blocks have one slot fewer than tokens, and every slot drafts."""
    fitted = {"length": NEW, "window": window, "drafter_intermediate_size": 320, "block_size": block_size, "first_slot": 0}
    pair = as_dspark(oracle_like_pair(3, PROMPTS, **{**SMALL, **fitted}), **fields)
    pair.drafter_config["block_size"] = 5
    lm = build(tmp_path, pair, draft_window=window, block_size=block_size)
    assert lm.drafter is not None
    assert lm.drafter.block_size == block_size
    seen = compare(lm, pair, PROMPTS, window, block_size)
    assert seen.last_start >= 30
    assert max(seen.accepted) >= 3


@pytest.mark.parametrize(
    ("window", "block_size", "fields"), [(None, 6, {}), (5, 4, {"top_k": 2, "size": 32, "heads": 4}), (None, 6, {"conv": True})]
)
def test_lilicorr_rounds_equal_the_reference(tmp_path: Path, window: int | None, block_size: int, fields: dict[str, Any]):
    """The anchor follows what is committed. A shorter block has fewer slots in its lattice."""
    fitted = {"length": NEW, "window": window, "drafter_intermediate_size": 320, "block_size": block_size}
    pair = oracle_like_pair(3, PROMPTS, **{**SMALL, **fitted})
    pair.drafter_config["block_size"] = 6
    lm = build(tmp_path, as_lilicorr(pair, **fields), draft_window=window, block_size=block_size)
    seen = compare(lm, as_lilicorr(pair, **fields), PROMPTS, window, block_size)
    assert seen.last_start >= 30


def test_candidates_of_lilicorr_have_the_embeddings_of_the_target(tmp_path: Path):
    """The drafter's own embeddings are those of its block alone."""
    pair = as_lilicorr(random_pair(3, **SMALL))
    pair.drafter_tensors["embed_tokens.weight"] = -pair.target_tensors["model.embed_tokens.weight"]
    lm = build(tmp_path, pair, block_size=6)
    drafter = lm.drafter
    assert isinstance(drafter, LiLiCorr)
    assert drafter.config.own_embedding
    session = lm.start(PROMPTS[:1], Sampling(NEW))
    session.prefill()
    state, _ = state_of(session)
    models = lm.model.models
    hidden = np.random.default_rng(0).normal(size=(1, 5, drafter.config.hidden_size)).astype(np.float32)
    score = jax.jit(partial(drafter.candidates, lm.model.target))
    without = replace(models, drafter=dflash.with_backbone(models.drafter, embed=None))
    scores = [score(each, state, state.last_position, hidden).scores for each in (models, without)]
    np.testing.assert_array_equal(*scores)


@pytest.mark.parametrize("kind", ["dflash2", "dspark", "lilicorr"])
def test_rounds_with_a_draft_vocabulary_equal_the_reference(tmp_path: Path, kind: str):
    """Codebooks of candidates hold the tokens that can be proposed, those of the tokens before hold all."""
    codebooks = {"dflash2": "candidate_selector.successor_codebook", "dspark": "markov_head.markov_w2.weight"}
    made = {"dflash2": as_dflash2, "dspark": as_dspark, "lilicorr": as_lilicorr}[kind](random_pair(3, **SMALL))
    pair = with_draft_vocab(made, range(1, 40, 3), [codebooks[kind]] if kind in codebooks else [])
    target, drafter = BUILD[pair.drafter_config["architectures"][0]](pair)
    lm = build(tmp_path, pair, block_size=6)
    want = [speculative_greedy(target, drafter, prompt, NEW, 6) for prompt in PROMPTS]
    session = lm.start(PROMPTS, Sampling(NEW))
    session.prefill()
    assert lm.drafter is not None
    propose = jax.jit(partial(lm.drafter.variant(None).propose, lm.model.target))
    number = 0
    while not session.finished:
        state, rows = state_of(session)
        blocks = np.asarray(propose(lm.model.models, state).block).tolist()
        wanted = [want[row].rounds[number] for row in rows]
        assert [blocks[at] for at in range(len(rows))] == [r.block for r in wanted]
        assert all(token % 3 == 1 for r in wanted for token in r.block[1:])
        session.advance(1)
        number += 1
    assert [result.tokens for result in session.results()] == [generation.output for generation in want]


def test_random_drafter_equals_the_reference(tmp_path: Path):
    """Almost nothing is accepted, so almost every round starts one position after the last."""
    pair = random_pair(12, **SMALL)
    seen = compare(build(tmp_path, pair, kernels="xla"), pair, PROMPTS, None, 6)
    assert np.mean(seen.accepted) < 0.5


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
def test_all_forms_of_a_drafter_folder_are_one_drafter(tmp_path: Path, prefix: bool, inside: bool):
    pair = random_pair(3)
    target, drafter = as_folders(tmp_path, pair, model_prefix=prefix, block_size_inside=inside)
    config, params = load_dflash(drafter, read_config(drafter), load_decoder(target, jnp.float32)[0], "float32", None)
    assert config.block_size == 6
    np.testing.assert_array_equal(params.fc, pair.drafter_tensors["fc.weight"].T)
    np.testing.assert_array_equal(params.layers[1].down, pair.drafter_tensors["layers.1.mlp.down_proj.weight"].T)


def test_a_window_that_holds_everything_changes_nothing(tmp_path: Path):
    pair = oracle_like_pair(1, PROMPTS, length=NEW, drafter_intermediate_size=320, **TINY)
    sampling = Sampling(max_new_tokens=NEW)
    want = build(tmp_path, pair).generate(PROMPTS, sampling)
    for window in (36, 1000):  # the longest text has 36 positions
        got = build(tmp_path, pair, draft_window=window).generate(PROMPTS, sampling)
        assert [(r.tokens, r.acceptance_lengths) for r in got] == [(r.tokens, r.acceptance_lengths) for r in want]


def test_the_window_bounds_the_drafters_cache(tmp_path: Path):
    pair = random_pair(0)
    for window, slots in ((None, 64), (7, 7), (1000, 64)):
        lm = build(tmp_path, pair, draft_window=window)
        target, drafter = allocate_caches(lm.model.target, Layout.full(4, 64), lm.drafter, jnp.float32)
        assert [x.shape for x in jax.tree.leaves(target)] == [(4, 2, 64, 16)] * 10
        assert [x.shape for x in jax.tree.leaves(drafter)] == [(4, 2, slots, 16)] * 4


@pytest.mark.parametrize("drafted", [False, True])
def test_padding_rows_stay_as_they_are(tmp_path: Path, drafted: bool):
    session = build(tmp_path, random_pair(0, **TINY)).start(PROMPTS, Sampling(max_new_tokens=NEW), speculative=drafted)
    runner = session.engine.runner
    assert runner.programs.layout.batch == 4
    session.prefill()
    while not session.finished:
        assert runner.state is not None
        assert bool(runner.state.done[3])
        assert int(runner.state.last_position[3]) == 0
        session.advance(5)
    assert len(session.results()) == 3


@pytest.mark.parametrize(
    ("block_size", "window", "message"),
    [
        (1, None, "expected a block size from 2 to the drafter's 6, found 1"),
        (7, None, "expected a block size from 2 to the drafter's 6, found 7"),
        (6, 0, "expected a draft window of at least 1, found 0"),
    ],
)
def test_drafting_errors(tmp_path: Path, block_size: int, window: int | None, message: str):
    drafter = build(tmp_path, random_pair(0)).drafter
    assert isinstance(drafter, DFlash)
    with pytest.raises(ValueError, match=message):
        DFlash(drafter.config, block_size, window)
