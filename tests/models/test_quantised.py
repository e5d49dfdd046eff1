"""Quantised matrices of published layouts: what other libraries stored is what they read, and blocks hold the same numbers."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from models.quantised_folders import METHODS, quantise_folder
from models.test_gguf import CONFIGS, SIZES, make
from tilewright.kernels import native
from tilewright.kernels.linear import blocks
from tilewright.kernels.linear.scaled import ScaledMatrix
from tilewright.kernels.select import operations
from tilewright.models.checkpoint import load_decoder, read_config, save_params
from tilewright.models.decoder import DecoderConfig, config_to_hf, declare
from tilewright.models.delta import DeltaSizes
from tilewright.models.mxfp4 import read_mxfp4
from tilewright.models.params import initialise
from tilewright.models.quantised import EightBits, Scaled, quantised_layout
from tilewright.models.stored import SafetensorsFile, gathered, in_order, read_headers

GOLDENS = Path(__file__).parent.parent / "golden" / "quantised"
NAMES = sorted(path.stem for path in GOLDENS.glob("*.safetensors"))
KEPT = {
    "gptq-symmetric": "q4_0",
    "gptq-zeros": "q4_z",
    "awq": "q4_z",
    "pack-group": "q4_0",
    "pack-zeros": "q4_z",
    "pack-channel": "q4_0",
    "int-channel": "q8_0",
    "mxfp4": "q5_0",
}
"""The format of blocks that holds a golden's numbers; of the others none does."""
needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")


def golden(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The configuration of a golden, and its tensors."""
    path = GOLDENS / f"{name}.safetensors"
    with safe_open(path, "numpy") as file:
        config = json.loads(file.metadata()["quantization_config"])
    with SafetensorsFile(path) as file:
        return config, {tensor: file.get_tensor(tensor) for tensor in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("name", NAMES)
def test_what_other_libraries_stored_is_what_they_read(name: str):
    config, tensors = golden(name)
    wanted = tensors.pop("wanted")
    layout = quantised_layout(config)
    assert layout is not None
    read = layout.read(tensors)
    np.testing.assert_array_equal(read.weights(), wanted)
    kept = read.blocks()
    assert (None if kept is None else kept.kind) == KEPT.get(name)
    if kept is not None:
        np.testing.assert_array_equal(blocks.dequantise(kept), wanted.T)


def test_zero_points_of_both_formats_of_gptq():
    """The first one stores a zero point less one, eight of them in one word, from which a borrow may go on."""
    config, tensors = golden("gptq-zeros")
    first = quantised_layout(config)
    second = quantised_layout({**config, "checkpoint_format": "gptq_v2"})
    assert first is not None
    assert second is not None
    later = {**tensors, "qzeros": (tensors["qzeros"].view(np.uint32) + np.uint32(0x11111111)).view(np.int32)}
    np.testing.assert_array_equal(first.read(tensors).weights(), second.read(later).weights())


@given(st.integers(0, 2**31 - 1), st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_floats_of_8_bits_in_blocks(seed: int, block: tuple[int, int]):
    """DeepSeek's and Qwen's checkpoints: the last blocks may be smaller."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 256, (37, 53), np.uint8).view(ml_dtypes.float8_e4m3fn)
    values = np.where(np.isnan(values.astype(np.float32)), ml_dtypes.float8_e4m3fn(1), values)
    scales = rng.random((-(-37 // block[0]), -(-53 // block[1])), np.float32)
    layout = quantised_layout({"quant_method": "fp8", "weight_block_size": list(block), "activation_scheme": "dynamic"})
    assert layout is not None
    found = layout.read({"weight": values, "weight_scale_inv": scales}).weights()
    for o, i in ((0, 0), (36, 52), (block[0] % 37, block[1] % 53)):
        assert found[o, i] == np.float32(values[o, i]) * scales[o // block[0], i // block[1]]
    rows, columns = (np.arange(size) // each for size, each in zip((37, 53), block, strict=True))
    np.testing.assert_array_equal(found, values.astype(np.float32) * scales[np.ix_(rows, columns)])


@given(st.integers(0, 2**31 - 1))
def test_mxfp4_is_what_its_specification_says(seed: int):
    """gpt-oss's tensors: sign, exponent with a bias of 1, one bit of fraction, subnormal at exponent 0; in float64."""
    rng = np.random.default_rng(seed)
    pairs = rng.integers(0, 256, (2, 5, 3, 16), np.uint8)
    scales = rng.integers(0, 255, (2, 5, 3), np.uint8)
    found = read_mxfp4(pairs, scales)
    assert (found.shape, found.dtype) == ((2, 5, 96), np.float32)
    floats = np.empty((2, 5, 3, 32), np.uint8)
    floats[..., 0::2] = pairs & 15
    floats[..., 1::2] = pairs >> 4
    exponent = (floats >> 1 & 3).astype(np.float64)
    fraction = (floats & 1).astype(np.float64)
    size = np.where(exponent == 0, fraction / 2, (1 + fraction / 2) * 2.0 ** (exponent - 1))
    wanted = np.where(floats & 8, -size, size) * 2.0 ** (scales.astype(np.float64)[..., None] - 127)
    with np.errstate(over="ignore", under="ignore"):
        np.testing.assert_array_equal(found, wanted.reshape(2, 5, 96).astype(np.float32))


def test_mxfp4_refuses_what_is_no_such_tensor():
    with pytest.raises(
        ValueError, match=r"a\.b: expected uint8 \[\.\.\., N, 16\] with scales uint8 \[\.\.\., N\], found uint8\[3"
    ):
        read_mxfp4(np.zeros((3, 8), np.uint8), np.zeros(3, np.uint8), "a.b")
    with pytest.raises(ValueError, match=r"a\.b: expected finite scales, found NaN"):
        read_mxfp4(np.zeros((1, 16), np.uint8), np.full(1, 255, np.uint8), "a.b")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method='bitsandbytes' of the linear layers is not supported (only gptq and awq",
        ),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "gptq with bits=8 is not supported (only bits=4)"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 0},
            "gptq with group_size=0 is not supported (only a number of inputs",
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"-:x": {}}}, "gptq with dynamic={'-:x': {}}"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "awq with version='gemv'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 with fmt='e5m2' is not supported (only fmt='e4m3')"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "compressed-tensors with 0 groups of layers"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"a": {}}},
            "compressed-tensors of format 'nvfp4-pack-quantized' is not supported",
        ),
    ],
)
def test_other_methods_are_refused_by_name(config: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=r"^quantization_config: ") as refused:
        quantised_layout(config)
    assert said in str(refused.value)


@needs_native
def test_bits_are_kept_where_outputs_stand_in_another_order(tmp_path: Path):
    """Channels of linear attention: all queries before all keys and values in the file, a head's after another's in memory."""
    sizes = DeltaSizes(8, 8, 16, 16, 4)
    config = DecoderConfig(family="qwen3_5_text", delta=sizes, delta_layers=(0,), partial_rotary_factor=0.5, **SIZES)
    folder = tmp_path / "quantised"
    other = tmp_path / "plain"
    for one in (folder, other):
        save_params(one, config_to_hf(config), declare(config), initialise(declare(config), jax.random.key(0)), "float32")
    after = quantise_folder(folder, "awq")
    save_file(after, other / "model.safetensors", {"format": "pt"})
    _, wanted = load_decoder(other, jnp.float32)
    _, kept = load_decoder(folder, jnp.float32, ops=operations(weights="int4"))
    qkv = kept.layers[0].delta.qkv
    read = blocks.dequantise(blocks.blocks_of(np.asarray(qkv.panels), qkv.outputs))
    np.testing.assert_array_equal(read[:64], wanted.layers[0].delta.qkv)
    stored = after["model.layers.0.linear_attn.in_proj_qkv.weight"].T
    np.testing.assert_array_equal(read[:64, 48:64], stored[:, 16:32])


@needs_native
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_bits_of_linear_attention_are_kept_in_another_order(tmp_path: Path, family: str):
    file, folder = make(tmp_path, CONFIGS[family], Kind.Q4_1)
    (_, kept), (_, want) = load_decoder(file, jnp.float32, ops=operations(weights="int4")), load_decoder(folder, jnp.float32)
    for name in ("qkv", "gate"):
        matrix = getattr(kept.layers[0].delta, name)
        read = blocks.dequantise(blocks.blocks_of(np.asarray(matrix.panels), matrix.outputs))
        np.testing.assert_array_equal(read[: SIZES["hidden_size"]], getattr(want.layers[0].delta, name))


def test_floats_of_8_bits_in_another_order():
    rng = np.random.default_rng(0)
    order = np.asarray([3, 0, 2])
    values = rng.standard_normal((4, 8)).astype(ml_dtypes.float8_e4m3fn)
    whole = Scaled(values, rng.random((2, 2)).astype(np.float32), (2, 4))
    kept = whole.fp8()
    assert kept is not None
    found = in_order(kept, order)
    assert isinstance(found, ScaledMatrix)
    np.testing.assert_array_equal(found.dequantised(jnp.float32), whole.weights()[order].T)


@pytest.mark.parametrize("name", METHODS)
def test_a_checkpoint_is_the_model_of_its_dequantised_weights(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture):
    _, folder = make(tmp_path, CONFIGS["llama"], Kind.F32)
    _, other = make(tmp_path / "plain", CONFIGS["llama"], Kind.F32)
    save_file(quantise_folder(folder, name), other / "model.safetensors", {"format": "pt"})
    ops = operations(kernels="xla")
    (_, found), (_, wanted) = (load_decoder(one, jnp.float32, ops=ops) for one in (folder, other))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    weights = "fp8" if "fp8" in name else "int4"
    assert "dequantising to float32: " in caplog.text
    assert f"matrices. Use --weights {weights} to keep them quantised." in caplog.text


def test_biases_of_zeros_are_passed_over_and_others_are_not(tmp_path: Path):
    """GPTQ's writers give every layer a bias, of zeros where the model has none."""
    _, folder = make(tmp_path, CONFIGS["llama"], Kind.F32)
    quantise_folder(folder, "awq")
    _, wanted = load_decoder(folder, jnp.float32)
    shard = folder / "model-00001-of-00002.safetensors"
    name = "model.layers.0.self_attn.q_proj.bias"
    tensors = load_file(shard)
    save_file({**tensors, name: np.zeros(7, np.float16)}, shard)
    _, found = load_decoder(folder, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    save_file({**tensors, name: np.full(7, 1e-3, np.float16)}, shard)
    with pytest.raises(ValueError, match=rf"1 unknown: {name}"):
        load_decoder(folder, jnp.float32)


def test_autogptqs_file_says_what_config_json_does_not(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 128, "desc_act": false, "sym": true}')
    found = read_config(tmp_path)["quantization_config"]
    assert found == {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    assert quantised_layout(found) is not None
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    assert read_config(tmp_path)["quantization_config"] == {"quant_method": "awq"}


def test_a_layer_that_lacks_tensors_or_has_others_is_named(tmp_path: Path):
    layout = quantised_layout({"quant_method": "awq", "bits": 4, "group_size": 32})
    assert layout is not None
    words = np.zeros((32, 2), np.int32)
    scales = np.zeros((1, 16), np.float16)
    save_file(
        {
            "a.qweight": words,
            "a.qzeros": words[:1],
            "b.qweight": words,
            "b.qzeros": words,
            "b.scales": scales,
            "c.qweight": words.astype(np.float32),
            "c.qzeros": words,
            "c.scales": scales,
        },
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ValueError, match="tensors that do not match AWQ") as refused:
        gathered(read_headers([tmp_path / "model.safetensors"]), layout)
    for said in ("a: it lacks scales", "b: qzeros (expected [1, 2], found [32, 2])", "c: qweight (expected I32, found F32)"):
        assert said in str(refused.value)


def test_layers_that_were_left_as_they_are_stay_so(tmp_path: Path):
    save_file(
        {"a.weight": np.ones((2, 3), np.float32), "a.input_scale": np.ones(1, np.float32)}, tmp_path / "model.safetensors"
    )
    (found,) = gathered(read_headers([tmp_path / "model.safetensors"]), EightBits("FP8", "weight_scale", (0, 0)))
    assert (found.name, found.layout, found.shape) == ("a.weight", None, (2, 3))
