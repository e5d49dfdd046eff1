"""`load` finds out a model's kind, and refuses options of the other."""

from pathlib import Path
from typing import Any

import pytest

import tilewright as tw
from diffusion.support import EOS, MODELS, asking
from reference.diffusion_cases import MASK
from reference.diffusion_folder import write_model
from tilewright.diffusion.programs import DiffusionTable

TABLE = DiffusionTable(batches=(2,), positions=(64,), responses=(16,), blocks=(16,), buckets=(12,))
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("diffusion"), MODELS["tiny"], MASK, EOS["tiny"])


def test_a_diffusion_model_generates_and_answers_a_conversation(folder: Path):
    model = tw.load(folder, table=TABLE)
    assert isinstance(model, tw.DiffusionModel)
    (result,) = model.generate("t4 t7", asking())
    assert (len(result.tokens), result.prompt_tokens, result.finish_reason) == (12, 2, "length")
    with pytest.raises(ValueError, match="expected a model with a chat template"):
        model.chat([{"role": "user", "content": "t4 t7"}])
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    model = tw.load(folder, table=TABLE)
    assert model.chat([{"role": "user", "content": "t4 t7"}], asking()).tokens == result.tokens


@pytest.mark.parametrize(
    ("drafter", "options", "said"),
    [("ngram", {}, "drafter"), (None, {"kv_dtype": "int8"}, "kv_dtype"), (None, {"lora": {}}, "lora")],
)
def test_an_option_of_the_other_kind_is_refused(folder: Path, drafter: str | None, options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=f"expected no {said}, an option of autoregressive models"):
        tw.load(folder, drafter, **options)


def test_an_option_that_no_kind_has_is_an_error(folder: Path):
    for model in (folder, "demo"):
        with pytest.raises(TypeError, match="nope"):
            tw.load(model, nope=1)


def test_a_model_of_tokens_is_one():
    assert isinstance(tw.load("demo", "ngram"), tw.LanguageModel)
