"""Blocks behind a causal context: tokens and passes of the published loop, by calls and by engines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffusion.support import VOCAB, randomness
from diffusion.test_block_causal import served, tokens_of
from llm.support import prompts
from reference.block_diffusion_numpy import random_model as block_model
from reference.causal_blocks_numpy import Options, generate
from reference.self_speculation_numpy import CHARACTERS, Model, as_folder, random_model, with_characters
from tilewright.diffusion.blocks import BlockDenoising
from tilewright.grammar.grammar import Grammar
from tilewright.llm.language_model import LanguageModel, check_decoding, load
from tilewright.parallel.mesh import make_mesh
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable

LENGTHS = (1, 3, 4, 7, 16, 21)
NEW = 18
BLOCK = 8
TABLE = ShapeTable(batches=(1, 4, 8), capacities=(64, 128), chunks=(8, 32))
WAYS = [
    Options(threshold=0.9),
    Options(threshold=0.3),
    Options(),
    Options(steps=3),
    Options(threshold=0.4, temperature=1.0),
    Options(threshold=0.6, temperature=0.7, top_p=0.8),
]


def denoising_of(options: Options) -> BlockDenoising:
    if options.threshold is None:
        return BlockDenoising("low_confidence_static", steps=options.steps)
    return BlockDenoising(threshold=options.threshold)


def sampling_of(options: Options, seed: int = 5, **more: Any) -> Sampling:
    return Sampling(NEW, options.temperature, options.top_p, seed=seed, **more)


def expected(model: Model, prompt: list[int], block: int, options: Options, seed: int = 5) -> tuple[list[int], list[int]]:
    noise = randomness(seed, 80)[0]
    return generate(model, prompt, NEW, block, options, lambda step, position, _: noise[step, position])


def model_of(seed: int, dlm_type: str = "llada", eos: int | None = None) -> Model:
    model = random_model(seed, dlm_type, VOCAB)
    return Model({**model.config, "block_size": BLOCK, "eos_token_id": eos}, model.tensors)


@pytest.fixture(scope="module")
def model() -> Model:
    return model_of(3)


@pytest.fixture(scope="module")
def lm(model: Model, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return load(as_folder(tmp_path_factory.mktemp("blocks"), model), table=TABLE, decoding="blocks")


@pytest.mark.parametrize(("block", "dlm_type"), [(8, "llada"), (2, "llada"), (5, "llada"), (16, "llada"), (8, "dream")])
def test_tokens_are_those_of_the_published_loop(block: int, dlm_type: str, tmp_path: Path):
    """Rows with different thresholds, temperatures and lengths in one batch; blocks that divide no page, too."""
    model = model_of(block, dlm_type)
    lm = load(as_folder(tmp_path, model), table=TABLE, decoding="blocks", block_size=block)
    asked = prompts(block, LENGTHS, VOCAB - 1)
    each = [WAYS[n % len(WAYS)] if block > 3 else WAYS[n % 3] for n in range(len(asked))]
    found = lm.generate(asked, [sampling_of(one) for one in each], denoising=[denoising_of(one) for one in each])
    wanted = [expected(model, prompt, block, one) for prompt, one in zip(asked, each, strict=True)]
    assert [result.tokens for result in found] == [tokens for tokens, _ in wanted]
    assert block == 2 or any(step < block - 1 for _, passes in wanted for step in passes), "no pass committed several tokens"


@pytest.mark.parametrize("block", [4, 8, 13, 16])
def test_many_requests_are_those_of_the_published_loop(block: int, tmp_path: Path):
    """240 requests: prompts of 1 to 30 tokens, most likely tokens and draws, in batches in mixed phases."""
    model = model_of(10 + block)
    lm = load(as_folder(tmp_path, model), table=TABLE, decoding="blocks", block_size=block)
    rng = np.random.default_rng(block)
    asked = prompts(block, [int(length) for length in rng.integers(1, 31, 60)], VOCAB - 1)
    each = [WAYS[n % len(WAYS)] for n in range(len(asked))]
    found = lm.generate(
        asked, [sampling_of(one, n) for n, one in enumerate(each)], denoising=[denoising_of(one) for one in each]
    )
    for n, (prompt, one, result) in enumerate(zip(asked, each, found, strict=True)):
        assert result.tokens == expected(model, prompt, block, one, n)[0]


@pytest.mark.parametrize("options", WAYS, ids=range(len(WAYS)))
def test_passes_are_those_of_the_published_loop(options: Options, lm: LanguageModel, model: Model):
    """One more pass for each block chooses its first token, and stores what is before."""
    asked = prompts(9, LENGTHS, VOCAB - 1)
    with lm.start(asked, sampling_of(options), denoising=denoising_of(options)) as stream:
        while not stream.finished:
            stream.advance(5)
    wanted = [expected(model, prompt, BLOCK, options) for prompt in asked]
    assert [result.tokens for result in stream.results()] == [tokens for tokens, _ in wanted]
    assert [sequence.handle.steps for sequence in stream.sequences] == [sum(passes) + len(passes) for _, passes in wanted]


def test_an_engine_with_few_pages_gives_the_tokens_of_calls(lm: LanguageModel, model: Model):
    """Requests in all phases, preempted and computed again, with prefixes from the cache; nothing compiles while it serves."""
    asked = [*prompts(1, (30, 9, 17, 26), VOCAB - 1)]
    asked += [[*asked[0][:24], 5, 6], asked[0]]
    each = [WAYS[n % len(WAYS)] for n in range(len(asked))]
    requests = [
        GenerateRequest(prompt, sampling_of(one, seed), denoising=denoising_of(one))
        for seed, (prompt, one) in enumerate(zip(asked, each, strict=True))
    ]
    outputs, engine = served(lm, requests, EngineOptions(TABLE, page_size=16, pages=10, dispatch_s=0.001))
    for seed, (prompt, one, found) in enumerate(zip(asked, each, outputs, strict=True)):
        assert tokens_of(found) == expected(model, prompt, BLOCK, one, seed)[0]
        assert found[-1].end == "length"
    assert engine.scheduler.preemptions
    # A later request finds the pages of the prompt, and of blocks whose keys and values are final.
    first = GenerateRequest(asked[0][:17], sampling_of(WAYS[0]), denoising=denoising_of(WAYS[0]))
    text = [*first.prompt, *expected(model, list(first.prompt), BLOCK, WAYS[0])[0]]
    second = GenerateRequest([*text, 7], sampling_of(WAYS[1]), denoising=denoising_of(WAYS[1]))
    again, engine = served(lm, [first, second], EngineOptions(TABLE, page_size=16, slots=1))
    assert tokens_of(again[0]) == text[17:]
    assert tokens_of(again[1]) == expected(model, [*text, 7], BLOCK, WAYS[1])[0]
    assert engine.scheduler.prefix_hits == 16


def test_a_block_ends_with_the_end_of_the_text(tmp_path: Path):
    """Tokens behind an end-of-sequence token are dropped; a first token that ends the text saves the block's passes."""
    asked = prompts(2, LENGTHS * 2, VOCAB - 1)
    firsts = inner = 0
    for eos in (9, 18):
        model = model_of(3, eos=eos)
        lm = load(as_folder(tmp_path / str(eos), model), table=TABLE, decoding="blocks")
        with lm.start(asked, Sampling(NEW), denoising=BlockDenoising(threshold=0.3)) as stream:
            while not stream.finished:
                stream.advance()
        for prompt, result, sequence in zip(asked, stream.results(), stream.sequences, strict=True):
            tokens, passes = expected(model, prompt, BLOCK, Options(0.3))
            assert result.tokens == tokens
            first = result.finish_reason == "eos" and len(tokens) % BLOCK == 1
            assert sequence.handle.steps == sum(passes) + len(passes) - first
            firsts += first
            inner += result.finish_reason == "eos" and not first
        ignoring = lm.generate(asked[:2], Sampling(NEW, ignore_eos=True))
        assert all(len(result.tokens) == NEW for result in ignoring)
    assert firsts
    assert inner


def test_a_block_ends_with_the_context(model: Model, tmp_path: Path):
    narrow = Model({**model.config, "max_position_embeddings": 64}, model.tensors)
    lm = load(as_folder(tmp_path, narrow), table=ShapeTable((1, 4), (64,), (8, 32)), decoding="blocks")
    asked = prompts(3, (49, 51, 46, 55), VOCAB - 1)
    found = lm.generate(asked, [Sampling(64 - len(prompt)) for prompt in asked])
    for prompt, result in zip(asked, found, strict=True):
        assert result.tokens == generate(narrow, prompt, 64 - len(prompt), BLOCK, WAYS[0], room=64)[0]


def test_logprobs_are_those_of_the_pass_that_committed_the_token(lm: LanguageModel, model: Model):
    (prompt,) = prompts(4, (10,), VOCAB - 1)
    request = GenerateRequest(prompt, Sampling(12), 3, denoising=BlockDenoising("sequential"))
    ((*found,),), _ = served(lm, [request], EngineOptions(TABLE, page_size=16))
    text = list(prompt)
    for n, piece in enumerate(token for output in found for token in output.tokens):
        masks = 0 if n % BLOCK == 0 else BLOCK - n % BLOCK
        start = len(text) - n % BLOCK
        visible = np.tril(np.ones((len(text) + masks, len(text) + masks), bool))
        if masks:
            visible[start:, start:] = True
        logits = model.logits([*text, *[VOCAB - 1] * masks], visible)[len(text) if masks else -1][: VOCAB - 1]
        scores = logits - np.log(np.exp(logits).sum())
        assert piece.logprobs is not None
        np.testing.assert_allclose(piece.logprobs.logprob, scores[piece.token], atol=1e-4)
        assert [token for token, _ in piece.logprobs.top] == np.argsort(-scores)[:3].tolist()
        text.append(piece.token)
    assert len(text) == len(prompt) + 12


def test_rows_from_left_to_right_decode_token_by_token(lm: LanguageModel, model: Model, tmp_path: Path):
    """Alone, beside rows that denoise blocks, and with few pages; penalties and biases are those of decoding."""
    plain = load(as_folder(tmp_path, model), table=TABLE)
    asked = prompts(11, (10, 13, 22, 28), VOCAB - 1)
    one_by_one = BlockDenoising(left_to_right=True)
    sampling = Sampling(NEW, presence_penalty=1.0, logit_bias=((5, 1.0), (VOCAB - 1, -100.0)))  # decoding may choose the mask
    wanted = [result.tokens for result in plain.generate(asked, sampling)]
    assert [result.tokens for result in lm.generate(asked, sampling, denoising=one_by_one)] == wanted
    requests = [GenerateRequest(prompt, sampling, denoising=one_by_one) for prompt in asked]
    requests += [GenerateRequest(prompt, Sampling(NEW), denoising=BlockDenoising(threshold=0.3)) for prompt in asked]
    outputs, engine = served(lm, requests, EngineOptions(TABLE, page_size=16, pages=9))
    assert [tokens_of(found) for found in outputs[:4]] == wanted
    for prompt, found in zip(asked, outputs[4:], strict=True):
        assert tokens_of(found) == expected(model, prompt, BLOCK, Options(0.3))[0]
    assert engine.scheduler.preemptions


def test_stop_strings_and_tokens_end_the_text(lm: LanguageModel):
    (prompt,) = prompts(6, (9,), VOCAB - 1)
    whole = lm.generate([prompt], Sampling(NEW))[0]
    token = whole.tokens[5]
    stopped = lm.generate([prompt], Sampling(NEW, stop_token_ids=(token,)))[0]
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == whole.tokens[: whole.tokens.index(token) + 1]
    assert lm.generate([prompt], Sampling(NEW, stop=(f"t{token} ",)))[0].finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_of_a_grammar_are_those_of_decoding(temperature: float, tmp_path: Path):
    vocab = len(CHARACTERS)
    made = random_model(3, "llada", vocab)
    model = Model({**made.config, "eos_token_id": vocab - 2}, made.tensors)
    folder = with_characters(tmp_path, model)
    grammar = Grammar.json_schema({"type": "array", "items": {"enum": [10, 12, 345, 8]}, "minItems": 3, "maxItems": 8})
    asked = prompts(13, (10, 13, 22), vocab - 2)
    texts = []
    for decoding in ("blocks", "tokens"):
        lm = load(folder, table=TABLE, decoding=decoding)
        texts.append([result.text for result in lm.generate(asked, Sampling(60, temperature, seed=1), grammar=grammar)])
    assert all(set(json.loads(text)) <= {10, 12, 345, 8} for text in texts[0])
    assert temperature or texts[0] == texts[1]


@pytest.mark.parametrize("settings", [{"kv_dtype": "int8"}, {"kernels": "xla"}, {"weights": "int4"}], ids=str)
def test_a_row_gets_the_same_tokens_alone_and_among_others(settings: dict[str, Any], model: Model, tmp_path: Path):
    lm = load(as_folder(tmp_path, model), table=TABLE, decoding="blocks", **settings)
    asked = prompts(7, (5, 12, 31), VOCAB - 1)
    each = [sampling_of(one) for one in WAYS[3:]]
    options = [denoising_of(one) for one in WAYS[3:]]
    alone = [lm.generate([asked[n]], each[n], denoising=options[n])[0].tokens for n in range(3)]
    assert [result.tokens for result in lm.generate(asked, each, denoising=options)] == alone


def test_two_devices_give_the_tokens_of_one(lm: LanguageModel, model: Model, tmp_path: Path):
    shared = load(as_folder(tmp_path, model), table=TABLE, mesh=make_mesh({"tp": 2}), decoding="blocks")
    asked = prompts(12, (6, 15), VOCAB - 1)
    both = [each.generate(asked, sampling_of(WAYS[4]), denoising=denoising_of(WAYS[4])) for each in (lm, shared)]
    assert [result.tokens for result in both[0]] == [result.tokens for result in both[1]]


def test_ways_of_decoding_that_a_model_lacks_are_errors(lm: LanguageModel, model: Model, tmp_path: Path):
    folder = as_folder(tmp_path / "a", model)
    plain = load(folder, table=TABLE)
    assert plain.block_length is None
    with pytest.raises(ValueError, match="the model decodes token by token; load it with decoding='blocks'"):
        plain.generate([[1, 2]], Sampling(NEW), denoising=BlockDenoising())
    assert plain.with_blocks(4).generate([[1, 2]], Sampling(9))[0].tokens == generate(model, [1, 2], 9, 4, WAYS[0])[0]
    with pytest.raises(ValueError, match="expected blocks of at least 2 tokens, found 1"):
        load(folder, table=TABLE, decoding="blocks", block_size=1)
    with pytest.raises(ValueError, match="expected no drafter where blocks are denoised, found self"):
        load(folder, "self", table=TABLE, decoding="blocks")
    with pytest.raises(ValueError, match="expected decoding among tokens, blocks, found 'both'"):
        check_decoding("both", plain.target)
    with pytest.raises(ValueError, match="expected at most 7 steps, one for each token of a block, found 8"):
        lm.generate([[1, 2]], Sampling(NEW), denoising=BlockDenoising(steps=8))
    dense = as_folder(tmp_path / "b", block_model(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a model that decodes token by token, found one of the family sdar"):
        load(dense, decoding="tokens")
    other = block_model(3)
    qwen = as_folder(tmp_path / "c", Model({**other.config, "model_type": "qwen3"}, other.tensors))
    with pytest.raises(ValueError, match="expected a model that was trained to denoise blocks, found one of the family qwen3"):
        load(qwen, decoding="blocks")
    with pytest.raises(ValueError, match="expected a model that was trained to denoise blocks, found one of the family qwen3"):
        load(qwen, table=TABLE).with_blocks()
