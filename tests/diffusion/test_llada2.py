"""LLaDA2.0 and LLaDA2.1: tokens and passes of the published loops, with edits of tokens, by calls and by engines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffusion.support import VOCAB, randomness
from diffusion.test_block_causal import served, tokens_of
from llm.support import prompts
from reference.llada2_numpy import Generation, Model, Options, generate, random_model
from reference.self_speculation_numpy import CHARACTERS, as_folder, with_characters
from tilewright.diffusion import blocks
from tilewright.diffusion.blocks import BlockDenoising
from tilewright.grammar.grammar import Grammar
from tilewright.llm.language_model import LanguageModel, load
from tilewright.models.config import MaskedBlocks
from tilewright.parallel.mesh import make_mesh
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable

NEW = 18
TABLE = ShapeTable(batches=(8,), capacities=(64,), chunks=(32,))
WAYS = [
    Options(False),
    Options(True, 0.7, editing_threshold=0.5),
    Options(True, 0.5),
    Options(True, 0.3, max_post_steps=2),
    Options(False, 0.3, temperature=1.0),
    Options(True, 0.5, editing_threshold=0.2, temperature=0.8),
    Options(True, 0.6, editing_threshold=0.1, num_to_transfer=2, temperature=1.0, top_p=0.9),
    Options(True, 0.5, max_post_steps=0),
    Options(False, 0.6, steps=2),
    Options(False, 0.5, temperature=0.7, top_p=0.9),
    Options(False, 0.1),
]


def denoising_of(options: Options, block: int) -> BlockDenoising:
    if not options.editing:
        return BlockDenoising(threshold=options.threshold, steps=options.steps)
    return BlockDenoising(
        "joint_threshold",
        options.threshold,
        block // options.num_to_transfer,
        edit_threshold=options.editing_threshold,
        max_post_steps=options.max_post_steps,
    )


def sampling_of(options: Options, seed: int) -> Sampling:
    return Sampling(NEW, options.temperature, options.top_p, seed=seed)


def expected(model: Model, prompt: list[int], options: Options, seed: int) -> Generation:
    if options.temperature == 0:
        return generate(model, prompt, NEW, options)
    noise = randomness(seed, 64)[0]
    return generate(model, prompt, NEW, options, lambda step, position, _: noise[step, position])


def expected_steps(wanted: Generation, options: Options) -> int:
    """Passes of the engine: one more for each block but the last that did not end with a pass which changed nothing."""
    stores = [not unchanged for unchanged in wanted.unchanged[:-1]]
    return sum(wanted.passes) + (sum(stores) if options.editing else len(wanted.passes) - 1)


def check(lm: LanguageModel, model: Model, asked: list[list[int]], each: list[Options]) -> list[Generation]:
    """Checks tokens and numbers of passes of one call; returns what the published loops give."""
    block = model.config["block_size"]
    wanted = [expected(model, prompt, one, seed) for seed, (prompt, one) in enumerate(zip(asked, each, strict=True))]
    sampling = [sampling_of(one, seed) for seed, one in enumerate(each)]
    with lm.start(asked, sampling, denoising=[denoising_of(one, block) for one in each]) as stream:
        while not stream.finished:
            stream.advance(5)
    assert [result.tokens for result in stream.results()] == [one.tokens for one in wanted]
    for sequence, want, one in zip(stream.sequences, wanted, each, strict=True):
        assert sequence.handle.steps == expected_steps(want, one)
    return wanted


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(3)


@pytest.fixture(scope="module")
def lm(model: Model, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return load(as_folder(tmp_path_factory.mktemp("llada2"), model), table=TABLE)  # type: ignore[arg-type]


def test_tokens_and_passes_are_those_of_the_published_loops(lm: LanguageModel, model: Model):
    """Rows with and without edits in one batch; some blocks use all of their passes."""
    asked = prompts(4, (1, 3, 4, 7, 16, 21, 5, 2, 10, 8, 13), VOCAB - 1)
    wanted = check(lm, model, asked, WAYS)
    assert sum(len(one.edited) for one in wanted) > 20
    assert any(not unchanged for one in wanted[1:3] for unchanged in one.unchanged), "no block used all of its passes"
    assert any(unchanged for one in wanted[1:4] for unchanged in one.unchanged), "every block used all of its passes"


def test_rows_store_a_block_with_the_next_one(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Several rows store blocks with the next ones, as on accelerators; edits and post passes are the same."""
    monkeypatch.setattr(blocks, "least_share", lambda target, blocks, rows: 0.3)
    lm = load(as_folder(tmp_path, model), table=TABLE)  # type: ignore[arg-type]
    check(lm, model, prompts(4, (1, 3, 4, 7, 16, 21, 5, 2, 10, 8, 13), VOCAB - 1), WAYS)


@pytest.mark.parametrize("block", [4, 8, 16, 32])
@pytest.mark.parametrize("eos", [None, 7])
def test_many_requests_are_those_of_the_published_loops(block: int, eos: int | None, tmp_path: Path):
    """200 requests without edits and 240 with: prompts of 1 to 30 tokens, likely tokens and draws, in all phases."""
    model = random_model(10 + block, block, eos=eos)
    lm = load(as_folder(tmp_path, model), table=TABLE)  # type: ignore[arg-type]
    rng = np.random.default_rng(block)
    asked = prompts(block, [int(length) for length in rng.integers(1, 31, 55)], VOCAB - 1)
    wanted = check(lm, model, asked, [WAYS[n % len(WAYS)] for n in range(len(asked))])
    assert sum(len(one.edited) for one in wanted) > 20
    assert eos is None or any(eos in one.tokens for one in wanted)


def test_an_engine_with_few_pages_gives_the_tokens_of_calls(lm: LanguageModel, model: Model):
    """Requests that are preempted, or begin with cached pages, are delivered in whole blocks.

    Log-probabilities are those of the pass that last set a token.
    """
    asked = [*prompts(1, (30, 9, 17, 26), VOCAB - 1)]
    asked += [[*asked[0][:24], 5, 6], asked[0]]
    each = [WAYS[n] for n in (1, 2, 3, 0, 5, 2)]
    requests = [
        GenerateRequest(prompt, sampling_of(one, seed), 0 if one.temperature == 0 else None, denoising=denoising_of(one, 4))
        for seed, (prompt, one) in enumerate(zip(asked, each, strict=True))
    ]
    options = EngineOptions(TABLE, page_size=16, pages=10, dispatch_s=0.001)
    outputs, engine = served(lm, requests, options)
    for seed, (prompt, one, found) in enumerate(zip(asked, each, outputs, strict=True)):
        want = expected(model, prompt, one, seed)
        assert tokens_of(found) == want.tokens
        ends = np.cumsum([each.tokens for output in found for each in output.rounds])[:-1]
        assert all((len(prompt) + ends) % 4 == 0), "a block was not delivered as a whole"
        if one.temperature == 0:
            logprobs = [token.logprobs.logprob for output in found for token in output.tokens if token.logprobs is not None]
            np.testing.assert_allclose(logprobs, np.log(want.probabilities), atol=2e-3)
    assert engine.scheduler.preemptions
    again, engine = served(lm, [*requests[:1], *requests[:1]], EngineOptions(TABLE, page_size=16, slots=1))
    assert tokens_of(again[1]) == tokens_of(again[0]) == tokens_of(outputs[0])
    assert engine.scheduler.prefix_hits == 16


def test_nothing_compiles_while_an_engine_serves_64_prompts(model: Model, tmp_path: Path):
    lm = load(as_folder(tmp_path, model), table=TABLE)  # type: ignore[arg-type]
    rng = np.random.default_rng(9)
    asked = prompts(9, [int(length) for length in rng.integers(1, 31, 64)], VOCAB - 1)
    each = [WAYS[n % len(WAYS)] for n in range(64)]
    requests = [
        GenerateRequest(prompt, sampling_of(one, seed), denoising=denoising_of(one, 4))
        for seed, (prompt, one) in enumerate(zip(asked, each, strict=True))
    ]
    outputs, engine = served(lm, requests, EngineOptions(TABLE, page_size=16, dispatch_s=0.001))
    assert engine.stats().compilations == 0
    for seed, (prompt, one, found) in enumerate(zip(asked, each, outputs, strict=True)):
        assert tokens_of(found) == expected(model, prompt, one, seed).tokens


def test_tokens_that_edits_replaced_neither_stop_a_text_nor_count_for_penalties(lm: LanguageModel, model: Model):
    asked = prompts(11, (5, 9, 14, 16, 19, 22, 27, 30), VOCAB - 1)
    options = BlockDenoising("joint_threshold", 0.3)
    plain = [generate(model, prompt, NEW, Options(True, 0.3)) for prompt in asked]
    gone = [sorted({*one.edited} - {*one.tokens}) for one in plain]
    assert sum(map(bool, gone)) > 3, "expected tokens that are in no final text"
    sampling = [
        Sampling(NEW, stop_token_ids=tuple(tokens), stop=tuple(f"t{token} " for token in tokens[:4])) for tokens in gone
    ]
    for result, want in zip(lm.generate(asked, sampling, denoising=options), plain, strict=True):
        assert (result.tokens, result.finish_reason) == (want.tokens, "length")
    stopped = lm.generate(asked, [Sampling(NEW, stop_token_ids=(one.tokens[7],)) for one in plain], denoising=options)
    for result, want in zip(stopped, plain, strict=True):
        assert (result.tokens, result.finish_reason) == (want.tokens[: want.tokens.index(want.tokens[7]) + 1], "stop")
    penalised = [generate(model, prompt, NEW, Options(True, 0.3), presence_penalty=1.5) for prompt in asked]
    assert [one.tokens for one in penalised] != [one.tokens for one in plain]
    found = lm.generate(asked, Sampling(NEW, presence_penalty=1.5), denoising=options)
    assert [result.tokens for result in found] == [one.tokens for one in penalised]


def test_a_row_with_a_grammar_has_no_edits(tmp_path: Path):
    """Its tokens are those of any other strategy: from left to right, one a pass."""
    vocab = len(CHARACTERS)
    lm = load(with_characters(tmp_path, random_model(3, vocab_size=vocab, eos=vocab - 2)), table=TABLE)
    schema = Grammar.json_schema({"type": "array", "items": {"enum": [10, 12, 345, 8]}, "minItems": 2, "maxItems": 3})
    (prompt,) = prompts(13, (10,), vocab - 2)
    each = (BlockDenoising("joint_threshold", 0.3, edit_threshold=0.0), BlockDenoising("sequential"))
    found = [lm.generate([prompt], Sampling(50), grammar=schema, denoising=one)[0] for one in each]
    assert found[0].tokens == found[1].tokens
    assert set(json.loads(found[0].text)) <= {10, 12, 345, 8}


@pytest.mark.parametrize(
    "settings", [{"weights": "int8"}, {"weights": "int4"}, {"kernels": "xla"}, {"dtype": "bfloat16"}], ids=str
)
def test_a_row_gets_the_same_tokens_alone_and_among_others(settings: dict[str, Any], model: Model, tmp_path: Path):
    lm = load(as_folder(tmp_path, model), table=TABLE, **settings)  # type: ignore[arg-type]
    asked = prompts(7, (5, 12, 31), VOCAB - 1)
    sampling = [sampling_of(one, 5) for one in WAYS[2:5]]
    options = [denoising_of(one, 4) for one in WAYS[2:5]]
    alone = [lm.generate([asked[n]], sampling[n], denoising=options[n])[0].tokens for n in range(3)]
    assert [result.tokens for result in lm.generate(asked, sampling, denoising=options)] == alone


def test_two_devices_give_the_tokens_of_one(model: Model, tmp_path: Path):
    shared = load(as_folder(tmp_path, model), table=TABLE, mesh=make_mesh({"tp": 2}))  # type: ignore[arg-type]
    check(shared, model, prompts(12, (6, 15, 9), VOCAB - 1), [WAYS[2], WAYS[5], WAYS[0]])


def test_thresholds_of_requests_that_name_none():
    llada2 = MaskedBlocks(39, 32, causal=False, threshold=0.95)
    assert BlockDenoising().threshold_for(llada2) == 0.95
    assert BlockDenoising().threshold_for(MaskedBlocks(39, 4, causal=False)) == 0.85
    assert BlockDenoising("joint_threshold").threshold_for(llada2) == 0.5
    assert BlockDenoising("joint_threshold", 0.7).threshold_for(llada2) == 0.7


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"edit_threshold": 1.5}, "expected an edit_threshold from 0 to 1, found 1.5"),
        ({"edit_threshold": -0.1}, "expected an edit_threshold from 0 to 1, found -0.1"),
        ({"max_post_steps": 1001}, "expected max_post_steps from 0 to 1000, found 1001"),
    ],
)
def test_wrong_options_are_errors(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        BlockDenoising("joint_threshold", **fields)


def test_blocks_with_a_decoded_first_token_have_no_edits():
    options = BlockDenoising("joint_threshold")
    options.check(MaskedBlocks(39, 8, causal=False))
    for refused in (MaskedBlocks(39, 8, first_token="drawn"), MaskedBlocks(39, 8, causal=False, first_token="likely")):
        with pytest.raises(
            ValueError,
            match="expected a strategy other than joint_threshold, since this model decodes the first token of a block",
        ):
            options.check(refused)
