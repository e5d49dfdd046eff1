"""Assistants of Gemma 4 as drafters: their rounds are the reference's, and the tokens those of plain decoding."""

import json
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
from tilewright.models.kinds import kind_of
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.speculation.drafters.assistant import Assistant

VOCAB = 16
BLOCK = 4
CAPACITY = 112
"""Pages have 16 positions, as this is no multiple of 32; they begin where the window of 16 does, so that its bounds matter."""
NEW = 60
TABLE = ShapeTable(batches=(1, 8), capacities=(CAPACITY,), chunks=(16,))
PROMPTS = prompts(0, [1, 1, 2, 3, 9, 14, 21, 45], vocab=VOCAB)
REQUESTS = [
    Sampling(NEW, temperature=1.0, seed=1, ignore_eos=True),
    Sampling(NEW, ignore_eos=True),
    Sampling(NEW, temperature=0.7, top_p=0.8, seed=2, ignore_eos=True),
    Sampling(NEW, temperature=1.0, min_p=0.05, repetition_penalty=1.2, presence_penalty=0.5, seed=6),
] * 2
KINDS: dict[str, dict[str, Any]] = {"head": {}, "centroids": {"clusters": 4}}

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module", params=KINDS)
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
    texts = [list(prompt) for prompt in PROMPTS[4:]]
    session = lm.start(PROMPTS[4:], Sampling(NEW, ignore_eos=True))
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
            assert new == choices[: agreed + 1][: NEW + len(PROMPTS[4 + number]) - len(text)]
            text += new
            seen.add(agreed)
    assert {0, 1} <= seen
    assert session.engine.decoding.programs.layout.page_size == 16


@pytest.mark.parametrize("batch", [1, 8])
def test_tokens_equal_plain_decoding(lm: LanguageModel, batch: int):
    """Greedy, sampled and penalised rows; nothing compiles in a second call."""
    want = tokens_of(lm, PROMPTS, REQUESTS, speculative=False, batch=batch)
    lengths = check_same_as_autoregressive(lm, PROMPTS, REQUESTS, batch, want)
    assert max(lengths) >= 2
    with no_compile_guard("fail", "the second call"):
        check_same_as_autoregressive(lm, PROMPTS, REQUESTS, batch, want)
