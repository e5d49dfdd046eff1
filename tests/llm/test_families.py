"""Every family of targets decodes as transformers does (`tests/golden/decoders`), by every path."""

from pathlib import Path
from shutil import copyfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llm.support import check_same_as_autoregressive, tokens_of
from models.test_decoder import GOLDENS
from products import cases
from reference.dflash_numpy import as_folders, random_pair
from tilewright.kernels.select import Kernels, operations
from tilewright.llm.language_model import load
from tilewright.models import dflash
from tilewright.models.checkpoint import decoder_config, save_params
from tilewright.models.decoder import DecoderConfig
from tilewright.models.params import initialise
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable

NAMES = sorted(path.name for path in GOLDENS.iterdir())
NEW = 64
PROMPTS = (5, 23)
"""As in the script that made the goldens. The second one goes into the caches in pieces."""
TABLE = ShapeTable(batches=(2,), capacities=(128,), chunks=(16,))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_folders(tmp_path_factory.mktemp("tokenizer"), random_pair(0))[0] / "tokenizer.json"


def copied(folder: Path, name: str, tokenizer: Path) -> Path:
    """A golden checkpoint with a tokenizer."""
    folder.mkdir()
    for file in (tokenizer, *(GOLDENS / name).glob("*.json"), *(GOLDENS / name).glob("*.safetensors")):
        copyfile(file, folder / file.name)
    return folder


def random_drafter(folder: Path, target: DecoderConfig) -> Path:
    """A DFlash drafter for a target, with the target's rotation."""
    config = dflash.DFlashConfig(
        **{**target.sizes(), "num_layers": 1},
        block_size=4,
        mask_token_id=3,
        target_layer_ids=(0, target.num_layers - 1),
        num_target_layers=target.num_layers,
    )
    specs = dflash.declare(config)
    save_params(folder, dflash.config_to_hf(config), specs, initialise(specs, jax.random.key(0)), jnp.float32)
    return folder


def golden_tokens(name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of different lengths, and what transformers puts after them."""
    with np.load(GOLDENS / name / "outputs.npz") as outputs:
        inputs = [row[:length].tolist() for row, length in zip(outputs["tokens"], PROMPTS, strict=True)]
        return inputs, outputs["greedy"].tolist()


QUICK = [("gemma4-tied", "auto", "ngram"), ("phi3-partial", "auto", "ngram"), ("smollm3-tied", "auto", "ngram")]
"""Families in which the kernels do something that no other test has them do; the others in the slow tests."""


@pytest.mark.parametrize("name, kernels, drafter", list(cases(QUICK, NAMES, ("auto", "xla"), ("ngram", "dflash"))))
def test_greedy_tokens_are_those_of_transformers(name: str, kernels: Kernels, drafter: str, tokenizer: Path, tmp_path: Path):
    """Without drafts, and with those of n-grams or of a DFlash drafter of random weights."""
    folder = copied(tmp_path / "target", name, tokenizer)
    source = "ngram" if drafter == "ngram" else random_drafter(tmp_path / "drafter", decoder_config(folder))
    lm = load(folder, source, table=TABLE, kernels=kernels, block_size=4)
    inputs, want = golden_tokens(name)
    sampling = Sampling(NEW, ignore_eos=True)
    check_same_as_autoregressive(lm, inputs, sampling, 2, want)
    assert tokens_of(lm, inputs, sampling, speculative=False, batch=2) == want


def test_8_bit_weights_of_a_family_with_biases(tokenizer: Path, tmp_path: Path):
    if not operations().prepares:
        pytest.skip("no CPU kernels here")
    lm = load(copied(tmp_path / "target", "qwen2-untied", tokenizer), "ngram", table=TABLE, weights="int8", block_size=4)
    inputs = golden_tokens("qwen2-untied")[0]
    sampling = Sampling(12, ignore_eos=True)
    check_same_as_autoregressive(lm, inputs, sampling, 2, tokens_of(lm, inputs, sampling, False, 2))
