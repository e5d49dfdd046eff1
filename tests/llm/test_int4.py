"""4-bit weights: a GGUF file's bits are those that products read, speculative decoding stays exact, and a step reads less."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from llm.support import check_same_as_autoregressive, tokens_of
from models.test_gguf import CONFIGS, make
from tilewright.kernels import native, select
from tilewright.kernels.linear import cpu
from tilewright.kernels.linear.blocks import FORMS, BlockFormat, PackedTable, QuantisedMatrix
from tilewright.kernels.linear.cpu import PackedMatrix
from tilewright.llm.language_model import LanguageModel, load
from tilewright.models import stored
from tilewright.models.checkpoint import load_decoder
from tilewright.runtime.memory import held_bytes, step_bytes
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable

needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
BLOCK_FORMATS: dict[Kind, BlockFormat] = {
    Kind.Q4_0: "q4_0",
    Kind.Q4_1: "q4_1",
    Kind.Q5_0: "q5_0",
    Kind.Q8_0: "q8_0",
}
KINDS = list(BLOCK_FORMATS)
NEW = 16


def leaves(params: Any) -> list[Any]:
    return jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, PackedMatrix))


def formats(params: Any) -> set[int]:
    return {leaf.panels.shape[2] for leaf in leaves(params) if isinstance(leaf, PackedMatrix)}


@needs_native
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_files_bits_are_kept_rows_permuted_and_joined(tmp_path: Path, family: str, kind: Kind):
    """Every matrix, unpacked, is what llama.cpp's library makes of the file's, in the order of rows that rotation wants."""
    file, _ = make(tmp_path, CONFIGS[family], kind)
    _, want = load_decoder(file, jnp.float32)
    found = load(file, dtype="float32").model.models.target
    assert formats(found) == {FORMS[BLOCK_FORMATS[kind]].group_bytes}
    for got, layer in zip(found.layers, want.layers, strict=True):
        for one, matrix in ((got.o, layer.o), (got.down, layer.down)):
            np.testing.assert_array_equal(cpu.unpack(one)[: matrix.shape[0]], matrix)
        joined = np.concatenate(layer.qkv.parts, axis=1)
        np.testing.assert_array_equal(cpu.unpack(got.qkv)[: len(joined)], joined)
        assert got.gate_up.gated
    head = want.embed.T if want.head is None else want.head
    np.testing.assert_array_equal(cpu.unpack(found.head)[: head.shape[0]], head)
    assert isinstance(found.embed, PackedTable) == (want.head is None)
    if want.head is None:
        assert found.embed.panels is found.head.panels
        rows = select.operations().gather_rows(found.embed, jnp.arange(len(want.embed)))
        np.testing.assert_array_equal(rows, want.embed)
        assert held_bytes(found) == step_bytes(found)


@needs_native
def test_by_default_matrices_are_as_in_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A quantised file keeps its bits unless it is to be dequantised; other files keep their dtype."""
    file, folder = make(tmp_path, CONFIGS["llama"], Kind.Q4_1)
    caplog.set_level("INFO", "tilewright.models")
    kept = load(file)
    assert kept.quantised
    assert re.search(r"keeping quantised: \d+ Q4_1 matrices", caplog.text)
    assert re.search(r"weights in the file's formats, \d\.\d\d bits a weight \(bfloat16\), no drafter", repr(kept))
    assert "dequantising" not in caplog.text
    dequantised = load(file, weights="dequantised")
    assert not dequantised.quantised
    assert "dequantising to bfloat16: " in caplog.text
    assert "weights in bfloat16, no drafter" in repr(dequantised)
    assert not load(folder).quantised
    _, want = load_decoder(file, jnp.bfloat16)
    np.testing.assert_array_equal(cpu.unpack(dequantised.model.models.target.layers[0].o), want.layers[0].o)


@needs_native
def test_a_format_that_no_matmul_reads_is_dequantised_beside_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Joined matrices are then multiplied one by one, where only some of them are in blocks."""
    file, _ = make(tmp_path, CONFIGS["llama"], Kind.Q4_1)
    read = stored.read_blocks

    def without_keys(files: Any, tensor: stored.StoredTensor, rows: slice = slice(None)) -> QuantisedMatrix | None:
        return None if "k_proj" in tensor.name else read(files, tensor, rows)

    monkeypatch.setattr(stored, "read_blocks", without_keys)
    lm = load(file, dtype="float32", table=ShapeTable(batches=(1,), capacities=(64,), chunks=(16,)))
    assert re.search(r"dequantising to float32, because .*: \d Q4_1 matrices. Use --weights int8 or int4", caplog.text)
    _, want = load_decoder(file, jnp.float32)
    q, k, v = lm.model.models.target.layers[0].qkv.parts
    assert [part.in_blocks for part in (q, k, v)] == [True, False, True]
    for got, matrix in zip((q, k, v), want.layers[0].qkv.parts, strict=True):
        np.testing.assert_array_equal(cpu.unpack(got)[: len(matrix)], matrix)
    assert len(tokens_of(lm, ["hello"], Sampling(4), speculative=False, batch=1)[0]) == 4


@needs_native
def test_other_checkpoints_get_layers_in_4_bits_and_a_head_in_8(tmp_path: Path):
    _, folder = make(tmp_path, CONFIGS["qwen3"])
    found = load(folder, dtype="float32", weights="int4").model.models.target
    assert formats(found.layers) == {FORMS["q4_1"].group_bytes}
    assert formats(found.head) == {FORMS["q8_0"].group_bytes}
    mixed, _ = make(tmp_path, CONFIGS["qwen3"], Kind.F16)
    assert formats(load(mixed, dtype="float32", weights="int4").model.models.target.layers) == {FORMS["q4_1"].group_bytes}


@needs_native
def test_a_step_reads_twenty_of_34_bytes_that_8_bits_take(tmp_path: Path):
    """For 32 weights 16 bytes of integers, a scale and a minimum in half precision; 8 bits have 32 and a scale."""
    file, _ = make(tmp_path, CONFIGS["llama"], Kind.Q4_1)
    small, eight = (load(file, dtype="float32", weights=weights).model.models.target for weights in ("int4", "int8"))
    packed = [[leaf.panels for leaf in leaves(p) if isinstance(leaf, PackedMatrix)] for p in (small, eight)]
    four_bits, eight_bits = (sum(panels.nbytes for panels in model) for model in packed)
    assert 34 * four_bits == 20 * eight_bits
    assert 0.5 < step_bytes(small) / step_bytes(eight) < 0.65
    others = sum(leaf.nbytes for leaf in leaves(small) if not isinstance(leaf, PackedMatrix))
    assert step_bytes(small) == four_bits + others - small.embed.nbytes


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    """Random models with an n-gram drafter, by the format of their file."""
    made = {}
    for kind in KINDS:
        file, _ = make(tmp_path_factory.mktemp(kind.name), CONFIGS["qwen3"], kind)
        table = ShapeTable(capacities=(128,), chunks=(16,))
        made[kind.name] = load(file, "ngram", block_size=6, dtype="bfloat16", table=table)
    return made


@needs_native
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_speculative_is_plain_decoding(tiny: dict[str, LanguageModel], kind: Kind):
    prompts = ["he he he he he", "hello hello hello", "abcabcabcabc", "x"]
    want = tokens_of(tiny[kind.name], prompts, Sampling(NEW), speculative=False, batch=4)
    for batch in (1, 4):
        check_same_as_autoregressive(tiny[kind.name], prompts, Sampling(NEW), batch, want)
