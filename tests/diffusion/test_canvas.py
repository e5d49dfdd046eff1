"""Canvases of DiffusionGemma: tokens and passes of the published loop by calls, and the requests that are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from llm.support import prompts
from reference.canvas_numpy import Model, Options, generate, random_model, randomness
from reference.self_speculation_numpy import as_folder
from tilewright.diffusion.blocks import BlockDenoising
from tilewright.diffusion.canvas import CanvasDenoising, kept_draws, random_tokens
from tilewright.llm.language_model import LanguageModel, load
from tilewright.models.config import Canvas, HeadSizes
from tilewright.models.decoder import config_from_hf, config_to_hf
from tilewright.parallel.mesh import make_mesh
from tilewright.runtime.constraints import ConstraintState
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.sampling import Sampling, row_sampling
from tilewright.runtime.shapes import ShapeTable

VOCAB = 40
NEW = 18
TABLE = ShapeTable(batches=(8,), capacities=(96,), chunks=(32,))
WAYS = [
    Options(5),
    Options(16, 1.0, 0.3, 0.15, 1, 0.4),
    Options(12, 0.5, 0.2, 0.15, 0, 0.15),
    Options(20, 1.0, 0.25, 0.15, 2, 0.5),
    Options(8, 3.0, 1.0, 0.5),
    Options(1),
]


def denoising_of(options: Options) -> CanvasDenoising:
    return CanvasDenoising(
        options.max_denoising_steps,
        options.entropy_bound,
        options.t_max,
        options.t_min,
        options.stability_threshold,
        options.confidence_threshold,
    )


def check(lm: LanguageModel, model: Model, asked: list[list[int]], each: list[Options]) -> list[list[int]]:
    """Checks tokens and numbers of passes of one call; returns the passes over each canvas."""
    wanted = [generate(model, prompt, NEW, one, seed) for seed, (prompt, one) in enumerate(zip(asked, each, strict=True))]
    sampling = [Sampling(NEW, seed=seed) for seed in range(len(asked))]
    found = lm.generate(asked, sampling, denoising=[denoising_of(one) for one in each])
    assert [result.tokens for result in found] == [tokens for tokens, _ in wanted]
    assert [result.passes for result in found] == [sum(passes) for _, passes in wanted]
    return [passes for _, passes in wanted]


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(1)


@pytest.fixture(scope="module")
def lm(model: Model, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return load(as_folder(tmp_path_factory.mktemp("canvas"), model), table=TABLE)  # type: ignore[arg-type]


def test_tokens_and_passes_are_those_of_the_published_loop(lm: LanguageModel, model: Model):
    """Rows of all options and lengths in one batch, in different phases; some canvases end before their last pass."""
    asked = prompts(3, (1, 5, 12, 17, 30, 8), VOCAB)
    passes = check(lm, model, asked, WAYS)
    assert len({tuple(each) for each in passes}) > 4
    for n in (2, 3):
        assert any(each < WAYS[n].max_denoising_steps for each in passes[n]), "all canvases used all passes"


@pytest.mark.parametrize("length", [4, 8, 16])
def test_many_requests_are_those_of_the_published_loop(length: int, tmp_path: Path):
    """Prompts of 1 to 40 tokens, with and without end-of-sequence tokens, more of them than rows."""
    for eos in (None, 7):
        model = random_model(10 + length, length, eos=eos)
        lm = load(as_folder(tmp_path / str(eos), model), table=TABLE)  # type: ignore[arg-type]
        rng = np.random.default_rng(length)
        asked = prompts(length, [int(each) for each in rng.integers(1, 41, 36)], VOCAB)
        check(lm, model, asked, [WAYS[n % len(WAYS)] for n in range(len(asked))])


def test_a_row_gets_the_same_tokens_alone_and_among_others(lm: LanguageModel):
    asked = prompts(7, (5, 12, 31), VOCAB)
    options = [denoising_of(one) for one in WAYS[:3]]
    sampling = [Sampling(NEW, seed=seed) for seed in (5, 6, 5)]
    alone = [lm.generate([asked[n]], sampling[n], denoising=options[n])[0].tokens for n in range(3)]
    assert [result.tokens for result in lm.generate(asked, sampling, denoising=options)] == alone


def test_seeds_decide_the_canvases(lm: LanguageModel):
    (prompt,) = prompts(8, (9,), VOCAB)
    options = denoising_of(WAYS[0])
    unseeded = lm.generate([prompt] * 2, Sampling(8), denoising=options)
    assert all(result.seed is not None for result in unseeded)
    assert unseeded[0].tokens != unseeded[1].tokens
    again = lm.generate([prompt], Sampling(8, seed=unseeded[0].seed), denoising=options)
    assert again[0].tokens == unseeded[0].tokens


def test_stop_strings_and_tokens_end_the_text(lm: LanguageModel, model: Model):
    (prompt,) = prompts(9, (9,), VOCAB)
    plain, _ = generate(model, prompt, NEW, WAYS[0], 3)
    options = denoising_of(WAYS[0])
    stop = plain[10]
    end = plain.index(stop)
    by_text, by_token = lm.generate(
        [prompt] * 2,
        [Sampling(NEW, seed=3, stop=(f"t{stop}",)), Sampling(NEW, seed=3, stop_token_ids=(stop,))],
        denoising=options,
    )
    assert (by_text.tokens[: end + 1], by_text.finish_reason) == (plain[: end + 1], "stop")
    assert (by_token.tokens, by_token.finish_reason) == (plain[: end + 1], "stop")


def test_a_model_file_names_the_defaults(model: Model, tmp_path: Path):
    folder = as_folder(tmp_path, model)  # type: ignore[arg-type]
    published = {
        "max_denoising_steps": 7,
        "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.3},
        "t_max": 0.9,
        "confidence_threshold": None,
    }
    (folder / "generation_config.json").write_text(json.dumps(published))
    assert load(folder, table=TABLE).denoising == CanvasDenoising(7, 0.3, 0.9)


def test_the_text_model_of_a_multimodal_configuration_is_read():
    text = {"model_type": "diffusion_gemma_text", "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
    fields = {"model_type": "diffusion_gemma", "canvas_length": 128, "text_config": text, "vision_config": {}}
    config = config_from_hf(fields)
    assert (config.canvas, config.logit_softcap, config.num_layers) == (Canvas(128), 30.0, 30)
    assert config.global_heads == HeadSizes(4, 512, keys_are_values=True)
    assert config_from_hf(config_to_hf(config)) == config
    with pytest.raises(ValueError, match="tie_word_embeddings=False is not supported"):
        config_from_hf({**fields, "tie_word_embeddings": False})


def test_draws_are_kept_up_to_the_bound():
    entropy = jnp.asarray([[0.5, 0.01, 0.3, 0.02, 0.3], [0.2, 0.0, 0.0, 0.0, 9.0]], jnp.float32)
    kept = np.asarray(kept_draws(entropy, jnp.asarray([0.1, 0.5], jnp.float32)))
    assert kept.tolist() == [[False, True, True, True, False], [True] * 5]


def test_random_tokens_are_a_function_of_seed_position_and_pass():
    rows = row_sampling([Sampling(seed=seed) for seed in (3, 3, 4)], [0, 0, 0])
    positions = jnp.asarray([[2, 3], [3, 4], [2, 3]], jnp.int32)
    found = np.asarray(random_tokens(rows, positions, jnp.asarray([0, 0, 5], jnp.int32), VOCAB))
    expected = [
        [randomness(seed, VOCAB)[1][step, at] for at in places]
        for seed, step, places in ((3, 0, (2, 3)), (3, 0, (3, 4)), (4, 5, (2, 3)))
    ]
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, "expected steps from 1 to 10000, found 0"),
        ({"entropy_bound": 0.0}, "expected an entropy_bound above 0, found 0.0"),
        ({"t_min": 0.8}, r"expected t_min from 0 to below t_max, found \(0.8, 0.8\)"),
        ({"stability_threshold": -1}, "expected a stability_threshold from 0 to 10000, found -1"),
        ({"confidence_threshold": 0.0}, "expected a confidence_threshold above 0, found 0.0"),
    ],
)
def test_wrong_options_are_errors(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        CanvasDenoising(**fields)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(8, temperature=1.0), r"expected no temperature for .* \(t_max and t_min are its temperatures\), found 1.0"),
        (Sampling(8, top_k=3), "expected no top_k for a model that refines canvases, found 3"),
        (Sampling(8, presence_penalty=1.0), "expected no presence_penalty"),
        (Sampling(8, logit_bias=((3, 1.0),)), "expected no logit_bias"),
        (Sampling(8, min_tokens=2), "expected no min_tokens"),
    ],
)
def test_options_that_a_canvas_has_no_meaning_for_are_refused(sampling: Sampling, message: str, lm: LanguageModel):
    with pytest.raises(ValueError, match=message):
        lm.generate([[1, 2]], sampling)


def test_requests_that_need_decoding_token_by_token_are_refused(lm: LanguageModel, tmp_path: Path):
    with pytest.raises(ValueError, match="expected denoising options as CanvasDenoising, found BlockDenoising"):
        lm.generate([[1]], Sampling(8), denoising=BlockDenoising())
    plain = GenerateRequest([1], Sampling(8))
    for request, named in (
        (replace(plain, logprobs=2), "logprobs"),
        (replace(plain, logprobs=1, prompt_logprobs=True), "prompt_logprobs"),
        (replace(plain, lora="a"), "lora"),
    ):
        with pytest.raises(ValueError, match=f"expected no {named}"):
            lm.engine(EngineOptions(TABLE, page_size=16)).check(request)
    engine = lm.engine(EngineOptions(TABLE, page_size=16, constraints=True))

    class AnyText:
        def begin(self) -> ConstraintState:
            raise AssertionError("the engine refuses the request before its text begins")

    with pytest.raises(ValueError, match="expected no constraint, which is not supported for a model that refines canvases"):
        engine.check(GenerateRequest([1], Sampling(8), constraint=AnyText()))
    with pytest.raises(ValueError, match="expected no pooling"):
        lm.embed([[1, 2]])
    with pytest.raises(ValueError, match="expected no drafter where blocks are denoised, found ngram"):
        load(lm.folder or tmp_path, "ngram")
    with pytest.raises(ValueError, match="expected a model that decodes token by token"):
        load(lm.folder or tmp_path, decoding="tokens")
    with pytest.raises(ValueError, match="expected one device for diffusion_gemma_text"):
        load(lm.folder or tmp_path, mesh=make_mesh({"tp": 2}))
