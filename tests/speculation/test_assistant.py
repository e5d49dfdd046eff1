"""Assistants of Gemma 4 as drafters: their rounds are the reference's, and the tokens those of plain decoding."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llm.support import check_same_as_autoregressive, prompts, state_of, tokens_of
from reference.assistant_numpy import Reference, as_folders
from reference.dflash_numpy import as_folders as other_folders
from reference.dflash_numpy import random_pair
from tilewright.compiled.ledger import no_compile_guard
from tilewright.kernels import native
from tilewright.llm.language_model import LanguageModel, load
from tilewright.models import assistant
from tilewright.models.checkpoint import decoder_config, read_config
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.speculation.drafters.assistant import Assistant
from tilewright.speculation.drafters.load import DrafterOptions, load_drafter

VOCAB = 16
BLOCK = 4
CAPACITY = 112
"""Pages have 16 positions, as this is no multiple of 32; they begin where the window of 16 does, so that its bounds matter."""
NEW = 32
ROUNDS = 20
"""New tokens of rows whose rounds are compared one by one; their windows end in several pages meanwhile."""
TABLE = ShapeTable(batches=(1, 8), capacities=(CAPACITY,), chunks=(16,))
PROMPTS = prompts(0, [1, 1, 2, 3, 9, 14, 21, 29], vocab=VOCAB)
REQUESTS = [
    Sampling(NEW, temperature=1.0, seed=1, ignore_eos=True),
    Sampling(NEW, ignore_eos=True),
    Sampling(NEW, temperature=0.7, top_p=0.8, seed=2, ignore_eos=True),
    Sampling(NEW, temperature=1.0, min_p=0.05, repetition_penalty=1.2, presence_penalty=0.5, seed=6),
] * 2
KINDS: dict[str, dict[str, Any]] = {"head": {}, "centroids": {"clusters": 4}}

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module", params=["head", pytest.param("centroids", marks=pytest.mark.slow)])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return as_folders(tmp_path_factory.mktemp("pair"), VOCAB, **KINDS[request.param])


@pytest.fixture(scope="module")
def lm(folders: tuple[Path, Path]) -> LanguageModel:
    return load(*folders, table=TABLE, block_size=BLOCK)


def test_rounds_equal_the_reference(lm: LanguageModel, folders: tuple[Path, Path]):
    """Round by round behind accepted and rejected drafts, while pages before the window are released."""
    reference = Reference(*folders, CAPACITY)
    drafter = lm.drafter
    assert isinstance(drafter, Assistant)
    propose = jax.jit(partial(drafter.propose, lm.model.target))
    inputs = PROMPTS[5::2]
    texts = [list(prompt) for prompt in inputs]
    session = lm.start(inputs, Sampling(ROUNDS, ignore_eos=True))
    session.prefill()
    seen = set()
    while not session.finished:
        state, numbers = state_of(session)
        proposal = propose(lm.model.models, state)
        pieces = session.advance(1)
        for number, block in zip(numbers, np.asarray(proposal.block).tolist(), strict=True):
            text = texts[number]
            drafts, choices = reference.round(text, BLOCK - 1)
            assert block == [text[-1], *drafts], f"row {number} behind {len(text)} tokens"
            agreed = [*(draft == choice for draft, choice in zip(drafts, choices, strict=False)), False].index(False)
            new = [piece.token for piece in pieces if piece.row == number]
            assert new == choices[: agreed + 1][: ROUNDS + len(inputs[number]) - len(text)]
            text += new
            seen.add(agreed)
    assert {0, 3} < seen
    assert session.engine.decoding.programs.layout.page_size == 16


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_tokens_equal_plain_decoding(lm: LanguageModel, batch: int):
    """Greedy, sampled and penalised rows; nothing compiles in a second call."""
    want = tokens_of(lm, PROMPTS, REQUESTS, speculative=False, batch=batch)
    lengths = check_same_as_autoregressive(lm, PROMPTS, REQUESTS, batch, want)
    assert max(lengths) >= 2
    with no_compile_guard("fail", "the second call"):
        check_same_as_autoregressive(lm, PROMPTS, REQUESTS, batch, want)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"kernels": "xla"},
        {"drafter_dtype": "bfloat16"},
        {"kv_dtype": "int8"},
        {"weights": "int8"},
        {"dtype": "bfloat16", "drafter_dtype": "float32"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_other_formats_and_kernels(kind: str, settings: dict[str, Any], tmp_path: Path):
    if settings.keys() & {"weights", "kv_dtype", "dtype"} and native.kernels().isa is None:
        pytest.skip(native.kernels().reason or "no kernels")  # others round a block and a row differently
    lm = load(*as_folders(tmp_path, VOCAB, **KINDS[kind]), table=TABLE, block_size=BLOCK, **settings)
    check_same_as_autoregressive(lm, PROMPTS, REQUESTS, 8, tokens_of(lm, PROMPTS, REQUESTS, speculative=False))


@pytest.mark.slow
def test_a_team_with_ngrams(tmp_path: Path):
    """The assistant's context is a state, which a round of another drafter leaves behind and a buffer restores."""
    target, drafter = as_folders(tmp_path, VOCAB)
    lm = load(target, ["ngram", drafter], table=TABLE)
    check_same_as_autoregressive(lm, PROMPTS, REQUESTS, 8, tokens_of(lm, PROMPTS, REQUESTS, speculative=False))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_window": 4}, "a draft window needs a drafter with a context; an assistant reads the target's keys and values"),
        ({"tree_nodes": (4,)}, "a tree needs .* EAGLE-3 or MTP drafter; this is an assistant"),
        ({"refine": 1}, "refining needs a DFlash drafter; this is an assistant"),
        ({"walk": "greedy"}, "a walk needs a DFlash 2, DSpark or LiLiCorr drafter; this is an assistant"),
        ({"block_size": 1}, "expected a block size of at least 2, found 1"),
    ],
)
def test_options_that_do_not_go_with_an_assistant(tmp_path: Path, settings: dict[str, Any], message: str):
    target, drafter = as_folders(tmp_path, VOCAB)
    with pytest.raises(ValueError, match=message):
        load_drafter(str(drafter), decoder_config(target), "float32", DrafterOptions(**{"block_size": BLOCK, **settings}), None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "text_config must be an object, found None"),
        ({"backbone_hidden_size": 48}, "does not fit the target: backbone_hidden_size is 48 but the target's is 32"),
        ({"use_ordered_embeddings": True, "num_centroids": 5}, "num_centroids must divide vocab_size (16), found 5"),
        ({"use_ordered_embeddings": True, "num_centroids": 4}, "centroid_intermediate_top_k must be at most 4, found 32"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers must be num_hidden_layers (3), found 1"),
        ({"hidden_size_per_layer_input": 8}, "is not supported: per-layer embeddings"),
        ({"sliding_window": 8}, "layer 0 has a window of 8, but the target has no such layer"),
        ({"num_global_key_value_heads": 2}, "the number of key heads in layers with no window is 2 but the target's is 1"),
        ({"global_head_dim": 16}, "the head size in layers with no window is 16 but the target's is 32"),
        ({"vocab_size": 12}, "vocab_size is 12 but the target's is 16"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, change: dict[str, Any], message: str):
    target, drafter = as_folders(tmp_path, VOCAB)
    fields = read_config(drafter)
    assert assistant.is_assistant(fields)
    outer = {name: value for name, value in change.items() if name in fields or "centroids" in name or "ordered" in name}
    inner = {name: value for name, value in change.items() if name not in outer}
    changed = {**fields, **outer} if not inner else {**fields, "text_config": {**fields["text_config"], **inner}}
    with pytest.raises(ValueError, match=re.escape(message)):
        assistant.config_from_hf(changed, decoder_config(target))


def test_a_target_of_another_family(tmp_path: Path):
    _, drafter = as_folders(tmp_path, VOCAB)
    target, _ = other_folders(tmp_path / "other", random_pair(0, vocab_size=VOCAB, target_layers=1, drafter_layers=1, taps=[0]))
    with pytest.raises(ValueError, match="it drafts for gemma4_text or gemma4_unified_text, not for qwen3; "):
        load(target, drafter, table=TABLE)
    with pytest.raises(ValueError, match="is a drafter: pass it to --drafter, with its target"):
        load(drafter, table=TABLE)


def test_files_with_other_tensors(tmp_path: Path):
    """Keys that no layer computes are not read; the tokens of the clusters have to be all tokens."""
    target, drafter = as_folders(tmp_path, VOCAB, clusters=4)
    file = drafter / "model.safetensors"
    tensors = load_file(file)
    config = decoder_config(target)
    extra = {f"model.layers.0.self_attn.{name}.weight": np.ones(3, np.float32) for name in ("k_proj", "v_proj", "k_norm")}
    save_file({**tensors, **extra, assistant.HEAD: np.ones(3, np.float32)}, file)
    loaded, params = assistant.load(drafter, config, np.float32)
    assert (loaded.cached_layers, loaded.target_layer_ids, loaded.block_size) == ((2, 2, 3), (3,), 4)
    assert params.clusters is not None
    np.testing.assert_array_equal(np.asarray(params.clusters.tokens).ravel(), tensors[assistant.ORDERING])
    save_file({**tensors, assistant.ORDERING: tensors[assistant.ORDERING] % 8}, file)
    with pytest.raises(ValueError, match="token_ordering to hold each of 16 tokens once, found int64"):
        assistant.load(drafter, config, np.float32)
