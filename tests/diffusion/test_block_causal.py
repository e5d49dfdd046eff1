"""Models whose blocks are denoised: tokens and passes of the published loop, by calls and by engines."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from diffusion.support import VOCAB, randomness
from llm.support import prompts
from reference.block_diffusion_numpy import Model, Options, generate, random_model
from reference.self_speculation_numpy import CHARACTERS, as_folder, with_characters
from tilewright.cli.common import check_decodes
from tilewright.diffusion import blocks
from tilewright.diffusion.blocks import BlockDenoising
from tilewright.grammar.grammar import Grammar
from tilewright.llm.language_model import LanguageModel, load
from tilewright.models.config import MaskedBlocks
from tilewright.parallel.mesh import make_mesh
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.request import GenerateRequest, RequestOutput
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.speculation.drafters.ngram import NGram

LENGTHS = (1, 3, 4, 7, 16, 21)
NEW = 18
TABLE = ShapeTable(batches=(1, 4, 8), capacities=(64, 128), chunks=(8, 32))
WAYS = [
    Options(),
    Options(threshold=0.3, top_p=0.8),
    Options("low_confidence_static", steps=2),
    Options("sequential", steps=3),
    Options(threshold=0.4, temperature=1.0, top_p=0.8),
    Options("low_confidence_static", temperature=0.7),
]


def denoising_of(options: Options) -> BlockDenoising:
    return BlockDenoising(options.strategy, options.threshold, options.steps)  # type: ignore[arg-type]


def sampling_of(options: Options, seed: int = 5, **more: Any) -> Sampling:
    return Sampling(NEW, options.temperature, options.top_p, seed=seed, **more)


def expected(model: Model, prompt: list[int], options: Options, seed: int = 5) -> tuple[list[int], list[int]]:
    noise = randomness(seed, 64)[0]
    return generate(model, prompt, NEW, options, lambda step, position, _: noise[step, position])


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(3)


@pytest.fixture(scope="module")
def lm(model: Model, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return load(as_folder(tmp_path_factory.mktemp("blocks"), model), table=TABLE)  # type: ignore[arg-type]


@pytest.mark.parametrize("block", [4, 8, 16])
def test_tokens_are_those_of_the_published_loop(block: int, tmp_path: Path):
    """Rows with different strategies, temperatures and lengths in one batch."""
    model = random_model(block, block)
    lm = load(as_folder(tmp_path, model), table=TABLE)  # type: ignore[arg-type]
    asked = prompts(block, LENGTHS, VOCAB - 1)
    each = [WAYS[n % len(WAYS)] for n in range(len(asked))]
    found = lm.generate(asked, [sampling_of(one) for one in each], denoising=[denoising_of(one) for one in each])
    wanted = [expected(model, prompt, one) for prompt, one in zip(asked, each, strict=True)]
    assert [result.tokens for result in found] == [tokens for tokens, _ in wanted]
    assert any(step < block for _, passes in wanted for step in passes), "no pass committed several tokens"


@pytest.mark.parametrize("block", [2, 4, 8, 16])
@pytest.mark.parametrize("threshold", [0.3, 0.85])
def test_many_requests_are_those_of_the_published_loop(block: int, threshold: float, tmp_path: Path):
    """240 requests: prompts of 1 to 30 tokens, most likely tokens and draws, all strategies, in batches in mixed phases."""
    model = random_model(10 + block, block)
    lm = load(as_folder(tmp_path, model), table=TABLE)  # type: ignore[arg-type]
    rng = np.random.default_rng(block)
    asked = prompts(block, [int(length) for length in rng.integers(1, 31, 30)], VOCAB - 1)
    ways = [
        Options(threshold=threshold),
        Options(threshold=threshold, temperature=1.0),
        Options(threshold=threshold, temperature=0.5, top_p=0.9),
        Options("low_confidence_static", steps=2, temperature=1.3),
        Options("sequential", steps=2),
    ]
    each = [ways[n % len(ways)] for n in range(len(asked))]
    found = lm.generate(
        asked, [sampling_of(one, n) for n, one in enumerate(each)], denoising=[denoising_of(one) for one in each]
    )
    for n, (prompt, one, result) in enumerate(zip(asked, each, found, strict=True)):
        assert result.tokens == expected(model, prompt, one, n)[0]


@pytest.mark.parametrize("options", WAYS, ids=range(len(WAYS)))
def test_each_strategy_counts_the_passes_of_the_published_loop(options: Options, lm: LanguageModel, model: Model):
    """Each finished block but the last takes one more pass, which stores its keys and values.

    A row that is alone stores a block in the first pass over the next one, which counts as two.
    """
    asked = prompts(9, LENGTHS, VOCAB - 1)
    wanted = [expected(model, prompt, options) for prompt in asked]
    counts = [sum(passes) + len(passes) - 1 for _, passes in wanted]
    for rows in (slice(None), slice(3, 4)):
        with lm.start(asked[rows], sampling_of(options), denoising=denoising_of(options)) as stream:
            while not stream.finished:
                stream.advance(5)
        assert [result.tokens for result in stream.results()] == [tokens for tokens, _ in wanted[rows]]
        assert [sequence.handle.steps for sequence in stream.sequences] == counts[rows]
    assert stream.rounds == sum(wanted[3][1]) < counts[3]


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_rows_store_a_block_with_the_next_one(share: float, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Several rows store blocks with the next ones, as on accelerators. A batch then takes fewer passes."""
    monkeypatch.setattr(blocks, "least_share", lambda target, blocks, rows: share)
    lm = load(as_folder(tmp_path, model), table=TABLE)  # type: ignore[arg-type]
    asked = prompts(4, LENGTHS, VOCAB - 1)
    wanted = [expected(model, prompt, one) for prompt, one in zip(asked, WAYS, strict=True)]
    each = [sampling_of(one) for one in WAYS]
    with lm.start(asked, each, denoising=[denoising_of(one) for one in WAYS]) as stream:
        while not stream.finished:
            stream.advance(5)
    assert [result.tokens for result in stream.results()] == [tokens for tokens, _ in wanted]
    counts = [sum(passes) + len(passes) - 1 for _, passes in wanted]
    assert [sequence.handle.steps for sequence in stream.sequences] == counts
    assert stream.rounds < max(counts)


@pytest.mark.parametrize(("length", "rows", "share"), [(4, 1, 0.0), (32, 4, 0.0), (48, 4, 0.5), (32, 8, None), (32, 64, None)])
def test_the_share_of_rows_is_the_one_from_which_two_blocks_pay(
    length: int, rows: int, share: float | None, lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
):
    """Up to 256 tokens a pass costs the same on an accelerator; then twice the tokens take twice the time, and gain nothing."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert blocks.least_share(lm.model.target, MaskedBlocks(39, length, causal=False), rows) == share
    assert blocks.least_share(lm.model.target, MaskedBlocks(39, length, causal=True), rows) is None


def served(lm: LanguageModel, requests: list[GenerateRequest], options: EngineOptions) -> tuple[list[list[RequestOutput]], Any]:
    """Serves requests together; returns the outputs of each, and the engine."""
    engine = lm.engine(options)
    engine.warm()
    engine.accept_requests()
    outputs: list[list[RequestOutput]] = [[] for _ in requests]
    for request, found in zip(requests, outputs, strict=True):
        engine.submit(request, found.append)
    while engine.busy:
        engine.step()
    engine.stop()
    return outputs, engine


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token.token for output in outputs for token in output.tokens]


def test_an_engine_with_few_pages_gives_the_tokens_of_calls(lm: LanguageModel, model: Model):
    """Requests in all phases, preempted and computed again, with prefixes from the cache; nothing compiles while it serves."""
    asked = [*prompts(1, (30, 9, 17, 26), VOCAB - 1)]
    asked += [[*asked[0][:24], 5, 6], asked[0]]
    each = [WAYS[n % len(WAYS)] for n in range(len(asked))]
    requests = [
        GenerateRequest(prompt, sampling_of(one, seed), denoising=denoising_of(one))
        for seed, (prompt, one) in enumerate(zip(asked, each, strict=True))
    ]
    options = EngineOptions(TABLE, page_size=16, pages=10, dispatch_s=0.001)
    outputs, engine = served(lm, requests, options)
    for seed, (prompt, one, found) in enumerate(zip(asked, each, outputs, strict=True)):
        assert tokens_of(found) == expected(model, prompt, one, seed)[0]
        assert found[-1].end == "length"
    assert engine.scheduler.preemptions
    again, engine = served(lm, [*requests[:1], *requests[:1]], EngineOptions(TABLE, page_size=16, slots=1))
    assert tokens_of(again[1]) == tokens_of(again[0]) == tokens_of(outputs[0])
    assert engine.scheduler.prefix_hits == 16


def test_a_block_ends_with_the_end_of_the_text(tmp_path: Path):
    """Tokens behind an end-of-sequence token are dropped, and so is the last pass of its block."""
    asked = prompts(2, LENGTHS * 2, VOCAB - 1)
    ended = 0
    for eos in range(3, 9):
        model = random_model(3, eos=eos)
        lm = load(as_folder(tmp_path / str(eos), model), table=TABLE)  # type: ignore[arg-type]
        for prompt, result in zip(asked, lm.generate(asked, Sampling(NEW)), strict=True):
            assert result.tokens == expected(model, prompt, Options())[0]
            ended += result.finish_reason == "eos"
        ignoring = lm.generate(asked[:2], Sampling(NEW, ignore_eos=True))
        assert all(len(result.tokens) == NEW for result in ignoring)
    assert ended


def test_logprobs_are_those_of_the_pass_that_committed_the_token(lm: LanguageModel, model: Model):
    """With one token a pass, from the left, they follow from the text before, masks behind it, and nothing else."""
    (prompt,) = prompts(4, (10,), VOCAB - 1)
    options = BlockDenoising("sequential")
    request = GenerateRequest(prompt, Sampling(6), 3, denoising=options)
    ((*found,),), _ = served(lm, [request], EngineOptions(TABLE, page_size=16))
    pieces = [token for output in found for token in output.tokens]
    text = list(prompt)
    for piece in pieces:
        end = -(-(len(text) + 1) // 4) * 4
        logits = model.logits([*text, *[VOCAB - 1] * (end - len(text))])[len(text)][: VOCAB - 1]
        scores = logits - np.log(np.exp(logits).sum())
        assert piece.logprobs is not None
        np.testing.assert_allclose(piece.logprobs.logprob, scores[piece.token], atol=1e-4)
        assert [token for token, _ in piece.logprobs.top] == np.argsort(-scores)[:3].tolist()
        text.append(piece.token)
    assert len(pieces) == 6


def test_penalties_count_the_text_before_a_position(lm: LanguageModel, model: Model):
    """These penalties count no tokens of the prompt, also where they share a block with the first new ones."""
    options = BlockDenoising("sequential")
    plain = lm.generate(prompts(5, (8,) * 6, VOCAB - 1), Sampling(NEW), denoising=options)
    likely = [result.tokens[-1] for result in plain]
    asked = [[*prompt, *[token] * 3] for prompt, token in zip(prompts(5, (8,) * 6, VOCAB - 1), likely, strict=True)]
    each = [Sampling(NEW, presence_penalty=2.0, frequency_penalty=2.0)] * len(asked)
    for prompt, result in zip(asked, lm.generate(asked, each, denoising=options), strict=True):
        text = list(prompt)
        for token in result.tokens:
            end = -(-(len(text) + 1) // 4) * 4
            logits = model.logits([*text, *[VOCAB - 1] * (end - len(text))])[len(text)][: VOCAB - 1]
            for generated in set(text[len(prompt) :]):
                logits[generated] -= 2.0 + 2.0 * text[len(prompt) :].count(generated)
            assert token == int(np.argmax(logits))
            text.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_of_a_grammar_are_chosen_from_left_to_right(temperature: float, tmp_path: Path):
    """Each token is the best allowed one behind the text before, alone, beside free rows, and with few pages."""
    vocab = len(CHARACTERS)
    model = random_model(3, vocab_size=vocab, eos=vocab - 2)
    lm = load(with_characters(tmp_path, model), table=TABLE)
    schema = {"type": "array", "items": {"enum": [10, 12, 345, 8]}, "minItems": 3, "maxItems": 8}
    constraint = lm.constrain(Grammar.json_schema(schema))
    asked = prompts(13, (10, 13, 22, 28, 5), vocab - 2)
    sampling = [Sampling(60, temperature, seed=seed) for seed in range(len(asked))]
    alone = [
        lm.generate([prompt], one, grammar=Grammar.json_schema(schema))[0] for prompt, one in zip(asked, sampling, strict=True)
    ]
    assert all(set(json.loads(result.text)) <= {10, 12, 345, 8} for result in alone)
    requests = [
        GenerateRequest(prompt, one, constraint=constraint if n % 2 == 0 else None)
        for n, (prompt, one) in enumerate(zip(asked, sampling, strict=True))
    ]
    options = EngineOptions(TABLE, page_size=16, pages=9, constraints=True)
    outputs, engine = served(lm, requests, options)
    for n, found in enumerate(outputs):
        wanted = alone[n] if n % 2 == 0 else lm.generate([asked[n]], sampling[n])[0]
        assert tokens_of(found) == wanted.tokens
    assert engine.scheduler.preemptions
    if temperature == 0:
        for prompt, result in zip(asked, alone, strict=True):
            state = constraint.begin()
            text = list(prompt)
            for token in result.tokens:
                masks = np.zeros((1, -(-vocab // 32)), np.uint32)
                state.fill([], masks)
                bits = [(int(masks[0, n // 32]) >> (n % 32)) & 1 for n in range(vocab - 1)]
                end = -(-(len(text) + 1) // 4) * 4
                logits = model.logits([*text, *[vocab - 1] * (end - len(text))])[len(text)][: vocab - 1]
                assert token == int(np.argmax(np.where(bits, logits, -np.inf)))
                text.append(token)
                if token != vocab - 2:
                    state.advance([token])


def test_stop_strings_and_tokens_end_the_text(lm: LanguageModel):
    (prompt,) = prompts(6, (9,), VOCAB - 1)
    whole = lm.generate([prompt], Sampling(NEW))[0]
    token = whole.tokens[5]
    first = whole.tokens.index(token)
    stopped = lm.generate([prompt], Sampling(NEW, stop_token_ids=(token,)))[0]
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == whole.tokens[: first + 1]
    by_string = lm.generate([prompt], Sampling(NEW, stop=(f"t{token} ",)))[0]
    assert by_string.finish_reason == "stop"


@pytest.mark.parametrize("settings", [{"kv_dtype": "int8"}, {"kernels": "xla"}, {"weights": "int4"}], ids=str)
def test_a_row_gets_the_same_tokens_alone_and_among_others(settings: dict[str, Any], model: Model, tmp_path: Path):
    lm = load(as_folder(tmp_path, model), table=TABLE, **settings)  # type: ignore[arg-type]
    asked = prompts(7, (5, 12, 31), VOCAB - 1)
    each = [sampling_of(one) for one in WAYS[2:5]]
    options = [denoising_of(one) for one in WAYS[2:5]]
    alone = [lm.generate([asked[n]], each[n], denoising=options[n])[0].tokens for n in range(3)]
    assert [result.tokens for result in lm.generate(asked, each, denoising=options)] == alone


def test_two_devices_give_the_tokens_of_one(lm: LanguageModel, model: Model, tmp_path: Path):
    shared = load(as_folder(tmp_path, model), table=TABLE, mesh=make_mesh({"tp": 2}))  # type: ignore[arg-type]
    asked = prompts(12, (6, 15), VOCAB - 1)
    both = [each.generate(asked, sampling_of(WAYS[4]), denoising=denoising_of(WAYS[4])) for each in (lm, shared)]
    assert [result.tokens for result in both[0]] == [result.tokens for result in both[1]]


def test_a_mixture_of_experts_denoises_blocks(model: Model, tmp_path: Path):
    """Rows get the same tokens alone and among others; with one expert, they are those of the dense model."""
    experts = {"num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 48, "norm_topk_prob": True}
    tensors: dict[str, Any] = {}
    for name, tensor in model.tensors.items():
        tensors[name.replace("mlp.", "mlp.experts.0.")] = tensor
    for n in range(model.config["num_hidden_layers"]):
        tensors[f"model.layers.{n}.mlp.gate.weight"] = np.ones((1, 32), np.float32)
    mixture = Model({**model.config, "model_type": "sdar_moe", **experts}, tensors)
    lm = load(as_folder(tmp_path, mixture), table=TABLE)  # type: ignore[arg-type]
    asked = prompts(8, (6, 15, 22), VOCAB - 1)
    found = [result.tokens for result in lm.generate(asked, sampling_of(WAYS[4]), denoising=denoising_of(WAYS[4]))]
    assert found == [expected(model, prompt, WAYS[4])[0] for prompt in asked]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"threshold": 0.0}, "expected a threshold above 0, up to 1, found 0.0"),
        ({"steps": 0}, "expected at least 1 step, found 0"),
    ],
)
def test_wrong_options_are_errors(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        BlockDenoising(**fields)


def test_an_unknown_strategy_is_an_error():
    options = BlockDenoising()
    object.__setattr__(options, "strategy", "best")  # the tests' type checker keeps it out otherwise
    with pytest.raises(ValueError, match=r"expected strategy to be one of low_confidence_dynamic, .*, found 'best'"):
        options.__post_init__()


def test_layers_with_a_window_are_refused(model: Model, tmp_path: Path):
    """Blocks attend to all positions."""
    folder = as_folder(tmp_path, model)  # type: ignore[arg-type]
    path = folder / "config.json"
    fields = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ValueError, match="use_sliding_window"):
        load(folder, table=TABLE)


def test_requests_that_cannot_be_served_are_errors(lm: LanguageModel, model: Model, tmp_path: Path):
    with pytest.raises(ValueError, match="expected at most 4 steps, one for each token of a block, found 5"):
        lm.generate([[1, 2]], Sampling(NEW), denoising=BlockDenoising(steps=5))
    with pytest.raises(ValueError, match="expected a prompt without the mask token 39, found one"):
        lm.generate([[1, 39]], Sampling(NEW))
    with pytest.raises(ValueError, match="expected no pooling, which is not supported for a model whose blocks are denoised"):
        lm.embed([[1, 2]])
    with pytest.raises(ValueError, match="a prompt of 60 tokens leaves room for 4 in the context of 64; max_new_tokens is 18"):
        lm.engine(EngineOptions(ShapeTable((1,), (64,), (16,)), page_size=16)).check(GenerateRequest([1] * 60, Sampling(NEW)))
    with pytest.raises(ValueError, match="expected a prefill chunk that is a multiple of the block length 4, found 6"):
        lm.engine(EngineOptions(ShapeTable((1,), (48,), (6,)), page_size=16))
    with pytest.raises(ValueError, match="expected no drafter where blocks are denoised, found ngram"):
        load(as_folder(tmp_path / "a", model), "ngram", table=TABLE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected no drafter where blocks are denoised, found ngram"):
        lm.with_drafter(NGram())
    with pytest.raises(ValueError, match="expected a model that decodes token by token, found one of the family sdar"):
        check_decodes(as_folder(tmp_path / "d", model))  # type: ignore[arg-type]
    wider = load(as_folder(tmp_path / "b", model), table=TABLE, block_size=8)  # type: ignore[arg-type]
    assert wider.block_length == 8
    plain = load(as_folder(tmp_path / "c", model_of_qwen(model)), table=TABLE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected no denoising options, since the model decodes token by token"):
        plain.generate([[1, 2]], Sampling(NEW), denoising=BlockDenoising())


def model_of_qwen(model: Model) -> Model:
    return Model({**model.config, "model_type": "qwen3"}, model.tensors)
