"""Shapes of published models: the numbers of parameters that their makers give, and configurations from files."""

import json
from pathlib import Path

import pytest

from tilewright.models import decoder
from tilewright.models.params import count
from tilewright.models.published_configs import MODELS, model_config

BILLIONS = {
    "smollm2-135m": 0.1345,
    "llama3-8b": 8.03,
    "llama3-70b": 70.55,
    "llama3.2-1b": 1.236,
    "qwen3-0.6b": 0.596,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.76,
}
"""huggingface.co's count of the safetensors of each."""


@pytest.mark.parametrize("name", MODELS)
def test_they_have_the_parameters_that_were_published(name: str):
    assert count(decoder.declare(MODELS[name])) / 1e9 == pytest.approx(BILLIONS[name], rel=2e-3)


def test_a_folder_or_its_file_is_read(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(decoder.config_to_hf(MODELS["qwen3-0.6b"])))
    assert model_config(str(tmp_path)) == model_config(str(tmp_path / "config.json"))
    assert model_config(str(tmp_path)).num_layers == MODELS["qwen3-0.6b"].num_layers


@pytest.mark.parametrize("text, message", [("{", "is not JSON"), ("[]", "expected a JSON object"), ("{}", "model_type")])
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        model_config(str(tmp_path))
    with pytest.raises(ValueError, match="expected a model of smollm2-135m, llama3-8b"):
        model_config(str(tmp_path / "nothing"))
