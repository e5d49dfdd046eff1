"""Canvases served by an engine: mixed phases, few pages, prefixes from the cache, cancelled requests, and no compilation."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diffusion.test_block_causal import served, tokens_of
from diffusion.test_canvas import NEW, TABLE, VOCAB, WAYS, denoising_of
from llm.support import prompts
from reference.canvas_numpy import Model, generate, random_model
from reference.self_speculation_numpy import as_folder
from tilewright.llm.language_model import LanguageModel, load
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.sampling import Sampling


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(1)


@pytest.fixture(scope="module")
def lm(model: Model, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return load(as_folder(tmp_path_factory.mktemp("canvas"), model), table=TABLE)  # type: ignore[arg-type]


def requests_of(asked: list[list[int]], new: int = NEW) -> list[GenerateRequest]:
    return [
        GenerateRequest(prompt, Sampling(new, seed=seed), denoising=denoising_of(WAYS[seed % len(WAYS)]))
        for seed, prompt in enumerate(asked)
    ]


def test_an_engine_with_few_pages_gives_the_tokens_of_the_published_loop(lm: LanguageModel, model: Model):
    """Requests in all phases, preempted and computed again, with prefixes from the cache; nothing compiles while it serves."""
    asked = prompts(1, (30, 9, 17, 46), VOCAB)
    asked += [[*asked[0][:24], 5, 6], asked[0]]
    options = EngineOptions(TABLE, page_size=16, pages=11, dispatch_s=0.001)
    outputs, engine = served(lm, requests_of(asked), options)
    for seed, (prompt, found) in enumerate(zip(asked, outputs, strict=True)):
        assert tokens_of(found) == generate(model, prompt, NEW, WAYS[seed], seed)[0]
        assert found[-1].end == "length"
        ends = np.cumsum([each.tokens for output in found for each in output.rounds])
        assert ends.tolist() == [8, 16, 18], "a canvas was not delivered as a whole"
    assert engine.scheduler.preemptions
    assert engine.stats().compilations == 0
    first = requests_of(asked[:1], 34)
    again, engine = served(lm, [*first, *first], EngineOptions(TABLE, page_size=16, slots=1))
    assert tokens_of(again[1]) == tokens_of(again[0]) == generate(model, asked[0], 34, WAYS[0], 0)[0]
    assert engine.scheduler.prefix_hits == 16
    # A further turn finds the pages of the encoded answer, but for the last canvas.
    turn = [*asked[0], *tokens_of(again[0]), 3]
    more = GenerateRequest(turn, Sampling(8, seed=4), denoising=denoising_of(WAYS[0]))
    found, engine = served(lm, [*first, more], EngineOptions(TABLE, page_size=16, slots=1))
    assert tokens_of(found[1]) == generate(model, turn, 8, WAYS[0], 4)[0]
    assert engine.scheduler.prefix_hits == 48


def test_nothing_compiles_while_an_engine_serves_many_prompts(lm: LanguageModel, model: Model):
    rng = np.random.default_rng(9)
    asked = prompts(9, [int(length) for length in rng.integers(1, 60, 24)], VOCAB)
    outputs, engine = served(lm, requests_of(asked), EngineOptions(TABLE, page_size=16, dispatch_s=0.001))
    assert engine.stats().compilations == 0
    for seed, (prompt, found) in enumerate(zip(asked, outputs, strict=True)):
        assert tokens_of(found) == generate(model, prompt, NEW, WAYS[seed % len(WAYS)], seed)[0]


def test_a_cancelled_request_leaves_the_others_unchanged(lm: LanguageModel, model: Model):
    asked = prompts(5, (20, 11, 33), VOCAB)
    requests = requests_of(asked, 40)
    engine = lm.engine(EngineOptions(TABLE, page_size=16, dispatch_s=0.001))
    engine.warm()
    engine.accept_requests()
    outputs: list[list] = [[] for _ in asked]
    handles = [engine.submit(request, found.append) for request, found in zip(requests, outputs, strict=True)]
    while engine.busy:
        engine.step()
        if outputs[0] and handles[0].result is None:
            engine.cancel(handles[0])
    engine.stop()
    assert outputs[0][-1].end == "cancelled"
    for seed in (1, 2):
        assert tokens_of(outputs[seed]) == generate(model, asked[seed], 40, WAYS[seed], seed)[0]


def test_texts_longer_than_many_windows_keep_few_pages_of_them(model: Model, tmp_path: Path):
    """Pages of layers with a window are released; the answer is that of the published loop."""
    table = replace(TABLE, capacities=(128,))
    lm = load(as_folder(tmp_path, random_model(4, 4)), table=table)  # type: ignore[arg-type]
    asked = prompts(6, (60, 44), VOCAB)
    requests = requests_of(asked, 50)
    outputs, _ = served(lm, requests, EngineOptions(table, page_size=16, dispatch_s=0.001))
    for seed, (prompt, found) in enumerate(zip(asked, outputs, strict=True)):
        assert tokens_of(found) == generate(random_model(4, 4), prompt, 50, WAYS[seed], seed)[0]


@pytest.mark.parametrize(
    "settings", [{"weights": "int8"}, {"kernels": "xla"}, {"kv_dtype": "int8"}, {"dtype": "bfloat16"}], ids=str
)
def test_a_row_gets_the_same_tokens_alone_and_among_others(settings: dict, model: Model, tmp_path: Path):
    lm = load(as_folder(tmp_path, model), table=TABLE, **settings)  # type: ignore[arg-type]
    asked = prompts(7, (5, 12, 31), VOCAB)
    options = [denoising_of(one) for one in WAYS[:3]]
    sampling = [Sampling(NEW, seed=seed) for seed in (5, 6, 5)]
    alone = [lm.generate([asked[n]], sampling[n], denoising=options[n])[0].tokens for n in range(3)]
    assert [result.tokens for result in lm.generate(asked, sampling, denoising=options)] == alone
