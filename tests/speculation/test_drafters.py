"""Every kind of drafter in the engine: its tokens are those of plain decoding, its rounds do and report what they should."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llm.support import build, check_same_as_autoregressive, prompts, state_of, tokens_of
from reference.dflash2_numpy import as_dflash2
from reference.dflash_numpy import Pair, Target, as_folders, autoregressive_greedy, cut, random_pair
from reference.dspark_numpy import as_dspark
from reference.eagle3_numpy import Chain, as_folder, random_eagle3
from reference.lilicorr_numpy import as_lilicorr
from reference.mtp_numpy import Head, add_head, random_head
from reference.mtp_numpy import as_folder as as_mtp_folder
from tilewright.kernels import native
from tilewright.kernels.paged.xla import in_rows
from tilewright.kernels.select import PLAIN
from tilewright.llm.language_model import LanguageModel, load
from tilewright.models import decoder, dflash, eagle3
from tilewright.models.checkpoint import read_config
from tilewright.runtime.cache import Ring
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.runtime.state import DecodeState, Models
from tilewright.speculation.drafters.blockwise import Blockwise
from tilewright.speculation.drafters.chain import BEAM, TOP_K
from tilewright.speculation.drafters.dflash import DFlash
from tilewright.speculation.drafters.dflash2 import DFlash2
from tilewright.speculation.drafters.dspark import DSpark
from tilewright.speculation.drafters.eagle3 import Eagle3
from tilewright.speculation.drafters.lilicorr import LiLiCorr
from tilewright.speculation.drafters.load import DrafterOptions, load_dflash
from tilewright.speculation.drafters.mtp import MTP
from tilewright.speculation.drafters.ngram import NGram
from tilewright.speculation.team import Team

NEW = 24
BLOCK = 4
VOCAB = 16
DRAFT_VOCAB = 12
TABLE = ShapeTable(batches=(1, 8), capacities=(64,), chunks=(8,))
PAIR = random_pair(0, vocab_size=VOCAB, target_layers=1, drafter_layers=1, taps=[0], block_size=BLOCK)
"""With so few tokens even random drafts are accepted now and then."""
PAIR2 = as_dflash2(PAIR, window=6, sliding=[0], output_multiplier=0.5, final_logit_softcapping=8.0, input_embedding_scale=0.5)
WALKERS = {"dflash2": PAIR2, "dspark": as_dspark(PAIR), "lilicorr": as_lilicorr(PAIR)}
EAGLE3 = random_eagle3(0, PAIR.target_config, taps=[0], draft_vocab_size=DRAFT_VOCAB)
MTP_HEAD = random_head(0, PAIR.target_config)
DEEP = random_pair(0, vocab_size=VOCAB, target_layers=3, drafter_layers=1, taps=[0])
PROMPTS = prompts(0, [1, 1, 2, 3, 9, 14, 21, 33], vocab=VOCAB)
GREEDY = Sampling(NEW)
PENALISED = Sampling(
    NEW, temperature=1.0, top_p=0.9, min_p=0.05, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1, seed=6
)
REQUESTS = [
    Sampling(NEW, temperature=1.0, seed=1),
    GREEDY,
    Sampling(NEW, temperature=0.7, top_p=0.8, seed=2),
    PENALISED,
    replace(PENALISED, temperature=0.0),
    GREEDY,
    Sampling(NEW - 5, temperature=1.5, top_k=6, seed=3),
    PENALISED,
]
KINDS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "dflash": ("dflash", {"block_size": BLOCK}),
    "dflash, window": ("dflash", {"block_size": BLOCK, "draft_window": 3}),
    "dflash, refined": ("dflash", {"block_size": BLOCK, "refine": 1}),
    "dflash2": ("dflash2", {"block_size": BLOCK}),
    "dflash2, sampled": ("dflash2", {"block_size": BLOCK, "walk": "sampled", "draft_window": 3}),
    "dspark": ("dspark", {"block_size": BLOCK}),
    "dspark, window": ("dspark", {"block_size": BLOCK - 1, "walk": "greedy", "draft_window": 3, "refine": 1}),
    "lilicorr": ("lilicorr", {"block_size": BLOCK}),
    "lilicorr, window": ("lilicorr", {"block_size": BLOCK - 1, "walk": "greedy", "draft_window": 3}),
    "eagle3": ("eagle3", {"block_size": BLOCK}),
    "eagle3, window": ("eagle3", {"block_size": BLOCK, "draft_window": 3}),
    "mtp": ("mtp", {"block_size": BLOCK}),
    "mtp, window": ("mtp", {"block_size": BLOCK, "draft_window": 3}),
    "mtp, draft vocabulary": ("mtp, draft vocabulary", {"block_size": BLOCK}),
    "ngram": ("ngram", {"block_size": BLOCK}),
    "none": (None, {"block_size": BLOCK}),
}
"""What to load, and how. All windows that are given are shorter than the block."""


pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Any]:
    """Where each kind of drafter is, and the target's folder under "target"."""
    folder = tmp_path_factory.mktemp("pair")
    target, drafter = as_folders(folder, PAIR)
    walkers = {name: as_folders(folder / name, pair)[1] for name, pair in WALKERS.items()}
    chain = as_folder(folder / "e", *EAGLE3)
    small = as_mtp_folder(folder / "m", PAIR.target_config, MTP_HEAD, range(1, DRAFT_VOCAB + 1))
    heads = {"mtp": "mtp", "mtp, draft vocabulary": small}
    return {
        "target": add_head(target, MTP_HEAD),
        "dflash": drafter,
        **walkers,
        "eagle3": chain,
        **heads,
        "ngram": "ngram",
        None: None,
    }


@pytest.fixture(scope="module")
def plain(folders: dict[str | None, Any]) -> LanguageModel:
    return load(folders["target"], table=TABLE)


@pytest.fixture(scope="module")
def greedy_alone(plain: LanguageModel) -> list[list[int]]:
    return tokens_of(plain, PROMPTS, GREEDY, speculative=False, batch=1)


@pytest.fixture(scope="module")
def sampled_alone(plain: LanguageModel) -> list[list[int]]:
    return tokens_of(plain, PROMPTS, REQUESTS, speculative=False, batch=1)


def with_drafter(plain: LanguageModel, source: Any, settings: dict[str, Any]) -> LanguageModel:
    """As `load` does it, with the options that it does not take."""
    options = DrafterOptions(**{"block_size": None if source is None else "auto", **settings})
    return plain.with_drafter(*plain.load_drafter(None if source is None else str(source), options))


@pytest.fixture(scope="module", params=KINDS)
def drafting(request: pytest.FixtureRequest, plain: LanguageModel, folders: dict[str | None, Any]) -> LanguageModel:
    source, settings = KINDS[request.param]
    return with_drafter(plain, folders[source], settings)


@pytest.mark.parametrize("batch", [1, 8])
def test_greedy_equals_plain_decoding(drafting: LanguageModel, greedy_alone: list[list[int]], batch: int):
    """Also the rows of one token, before which no drafter has anything to read."""
    lengths = check_same_as_autoregressive(drafting, PROMPTS, GREEDY, batch, greedy_alone)
    assert drafting.drafter is not None
    assert max(lengths) == 1 if drafting.drafter.name == "none" else max(lengths) >= 2


def test_a_row_drafts_what_it_drafts_alone(drafting: LanguageModel):
    """Round by round, but for the rows of one token: their first drafts come from nothing and may be anything."""
    together = drafting.generate(PROMPTS, GREEDY)
    assert [drafting.generate([prompt], GREEDY)[0] for prompt in PROMPTS[2:]] == together.results[2:]


@pytest.mark.parametrize(
    "drafting", ["dflash", "dflash2, sampled", "dspark", "lilicorr", "eagle3", "mtp", "ngram", "none"], indirect=True
)
def test_sampled_rows_equal_plain_decoding(drafting: LanguageModel, sampled_alone: list[list[int]]):
    """Penalised, filtered and greedy rows in one batch, each with its seed."""
    check_same_as_autoregressive(drafting, PROMPTS, REQUESTS, 8, sampled_alone)


def test_what_is_loaded(drafting: LanguageModel):
    drafter = drafting.drafter
    assert drafter is not None
    assert not isinstance(drafter, Team)
    assert drafter.block_size in (BLOCK - 1, BLOCK)
    walkers = {"dflash2": DFlash2, "dspark": DSpark, "lilicorr": LiLiCorr}
    kinds = {"dflash": DFlash, **walkers, "eagle3": Eagle3, "mtp": MTP, "ngram": NGram, "none": Blockwise}
    assert type(drafter) is kinds[drafter.name]
    whole = isinstance(drafter, DFlash) or (isinstance(drafter, MTP) and drafter.config.draft_vocab_size is None)
    assert drafter.reads_target_head == whole


@pytest.mark.parametrize("settings", [{"drafter_dtype": "bfloat16"}, {"weights": "int8"}, {"kernels": "xla"}])
@pytest.mark.parametrize("kind", ["dspark", "lilicorr"])
def test_walkers_in_other_formats_and_by_other_kernels(folders: dict[str | None, Any], kind: str, settings: dict[str, Any]):
    if settings.get("weights") and native.kernels().isa is None:
        pytest.skip(native.kernels().reason or "no kernels")
    lm = load(folders["target"], folders[kind], table=TABLE, block_size=BLOCK, **settings)
    check_same_as_autoregressive(lm, PROMPTS, REQUESTS, 8, tokens_of(lm, PROMPTS, REQUESTS, speculative=False))


def test_a_published_eagle3_drafts_seven_tokens(folders: dict[str | None, Any]):
    drafter = load(folders["target"], folders["eagle3"], table=TABLE).drafter
    assert drafter is not None
    assert drafter.block_size == 8


def test_a_drafter_is_changed_and_the_target_shared(plain: LanguageModel, greedy_alone: list[list[int]], folders: Any):
    options = DrafterOptions(block_size=3)
    for source in ("eagle3", "dflash"):
        other = plain.with_drafter(*plain.load_drafter(str(folders[source]), options))
        assert other.model.models.target is plain.model.models.target
        assert other.drafter is not None
        assert other.drafter.block_size == 3
        assert other.generate(PROMPTS[2:3], GREEDY)[0].tokens == greedy_alone[2]
    assert plain.drafter is None
    assert other.with_drafter(None).drafter is None


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ("eagle3", {"block_size": 1}, "expected a block size of at least 2, found 1"),
        ("eagle3", {"draft_window": 0}, "expected a draft window of at least 1, found 0"),
        ("eagle3", {"refine": 1}, "refining needs a DFlash drafter; this is an EAGLE-3 one"),
        ("mtp", {"refine": 1}, "refining needs a DFlash drafter; this is an MTP head"),
        ("mtp", {"walk": "greedy"}, "a walk needs a DFlash 2, DSpark or LiLiCorr drafter; this is an MTP head"),
        ("mtp", {"revision": "main"}, "revision 'main' was given, but 'mtp' is part of the target"),
        ("mtp, draft vocabulary", {"refine": 1}, "refining needs a DFlash drafter; this is an MTP head"),
        ("dflash", {"refine": -1}, "expected 0 or more refining passes, found -1"),
        ("ngram", {"block_size": 1}, "expected a block size of at least 2, found 1"),
        ("ngram", {"draft_window": 4}, "a draft window needs a drafter with weights; n-gram drafting has no weights"),
        ("ngram", {"drafter_dtype": "bfloat16"}, "a drafter dtype needs a drafter with weights; n-gram"),
        ("ngram", {"refine": 1}, "refining needs a DFlash drafter; n-gram drafting has no weights"),
        ("dflash2", {"walk": "random"}, "expected the walk to be greedy or sampled, found 'random'"),
        ("dflash2", {"block_size": 5}, "expected a block size from 2 to the drafter's 4, found 5"),
        ("dspark", {"block_size": 5}, "expected a block size from 2 to the drafter's 4, found 5"),
        ("lilicorr", {"walk": "random"}, "expected the walk to be greedy or sampled, found 'random'"),
        ("dflash", {"walk": "greedy"}, "a walk needs a DFlash 2, DSpark or LiLiCorr drafter; this is a DFlash one"),
        ("eagle3", {"walk": "greedy"}, "a walk needs a DFlash 2, DSpark or LiLiCorr drafter; this is an EAGLE-3 one"),
        ("ngram", {"walk": "greedy"}, "a walk needs a DFlash 2, DSpark or LiLiCorr drafter; n-gram drafting has no weights"),
        (None, {"block_size": 1}, "expected a block size of at least 2, found 1"),
    ],
)
def test_options_that_do_not_go_with_a_drafter(
    plain: LanguageModel, folders: Any, source: str | None, settings: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        with_drafter(plain, folders[source], settings)


def test_an_eagle3_drafter_that_does_not_fit(tmp_path: Path):
    other = random_pair(0, vocab_size=VOCAB, hidden_size=48, target_layers=1, drafter_layers=1, taps=[0])
    target, _ = as_folders(tmp_path, other)
    with pytest.raises(ValueError, match="does not fit the target: target_hidden_size is 32 but the target's is 48"):
        load(target, as_folder(tmp_path / "eagle3", *EAGLE3), table=TABLE)


# EAGLE-3, round by round


def skilled_chain(inputs: Sequence[list[int]], steps: int) -> Chain:
    """A random drafter whose head was fitted, by ridge regression, to the target's own texts after `inputs`."""
    target = Target(DEEP.target_config, DEEP.target_tensors)
    config, tensors = random_eagle3(0, DEEP.target_config, taps=[0, 2], draft_vocab_size=DRAFT_VOCAB)
    chain = Chain(config, tensors, target)
    outputs = []
    wanted = []
    for prompt in inputs:
        text = [*prompt, *autoregressive_greedy(target, prompt, NEW + steps)]
        features = chain.fuse(target.run(text)[1])
        for known in range(max(len(prompt) - 1, 1), len(text) - steps):
            right = text[known + 1 : known + 1 + steps]
            drafted = chain.draft(text[: known + 1], features, steps, forced=right)
            outputs += [x for x, token in zip(drafted.outputs, right, strict=True) if token in chain.map]
            wanted += [chain.map.index(token) for token in right if token in chain.map]
    a = chain.norm(np.stack(outputs), "norm")
    b = np.eye(DRAFT_VOCAB)[wanted]
    head = np.linalg.solve(a.T @ a + 0.1 * np.eye(a.shape[1]), a.T @ b).T
    return Chain(config, {**tensors, "lm_head.weight": head.astype(np.float32)}, target)


def reference_drafts(chain: Chain | Head, text: list[int], window: int | None, steps: int) -> list[int]:
    """What the reference drafts after `text`. As only distances count, a window is a text that begins later."""
    features = chain.features(text)
    known = len(text) - 1
    first = 0 if window is None else max(0, known - window)
    draft = chain.draft(text[first:], features[first:known], steps)
    best = np.sort(draft.logits, axis=1)
    assert (best[:, -1] - best[:, -2]).min() > 1e-5, "rounding must not be able to turn a choice"
    return draft.tokens


def compare_rounds(lm: LanguageModel, chain: Chain | Head, inputs: Sequence[list[int]], window: int | None) -> list[int]:
    """Holds every round of every row against the reference. Returns how many drafts each accepted."""
    assert lm.drafter is not None
    drafter = lm.drafter.variant(None)
    seen = []
    propose = jax.jit(partial(drafter.propose, lm.model.target))
    session = lm.start(inputs, GREEDY)
    texts = [list(prompt) for prompt in inputs]
    session.prefill()
    while not session.finished:
        state, numbers = state_of(session)
        proposal = propose(lm.model.models, state)
        pieces = session.advance(1)
        for number, block, count in zip(numbers, *(np.asarray(x).tolist() for x in proposal[:2]), strict=True):
            row = session.rows[number]
            text = texts[number]
            drafts = block[1:]
            assert block[0] == text[-1]
            assert count == len(drafts) == drafter.block_size - 1
            if len(text) > 1:  # a single token has no feature before it: anything may be drafted
                assert drafts == reference_drafts(chain, text, window, len(drafts))
            choices = chain.target.run([*text, *drafts])[0][len(text) - 1 :].argmax(axis=1).tolist()
            agrees = [draft == choice for draft, choice in zip(drafts, choices, strict=False)]
            accepted = [*agrees, False].index(False)
            emitted = cut([*drafts[:accepted], choices[accepted]], NEW - len(text) + len(inputs[number]), ())
            row_pieces = [piece for piece in pieces if piece.row == number]
            assert [piece.token for piece in row_pieces] == emitted
            assert [piece.drafted for piece in row_pieces] == ([True] * accepted + [False])[: len(emitted)]
            assert (row.drafted[-1], row.accepted[-1]) == (len(drafts), accepted)
            assert row.acceptance_lengths[-1] == len(emitted)
            text += emitted
            seen.append(accepted)
    return seen


@pytest.mark.parametrize("window", [None, 4])
def test_eagle3_rounds_equal_the_reference(tmp_path: Path, window: int | None):
    inputs = [PROMPTS[0], PROMPTS[3], PROMPTS[5]]
    chain = skilled_chain(inputs, BLOCK - 1)
    assert chain.map != list(range(DRAFT_VOCAB))
    lm = build(tmp_path, DEEP, table=TABLE)
    config, params = eagle3.load(as_folder(tmp_path / "made", chain.config, chain.tensors), lm.target, jnp.float32)
    eagle3.save(tmp_path / "saved", config, params, jnp.float32)
    saved = load(tmp_path / "target", tmp_path / "saved", block_size=BLOCK, draft_window=window, table=TABLE)
    seen = compare_rounds(saved, chain, inputs, window)
    assert {0, 1, 2} <= set(seen)
    if window is None:
        assert BLOCK - 1 in seen


# MTP, round by round


@pytest.mark.parametrize("window", [None, 4])
def test_mtp_rounds_equal_the_reference(tmp_path: Path, window: int | None):
    """With so few tokens a random head's drafts are accepted now and then."""
    inputs = [PROMPTS[0], PROMPTS[3], PROMPTS[5]]
    tensors = random_head(1, DEEP.target_config)
    target, _ = as_folders(tmp_path, DEEP)
    head = Head(DEEP.target_config, tensors, Target(DEEP.target_config, DEEP.target_tensors))
    add_head(target, tensors)
    lm = load(target, "mtp", block_size=BLOCK, draft_window=window, table=TABLE)
    seen = compare_rounds(lm, head, inputs, window)
    assert {0, 1} <= set(seen)


# Trees of chains


def most_probable_paths(chain: Any, text: Sequence[int], nodes: int) -> set[tuple[int, ...]]:
    """The `nodes - 1` most probable drafts of the reference behind a text, each as the path to it."""
    features = chain.features(text)
    probabilities: dict[tuple[int, ...], float] = {}
    open_paths: list[tuple[int, ...]] = [()]
    for _ in range(BLOCK - 1):
        for path in open_paths:
            logits = chain.draft(text, features, len(path) + 1, path).logits[-1]
            best = np.argsort(-logits)[:TOP_K]
            logs = logits[best] - np.log(np.sum(np.exp(logits[best])))
            tokens = best if chain.map is None else np.asarray(chain.map)[best]
            for token, log in zip(tokens.tolist(), logs.tolist(), strict=True):
                probabilities[*path, token] = probabilities.get(path, 0.0) + log
        # No other path of this depth has a part in the most probable paths.
        deepest = [path for path in probabilities if len(path) == len(open_paths[0]) + 1]
        open_paths = sorted(deepest, key=lambda path: -probabilities[path])[: nodes - 1]
    return set(sorted(probabilities, key=lambda path: -probabilities[path])[: nodes - 1])


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_trees_of_chains_hold_the_most_probable_paths(kind: str, tmp_path: Path):
    target, _ = as_folders(tmp_path, DEEP)
    reference = Target(DEEP.target_config, DEEP.target_tensors)
    nodes = 1 + BEAM
    if kind == "mtp":
        tensors = random_head(1, DEEP.target_config)
        chain: Any = Head(DEEP.target_config, tensors, reference)
        lm = load(add_head(target, tensors), "mtp", block_size=BLOCK, tree_nodes=(nodes,), table=TABLE)
    else:
        drawn = random_eagle3(0, DEEP.target_config, taps=[0, 2], draft_vocab_size=DRAFT_VOCAB)
        chain = Chain(*drawn, reference)
        lm = load(target, as_folder(tmp_path / "eagle3", *drawn), block_size=BLOCK, tree_nodes=(nodes,), table=TABLE)
    drafter: Any = lm.drafter
    propose_tree = jax.jit(partial(drafter.propose_tree, lm.model.target))
    inputs = [PROMPTS[3], PROMPTS[5]]
    session = lm.start(inputs, Sampling(NEW))
    session.prefill()
    session.advance(1)
    state, numbers = state_of(session)
    tree = jax.tree.map(np.asarray, propose_tree(lm.model.models, state).tree)
    deep = 0
    for row, number in enumerate(numbers):
        text = [*inputs[number], *session.results()[number].tokens]
        paths = []
        for node in range(1, nodes):
            above = np.flatnonzero(tree.ancestors[row, node])[1:]
            assert tree.depths[row, node] == len(above)
            assert above[-1] == node
            assert tree.parents[row, node] == (0 if len(above) == 1 else above[-2])
            paths.append(tuple(tree.tokens[row, above].tolist()))
        assert set(paths) == most_probable_paths(chain, text, nodes)
        assert tree.tokens[row, 0] == text[-1]
        deep = max(deep, *map(len, paths))
    assert deep > 1


# DFlash


def test_refining_reads_the_drafts_in_place_of_the_masks(folders: dict[str | None, Any]):
    lm = load(folders["target"], folders["dflash"], block_size=BLOCK, table=TABLE)
    session = lm.start(PROMPTS[5:6], GREEDY)
    drafter = lm.drafter
    session.prefill()
    assert isinstance(drafter, DFlash)

    @jax.jit
    def passes(models: Models, state: DecodeState) -> tuple[jax.Array, list[jax.Array]]:
        block = drafter.propose(lm.model.target, models, state).block
        drafts = [block[:, 1:]]
        for _ in range(2):
            block = jnp.concatenate([block[:, :1], drafts[-1]], axis=1)
            drafts.append(drafter.fill(lm.model.target, models, state, block))
        return replace(drafter, refine=2).propose(lm.model.target, models, state).block, drafts

    refined, drafts = passes(lm.model.models, state_of(session)[0])
    np.testing.assert_array_equal(refined[:, 1:], drafts[2])
    assert (np.asarray(drafts[0]) != np.asarray(drafts[1])).any()


def test_the_scale_of_the_blocks_embeddings(folders: dict[str | None, Any]):
    inner = PAIR.drafter_config["dflash_config"] | {"input_embedding_scale": 2.0}
    scaled = dflash.config_from_hf(PAIR.drafter_config | {"dflash_config": inner})
    fields = read_config(folders["dflash"])
    target = decoder.config_from_hf(PAIR.target_config)
    config, params = load_dflash(folders["dflash"], fields, target, "float32", None)
    assert scaled == replace(config, input_embedding_scale=2.0) == dflash.config_from_hf(dflash.config_to_hf(scaled))
    embedded = np.random.default_rng(0).normal(size=(2, 3, config.hidden_size)).astype(np.float32)
    positions = np.arange(3)[None] + np.array([[4], [9]], np.int32)

    @partial(jax.jit, static_argnums=0)
    def run(config: dflash.DFlashConfig, x: jax.Array) -> jax.Array:
        pairs = dflash.context_kv(config, PLAIN, params, jnp.asarray(embedded), jnp.asarray(positions - 3))
        context = tuple(Ring(*pair) for pair in pairs)
        seen = jnp.array([3, 3])
        return dflash.run_block(config, PLAIN, params, x, jnp.asarray(positions), context, dflash.attend_context, seen)

    np.testing.assert_allclose(run(scaled, embedded), run(config, 2 * embedded), rtol=1e-5)
    assert not np.allclose(run(scaled, embedded), run(config, embedded), rtol=1e-2)


def test_fields_that_change_no_argmax_are_read_over():
    plain = dflash.config_from_hf(PAIR.drafter_config)
    for changed in (
        {"output_multiplier": 0.25, "final_logit_softcapping": 30.0},
        {"output_multiplier": None, "final_logit_softcapping": None},
        {"final_logit_softcapping": 0, "input_embedding_scale": 1, "use_swa": False},
    ):
        assert dflash.config_from_hf(PAIR.drafter_config | changed) == plain
        inside = PAIR.drafter_config["dflash_config"] | changed
        assert dflash.config_from_hf(PAIR.drafter_config | {"dflash_config": inside}) == plain
    for changed in ({"is_causal": False}, {"sliding_window": 4096, "use_sliding_window": False}):
        assert dflash.config_from_hf(PAIR.drafter_config | changed) == plain


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": 1}, "causal must be true or false, found 1"),
        ({"use_swa": True, "swa_window_size": 3}, "swa_window_size must be at least the block's 4, found 3"),
        ({"is_neox_style": False}, "is_neox_style=False is not supported"),
        ({"attention_value_scale": 0}, "attention_value_scale must be a positive number, found 0"),
        ({"input_embedding_scale": 0}, "input_embedding_scale must be a positive number, found 0"),
        ({"output_multiplier": -1.0}, "output_multiplier must be a positive number, found -1.0"),
        ({"final_logit_softcapping": -30.0}, "final_logit_softcapping must be a positive number, found -30.0"),
        ({"sample_from_anchor": "yes"}, "sample_from_anchor must be true or false, found 'yes'"),
        ({"architectures": ["Qwen3DominoModel"]}, "architectures=.'Qwen3DominoModel'. is not supported"),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_newer_fields_that_stop_the_load_are_named(tmp_path: Path, change: dict[str, Any], message: str, inside: bool):
    config = PAIR.drafter_config | change
    if inside:
        config = PAIR.drafter_config | {"dflash_config": PAIR.drafter_config["dflash_config"] | change}
    if inside and "architectures" in change:
        message = "dflash_config has unknown fields: architectures"
    target, drafter = as_folders(tmp_path, replace(PAIR, drafter_config=config))
    with pytest.raises(ValueError, match=message):
        load(target, drafter, table=TABLE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_causal": "x"}, "is_causal must be true or false, found 'x'"),
        ({"layer_types": ["chunked"]}, r"layer_types must name full_attention or sliding_attention for each of 1 layers"),
        ({"layer_types": None, "use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window needs layer_types"),
        ({"layer_types": None, "sliding_window": 4096}, "sliding_window=4096 is not supported"),
        ({"rope_dim": 4}, r"rope_dim=4 is not supported \(only 16\)"),
        ({"target_hidden_size": -1}, "target_hidden_size must be a positive integer, found -1"),
        ({"quantization_config": {"quant_method": "new"}}, "quant_method='new' of the linear layers is not supported"),
    ],
)
def test_fields_of_the_top_level_that_stop_the_load_are_named(tmp_path: Path, change: dict[str, Any], message: str):
    target, drafter = as_folders(tmp_path, replace(PAIR, drafter_config=PAIR.drafter_config | change))
    with pytest.raises(ValueError, match=message):
        load(target, drafter, table=TABLE)


def test_what_only_later_drafters_have_is_named():
    later = {"conv_kernel_size": 2, "selector_rank": 256}
    config = PAIR.drafter_config | {"dflash_config": PAIR.drafter_config["dflash_config"] | later}
    with pytest.raises(ValueError, match="dflash_config has unknown fields: conv_kernel_size, selector_rank"):
        dflash.config_from_hf(config)
    with pytest.raises(ValueError, match=r"dflash_config must be an object, found \[1\]"):
        dflash.config_from_hf(PAIR.drafter_config | {"dflash_config": [1]})


# N-gram


def counting_pair(vocab: int = 8) -> Pair:
    """A target that counts: after token i comes i + 1, and 0 after the last."""
    pair = random_pair(0, vocab_size=vocab, target_layers=1, drafter_layers=1, taps=[0])
    tensors = dict(pair.target_tensors)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.0.{name}.weight"] = np.zeros_like(tensors[f"model.layers.0.{name}.weight"])
    tensors["model.norm.weight"] = np.ones_like(tensors["model.norm.weight"])
    tensors["lm_head.weight"] = np.roll(tensors["model.embed_tokens.weight"], 1, axis=0)
    return replace(pair, target_tensors=tensors)


def counter(folder: Path, drafter: NGram) -> LanguageModel:
    return load(as_folders(folder, counting_pair())[0], table=TABLE).with_drafter(drafter)


@pytest.mark.parametrize("idle", [True, False])
def test_ngram_rounds_by_hand(tmp_path: Path, idle: bool):
    """Nothing is found until the count has come round to its first two tokens; from then on every draft is right."""
    result = counter(tmp_path, NGram(5, may_be_idle=idle)).generate([[0, 1]], Sampling(20))[0]
    assert result.tokens == [n % 8 for n in range(2, 22)]
    assert result.drafted == [0] * 8 + [4, 4, 4]
    assert result.accepted == [0] * 8 + [4, 4, 4]
    assert result.acceptance_lengths == [1] * 8 + [5, 5, 2], "the last round is cut by the length limit"


def test_tokens_of_a_cut_round_are_drafted_ones(tmp_path: Path):
    session = counter(tmp_path, NGram(5)).start([[0, 1]], Sampling(20))
    drafted = [piece.drafted for piece in session.advance()]
    assert drafted == [False] * 8 + ([True] * 4 + [False]) * 2 + [True, True]


def test_a_round_without_a_proposal_is_a_plain_step(tmp_path: Path):
    """Seen by what it wrote to the target's cache: one position, or as many as a block has."""
    for idle, written in ((True, 9), (False, 24)):
        session = counter(tmp_path, NGram(16, may_be_idle=idle)).start([[*range(8), 0]], Sampling(NEW))
        session.prefill()
        session.advance(1)
        assert session.rows[0].drafted == [0]
        (state, _), pages = state_of(session), session.engine.scheduler.running[0].pages
        keys = in_rows(state.target_cache[0].pool.k, jnp.asarray([pages], jnp.int32))  # type: ignore[attr-defined]
        assert int(np.flatnonzero(np.abs(np.asarray(keys)).max(axis=(0, 1, 3)))[-1]) + 1 == written


def test_rows_that_find_something_and_rows_that_do_not(tmp_path: Path):
    lm = counter(tmp_path, NGram(5))
    inputs = [[*range(8), 0, 1], [3], [5, 5, 5], [2, 0]]
    together = lm.generate(inputs, GREEDY)
    assert together[0].drafted[0] == 4
    assert together[1].drafted[0] == 0
    assert sum(together[2].drafted[:1]) > 0, "a run of one token is found in itself"
    assert together[2].accepted[0] == 0
    for prompt, result in zip(inputs, together, strict=True):
        assert lm.generate([prompt], GREEDY)[0] == result
