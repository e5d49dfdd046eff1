"""Targets with layers of linear attention: speculation, batches and preemption give the tokens of transformers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from llm.test_families import copied, golden_tokens, random_drafter, tokenizer  # noqa: F401 (a fixture)
from models.test_decoder import GOLDENS
from runtime.support import check_empty, drive
from tilewright.kernels.operations import Operations
from tilewright.kernels.select import PLAIN, Kernels
from tilewright.llm.language_model import LanguageModel, load
from tilewright.models import decoder, eagle3
from tilewright.models.checkpoint import decoder_config, load_decoder
from tilewright.models.delta import DeltaState
from tilewright.models.params import initialise
from tilewright.parallel.mesh import make_mesh
from tilewright.runtime.engine import Engine
from tilewright.runtime.interfaces import Proposal
from tilewright.runtime.layout import rows_of
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.placement import placement_over
from tilewright.runtime.programs import allocate_caches, empty_state
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.rounds import autoregressive_step, verify_and_extend
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable

NAMES = ["qwen3-next", "qwen3.5-tied"]
NEW = 64
TABLE = ShapeTable(batches=(2,), capacities=(256,), chunks=(16,), widths=(4,))
ASKED = [0, 1, 1, 0, 1]
"""Of the golden prompts, several of which begin alike."""


@pytest.fixture(scope="module")
def hybrid(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:  # noqa: F811
    folder = copied(tmp_path_factory.mktemp("hybrids") / "target", "qwen3.5-tied", tokenizer)
    return load(folder, "ngram", table=TABLE, block_size=4)


def engine_of(lm: LanguageModel, **options: Any) -> Engine:
    engine = lm.engine(EngineOptions(page_size=16, table=lm.table, slots=lm.table.batches[-1], guard="off", **options))
    engine.warm()
    engine.open()
    return engine


def requests_of(name: str, which: Sequence[int]) -> tuple[list[GenerateRequest], list[list[int]]]:
    prompts, want = golden_tokens(name)
    return [GenerateRequest(prompts[n], Sampling(NEW, ignore_eos=True)) for n in which], [want[n] for n in which]


def test_requests_come_and_go_and_the_newest_gives_way(hybrid: LanguageModel):
    """Slots change hands, and what gave way is computed again: always from an empty state."""
    engine, (requests, want) = engine_of(hybrid, pages=7), requests_of("qwen3.5-tied", ASKED)
    heard, _ = drive(engine, requests, np.random.default_rng(0))
    assert [each.tokens for each in heard] == want
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.accepted > 0, "drafts that are accepted are what there is to roll back to"
    assert (engine.prefix_cache, stats.prefix_hits) == (False, 0)
    check_empty(engine)
    assert not jax.tree.leaves(engine.runner.state.target_cache[0].pending)  # type: ignore[union-attr]


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_rollback_that_is_forgotten_is_seen(
    forgotten: bool, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
):  # fmt: skip
    """A drafter of random weights, all of whose drafts are refused; with the rollback, tokens are those of transformers."""
    settle = DeltaState.settle

    def settle_all(kept: DeltaState, ops: Operations, count: Array) -> DeltaState:
        return kept if kept.pending is None else settle(kept, ops, jnp.full_like(count, kept.pending.k.shape[1]))

    if forgotten:
        monkeypatch.setattr(DeltaState, "settle", settle_all)
    folder = copied(tmp_path / "target", "qwen3-next", tokenizer)
    lm = load(folder, random_drafter(tmp_path / "drafter", decoder_config(folder)), table=TABLE, block_size=4)
    engine, (requests, want) = engine_of(lm), requests_of("qwen3-next", [0, 1])
    heard, _ = drive(engine, requests, np.random.default_rng(0))
    assert engine.stats().drafted >= 3 * NEW, "every round drafts"
    assert ([each.tokens for each in heard] == want) is not forgotten


def test_a_round_passes_the_target_once(hybrid: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    """And reads its weights once, as a step of plain decoding does: the rollback asks for no further pass."""
    passes: list[tuple[int, ...]] = []
    forward = decoder.forward

    def counted(config: Any, ops: Any, params: Any, tokens: Array, *rest: Any) -> Any:
        passes.append(tokens.shape)
        return forward(config, ops, params, tokens, *rest)

    monkeypatch.setattr(decoder, "forward", counted)
    programs = hybrid.engine(EngineOptions(page_size=16, table=TABLE, slots=2)).programs
    target, models, layout = programs.target, programs.models, programs.layout
    drafter = replace(hybrid.drafter, block_size=4)  # type: ignore[type-var]

    def state() -> Any:
        return empty_state(layout, *allocate_caches(target, layout, drafter, jnp.float32))

    def round_of(state: Any) -> Any:
        drafts = Proposal(jnp.zeros((2, 4), jnp.int32), jnp.full(2, 3, jnp.int32))
        return verify_and_extend(drafter, target, models, state, drafts)

    table = jnp.zeros((layout.groups, 2, layout.capacity // layout.page_size), jnp.int32)
    for run, width in ((partial(autoregressive_step, target, models), 1), (round_of, 4)):
        passes.clear()
        jax.eval_shape(lambda run=run: run(rows_of(jax.tree.map(jnp.asarray, state()), jnp.arange(2), table)))
        assert passes == [(2, width)]


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "xla"])
@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_in_batches_with_and_without_room(name: str, kernels: Kernels, tokenizer: Path, tmp_path: Path):  # noqa: F811
    """Of 1 and 8 rows; n-grams, DFlash, EAGLE-3, and a team of two that take turns."""
    folder = copied(tmp_path / "target", name, tokenizer)
    config = decoder_config(folder)
    dflash, chain = random_drafter(tmp_path / "dflash", config), random_eagle3(tmp_path / "eagle3", config)
    for drafters in ("ngram", dflash, chain, ["ngram", dflash]):
        for batch, pages in ((1, 16), (8, 40)):
            lm = load(folder, drafters, table=replace(TABLE, batches=(batch,)), kernels=kernels, block_size=None)
            engine, (requests, want) = engine_of(lm, pages=pages), requests_of(name, ASKED * 2)
            heard, _ = drive(engine, requests, np.random.default_rng(0))
            assert [each.tokens for each in heard] == want
            check_empty(engine)


def random_eagle3(folder: Path, target: decoder.DecoderConfig) -> Path:
    """An EAGLE-3 drafter of random weights that proposes every token."""
    config = eagle3.Eagle3Config(
        **{**target.sizes(), "num_layers": 1, "partial_rotary_factor": 1.0}, draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size, target_layer_ids=(0, 1, target.num_layers - 1), block_size=4,
    )  # fmt: skip
    params = initialise(eagle3.declare(config), jax.random.key(1))
    eagle3.save(folder, config, replace(params, target_ids=jnp.arange(target.vocab_size)), jnp.float32)
    return folder


@pytest.mark.parametrize("schedule", [None, "exact"])
def test_several_devices_are_refused(schedule: str | None):
    with pytest.raises(ValueError, match="models of qwen3_next run on one device: no schedule divides their layers of linear"):
        placement_over(decoder_config(GOLDENS / "qwen3-next"), make_mesh({"tp": 2}), schedule)


def test_training_is_refused():
    config, params = load_decoder(GOLDENS / "qwen3.5-tied", jnp.float32)
    with pytest.raises(ValueError, match="models of qwen3_5_text are not trained here: their layers have linear attention"):
        jax.eval_shape(
            lambda p: decoder.cross_entropy(config, PLAIN, p, jnp.zeros((1, 32)), jnp.zeros(1, jnp.int32), jnp.ones(1)), params
        )


def test_a_prefix_cache_is_refused(hybrid: LanguageModel):
    with pytest.raises(ValueError, match="expected no prefix cache: layers of linear attention keep a state of each row"):
        engine_of(hybrid, prefix_cache=True)
