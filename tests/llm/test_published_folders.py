"""Folders in few bits as they are published, from files to tokens: through the CPU kernels, and through XLA."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import save_file

from llm.support import check_same_as_autoregressive, tokens_of
from models.quantised_folders import METHODS, quantise_folder
from models.test_gguf import CONFIGS, make
from tilewright.kernels import native
from tilewright.kernels.linear import cpu
from tilewright.kernels.linear.blocks import FORMS, BlockFormat
from tilewright.kernels.linear.scaled import ScaledMatrix
from tilewright.llm.language_model import Kernels, LanguageModel, load
from tilewright.models.checkpoint import load_decoder
from tilewright.models.decoder import DecoderParams
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable

TABLE = ShapeTable(batches=(4,), capacities=(64,), chunks=(16,))
PROMPTS = ["he he he he", "abcabcabc", "x", "hello hello"]
GREEDY = Sampling(12)
IN_BLOCKS: dict[str, BlockFormat] = {
    "gptq": "q4_z",
    "awq": "q4_z",
    "packed": "q4_0",
    "int8": "q8_0",
    "mxfp4": "q5_0",
}
"""The blocks in which the CPU kernels read a method's weights as they are; they read FP8 in none."""
needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")


def folders(path: Path, name: str) -> tuple[Path, Path]:
    """A folder in few bits, and one of the same weights in float32."""
    (_, folder), (_, plain) = (make(path / each, CONFIGS["llama"], Kind.F32) for each in ("few", "plain"))
    save_file(quantise_folder(folder, name), plain / "model.safetensors", {"format": "pt"})
    return folder, plain


def drafted(folder: Path, weights: Any, kernels: Kernels) -> tuple[LanguageModel, list[list[int]]]:
    """The model of a folder, and its greedy tokens, which are the same with n-gram drafts and without."""
    lm = load(folder, "ngram", block_size=4, dtype="float32", weights=weights, kernels=kernels, table=TABLE)
    want = tokens_of(lm, PROMPTS, GREEDY, speculative=False, batch=4)
    check_same_as_autoregressive(lm, PROMPTS, GREEDY, 4, want)
    return lm, want


def quick(name: str) -> list[Any]:
    """Every method, all but one of them in slow runs alone."""
    return [pytest.param(each, marks=[] if each == name else pytest.mark.slow) for each in METHODS]


@needs_native
@pytest.mark.parametrize("name", quick("gptq"))
def test_the_cpu_kernels_read_the_files_bits(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture):
    folder, plain = folders(tmp_path, name)
    lm, _ = drafted(folder, "int4", "auto")
    if name not in IN_BLOCKS:
        assert "quantising again" in caplog.text
        return
    assert "dequantising" not in caplog.text
    _, wanted = load_decoder(plain, jnp.float32)
    for got, layer in zip(lm.model.models.target.layers, wanted.layers, strict=True):
        joined = np.concatenate(layer.qkv.parts, axis=1)
        for packed, matrix in ((got.o, layer.o), (got.down, layer.down), (got.qkv, joined)):
            assert packed.panels.shape[2] == FORMS[IN_BLOCKS[name]].group_bytes
            np.testing.assert_array_equal(cpu.unpack(packed)[: len(matrix)], matrix)


def dequantised(params: DecoderParams) -> DecoderParams:
    """The same weights in float32."""

    def wide(leaf: Any) -> Any:
        return leaf.dequantised(jnp.float32)[:, : leaf.width or None] if isinstance(leaf, ScaledMatrix) else leaf

    return jax.tree.map(wide, params, is_leaf=lambda leaf: isinstance(leaf, ScaledMatrix))


@pytest.mark.parametrize("name", quick("fp8 in blocks"))
def test_xla_gives_the_tokens_of_the_dequantised_model(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture):
    """Matrices of layers are the file's, the head and the embedding in 8 bits; activations are as they are."""
    folder, plain = folders(tmp_path, name)
    lm, tokens = drafted(folder, "fp8" if name.startswith("fp8") else "int4", "xla")
    assert "dequantising" not in caplog.text
    held = dequantised(lm.model.models.target)
    _, wanted = load_decoder(plain, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, held.layers, wanted.layers)
    other = LanguageModel(lm.target, held, lm.tokenizer, kernels="xla", table=TABLE)
    assert tokens_of(other, PROMPTS, GREEDY, speculative=False, batch=4) == tokens
