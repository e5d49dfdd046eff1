"""Trees of drafts in generation: the tokens are those of plain decoding, whatever the tree, and a wrong path is noticed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from llm.support import build, check_same_as_autoregressive, prompts, tokens_of
from llm.test_families import copied, golden_tokens, random_drafter, tokenizer  # noqa: F401 (a fixture)
from reference.dflash2_numpy import as_dflash2
from reference.dflash_numpy import as_folders, random_pair
from reference.dspark_numpy import as_dspark
from reference.eagle3_numpy import as_folder, random_eagle3
from reference.lilicorr_numpy import as_lilicorr
from reference.mtp_numpy import add_head, random_head
from runtime.support import check_empty, drive
from tilewright.kernels import native
from tilewright.llm.language_model import LanguageModel, load
from tilewright.runtime import rounds
from tilewright.runtime.interfaces import PLAIN, Choice
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.programs import allocate_caches
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.runtime.trees import DraftTree, accepted_nodes
from tilewright.speculation.team import Team

needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
NEW = 20
VOCAB = 8
BLOCK = 4
NODES = (4, 8, 16)
TABLE = ShapeTable(batches=(1, 4), capacities=(64,), chunks=(8,), widths=(2,))
SMALL = ShapeTable(batches=(4,), capacities=(64,), chunks=(8,))
PAIR = random_pair(8, vocab_size=VOCAB, target_layers=2, drafter_layers=1, taps=[0, 1], block_size=BLOCK)
"""With so few tokens even random drafts are accepted now and then."""
KINDS = {"dflash": PAIR, "dflash2": as_dflash2(PAIR), "dspark": as_dspark(PAIR), "lilicorr": as_lilicorr(PAIR)}
PROMPTS = prompts(0, [1, 3, 14, 21], vocab=VOCAB)
PENALISED = Sampling(
    NEW, temperature=1.0, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1, min_tokens=9, seed=6
)
REQUESTS = [Sampling(NEW), Sampling(NEW, temperature=1.0, seed=1), replace(PENALISED, temperature=0.0), PENALISED]

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return as_folders(tmp_path_factory.mktemp("pair"), KINDS["dflash2"])


@pytest.fixture(scope="module")
def team(folders: tuple[Path, Path]) -> LanguageModel:
    """N-grams, and trees behind them."""
    target, drafter = folders
    return load(target, ["ngram", drafter], table=TABLE, tree_nodes=NODES)


@pytest.fixture(scope="module")
def want(team: LanguageModel) -> list[list[int]]:
    return tokens_of(team, PROMPTS, REQUESTS, speculative=False)


def test_a_team_declares_its_trees(team: LanguageModel):
    choices = cast(Team, team.drafter).choices
    assert choices[:2] == (PLAIN, Choice("ngram", 2)), "rounds under masks are chains"
    assert choices[-3:] == tuple(Choice("ngram+dflash2", BLOCK, nodes) for nodes in NODES)
    assert [str(choice) for choice in choices[-2:]] == ["ngram+dflash2, tree 8", "ngram+dflash2, tree 16"]


def test_chains_and_trees_take_turns(team: LanguageModel, want: list[list[int]]):
    """Penalties follow the ancestors of each node, and every drafter's context follows the path."""
    accepted: set[int] = set()
    for runs in ((16,), (8, 0)):
        session = team.start(PROMPTS, REQUESTS)
        number = 0
        while not session.finished:
            nodes = runs[number % len(runs)]
            session.advance(3, Choice("ngram+dflash2", BLOCK, nodes))
            number += 1
        results = session.results()
        assert [result.tokens for result in results] == want
        accepted |= {count for result in results for count in result.accepted}
        assert max(drafted for result in results for drafted in result.drafted) > BLOCK
    assert {0, 1, 2} <= accepted


def siblings(tree: DraftTree, drawn: Array) -> Array:
    """Accepts the first sibling of the deepest node that matches, where it has one."""
    right = accepted_nodes(tree, drawn)
    deepest = jnp.argmax(jnp.where(right, tree.depths, -1), axis=1)
    node = jnp.arange(tree.tokens.shape[1])[None]
    parent = jnp.take_along_axis(tree.parents, deepest[:, None], axis=1)
    others = (tree.parents == parent) & (node != deepest[:, None]) & (parent >= 0)
    wrong = others & (node == jnp.argmax(others, axis=1)[:, None])
    instead = (right & (node != deepest[:, None])) | wrong
    return jnp.where(jnp.any(others, axis=1)[:, None], instead, right)


def test_an_accepted_sibling_is_noticed(folders: tuple[Path, Path], want: list[list[int]], monkeypatch: pytest.MonkeyPatch):
    target, drafter = folders
    mutant = load(target, drafter, table=SMALL, block_size=BLOCK, tree_nodes=(8,))
    monkeypatch.setattr(rounds, "accepted_nodes", siblings)
    assert tokens_of(mutant, PROMPTS, REQUESTS, speculative=True)[0] != want[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
@pytest.mark.parametrize("nodes", [2, 8, 32])
def test_trees_of_chains_give_the_tokens_of_plain_decoding(kind: str, nodes: int, tmp_path: Path):
    target, _ = as_folders(tmp_path, PAIR)
    drafter = "mtp"
    if kind == "mtp":
        add_head(target, random_head(0, PAIR.target_config))
    else:
        drafter = str(as_folder(tmp_path / "eagle3", *random_eagle3(0, PAIR.target_config, taps=[0, 1], draft_vocab_size=6)))
    lm = load(target, drafter, table=TABLE, block_size=BLOCK, tree_nodes=(nodes,))
    want = tokens_of(lm, PROMPTS, REQUESTS, speculative=False)
    for batch in (4, 1):
        lengths = check_same_as_autoregressive(lm, PROMPTS, REQUESTS, batch, want)
        assert max(lengths) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "nodes", "settings"),
    [
        *((kind, 8, {}) for kind in KINDS),
        ("dflash2", 2, {}),
        *(("dflash2", nodes, {}) for nodes in (16, 32, 64)),
        ("dflash2", 16, {"kernels": "xla"}),
        pytest.param("dflash2", 16, {"dtype": "bfloat16"}, marks=needs_native),
        pytest.param("dflash2", 16, {"dtype": "float32", "weights": "int4"}, marks=needs_native),
    ],
)
def test_every_tree_gives_the_tokens_of_plain_decoding(kind: str, nodes: int, settings: dict[str, Any], tmp_path: Path):
    lm = build(tmp_path, KINDS[kind], table=TABLE, block_size=BLOCK, tree_nodes=(nodes,), **settings)
    want = tokens_of(lm, PROMPTS, REQUESTS, speculative=False)
    for batch in (4, 1):
        lengths = check_same_as_autoregressive(lm, PROMPTS, REQUESTS, batch, want)
        assert max(lengths) > 1


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "xla"])
def test_keys_and_values_of_8_bits(kernels: Any, tmp_path: Path):
    """A tree reads the keys of its nodes as a cache would hold them."""
    lm = build(tmp_path, KINDS["dflash2"], table=SMALL, tree_nodes=(16,), kv_dtype="int8", kernels=kernels)
    want = tokens_of(lm, PROMPTS, Sampling(NEW), speculative=False)
    check_same_as_autoregressive(lm, PROMPTS, Sampling(NEW), 4, want)


@pytest.mark.slow
def test_layers_with_a_window(tokenizer: Path, tmp_path: Path):  # noqa: F811
    """The window counts a node's ancestors, and the tokens are those of transformers."""
    folder = copied(tmp_path / "target", "mistral-window", tokenizer)
    drafter = random_drafter(tmp_path / "drafter", load(folder).target)
    table = ShapeTable(batches=(2,), capacities=(128,), chunks=(16,))
    lm = load(folder, drafter, table=table, block_size=4, tree_nodes=(12,))
    inputs, want = golden_tokens("mistral-window")
    each = Sampling(len(want[0]), ignore_eos=True)
    found = [result.tokens for start in range(0, len(inputs), 2) for result in lm.generate(inputs[start : start + 2], each)]
    assert found == want


@pytest.mark.slow
def test_preemption_prefixes_and_log_probabilities(folders: tuple[Path, Path]):
    target, drafter = folders
    lm = load(target, drafter, table=TABLE, block_size=BLOCK, tree_nodes=(8,))
    plain = lm.with_drafter(None)
    begun = prompts(1, [20], vocab=VOCAB)[0]
    inputs = [[*begun, *suffix] for suffix in prompts(2, [1, 6, 3, 9], vocab=VOCAB)]
    asks = [GenerateRequest(tokens, sampling, logprobs=3) for tokens, sampling in zip(inputs, REQUESTS, strict=True)]
    found = []
    for one, pages in ((plain, 32), (lm, 6)):
        engine = one.engine(EngineOptions(table=TABLE, page_size=16, pages=pages, guard="off"))
        engine.runner.reset()
        engine.accept_requests()
        listeners, _ = drive(engine, asks, np.random.default_rng(0))
        stats = engine.stats()
        if one is lm:
            assert stats.preemptions > 0
            assert stats.prefix_hits > 0
        check_empty(engine)
        engine.stop()
        tokens = [[token for update in each.updates for token in update.tokens] for each in listeners]
        found.append(tokens)
    for one, other in zip(*found, strict=True):
        assert [token.token for token in one] == [token.token for token in other]
        for a, b in zip(one, other, strict=True):
            assert a.logprobs is not None
            assert b.logprobs is not None
            assert a.logprobs.logprob == pytest.approx(b.logprobs.logprob, abs=1e-4)
            assert [value for _, value in a.logprobs.top] == pytest.approx([value for _, value in b.logprobs.top], abs=1e-4)


@needs_native
def test_a_tree_round_moves_no_whole_cache(folders: tuple[Path, Path]):
    target, drafter = folders
    table = ShapeTable(batches=(4,), capacities=(2048,), chunks=(8,))
    lm = load(target, drafter, table=table, block_size=BLOCK, tree_nodes=(8,))
    programs = lm.start(PROMPTS, Sampling(NEW)).engine.decoding.programs
    caches = jax.eval_shape(lambda: allocate_caches(lm.model.target, programs.layout, lm.drafter, jnp.float32))
    smallest = min(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches) if leaf.ndim == 4)
    memory = programs.get(programs.round_key(None, 4, 2048, "greedy")).memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < smallest


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tree_nodes": (1,)}, "at least 2 nodes"),
        ({"tree_nodes": (8, 16), "block_size": BLOCK}, "expected one number of nodes with a block size"),
        ({"tree_nodes": (8,), "kv_dtype": "int8"}, "rounds otherwise in a tree"),
        ({"tree_nodes": (8,), "dtype": "bfloat16", "kernels": "xla"}, "rounds otherwise in a tree"),
    ],
)
def test_what_is_refused(folders: tuple[Path, Path], settings: dict[str, Any], message: str):
    target, drafter = folders
    with pytest.raises(ValueError, match=message):
        load(target, drafter, table=SMALL, **settings)
    drafters: Sequence[Any] = ("ngram", None)
    for other in drafters:
        with pytest.raises(ValueError, match="a tree needs a DFlash"):
            load(target, other, table=SMALL, tree_nodes=(8,))
