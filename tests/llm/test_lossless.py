"""What speculative decoding emits, against the target's warped distribution as NumPy has it; and rules broken on purpose.

Batches mix rows of every kind. The tokens after one prompt are counted over many seeds and compared, by chi-square, with the
distribution worked out in float64 from the target's logits; greedy rows have one right answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from numpy.typing import NDArray

from llm.support import build, check_same_as_autoregressive, prompts, tokens_of
from reference.dflash2_numpy import as_dflash2
from reference.dflash_numpy import Pair, Target, as_folders, random_pair
from reference.dspark_numpy import as_dspark
from reference.eagle3_numpy import as_folder, random_eagle3
from reference.lilicorr_numpy import as_lilicorr
from reference.mtp_numpy import add_head, random_head
from reference.sampling_numpy import boundary_gap, chi_square_excess, penalised, warped
from tilewright.llm.language_model import LanguageModel, load
from tilewright.runtime import per_row as mixed_module
from tilewright.runtime import rounds
from tilewright.runtime import state as state_module
from tilewright.runtime.per_row import draw_slots, sample_each
from tilewright.runtime.sampling import RowSampling, Sampling, penalise, warp_logits
from tilewright.runtime.shapes import ShapeTable
from tilewright.runtime.state import DecodeState, Verified, verify

PROMPT = [3, 1, 6, 2, 3, 1]
"""Its end has come before, so that looking it up drafts something."""
LENGTHS = {8: 3, 64: 2}
"""How many tokens to look at together, by the size of the vocabulary."""
SAMPLED = {
    "plain": Sampling(temperature=1.2),
    "top-p": Sampling(temperature=0.7, top_p=0.8),
    "min-p": Sampling(temperature=1.6, top_k=6, min_p=0.15),
    "all": Sampling(
        temperature=1.4, top_p=0.9, min_p=0.03, repetition_penalty=1.3, presence_penalty=1.0, frequency_penalty=0.5
    ),
}
GREEDY = {"greedy": Sampling(), "greedy, penalised": Sampling(repetition_penalty=1.5, presence_penalty=1.0)}
KINDS = SAMPLED | GREEDY
EACH = 3
"""Rows of each sampled kind in a batch; with one of each greedy kind, two of the shape's 16 rows are padding."""
TABLE = ShapeTable(batches=(16,), capacities=(64,), chunks=(8,))


def dflash(folder: Path, pair: Pair) -> LanguageModel:
    return build(folder, pair, table=TABLE)


def dflash2(folder: Path, pair: Pair) -> LanguageModel:
    """Its drafts are drawn; a selector that says little keeps them likely."""
    return build(folder, as_dflash2(pair, strength=0.3), table=TABLE)


def dspark(folder: Path, pair: Pair) -> LanguageModel:
    """Its drafts are drawn, as are those that follow."""
    return build(folder, as_dspark(pair, strength=0.3), table=TABLE, block_size=4)


def tree(folder: Path, pair: Pair) -> LanguageModel:
    return build(folder, as_dflash2(pair, strength=0.3), table=TABLE, tree_nodes=(8,))


def lilicorr(folder: Path, pair: Pair) -> LanguageModel:
    return build(folder, as_lilicorr(pair, lilicorr_logit_scale=4.0), table=TABLE)


def ngram(folder: Path, pair: Pair) -> LanguageModel:
    return load(as_folders(folder, pair)[0], "ngram", block_size=4, table=TABLE)


def eagle3(folder: Path, pair: Pair) -> LanguageModel:
    vocab = pair.target_config["vocab_size"]
    config, tensors = random_eagle3(0, pair.target_config, taps=[0], draft_vocab_size=vocab * 3 // 4)
    return load(as_folders(folder, pair)[0], as_folder(folder / "eagle3", config, tensors), block_size=4, table=TABLE)


def mtp(folder: Path, pair: Pair) -> LanguageModel:
    target, _ = as_folders(folder, pair)
    return load(add_head(target, random_head(0, pair.target_config)), "mtp", block_size=4, table=TABLE)


pytestmark = pytest.mark.usefixtures("quick_compiles")

DRAFTERS: dict[str, Callable[[Path, Pair], LanguageModel]] = {
    "dflash": dflash,
    "dflash2": dflash2,
    "tree": tree,
    "dspark": dspark,
    "lilicorr": lilicorr,
    "eagle3": eagle3,
    "mtp": mtp,
    "ngram": ngram,
}
"""How to load the target of a pair with each kind of drafter; what weights these have is random."""


AT_LENGTH = ("dflash2", "tree", "dspark", "lilicorr", "mtp", "ngram")


# With these at length only: `test_drafters.py` holds their tokens to those of plain decoding too.
@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=pytest.mark.slow if kind in AT_LENGTH else ()) for kind in DRAFTERS],
)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, LanguageModel]:
    """One drafter's models, by the size of the vocabulary."""
    load = DRAFTERS[request.param]
    return {vocab: load(tmp_path_factory.mktemp(f"{request.param}-{vocab}"), pair_of(vocab)) for vocab in LENGTHS}


@cache
def pair_of(vocab: int) -> Pair:
    """A target that is not too sure of itself, and a DFlash drafter whose drafts after the prompt are likely enough."""
    seed, sureness = {8: (8, 0.25), 64: (100, 0.4)}[vocab]
    pair = random_pair(seed, vocab_size=vocab, target_layers=1, drafter_layers=1, taps=[0], block_size=4)
    pair.drafter_config["dflash_config"]["last_tap_before_norm"] = True
    pair.target_tensors["lm_head.weight"] *= np.float32(sureness)
    return pair


@cache
def target_logits(vocab: int, generated: tuple[int, ...]) -> NDArray[np.float64]:
    """What the target puts after the prompt and `generated`."""
    pair = pair_of(vocab)
    return Target(pair.target_config, pair.target_tensors).run([*PROMPT, *generated])[0][-1]


def next_token(vocab: int, request: Sampling, generated: tuple[int, ...]) -> NDArray[np.float64]:
    """The distribution of the token after the prompt and `generated`."""
    penalties = (request.repetition_penalty, request.presence_penalty, request.frequency_penalty)
    logits = penalised(target_logits(vocab, generated), PROMPT, generated, *penalties)
    if request.temperature == 0:
        return np.eye(vocab)[logits.argmax()]
    fields = (request.temperature, request.top_p, request.top_k, request.min_p)
    assert boundary_gap(logits, *fields) > 1e-5
    return warped(logits, *fields)


@cache
def joint(vocab: int, kind: str) -> NDArray[np.float64]:
    """The probability of every text of the length that is looked at."""
    p = np.ones(1)
    for length in range(LENGTHS[vocab]):
        texts = product(range(vocab), repeat=length)
        p = np.concatenate(
            [q * next_token(vocab, KINDS[kind], t) if q else np.zeros(vocab) for q, t in zip(p, texts, strict=True)]
        )
    return p


def emitted(lm: LanguageModel, vocab: int, batches: int) -> tuple[dict[str, NDArray[np.int64]], set[int]]:
    """How often each text came, by kind; and how many tokens the rounds of sampled rows committed.

    The prompt is prefilled once; every batch goes on from there with seeds of its own.
    """
    counts = {kind: np.zeros(vocab ** LENGTHS[vocab], np.int64) for kind in KINDS}
    kinds = [*list(SAMPLED) * EACH, *GREEDY]
    committed = set()
    requests = [replace(KINDS[kind], max_new_tokens=LENGTHS[vocab]) for kind in kinds]
    stream = lm.start([PROMPT] * len(kinds), requests)
    length = LENGTHS[vocab]
    stream.prefill()
    runner = stream.engine.runner
    scheduler = stream.engine.scheduler
    running, _ = scheduler.make_room(scheduler.running, length, stream.engine.decoding.programs.width(None))
    first = jax.tree.map(np.array, runner.state)
    digits = vocab ** np.arange(length)[::-1]
    for batch in range(batches):
        key = first.sampling.key.copy()
        key[:, 1] = np.arange(len(key)) + batch * len(key)
        runner.state = replace(first, sampling=replace(first.sampling, key=key))
        infos = runner.read(runner.rounds(running, None, length, runner.programs.layout.capacity))
        assert runner.state is not None
        texts = np.asarray(runner.state.tokens)[: len(kinds), len(PROMPT) : len(PROMPT) + length] @ digits
        for kind, text in zip(kinds, texts, strict=True):
            counts[kind][text] += 1
        committed |= set(infos.committed[:, : len(SAMPLED) * EACH].ravel().tolist())
    return counts, committed


def excess(counts: dict[str, NDArray[np.int64]], vocab: int) -> dict[str, float]:
    """By kind, the chi-square statistic over what chance allows; infinite where something impossible came."""
    return {
        kind: (np.inf if counts[kind][joint(vocab, kind) == 0].any() else 0.0)
        if kind in GREEDY
        else chi_square_excess(counts[kind], joint(vocab, kind))
        for kind in KINDS
    }


@pytest.mark.parametrize("vocab", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_emits_the_targets_warped_distribution(models: dict[int, LanguageModel], vocab: int):
    counts, committed = emitted(models[vocab], vocab, batches=800)
    assert {1, 2} <= committed, "rounds without and with an accepted draft"
    assert max(excess(counts, vocab).values()) < 1
    assert all((counts[kind] > 0).sum() >= 10 for kind in SAMPLED)


def greedy_text(request: Sampling, prompt: list[int], vocab: int) -> list[int]:
    """The most likely tokens, one run of the target for each."""
    pair = pair_of(vocab)
    text = []
    penalties = (request.repetition_penalty, request.presence_penalty, request.frequency_penalty)
    for _ in range(request.max_new_tokens):
        logits = Target(pair.target_config, pair.target_tensors).run([*prompt, *text])[0][-1]
        text.append(int(penalised(logits, prompt, text, *penalties).argmax()))
    return text


PROMPTS = prompts(3, range(1, 15), vocab=8)
REQUESTS = [replace(KINDS[kind], max_new_tokens=24, seed=n) for n, kind in enumerate([*KINDS, *KINDS, "all", "all"])]
"""Every kind of row, some more than once, to go with prompts of different lengths in one batch."""


@pytest.fixture(scope="module")
def autoregressive(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What the target gives alone; greedy rows are checked against NumPy."""
    lm = load(as_folders(tmp_path_factory.mktemp("plain"), pair_of(8))[0], table=TABLE)
    texts = tokens_of(lm, PROMPTS, REQUESTS, speculative=False, batch=16)
    for prompt, request, text in zip(PROMPTS, REQUESTS, texts, strict=True):
        assert len(text) == 24
        assert (text == greedy_text(request, prompt, 8)) == (request.temperature == 0)
    return texts


def test_equals_autoregressive_decoding_token_for_token(models: dict[int, LanguageModel], autoregressive: list[list[int]]):
    """With penalties that see the drafts before a slot; some rounds commit two drafts and more."""
    lengths = check_same_as_autoregressive(models[8], PROMPTS, REQUESTS, 16, autoregressive)
    assert {1, 2, 3} <= set(lengths)


Rule = Callable[..., Any]


def second_chance(config: Any, params: Any, state: DecodeState, block: Array, *rest: Any) -> Verified:
    """A draft that was rejected is not taken out of what is drawn instead."""
    other = replace(state, sampling=replace(state.sampling, key=state.sampling.key + jnp.uint32(2**31)))
    first = verify(config, params, state, block, *rest)
    second = verify(config, params, other, block, *rest)
    drafts = jnp.concatenate([block[:, 1:], jnp.full_like(block[:, :1], -1)], axis=1)
    return first._replace(tokens=jnp.where(first.tokens == drafts, first.tokens, second.tokens))


def one_noise(logits: Array, row: RowSampling, positions: Array, *rest: Any) -> Array:
    """All slots of a block draw with the same noise."""
    return draw_slots(logits, row, jnp.broadcast_to(positions[:, :1], positions.shape), *rest)


def greedy_rows_drawn(logits: Array, rows: RowSampling, *rest: Any) -> Array:
    """Greedy rows of a mixed batch are drawn at temperature 1."""
    return sample_each(logits, replace(rows, temperature=jnp.where(rows.temperature > 0, rows.temperature, 1)), *rest)


def temperature_last(tempered: Array, scores: Array, rows: RowSampling) -> Array:
    """The filters see the distribution before its temperature."""
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1)[:, None, None]
    filtered = warp_logits(tempered * temperature, replace(rows, temperature=jnp.ones_like(rows.temperature)))
    return jnp.argmax(filtered / temperature + (scores - tempered), axis=-1)


def block_unseen(logits: Array, rows: RowSampling, tokens: Array, known: Array, block: Array) -> Array:
    """Penalties do not see the tokens drafted before a slot."""
    return penalise(logits, rows, tokens, known, jnp.full_like(block, logits.shape[-1]))


MUTATIONS: list[tuple[Any, str, Rule, Sequence[str]]] = [
    (rounds, "verify", second_chance, ["plain", "top-p", "min-p"]),
    (mixed_module, "draw_slots", one_noise, ["plain", "min-p"]),
    (state_module, "sample_each", greedy_rows_drawn, list(GREEDY)),
    (mixed_module, "draw_kept", temperature_last, ["top-p"]),
    (mixed_module, "penalise", block_unseen, ["all"]),
]
"""Where a rule stands, what breaks it, and which kinds of rows must show it."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return DRAFTERS["dflash"](tmp_path_factory.mktemp("sound"), pair_of(8))


@pytest.mark.parametrize(("module", "name", "rule", "shown_by"), MUTATIONS, ids=[rule.__name__ for _, _, rule, _ in MUTATIONS])
def test_a_broken_rule_is_rejected(
    module: Any, name: str, rule: Rule, shown_by: Sequence[str], sound: LanguageModel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, name, rule)
    for programs in sound.programs.values():
        kept = {key: program for key, program in programs.compiled.items() if key.name != "rounds"}
        monkeypatch.setattr(programs, "compiled", kept)
    found = excess(emitted(sound, 8, batches=300)[0], 8)
    assert all(found[kind] > 1 for kind in shown_by), found
