"""Small blocks with shifted logits: tokens and passes of the published loop, by calls and by engines."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffusion.support import VOCAB, randomness
from diffusion.test_block_causal import served, tokens_of
from llm.support import prompts
from reference.self_speculation_numpy import CHARACTERS, as_folder, with_characters
from reference.small_blocks_numpy import Model, Options, generate, random_model
from tilewright.diffusion.blocks import BlockDenoising
from tilewright.grammar.grammar import Grammar
from tilewright.llm.language_model import LanguageModel, load
from tilewright.parallel.mesh import make_mesh
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.request import GenerateRequest, RequestOutput
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable

BLOCK = 16
LENGTHS = (1, 3, 15, 16, 17, 32)
NEW = 22
TABLE = ShapeTable(batches=(1, 4, 8), capacities=(64, 128), chunks=(16, 32))
WAYS = [
    Options(),
    Options(0.3),
    Options(1.0),
    Options(0.4, 4, top_p=0.5),
    Options(0.4, temperature=1.0),
    Options(0.6, 16, temperature=0.7, top_p=0.95),
]
ENDS = (9, 18)
"""Tokens that end texts of the random model, as the first token of a block and within one."""


def denoising_of(options: Options) -> BlockDenoising:
    return BlockDenoising(threshold=options.threshold, small_block_size=options.small_block_size)


def sampling_of(options: Options, seed: int = 5, **more: Any) -> Sampling:
    return Sampling(NEW, options.temperature, options.top_p, seed=seed, **more)


def expected(
    model: Model, prompt: list[int], options: Options, seed: int = 5, block: int = BLOCK
) -> tuple[list[int], list[int]]:
    noise = randomness(seed, 96)[0]
    return generate(model, prompt, NEW, block, options, lambda step, position, _: noise[step, position])


def passes_of(prompt: list[int], passes: list[int], block: int = BLOCK) -> int:
    """All passes: those that denoise, and those that store a block and choose the next block's first token."""
    return sum(passes) + len(passes) - 1 + (len(prompt) % block == 0)


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(3)


@pytest.fixture(scope="module")
def lm(model: Model, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return load(as_folder(tmp_path_factory.mktemp("blocks"), model), table=TABLE)  # type: ignore[arg-type]


def test_tokens_and_passes_are_those_of_the_published_loop(lm: LanguageModel, model: Model):
    """Rows with different options and lengths in one batch, two of them at the end of a block."""
    asked = prompts(3, LENGTHS, VOCAB - 1)
    each = [WAYS[n % len(WAYS)] for n in range(len(asked))]
    sampling = [sampling_of(one) for one in each]
    with lm.start(asked, sampling, denoising=[denoising_of(one) for one in each]) as stream:
        while not stream.finished:
            stream.advance(5)
    wanted = [expected(model, prompt, one) for prompt, one in zip(asked, each, strict=True)]
    assert [result.tokens for result in stream.results()] == [tokens for tokens, _ in wanted]
    counted = [passes_of(prompt, passes) for prompt, (_, passes) in zip(asked, wanted, strict=True)]
    assert [sequence.handle.steps for sequence in stream.sequences] == counted
    assert any(step < BLOCK - 1 for _, passes in wanted for step in passes), "no pass committed several tokens"


@pytest.mark.parametrize(("block", "small"), [(8, 4), (8, 8), (16, 8), (32, 8)])
def test_many_requests_are_those_of_the_published_loop(block: int, small: int, tmp_path: Path):
    """256 requests: prompts of 1 to 70 tokens, most likely tokens and draws, in all phases, without a compilation."""
    model = random_model(10 + block)
    table = ShapeTable(batches=(8,), capacities=(128,), chunks=(32,))
    lm = load(as_folder(tmp_path, model), table=table, block_size=block)  # type: ignore[arg-type]
    rng = np.random.default_rng(block)
    asked = prompts(block, [int(length) for length in rng.integers(1, 71, 64)], VOCAB - 1)
    each = [replace(WAYS[n % len(WAYS)], small_block_size=small) for n in range(len(asked))]
    engine = lm.engine(EngineOptions(table, page_size=32, dispatch_s=0.001))
    engine.warm()
    engine.accept_requests()
    outputs: list[list[RequestOutput]] = [[] for _ in asked]
    handles = [
        engine.submit(GenerateRequest(prompt, sampling_of(one, n), denoising=denoising_of(one)), outputs[n].append)
        for n, (prompt, one) in enumerate(zip(asked, each, strict=True))
    ]
    while engine.busy:
        engine.step()
    engine.stop()
    assert engine.stats().compilations == 0
    for n, (prompt, one, handle) in enumerate(zip(asked, each, handles, strict=True)):
        tokens, passes = expected(model, prompt, one, n, block)
        assert tokens_of(outputs[n]) == tokens
        assert handle.steps == passes_of(prompt, passes, block)


def test_an_engine_with_few_pages_gives_the_tokens_of_calls(lm: LanguageModel, model: Model):
    """Requests in all phases, preempted and computed again, with prefixes from the cache; nothing compiles while it serves."""
    asked = [*prompts(1, (30, 9, 16, 26), VOCAB - 1)]
    asked += [[*asked[0][:24], 5, 6], asked[0]]
    each = [WAYS[n % len(WAYS)] for n in range(len(asked))]
    requests = [
        GenerateRequest(prompt, sampling_of(one, seed), denoising=denoising_of(one))
        for seed, (prompt, one) in enumerate(zip(asked, each, strict=True))
    ]
    outputs, engine = served(lm, requests, EngineOptions(TABLE, page_size=16, pages=10, dispatch_s=0.001))
    for seed, (prompt, one, found) in enumerate(zip(asked, each, outputs, strict=True)):
        assert tokens_of(found) == expected(model, prompt, one, seed)[0]
        assert found[-1].end == "length"
    assert engine.scheduler.preemptions
    # A later request finds the pages of the prompt, and of finished blocks.
    first = GenerateRequest(asked[0][:17], sampling_of(WAYS[0]), denoising=denoising_of(WAYS[0]))
    text = [*first.prompt, *expected(model, list(first.prompt), WAYS[0])[0]]
    second = GenerateRequest([*text, 7], sampling_of(WAYS[1]), denoising=denoising_of(WAYS[1]))
    again, engine = served(lm, [first, second], EngineOptions(TABLE, page_size=16, slots=1))
    assert tokens_of(again[0]) == text[17:]
    assert tokens_of(again[1]) == expected(model, [*text, 7], WAYS[1])[0]
    assert engine.scheduler.prefix_hits == 32


def test_a_block_ends_with_the_end_of_the_text(tmp_path: Path):
    """Tokens behind a stop token are dropped, also behind one that is the first token of a block."""
    asked = prompts(2, LENGTHS * 3, VOCAB - 1)
    firsts = inner = 0
    for eos in ENDS:
        model = random_model(3, eos=eos)
        lm = load(as_folder(tmp_path / str(eos), model), table=TABLE)  # type: ignore[arg-type]
        with lm.start(asked, Sampling(NEW), denoising=BlockDenoising(threshold=0.3)) as stream:
            while not stream.finished:
                stream.advance()
        for prompt, result, sequence in zip(asked, stream.results(), stream.sequences, strict=True):
            tokens, passes = expected(model, prompt, Options(0.3))
            assert result.tokens == tokens
            assert sequence.handle.steps == passes_of(prompt, passes)
            first = (len(prompt) + len(tokens)) % BLOCK == 1
            firsts += result.finish_reason == "eos" and first
            inner += result.finish_reason == "eos" and not first
        ignoring = lm.generate(asked[:2], Sampling(NEW, ignore_eos=True))
        assert all(len(result.tokens) == NEW for result in ignoring)
    assert firsts
    assert inner


def test_logprobs_are_those_of_the_pass_that_committed_the_token(lm: LanguageModel, model: Model):
    """With one token a pass, from the left, they follow from the text before, masks behind it, and nothing else."""
    (prompt,) = prompts(4, (26,), VOCAB - 1)
    request = GenerateRequest(prompt, Sampling(12), 3, denoising=BlockDenoising("sequential"))
    ((*found,),), _ = served(lm, [request], EngineOptions(TABLE, page_size=16))
    text = list(prompt)
    for piece in (token for output in found for token in output.tokens):
        scores = log_softmax(model, text)
        assert piece.logprobs is not None
        np.testing.assert_allclose(piece.logprobs.logprob, scores[piece.token], atol=1e-4)
        assert [token for token, _ in piece.logprobs.top] == np.argsort(-scores)[:3].tolist()
        text.append(piece.token)
    assert len(text) == len(prompt) + 12


def log_softmax(model: Model, text: list[int]) -> np.ndarray:
    """Log-probabilities of the token behind a text, whose block is filled with masks."""
    masks = -len(text) % BLOCK
    logits = model.logits([*text, *[VOCAB - 1] * masks], BLOCK)[len(text) - 1][: VOCAB - 1]
    return logits - np.log(np.exp(logits).sum())


def test_penalties_and_stops_count_the_text_before_a_position(lm: LanguageModel, model: Model):
    options = BlockDenoising("sequential")
    asked = prompts(5, (8, 13, 16, 20), VOCAB - 1)
    found = lm.generate(asked, Sampling(NEW, presence_penalty=2.0, frequency_penalty=2.0), denoising=options)
    for prompt, result in zip(asked, found, strict=True):
        text = list(prompt)
        for token in result.tokens:
            logits = log_softmax(model, text)
            for generated in set(text[len(prompt) :]):
                logits[generated] -= 2.0 + 2.0 * text[len(prompt) :].count(generated)
            assert token == int(np.argmax(logits))
            text.append(token)
    # The text before a stop string ends within a block.
    stopping = Sampling(NEW, presence_penalty=2.0, frequency_penalty=2.0, stop=(f"t{found[0].tokens[5]} ",))
    stopped = lm.generate(asked[:1], stopping, denoising=options)[0]
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == found[0].tokens[: len(stopped.tokens)]


def test_texts_of_a_grammar_are_chosen_from_left_to_right(tmp_path: Path):
    """Alone, beside free rows, and with few pages; also over the end of a block."""
    vocab = len(CHARACTERS)
    model = random_model(3, vocab_size=vocab, eos=vocab - 2)
    lm = load(with_characters(tmp_path, model), table=TABLE)
    grammar = Grammar.json_schema({"type": "array", "items": {"enum": [10, 12, 345, 8]}, "minItems": 3, "maxItems": 8})
    constraint = lm.constrain(grammar)
    asked = prompts(13, (10, 13, 16, 31, 5), vocab - 2)
    sampling = [Sampling(60, 1.0, seed=seed) for seed in range(len(asked))]
    alone = [lm.generate([prompt], one, grammar=grammar)[0] for prompt, one in zip(asked, sampling, strict=True)]
    assert all(set(json.loads(result.text)) <= {10, 12, 345, 8} for result in alone)
    requests = [
        GenerateRequest(prompt, one, constraint=constraint if n % 2 == 0 else None)
        for n, (prompt, one) in enumerate(zip(asked, sampling, strict=True))
    ]
    outputs, engine = served(lm, requests, EngineOptions(TABLE, page_size=16, pages=9, constraints=True))
    for n, found in enumerate(outputs):
        wanted = alone[n] if n % 2 == 0 else lm.generate([asked[n]], sampling[n])[0]
        assert tokens_of(found) == wanted.tokens
    assert engine.scheduler.preemptions


@pytest.mark.parametrize("settings", [{"kv_dtype": "int8"}, {"kernels": "xla"}, {"weights": "int4"}], ids=str)
def test_a_row_gets_the_same_tokens_alone_and_among_others(settings: dict[str, Any], model: Model, tmp_path: Path):
    lm = load(as_folder(tmp_path, model), table=TABLE, **settings)  # type: ignore[arg-type]
    asked = prompts(7, (5, 12, 31), VOCAB - 1)
    each = [sampling_of(one) for one in WAYS[3:]]
    options = [denoising_of(one) for one in WAYS[3:]]
    alone = [lm.generate([asked[n]], each[n], denoising=options[n])[0].tokens for n in range(3)]
    assert [result.tokens for result in lm.generate(asked, each, denoising=options)] == alone


def test_two_devices_give_the_tokens_of_one(lm: LanguageModel, model: Model, tmp_path: Path):
    shared = load(as_folder(tmp_path, model), table=TABLE, mesh=make_mesh({"tp": 2}))  # type: ignore[arg-type]
    asked = prompts(12, (6, 16), VOCAB - 1)
    both = [each.generate(asked, sampling_of(WAYS[4]), denoising=denoising_of(WAYS[4])) for each in (lm, shared)]
    assert [result.tokens for result in both[0]] == [result.tokens for result in both[1]]


def test_small_blocks_share_the_steps(lm: LanguageModel):
    """A block takes at most its steps, and those of a small block are its share."""
    asked = prompts(8, (1, 17), VOCAB - 1)
    for steps in (2, 4, 8):
        options = BlockDenoising("low_confidence_static", steps=steps, small_block_size=8)
        with lm.start(asked, Sampling(31), denoising=options) as stream:
            while not stream.finished:
                stream.advance()
        # Two blocks of 15 tokens to denoise, and a pass between them that stores the first one.
        assert [sequence.handle.steps for sequence in stream.sequences] == [2 * steps + 1] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (BlockDenoising(small_block_size=3), "expected a small_block_size that divides the block length 16, found 3"),
        (BlockDenoising(small_block_size=32), "expected a small_block_size that divides the block length 16, found 32"),
        (BlockDenoising(steps=3), "expected steps that are a multiple of the 2 small blocks of a block, found 3"),
        (BlockDenoising(steps=16), "expected at most 15 steps, one for each token of a block, found 16"),
    ],
)
def test_options_that_do_not_fit_a_block_are_errors(options: BlockDenoising, message: str, lm: LanguageModel):
    with pytest.raises(ValueError, match=message):
        lm.generate([[1, 2]], Sampling(NEW), denoising=options)


def test_a_small_block_needs_a_token():
    with pytest.raises(ValueError, match="expected a small_block_size of at least 1, found 0"):
        BlockDenoising(small_block_size=0)
