"""Writing and reading checkpoints, and what is said of those that do not fit."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from rich.console import Console
from safetensors.numpy import load_file, save_file

import tilewright.models.checkpoint
from tilewright.models.checkpoint import decoder_config, load_decoder, load_params, read_config, save_params
from tilewright.models.decoder import DecoderConfig, DecoderParams, config_to_hf, declare
from tilewright.models.layers import Llama3Scaling
from tilewright.models.params import initialise, spec_leaves

SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "eos_token_ids": (3,),
}
QWEN = DecoderConfig(family="qwen3", tie_word_embeddings=True, **SIZES)
LLAMA = DecoderConfig(family="llama", rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 32), **SIZES)
Tensors = dict[str, np.ndarray]


def make(folder: Path, config: DecoderConfig, dtype: str = "float32") -> DecoderParams:
    """Writes a model with random parameters and returns them."""
    params = initialise(declare(config), jax.random.key(0), jnp.dtype(dtype))
    save_params(folder, config_to_hf(config), declare(config), params, dtype)
    return params


def tensors_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, change: Tensors, drop: tuple[str, ...] = ()) -> None:
    kept = {name: value for name, value in tensors_of(folder).items() if name not in drop}
    save_file(kept | change, folder / "model.safetensors")


def assert_equal(got: object, want: object) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("base", [QWEN, LLAMA], ids=["qwen3", "llama"])
def test_round_trip(tmp_path: Path, base: DecoderConfig, tied: bool, dtype: str):
    config = DecoderConfig(**{**vars(base), "tie_word_embeddings": tied})
    params = make(tmp_path / "new" / "folder", config, dtype)
    got_config, got = load_decoder(tmp_path / "new" / "folder", jnp.dtype(dtype))
    assert got_config == config
    assert_equal(got, params)
    assert (got.head is None) == tied
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["config.json", "model.safetensors"]


def test_files_are_as_other_libraries_expect_them(tmp_path: Path):
    params = make(tmp_path, LLAMA, "bfloat16")
    raw = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert set(header) == {spec.name for spec in spec_leaves(declare(LLAMA))}
    gate = header["model.layers.1.mlp.gate_proj.weight"]
    assert (gate["dtype"], gate["shape"]) == ("BF16", [12, 8])  # [out, in]
    np.testing.assert_array_equal(
        tensors_of(tmp_path)["model.layers.1.mlp.gate_proj.weight"], params.layers[1].gate_up.parts[0].T
    )
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_dtype_is_the_one_asked_for(tmp_path: Path, stored: str, wanted: str):
    make(tmp_path, QWEN, stored)
    _, params = load_decoder(tmp_path, wanted)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {wanted}
    want = tensors_of(tmp_path)["model.layers.0.self_attn.q_proj.weight"].T.astype(jnp.dtype(wanted))
    np.testing.assert_array_equal(params.layers[0].qkv.parts[0], want)


def shard(folder: Path) -> None:
    """Splits `model.safetensors` into two files and an index."""
    tensors = tensors_of(folder)
    weight_map = {}
    (folder / "model.safetensors").unlink()
    for n in (1, 2):
        name = f"model-{n:05}-of-00002.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[n - 1 :: 2]}
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_sharded(tmp_path: Path):
    params = make(tmp_path, QWEN)
    shard(tmp_path)
    assert_equal(load_decoder(tmp_path, jnp.float32)[1], params)


def test_single_file_of_any_name(tmp_path: Path):
    params = make(tmp_path, QWEN)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert_equal(load_decoder(tmp_path, jnp.float32)[1], params)


def test_saving_replaces_what_was_there(tmp_path: Path):
    make(tmp_path, LLAMA)
    params = make(tmp_path, QWEN)
    assert_equal(load_decoder(tmp_path, jnp.float32)[1], params)


def test_interrupted_writing_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    params = make(tmp_path, QWEN)

    def half(tensors: Any, path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    for processes in (1, 2):
        with monkeypatch.context() as patched:
            patched.setattr(tilewright.models.checkpoint, "save_file", half)
            with pytest.raises(OSError, match="disk full"):
                make_together(tmp_path, LLAMA, processes, patched)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert_equal(load_decoder(tmp_path, jnp.float32)[1], params)


def make_together(folder: Path, config: DecoderConfig, processes: int, monkeypatch: pytest.MonkeyPatch) -> DecoderParams:
    """Writes a model as so many processes do, the first of them last, since it waits for the others."""
    with monkeypatch.context() as patched:
        patched.setattr(jax, "process_count", lambda: processes)
        patched.setattr(multihost_utils, "sync_global_devices", lambda name: None)
        for index in range(processes - 1, 0, -1):
            patched.setattr(jax, "process_index", lambda index=index: index)
            make(folder, config)
        patched.setattr(jax, "process_index", lambda: 0)
        return make(folder, config)


def test_processes_write_a_part_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make(tmp_path, LLAMA)
    for processes in (3, 2):
        params = make_together(tmp_path, QWEN, processes, monkeypatch)
        assert_equal(load_decoder(tmp_path, jnp.float32)[1], params)
        parts = [f"model-{n + 1:05d}-of-{processes:05d}.safetensors" for n in range(processes)]
        index = "model.safetensors.index.json"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", *parts, index], "and nothing of before"
        found = {part: load_file(tmp_path / part) for part in parts}
        map_ = json.loads((tmp_path / index).read_text())["weight_map"]
        assert map_ == {name: part for part, tensors in found.items() for name in tensors}
        sizes = [sum(value.nbytes for value in tensors.values()) for tensors in found.values()]
        assert max(sizes) < 1.5 * sum(sizes) / processes
    make(tmp_path, QWEN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_failed_save_leaves_the_old_files(tmp_path: Path):
    params = make(tmp_path, QWEN)
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_params(tmp_path, {"model_type": object()}, declare(QWEN), params, jnp.float32)
    assert_equal(load_decoder(tmp_path, jnp.float32)[1], params)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_redundant_tensors_are_passed_over_only_where_they_are_redundant(tmp_path: Path):
    params = make(tmp_path, QWEN)
    extra = {"lm_head.weight": np.zeros((24, 8), np.float32), "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(3)}
    rewrite(tmp_path, extra)
    assert_equal(load_decoder(tmp_path, jnp.float32)[1], params)
    make(tmp_path, LLAMA)
    rewrite(tmp_path, {}, drop=("lm_head.weight",))
    with pytest.raises(ValueError, match=r"1 missing: lm_head\.weight$"):
        load_decoder(tmp_path, jnp.float32)


def test_rename(tmp_path: Path):
    params = make(tmp_path, QWEN)
    bare = {name.removeprefix("model."): value for name, value in tensors_of(tmp_path).items()}
    save_file(bare, tmp_path / "model.safetensors")
    assert_equal(load_params(tmp_path, declare(QWEN), jnp.float32, rename=lambda name: f"model.{name}"), params)


def test_two_tensors_of_one_name(tmp_path: Path):
    make(tmp_path, QWEN)
    rewrite(tmp_path, {"norm.weight": np.ones(8, np.float32)})
    with pytest.raises(ValueError, match=r"; 1 stored twice: model\.norm\.weight$"):
        load_params(tmp_path, declare(QWEN), jnp.float32, rename=lambda name: "model." + name.removeprefix("model."))


def test_one_error_lists_all_that_does_not_fit(tmp_path: Path):
    make(tmp_path, QWEN)
    gone = ("model.norm.weight", "model.layers.1.mlp.up_proj.weight")
    change = {
        "model.embed_tokens.weight": np.zeros((24, 9), np.float32),
        "model.layers.0.mlp.up_proj.weight": np.zeros((12, 8), np.int8),
        "model.layers.7.mlp.up_proj.weight": np.zeros((12, 8), np.float32),
    }
    rewrite(tmp_path, change, drop=gone)
    want = (
        f"{tmp_path}: the tensors do not fit the configuration; "
        "2 missing: model.layers.1.mlp.up_proj.weight, model.norm.weight; "
        "1 unknown: model.layers.7.mlp.up_proj.weight; "
        "1 of the wrong shape: model.embed_tokens.weight (expected [24, 8], found [24, 9]); "
        "1 of a dtype other than F32, F16, BF16: model.layers.0.mlp.up_proj.weight (I8)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(want)}$"):
        load_decoder(tmp_path, jnp.float32)


def test_long_lists_are_cut(tmp_path: Path):
    make(tmp_path, QWEN)
    save_file({f"extra.{i}": np.zeros(1, np.float32) for i in range(30)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"24 missing: .* and 16 more; 30 unknown: extra\.0, .* and 22 more$") as error:
        load_decoder(tmp_path, jnp.float32)
    assert str(error.value).count("extra.") == 8


@pytest.mark.parametrize("content", [b"", b"hello", None], ids=["empty", "garbage", "truncated"])
@pytest.mark.parametrize("sharded", [False, True])
def test_unreadable_file_is_named(tmp_path: Path, sharded: bool, content: bytes | None):
    make(tmp_path, QWEN)
    name = "model.safetensors"
    if sharded:
        shard(tmp_path)
        name = "model-00002-of-00002.safetensors"
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-5] if content is None else content)
    with pytest.raises(ValueError, match=rf"{re.escape(name)} is not a readable safetensors file: \w+"):
        load_decoder(tmp_path, jnp.float32)


def test_absent_shard_is_named(tmp_path: Path):
    make(tmp_path, QWEN)
    shard(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"index\.json names files that do not exist: model-00002-of-00002\.safetensors$"):
        load_decoder(tmp_path, jnp.float32)


@pytest.mark.parametrize(
    "index, problem",
    [
        ("{", "is not JSON"),
        ("[]", "expected a JSON object, found list"),
        ("{}", "weight_map must map tensor names to file names"),
        ('{"weight_map": {"a": 1}}', "weight_map must map tensor names to file names"),
        ('{"weight_map": {"a": "../b.safetensors"}}', r"expected names of files beside it, found \.\./b\.safetensors"),
    ],
)
def test_bad_index(tmp_path: Path, index: str, problem: str):
    make(tmp_path, QWEN)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=rf"model\.safetensors\.index\.json:? {problem}"):
        load_decoder(tmp_path, jnp.float32)


def test_no_or_several_weight_files(tmp_path: Path):
    make(tmp_path, QWEN)
    (tmp_path / "model.safetensors").rename(tmp_path / "b.safetensors")
    (tmp_path / "a.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"single \*\.safetensors file, found a\.safetensors, b\.safetensors$"):
        load_decoder(tmp_path, jnp.float32)
    for name in "ab":
        (tmp_path / f"{name}.safetensors").unlink()
    with pytest.raises(ValueError, match=r"expected model\.safetensors, .*, found none$"):
        load_decoder(tmp_path, jnp.float32)


def test_read_config_errors(tmp_path: Path):
    with pytest.raises(ValueError, match="missing is not a folder"):
        read_config(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"is not a checkpoint: it has no config\.json"):
        read_config(tmp_path)
    for content, problem in {
        b"{,": "is not JSON",
        b"\xff\xfe": "is not JSON",
        b"3": "expected a JSON object, found int",
    }.items():
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match=rf"config\.json:? {problem}"):
            read_config(tmp_path)


def test_generation_config_names_the_end_tokens(tmp_path: Path):
    make(tmp_path, QWEN)
    ends = tmp_path / "generation_config.json"
    ends.write_text('{"eos_token_id": [5, 7], "temperature": 0.6}')
    assert load_decoder(tmp_path, jnp.float32)[0].eos_token_ids == (5, 7)
    ends.write_text('{"temperature": 0.6}')
    assert read_config(tmp_path)["eos_token_id"] == [3]
    assert "temperature" not in read_config(tmp_path)
    ends.write_text("?")
    with pytest.raises(ValueError, match=r"generation_config\.json is not JSON"):
        read_config(tmp_path)


def test_unsupported_configuration_names_the_file(tmp_path: Path):
    make(tmp_path, QWEN)
    (tmp_path / "config.json").write_text(json.dumps({**config_to_hf(QWEN), "model_type": "gpt2", "hidden_act": "gelu"}))
    with pytest.raises(ValueError, match=r"config\.json: model_type must be one of .*, found 'gpt2'; the nearest family is "):
        load_decoder(tmp_path, jnp.float32)


@pytest.mark.parametrize(
    ("layers", "head"),
    [("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")],
)
def test_the_text_half_of_a_multimodal_checkpoint(tmp_path: Path, layers: str, head: str):
    """Under either of the prefixes that libraries gave it; the other half is passed over."""
    make(tmp_path / "text", LLAMA)
    stored = load_file(tmp_path / "text" / "model.safetensors")
    renamed = {name.replace("model.", layers, 1).replace("lm_head.", head): value for name, value in stored.items()}
    (tmp_path / "both").mkdir()
    save_file(
        {**renamed, "vision_tower.w": np.ones(3, np.float32), "model.projector.w": np.ones(3, np.float32)},
        tmp_path / "both" / "model.safetensors",
    )
    config = {"model_type": "llava", "text_config": config_to_hf(LLAMA), "vision_config": {}}
    (tmp_path / "both" / "config.json").write_text(json.dumps(config))
    (got_config, got), (want_config, want) = (load_decoder(tmp_path / name, jnp.float32) for name in ("both", "text"))
    assert got_config == want_config
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_saved_without_its_head(tmp_path: Path, tied: bool, prefix: str, caplog: pytest.LogCaptureFixture):
    """Embedding models have no `model.` before the names, and no head even if the configuration declares one."""
    base = replace(LLAMA, tie_word_embeddings=tied)
    params = make(tmp_path, base)
    stored = tensors_of(tmp_path)
    bare = {prefix + name.removeprefix("model."): value for name, value in stored.items() if name != "lm_head.weight"}
    if prefix:
        fields = {"model_type": "llava", "text_config": config_to_hf(base)}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        bare["vision_tower.layers.0.weight"] = np.ones(3, np.float32)
    save_file(bare, tmp_path / "model.safetensors")
    config, got = load_decoder(tmp_path, jnp.float32)
    assert config == decoder_config(tmp_path) == replace(base, tie_word_embeddings=True)
    assert_equal(got, replace(params, head=None))
    assert ("has no output head" in caplog.text) == (not tied)


def test_names_without_model_beside_a_head(tmp_path: Path):
    params = make(tmp_path, LLAMA)
    save_file(
        {name.removeprefix("model."): value for name, value in tensors_of(tmp_path).items()}, tmp_path / "model.safetensors"
    )
    got_config, got = load_decoder(tmp_path, jnp.float32)
    assert got_config == LLAMA
    assert_equal(got, params)


def test_progress_bar_counts_the_bytes(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    make(tmp_path, QWEN, "bfloat16")
    out = io.StringIO()
    load_decoder(tmp_path, jnp.float32, Console(file=out, force_terminal=True, width=100))
    total = sum(value.nbytes for value in tensors_of(tmp_path).values()) / 1000
    assert "loading weights" in out.getvalue()
    assert re.search(rf"{total:.1f}/{total:.1f}\s+kB", out.getvalue())
    load_decoder(tmp_path, jnp.float32)
    assert capfd.readouterr() == ("", "")
