"""Targets with layers of linear attention: speculation, batches and preemption give the tokens of transformers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from llm.test_families import copied, golden_tokens, random_drafter, tokenizer  # noqa: F401 (a fixture)
from models.test_decoder import GOLDENS
from products import cases
from reference.mtp_numpy import add_random_head
from runtime.support import check_empty, drive, expected
from tilewright.kernels.operations import Operations
from tilewright.kernels.select import Kernels
from tilewright.llm.language_model import LanguageModel, load
from tilewright.models import decoder, eagle3
from tilewright.models.checkpoint import decoder_config, save_params
from tilewright.models.delta import DeltaSizes, DeltaState
from tilewright.models.experts import Mixture
from tilewright.models.params import initialise
from tilewright.parallel.mesh import make_mesh
from tilewright.runtime import programs as programs_module
from tilewright.runtime.engine import Engine
from tilewright.runtime.interfaces import Proposal
from tilewright.runtime.layout import restore_states, rows_of
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.placement import placement_over
from tilewright.runtime.programs import allocate_caches, empty_state
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.rounds import autoregressive_step, verify_and_extend
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.runtime.sizes import engine_sizes, state_bytes

NAMES = ["qwen3-next", "qwen3.5-tied"]
NEW = 64
TABLE = ShapeTable(batches=(2,), capacities=(256,), chunks=(16,), widths=(4,))
REQUEST_ORDER = [0, 1, 1, 0, 1]
"""Of the golden prompts, several of which begin alike."""


@pytest.fixture(scope="module")
def hybrid(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:  # noqa: F811
    folder = copied(tmp_path_factory.mktemp("hybrids") / "target", "qwen3.5-tied", tokenizer)
    return load(folder, "ngram", table=TABLE, block_size=4)


def engine_of(lm: LanguageModel, **options: Any) -> Engine:
    engine = lm.engine(EngineOptions(page_size=16, table=lm.table, slots=lm.table.batches[-1], guard="off", **options))
    engine.warm()
    engine.accept_requests()
    return engine


def requests_of(name: str, which: Sequence[int]) -> tuple[list[GenerateRequest], list[list[int]]]:
    prompts, want = golden_tokens(name)
    return [GenerateRequest(prompts[n], Sampling(NEW, ignore_eos=True)) for n in which], [want[n] for n in which]


def test_requests_come_and_go_and_the_newest_gives_way(hybrid: LanguageModel):
    """Slots change hands, and what gave way is computed again: always from an empty state."""
    engine, (requests, want) = engine_of(hybrid, pages=7), requests_of("qwen3.5-tied", REQUEST_ORDER)
    listeners, _ = drive(engine, requests, np.random.default_rng(0))
    assert [each.tokens for each in listeners] == want
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.accepted > 0, "drafts that are accepted are what there is to roll back to"
    assert (engine.decoding.prefix_cache, stats.prefix_hits) == (True, 0), "prompts so short do not pay for a snapshot"
    check_empty(engine)
    assert not jax.tree.leaves(engine.runner.state.target_cache[0].pending)  # type: ignore[union-attr]


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_rollback_that_is_forgotten_is_seen(
    forgotten: bool,
    tokenizer: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """A drafter of random weights, all of whose drafts are refused; with the rollback, tokens are those of transformers."""
    commit = DeltaState.commit

    def commit_all(kept: DeltaState, ops: Operations, count: Array) -> DeltaState:
        return kept if kept.pending is None else commit(kept, ops, jnp.full_like(count, kept.pending.k.shape[1]))

    if forgotten:
        monkeypatch.setattr(DeltaState, "commit", commit_all)
    folder = copied(tmp_path / "target", "qwen3-next", tokenizer)
    lm = load(folder, random_drafter(tmp_path / "drafter", decoder_config(folder)), table=TABLE, block_size=4)
    engine, (requests, want) = engine_of(lm), requests_of("qwen3-next", [0, 1])
    listeners, _ = drive(engine, requests, np.random.default_rng(0))
    assert engine.stats().drafted >= 3 * NEW, "every round drafts"
    assert ([each.tokens for each in listeners] == want) is not forgotten


def test_a_round_passes_the_target_once(hybrid: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    """And reads its weights once, as a step of plain decoding does: the rollback asks for no further pass."""
    passes: list[tuple[int, ...]] = []
    forward = decoder.forward

    def counted(config: Any, ops: Any, params: Any, tokens: Array, *rest: Any) -> Any:
        passes.append(tokens.shape)
        return forward(config, ops, params, tokens, *rest)

    monkeypatch.setattr(decoder, "forward", counted)
    programs = hybrid.engine(EngineOptions(page_size=16, table=TABLE, slots=2)).decoding.programs
    target = programs.target
    models = programs.models
    layout = programs.layout
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


def random_eagle3(folder: Path, target: decoder.DecoderConfig) -> Path:
    """An EAGLE-3 drafter of random weights that proposes every token."""
    config = eagle3.Eagle3Config(
        **{**target.sizes(), "num_layers": 1, "partial_rotary_factor": 1.0},
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        target_layer_ids=(0, 1, target.num_layers - 1),
        block_size=4,
    )
    params = initialise(eagle3.declare(config), jax.random.key(1))
    eagle3.save(folder, config, replace(params, target_ids=jnp.arange(target.vocab_size)), jnp.float32)
    return folder


def stored_head(folder: Path, target: decoder.DecoderConfig) -> str:
    add_random_head(folder.parent / "target")
    return "mtp"


DRAFTERS: dict[str, Callable[[Path, decoder.DecoderConfig], Any]] = {
    "ngram": lambda folder, config: "ngram",
    "dflash": random_drafter,
    "eagle3": random_eagle3,
    "mtp": stored_head,
    "team": lambda folder, config: ["ngram", random_drafter(folder, config)],
}
PAGES = {1: 16, 8: 40}
"""For so many rows: as many as they want, or too few."""


@pytest.mark.parametrize("name, kernels, drafter, rows", list(cases([], NAMES, ("auto", "xla"), DRAFTERS, PAGES)))
def test_every_drafter_in_batches_with_and_without_room(
    name: str,
    kernels: Kernels,
    drafter: str,
    rows: int,
    tokenizer: Path,  # noqa: F811
    tmp_path: Path,
):
    folder = copied(tmp_path / "target", name, tokenizer)
    sources = DRAFTERS[drafter](tmp_path / "drafter", decoder_config(folder))
    lm = load(folder, sources, table=replace(TABLE, batches=(rows,)), kernels=kernels, block_size=None)
    engine, (requests, want) = engine_of(lm, pages=PAGES[rows]), requests_of(name, REQUEST_ORDER * 2)
    listeners, _ = drive(engine, requests, np.random.default_rng(0))
    assert [each.tokens for each in listeners] == want
    check_empty(engine)


@pytest.fixture(scope="module")
def wide(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A random checkpoint with heads, experts and a shared expert for 8 devices."""
    folder = tmp_path_factory.mktemp("wide")
    config = decoder.DecoderConfig(
        family="qwen3_next",
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        num_layers=3,
        num_heads=8,
        num_kv_heads=2,
        head_dim=16,
        partial_rotary_factor=0.25,
        max_position_embeddings=256,
        delta=DeltaSizes(8, 16, 8, 12, 4),
        delta_layers=(0, 1),
        mixture=Mixture(16, 3, 32, shared=24),
        dense_layers=(1,),
    )
    specs = decoder.declare(config)
    large = jax.tree.map(lambda spec: replace(spec, scale=max(spec.scale, 0.2)), specs)
    save_params(folder, decoder.config_to_hf(config), specs, initialise(large, jax.random.key(0)), "float32")
    copyfile(tokenizer, folder / "tokenizer.json")
    return folder


@pytest.mark.parametrize(
    ("devices", "schedule", "kernels"),
    [
        (2, "ring", "auto"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((8, "domino", "auto"), (4, "exact", "xla"))),
    ],
)
def test_several_devices_decode_what_one_does(devices: int, schedule: str, kernels: Kernels, wide: Path):
    """Each has some of the heads, their states and their convolutions; with drafts and behind a snapshot, too."""
    one = load(wide, "ngram", table=TABLE, block_size=4, kernels=kernels)
    several = load(wide, "ngram", table=TABLE, block_size=4, kernels=kernels, mesh=over(devices), schedule=schedule)
    requests = alike_requests(3, new=16)
    rng = np.random.default_rng(0)
    want = expected(one, requests)
    engine = engine_of(several)
    assert [drive(engine, [request], rng)[0][0].tokens for request in requests] == want
    assert engine.stats().prefix_hits == 96
    assert [listener.tokens for listener in drive(engine, requests, rng)[0]] == want
    held: Any = engine.runner.state.target_cache[0]  # type: ignore[union-attr]
    for array, dim in ((held.state, 1), (held.before, 2), (several.model.models.target.layers[0].delta.log_rate, 0)):
        assert {shard.data.shape[dim] * devices for shard in array.addressable_shards} == {array.shape[dim]}


def over(devices: int) -> jax.sharding.Mesh:
    return make_mesh({"tp": devices})


@pytest.mark.parametrize(
    ("devices", "schedule", "said"),
    [
        (
            2,
            "exact",
            "the schedule exact sums 8 parts: expected sizes that are multiples of 8, found 4 value heads of linear attention",
        ),
        (4, None, "expected devices that divide 4 heads, .*, 2 key heads of linear attention"),
    ],
)
def test_what_is_not_divided_is_refused(devices: int, schedule: str | None, said: str):
    with pytest.raises(ValueError, match=said):
        placement_over(decoder_config(GOLDENS / "qwen3-next"), over(devices), schedule)


ALIKE = 97
RESTS = (43, 43, 2, 3)
LATER = 100
"""Tokens of prompts that begin alike, up to where they part; those behind, and of answers. States fade within a few tokens."""


def alike_requests(count: int, new: int = LATER) -> list[GenerateRequest]:
    rng = np.random.default_rng(0)
    alike = rng.integers(3, 96, ALIKE).tolist()
    prompts = [[*alike, *rng.integers(3, 96, rest).tolist()] for rest in RESTS[:count]]
    return [GenerateRequest(prompt, Sampling(new, ignore_eos=True)) for prompt in prompts]


def test_a_prompt_begins_with_a_snapshot_of_one_that_began_alike(hybrid: LanguageModel):
    """One after the other, then together with too few pages: tokens are those of plain decoding from an empty state."""
    engine = engine_of(hybrid, pages=22, state_snapshots=2)
    requests = alike_requests(4)
    want = expected(hybrid, requests)
    rng = np.random.default_rng(0)
    found = []
    for request, tokens in zip([*requests, requests[0]], [*want, want[0]], strict=True):
        (listener,), (handle,) = drive(engine, [request], rng)
        assert listener.tokens == tokens
        found.append(handle.cached_tokens)
    # The second one stops at the last page that it shares; the last page of the first one is gone by the end.
    assert found == [0, 0, 96, 96, 96]
    listeners, _ = drive(engine, requests * 2, rng)
    assert [each.tokens for each in listeners] == want * 2
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hits > sum(found)
    check_empty(engine)
    assert engine.scheduler.snapshots is not None
    assert not any(engine.scheduler.snapshots.held)


@pytest.mark.slow
def test_a_stale_snapshot_is_seen(hybrid: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    def restored_of_another(caches: Any, snapshots: Any, rows: Array) -> Any:
        return restore_states(caches, snapshots, jnp.where(rows < 0, rows, rows - 1))

    monkeypatch.setattr(programs_module, "restore_states", restored_of_another)
    engine = engine_of(hybrid)
    requests = alike_requests(3)
    tokens = [drive(engine, [request], np.random.default_rng(0))[0][0].tokens for request in requests]
    assert engine.stats().prefix_hits == 96
    assert [found == want for found, want in zip(tokens, expected(hybrid, requests), strict=True)] == [True, True, False]


def test_snapshots_are_counted_and_without_any_a_prefix_cache_is_refused(hybrid: LanguageModel):
    options = EngineOptions(page_size=16, table=TABLE, slots=2)
    target = hybrid.model.target
    assert target.config.delta is not None
    one = DeltaState.empty(target.config.delta, 1, jnp.float32)
    layers = len(target.config.delta_layers)
    sizes = [engine_sizes(target, None, jnp.float32, replace(options, state_snapshots=n)) for n in (None, 0, 7)]
    assert [each.layout.snapshots for each in sizes] == [4, 0, 7]
    assert {each.row_bytes for each in sizes} == {layers * sum(leaf.nbytes for leaf in jax.tree.leaves(one))}
    used_bytes = [state_bytes(target, None, each.layout, jnp.float32) for each in sizes]
    assert used_bytes[2] - used_bytes[1] == 7 * sizes[0].row_bytes
    assert "2 rows and 4 snapshots (--slots, --memory state_snapshots)" in hybrid.engine(options).decoding.sizes_line
    with pytest.raises(ValueError, match="layers of linear attention keep a state of each row, without snapshots"):
        engine_of(hybrid, prefix_cache=True, state_snapshots=0)
