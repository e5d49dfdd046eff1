"""Keys and values in 8 bits: the same tokens however a prompt is cut, shared or drafted for, and half of bfloat16's memory."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from llm.support import build, check_same_as_autoregressive, prompts, state_of, tokens_of
from reference.dflash_numpy import Pair, random_pair
from runtime.support import drive
from tilewright.kernels import native
from tilewright.kernels.operations import Quantised
from tilewright.kernels.select import operations
from tilewright.llm.language_model import LanguageModel, check_kv_dtype, load
from tilewright.parallel.mesh import make_mesh
from tilewright.runtime.layout import Layout
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.runtime.sizes import state_bytes
from tilewright.runtime.state import Target
from tilewright.speculation.drafters.load import DrafterOptions

NEW = 20
PAIR = random_pair(0, vocab_size=24, target_layers=2, drafter_layers=1, taps=[0], block_size=4)
PROMPTS = prompts(0, [30, 3, 17], vocab=24)
needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")

pytestmark = pytest.mark.usefixtures("quick_compiles")


def small(folder: Path, chunk: int = 16, pair: Pair = PAIR, **settings: Any) -> LanguageModel:
    table = ShapeTable(batches=(3,), capacities=(64,), chunks=(chunk,))
    return build(folder, pair, **{"table": table, "kv_dtype": "int8", **settings})


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"dtype": "float32"}, id="float32"),
        pytest.param({"dtype": "bfloat16"}, id="bfloat16", marks=[needs_native, pytest.mark.slow]),
        pytest.param({"dtype": "float32", "kernels": "xla"}, id="xla", marks=pytest.mark.slow),
    ],
)
def test_speculative_is_plain_decoding(tmp_path: Path, settings: dict[str, Any]):
    """In 8 bits both: what a draft's entry holds depends on the draft alone, and a rejected one is written over."""
    lm = small(tmp_path, **settings)
    want = tokens_of(lm, PROMPTS, Sampling(NEW), speculative=False)
    check_same_as_autoregressive(lm, PROMPTS, Sampling(NEW), 3, want)
    ngrams = lm.with_drafter(*lm.load_drafter("ngram", DrafterOptions(block_size=4)))
    check_same_as_autoregressive(ngrams, PROMPTS, Sampling(NEW), 3, want)


@needs_native
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_prompt_in_pieces_is_the_prompt_in_one(tmp_path: Path, dtype: str):
    """Queries of a piece see its own keys as they are stored. So tokens and caches are the same, bit by bit."""
    found = []
    for chunk in (16, 32):
        lm = small(tmp_path / str(chunk), chunk, dtype=dtype)
        stream = lm.start(PROMPTS, Sampling(NEW), speculative=False)
        held = []
        while not stream.finished:
            stream.advance(4)
            state, rows = state_of(stream) if not stream.finished else (None, [])
            if state is not None and rows == [0, 1, 2]:
                held = [held_entries(cache, state.last_position) for cache in state.target_cache]
        found.append((held, [result.tokens for result in stream.generation()]))
    (caches, tokens), (others, other_tokens) = found
    assert caches
    assert tokens == other_tokens
    for one, other in zip(jax.tree.leaves(caches), jax.tree.leaves(others), strict=True):
        np.testing.assert_array_equal(one, other)


def held_entries(cache: Any, known: Any) -> list[np.ndarray]:
    """What is held of each row's known positions."""
    parts = []
    for part in jax.tree.leaves(cache.pool):
        for row, stop in enumerate(np.asarray(known)):
            pages = np.asarray(part)[np.maximum(np.asarray(cache.table)[row], 0)]  # [M, K, E, ...]
            parts.append(pages.swapaxes(0, 1).reshape(pages.shape[1], -1, *pages.shape[3:])[:, :stop])
    return parts


def test_a_prefix_that_is_shared_gives_what_it_gives_alone(tmp_path: Path):
    """With too few pages for all, too: some are computed again."""
    lm = small(tmp_path).with_drafter(None)
    begun = prompts(1, [20], vocab=24)[0]
    inputs = [[*begun, *suffix] for suffix in prompts(2, [1, 6, 3, 9], vocab=24)]
    want = [lm.generate([tokens], Sampling(NEW))[0].tokens for tokens in inputs]
    engine = lm.engine(EngineOptions(table=lm.table, page_size=16, pages=5, guard="off"))
    engine.runner.reset()
    engine.accept_requests()
    listeners, _ = drive(engine, [GenerateRequest(tokens, Sampling(NEW)) for tokens in inputs], np.random.default_rng(0))
    assert [each.tokens for each in listeners] == want
    stats = engine.stats()
    assert stats.prefix_hits > 0
    assert stats.preemptions > 0
    engine.stop()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sync", "exact"])
def test_over_devices_heads_are_divided_with_their_scales(tmp_path: Path, schedule: str):
    settings: dict[str, Any] = {"kernels": "xla", "dtype": "float32"}
    want = tokens_of(small(tmp_path / "one", **settings), PROMPTS, Sampling(NEW), speculative=False)
    lm = small(tmp_path / "two", mesh=make_mesh({"tp": 2}), schedule=schedule, **settings)
    stream = lm.start(PROMPTS, Sampling(NEW))
    stream.advance(1)
    held = state_of(stream)[0].target_cache[0].pool.k  # type: ignore[attr-defined]
    assert isinstance(held, Quantised)
    assert [part.sharding.shard_shape(part.shape)[1] for part in held] == [1, 1]
    check_same_as_autoregressive(lm, PROMPTS, Sampling(NEW), 3, want)


def test_a_page_takes_about_half_of_bfloat16():
    """A head of 64: 64 bytes and 4 for the scale, where bfloat16 has 128."""
    config = load("demo").target
    sizes = {}
    for name in ("auto", "int8"):
        target = Target(config, operations(), kv_dtype=name)
        sizes[name] = state_bytes(target, None, Layout(2, 64, 10, 64), "bfloat16")
    assert sizes["int8"] / sizes["auto"] == (config.head_dim + 4) / (2 * config.head_dim)


def test_the_server_says_what_it_keeps(tmp_path: Path):
    assert "in int8 (--kv-dtype)" in small(tmp_path, dtype="float32").engine(EngineOptions(pages=4)).decoding.sizes_line
    assert "in float32 (--kv-dtype)" in small(tmp_path, kv_dtype="auto").engine(EngineOptions(pages=4)).decoding.sizes_line


def test_another_format_is_refused():
    with pytest.raises(ValueError, match="expected a kv_dtype among auto, int8, found 'int4'"):
        check_kv_dtype("int4")
