"""Loading and prompting a diffusion language model, what comes of it, and what is said of what does not fit."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from diffusion.support import EOS, MODELS, asking, build, needs_native
from reference.diffusion_cases import MASK
from reference.diffusion_folder import write_model
from tilewright.diffusion.options import Denoising
from tilewright.diffusion.programs import DiffusionTable
from tilewright.llm.diffusion_model import DiffusionModel, load

TABLE = DiffusionTable((1, 2), (32,), (16,), (16,), ())


@pytest.fixture(scope="module")
def model() -> DiffusionModel:
    return build("tiny", "xla", TABLE)


def test_a_prompt_is_text_or_tokens(model: DiffusionModel):
    assert model.encode("t3 t17 t8") == model.encode([3, 17, 8]) == [3, 17, 8]
    asked = asking()
    text, tokens, listed = (model.generate(prompt, asked) for prompt in ("t3 t17", [[3, 17]], ["t3 t17"]))
    assert text.results == tokens.results == listed.results == model.generate(["t3 t17"], [asked]).results


def test_a_result_is_what_it_says(model: DiffusionModel):
    (result,) = model.generate("t3 t17", asking(threshold=0.3))
    assert len(result.tokens) == 12
    assert result.text == "".join(f" t{token}" for token in result.tokens)
    assert (result.finish_reason, result.seed) == ("length", 7)
    assert sum(result.committed) == 12
    assert result.steps == len(result.committed) <= 12
    assert min(result.committed) >= 1


def test_an_unfinished_result_shows_what_is_there(model: DiffusionModel):
    session = model.start("t3 t17", asking())
    (before,) = session.results()
    assert (before.tokens, before.text, before.steps) == ([MASK] * 12, "", 0)
    session.advance(3)
    (some,) = session.results()
    assert (some.steps, some.committed, some.tokens.count(MASK)) == (3, [1, 1, 1], 9)
    assert some.text == "".join(f" t{token}" for token in some.tokens if token != MASK)


def test_rows_that_draw_get_seeds_that_bring_their_results_back(model: DiffusionModel):
    drawn = model.generate(["t3", "t3"], asking(temperature=1.5, seed=None))
    assert drawn[0].seed != drawn[1].seed
    again = model.generate(["t3", "t3"], [asking(temperature=1.5, seed=result.seed) for result in drawn])
    assert [result.tokens for result in again] == [result.tokens for result in drawn]
    assert model.generate("t3", asking(seed=None))[0].seed is None


@needs_native
@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, pytest.param({"weights": "int8"}, marks=pytest.mark.slow)], ids=str
)
def test_models_in_few_bits_denoise(settings: dict[str, Any]):
    made = build("tiny", table=TABLE, **settings)
    for result in made.generate(["t3 t17", "t5"], asking(mode="sparse")):
        assert MASK not in result.tokens
        assert len(result.tokens) == 12


BAD: list[tuple[Any, Any, str]] = [
    ("", asking(), "expected a prompt of at least one token, found an empty one"),
    ([[]], asking(), "expected a prompt of at least one token, found an empty one"),
    ([[1], []], asking(), "expected a prompt of at least one token, found an empty one"),
    ([[3, 40]], asking(), "expected token ids below the vocabulary size 40, found 40"),
    ([[3, -1]], asking(), "expected token ids below the vocabulary size 40, found -1"),
    ([[3, MASK]], asking(), f"expected a prompt without the mask token {MASK}, found one"),
    (f"t3 t{MASK}", asking(), f"expected a prompt without the mask token {MASK}, found one"),
    ([], asking(), "expected prompts and a request for each, found 0 and 0"),
    ([[1], [2]], [asking()], "expected prompts and a request for each, found 2 and 1"),
    ([[1]], [], "expected prompts and a request for each, found 1 and 0"),
    ([[1] * 21], asking(), "a prompt of 21 tokens leaves room for 11 in the context of 32; new_tokens is 12"),
    ([[1] * 40], asking(), "a prompt of 40 tokens leaves room for 0 in the context of 32; new_tokens is 12"),
    ([[1]], asking(mode="dual", first_alone=True), "expected no first_alone, since the model's logits predict their own"),
    ([[1]], Denoising(20), "expected responses of at most 16, the largest declared, found 20"),
]


@pytest.mark.parametrize(("prompts", "requests", "said"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_denoised_is_said(model: DiffusionModel, prompts: Any, requests: Any, said: str):
    for call in (model.start, model.generate):
        with pytest.raises(ValueError, match=re.escape(said)):
            call(prompts, requests)


def test_switches_of_tokens_that_a_model_does_not_name_are_said(tmp_path: Path):
    made = load(write_model(tmp_path, MODELS["tiny"], MASK, EOS["tiny"], eos_token_id=None), kernels="xla", table=TABLE)
    for name, token in (("logits_eos_inf", "end-of-sequence"), ("confidence_eos_eot_inf", "end-of-turn")):
        with pytest.raises(ValueError, match=f"expected no {name}, since the model names no {token} token"):
            made.start([[1]], asking(**{name: True}))


def test_more_rows_than_the_table_has_wait_for_one_another(model: DiffusionModel):
    prompts = [[1], [2], [3]]
    together = [result.tokens for result in model.generate(prompts, asking())]
    assert together == [model.generate([prompt], asking())[0].tokens for prompt in prompts]


def test_a_prompt_may_fill_the_context(model: DiffusionModel):
    assert model.context == 32
    (result,) = model.generate([[1] * 20], asking())
    assert MASK not in result.tokens


def test_the_context_is_the_models_where_that_is_smaller(tmp_path: Path):
    folder = write_model(tmp_path, MODELS["tiny"], MASK, EOS["tiny"])
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"max_sequence_length": 20}))
    made = load(folder, kernels="xla", table=TABLE)
    assert made.context == 20
    with pytest.raises(ValueError, match="a prompt of 9 tokens leaves room for 11 in the context of 20"):
        made.start([[1] * 9], asking())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "float16"}, "expected dtype to be one of auto, float32, bfloat16, found 'float16'"),
    ],
)
def test_settings_that_are_none_are_said_before_anything_is_read(settings: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=re.escape(said)):
        load("/no/such/folder", **settings)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mask_token_id": 40}, r"mask_token_id \[40\] lies outside the vocabulary of 40"),
        ({"mask_token_id": None}, "mask_token_id must be a token id, found None"),
        ({"eos_token_id": 99}, r"eos_token_id \[99\] lies outside the vocabulary of 40"),
        ({"model_type": "qwen3"}, "expected a diffusion language model"),
    ],
)
def test_a_configuration_that_does_not_fit_is_said(tmp_path: Path, change: dict[str, Any], said: str):
    folder = write_model(tmp_path, MODELS["tiny"], MASK, EOS["tiny"])
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | change))
    with pytest.raises(ValueError, match=said):
        load(folder)


def test_a_folder_without_files_is_said(tmp_path: Path):
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        load(tmp_path)
