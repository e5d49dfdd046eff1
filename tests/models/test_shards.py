"""Parameters over many devices: drawn, loaded and saved in shards, they are what one device would hold."""

import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.counting import READ, CountedFile
from models.sizes import decoder_config
from parallel.processes import run_two
from tilewright.models import stored
from tilewright.models.checkpoint import load_decoder, save_params
from tilewright.models.decoder import DecoderParams, config_to_hf, declare
from tilewright.models.params import abstract, initialise, spec_leaves
from tilewright.parallel.mesh import make_mesh
from tilewright.parallel.sharding import FULLY_SHARDED_TENSOR_PARALLEL, GROUPED, Rules, grouped_mesh, shardings

CONFIG = decoder_config("qwen3", 24, 16, 48, 1, 8, 4, 6)
SPECS = declare(CONFIG)
RULES = FULLY_SHARDED_TENSOR_PARALLEL
Sizes = dict[str, int | None]


def placed(axes: Sizes, rules: Rules = RULES) -> DecoderParams:
    return shardings(SPECS, make_mesh(axes), rules)


def assert_equal(got: DecoderParams, want: DecoderParams, on: DecoderParams) -> None:
    """Asserts equal values, with these shardings."""
    for a, b, sharding in zip(*map(jax.tree.leaves, (got, want, on)), strict=True):
        assert (a.dtype, a.sharding) == (b.dtype, sharding)
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def params() -> DecoderParams:
    return jax.jit(lambda key: initialise(SPECS, key))(jax.random.key(0))


@pytest.fixture(scope="module")
def folder(params: DecoderParams, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_params(folder, config_to_hf(CONFIG), SPECS, params, jnp.float32)
    return folder


@given(st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2), (4, 2), (2, 4), (1, 8), (8, 1)]), st.booleans())
def test_loading_under_any_mesh(folder: Path, params: DecoderParams, sizes: tuple[int, int], turned: bool):
    names = ("tp", "fsdp") if turned else ("fsdp", "tp")
    on = placed(dict(zip(names, sizes, strict=True)))
    assert_equal(load_decoder(folder, jnp.float32, shard=lambda _: on)[1], params, on)


def test_each_entry_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Replicas share what was read, and of a matrix that the checkpoint holds transposed no more is read either."""
    monkeypatch.setattr(stored, "SafetensorsFile", CountedFile)
    READ.clear()
    load_decoder(folder, jnp.bfloat16, shard=lambda _: placed({"fsdp": 4, "tp": 2}))
    whole = {spec.name: 4 * int(np.prod(spec.shape)) for spec in spec_leaves(SPECS)}
    totals = Counter[str]()
    for name, size in READ:
        totals[name] += size
    assert totals == whole
    parts = Counter(name for name, _ in READ)
    layer = "model.layers.0."
    names = ("mlp.down_proj.weight", "input_layernorm.weight", "self_attn.q_norm.weight")
    assert [parts[layer + name] for name in names] == [8, 4, 1]


@pytest.mark.parametrize("devices", [2, 8])
def test_shared_key_value_heads_are_read_once_and_no_device_holds_others(
    folder: Path, params: DecoderParams, monkeypatch: pytest.MonkeyPatch, devices: int
):
    """Four key/value heads over eight devices: two devices read and hold the same one."""
    monkeypatch.setattr(stored, "SafetensorsFile", CountedFile)
    READ.clear()
    mesh = grouped_mesh(make_mesh({"tp": devices}), "tp", heads=CONFIG.num_heads, kv_heads=CONFIG.num_kv_heads)
    on = shardings(SPECS, mesh, GROUPED)
    loaded = load_decoder(folder, jnp.float32, shard=lambda _: on)[1]
    assert_equal(loaded, params, on)
    held = min(devices, CONFIG.num_kv_heads)
    name = "model.layers.0.self_attn.k_proj.weight"
    size = 4 * CONFIG.hidden_size * CONFIG.num_kv_heads * CONFIG.head_dim
    assert [part for part in READ if part[0] == name] == [(name, size // held)] * held
    for n, shard in enumerate(loaded.layers[0].qkv.parts[1].addressable_shards):
        head = n * held // devices
        width = CONFIG.num_kv_heads // held * CONFIG.head_dim
        np.testing.assert_array_equal(shard.data, params.layers[0].qkv.parts[1][:, head * width : (head + 1) * width])


def test_saved_from_shards_and_loaded_under_another_mesh(folder: Path, params: DecoderParams, tmp_path: Path):
    on = placed({"fsdp": 4, "tp": 2})
    other = placed({"fsdp": 1, "tp": 4})
    loaded = load_decoder(folder, jnp.float32, shard=lambda _: on)[1]
    save_params(tmp_path, config_to_hf(CONFIG), SPECS, loaded, jnp.float32)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    assert_equal(load_decoder(tmp_path, jnp.float32, shard=lambda _: other)[1], params, other)


def test_shards_are_drawn_as_the_whole_would_be(params: DecoderParams):
    on = placed({"fsdp": 2, "tp": 2})
    assert_equal(initialise(SPECS, jax.random.key(0), shardings=on), params, on)


def test_no_device_draws_a_whole_array():
    """A device of the compiled program holds its share of the embedding, and no larger part in any shape."""
    on = placed({"fsdp": 4, "tp": 2})
    shard = on.embed.shard_shape(SPECS.embed.shape)
    size = int(np.prod(SPECS.embed.shape))

    def largest(on: object) -> int:
        drawn = jax.jit(lambda key: initialise(SPECS.embed, key, shardings=on)).lower(jax.random.key(0)).compile()
        shapes = re.findall(r"\b[fus]\d+\[([\d,]*)\]", str(drawn.as_text()))
        return max(int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes)

    assert largest(on.embed) == int(np.prod(shard)) == size // 8
    assert largest(None) == size


def test_abstract_shapes_have_the_shardings_of_arrays(params: DecoderParams):
    """A program compiled for abstract shapes runs on the arrays, without a copy to other devices before it."""
    on = placed({"fsdp": 4, "tp": 2})
    shapes = abstract(SPECS, jnp.float32, on)
    assert jax.tree.map(lambda leaf: leaf.sharding, shapes) == on
    program = jax.jit(lambda params: jax.tree.map(lambda leaf: 2 * leaf, params)).lower(shapes).compile()
    doubled = program(jax.device_put(params, on))
    assert_equal(doubled, jax.tree.map(lambda leaf: 2 * leaf, params), on)


def test_a_loaded_replica_is_a_copy(folder: Path):
    """Donating a loaded replica leaves the replicas on other devices unchanged."""
    on = placed({"fsdp": 1, "tp": 8})
    loaded = load_decoder(folder, jnp.float32, shard=lambda _: on)[1]
    first = loaded.norm.addressable_shards[0].data
    last = loaded.norm.addressable_shards[-1].data
    before = np.array(last)
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(first))
    np.testing.assert_array_equal(last, before)


def test_two_processes(tmp_path: Path):
    said = run_two(Path(__file__).with_name("shards_process.py"), tmp_path / "made")
    assert all("equal to one process" in text for text in said), "\n".join(said)
