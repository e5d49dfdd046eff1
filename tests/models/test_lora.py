"""Low-rank adapters beside matrices of every bundle, and PEFT's files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from reference.lora_numpy import config_of, merged, random_adapter, write_adapter
from tilewright.kernels.operations import Joined, Norm, with_gates_apart
from tilewright.kernels.select import operations
from tilewright.models.decoder import Layer, config_from_hf, declare
from tilewright.models.lora import Adapter, Adapters, LowRankPair, adapted_operations, changeable_modules, module_of, row_ranks
from tilewright.models.lora_files import read_adapter, read_adapters
from tilewright.models.params import matrix

ROWS = 4
INPUTS = 32
OUTPUTS = 48
UP = "base_model.model.model.layers.0.mlp.up_proj"
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "attention_bias": False,
    "num_hidden_layers": 1,
    "tie_word_embeddings": True,
}


def pair(rng: np.random.Generator, rank: int, outputs: int = OUTPUTS) -> LowRankPair:
    shapes = (rank, INPUTS), (outputs, rank)
    return LowRankPair(*(rng.normal(size=shape).astype(np.float32) for shape in shapes))


@pytest.mark.parametrize(("kernels", "weights"), [("xla", "auto"), ("auto", "auto"), ("auto", "int8"), ("auto", "int4")])
def test_products_of_adapted_matrices(kernels: Any, weights: Any) -> None:
    """Each row gets its own adapter's correction on top of the base product, whatever holds the base; the first gets none."""
    rng = np.random.default_rng(0)
    ops = with_gates_apart(operations(weights=weights, kernels=kernels))
    specs = [matrix(f"layer.{name}.weight", INPUTS, OUTPUTS, ("hidden", "mlp")) for name in ("gate_proj", "up_proj", "v_proj")]
    modules = [module_of(spec) for spec in specs]
    some = (  # the first changes the gate alone, the last nothing but the third
        Adapter("a", 3, {modules[0]: pair(rng, 3)}),
        Adapter("b", 8, {module: pair(rng, 8) for module in modules}),
        Adapter("c", 1, {modules[2]: pair(rng, 1)}),
    )
    adapters = Adapters(some)
    w = [jnp.asarray(rng.normal(size=(INPUTS, OUTPUTS)), jnp.float32) for _ in specs]
    x = jnp.asarray(rng.normal(size=(ROWS, 2, INPUTS)), jnp.float32)
    norm = Norm(jnp.asarray(rng.uniform(0.5, 1.5, INPUTS), jnp.float32), 1e-6)
    add = jnp.ones((ROWS, 2, OUTPUTS))
    ranks = row_ranks(jnp.asarray(adapters.columns), jnp.arange(ROWS, dtype=jnp.int32))
    adapted = adapted_operations(ops, ranks)

    def field(spec: Any, base: Any) -> Any:
        return adapters.field(ops, spec, base, jnp.float32)

    normed = np.asarray(ops.rms_norm(x, *norm), np.float64)

    def correction(module: str, rows: np.ndarray) -> np.ndarray:
        found = np.zeros((ROWS, 2, OUTPUTS))
        for row, adapter in enumerate(some, 1):
            if module in adapter.pairs:
                a, b = adapter.pairs[module]
                found[row] = rows[row] @ a.T.astype(np.float64) @ b.T
        return found

    base = ops.prepare_matrix(w[2], "w")
    got = adapted.linear(x, field(specs[2], base), add=add) - ops.linear(x, base, add=add)
    np.testing.assert_allclose(got, correction(modules[2], np.asarray(x, np.float64)), atol=2e-4)

    joined = Joined(tuple(specs))
    base = ops.prepare_joined(Joined(tuple(w)), "qkv")
    bias = tuple(jnp.asarray(rng.normal(size=OUTPUTS), jnp.float32) for _ in w)
    parts = [np.asarray(each, np.float64) for each in split(adapted.project(x, field(joined, base), norm, bias=bias))]
    plain = [np.asarray(each, np.float64) for each in split(ops.project(x, base, norm, bias=bias))]
    for module, mine, without in zip(modules, parts, plain, strict=True):
        np.testing.assert_allclose(mine - without, correction(module, normed), atol=2e-4)

    both = ops.prepare_joined(Joined(tuple(w[:2]), gated=True), "gate and up")
    gate, up = (
        np.asarray(ops.linear(x, one, jnp.float32, norm), np.float64) + correction(module, normed)
        for one, module in zip(both.parts, modules, strict=False)
    )
    got = adapted.gated_linear(x, field(Joined(tuple(specs[:2]), gated=True), both), norm)
    np.testing.assert_allclose(got, gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=2e-3)


def split(projection: Any) -> Any:
    return projection if isinstance(projection, tuple) else projection.split()


def test_a_matrix_that_no_adapter_changes_stays() -> None:
    spec = matrix("layer.o_proj.weight", INPUTS, OUTPUTS, ("heads", "hidden"))
    adapters = Adapters((Adapter("a", 2, {"layer.q_proj": LowRankPair(np.ones((2, 1)), np.ones((1, 2)))}),))
    base = object()
    assert adapters.field(operations(kernels="xla"), spec, base, jnp.float32) is base


def test_numbers_and_ranks_of_adapters() -> None:
    adapters = Adapters((Adapter("a", 2, {}), Adapter("b", 1, {})))
    assert adapters.names == ("a", "b")
    assert adapters.columns.tolist() == [[False, False, False], [True, True, False], [False, False, True]]
    for names in ([], ["a", "a"]):
        with pytest.raises(ValueError, match="adapters of different names"):
            Adapters(tuple(Adapter(name, 1, {}) for name in names))


@pytest.mark.parametrize("rslora", [False, True])
def test_a_published_adapter_is_read(tmp_path: Path, rslora: bool) -> None:
    """An adapter added to a weight equals the weight merged by PEFT's formula."""
    rng = np.random.default_rng(1)
    name = "model.layers.0.mlp.up_proj.weight"
    model = {name: rng.normal(size=(48, 32)).astype(np.float32)}
    config = config_of(["up_proj"], 4, 24, use_rslora=rslora)
    tensors = random_adapter(rng, model, ["up_proj"], 4)
    adapter = read_adapter("mine", write_adapter(tmp_path, config, tensors))
    a, b = adapter.pairs["model.layers.0.mlp.up_proj"]
    np.testing.assert_allclose(model[name] + b @ a, merged(model, config, tensors)[name], rtol=1e-5, atol=1e-5)
    assert (adapter.name, adapter.rank) == ("mine", 4)


def test_modules_of_a_multimodal_checkpoint_are_those_of_its_text_half(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    tensors = random_adapter(rng, {"model.language_model.layers.0.mlp.up_proj.weight": np.zeros((8, 6))}, ["up_proj"], 2)
    adapter = read_adapter("mine", write_adapter(tmp_path, config_of(["up_proj"], 2, 2), tensors))
    assert list(adapter.pairs) == ["model.layers.0.mlp.up_proj"]


def test_joined_tensors_of_a_checkpoint_are_divided() -> None:
    """Phi-3's `qkv_proj` is one module: the three matrices share A, and have their own rows of B."""
    config = config_from_hf({**CONFIG, "model_type": "phi3", "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 0})
    specs = declare(config)
    (layer,) = specs.layers
    modules = changeable_modules(specs)
    assert modules["model.layers.0.self_attn.qkv_proj"].stored_shape == (96, 32)
    both = LowRankPair(np.ones((2, 32), np.float32), np.repeat(np.arange(96, dtype=np.float32)[:, None], 2, 1))
    adapters = Adapters((Adapter("a", 2, {"model.layers.0.self_attn.qkv_proj": both}),))
    adapters.adapters[0].check_fit(modules)
    for spec, first in zip(layer.qkv.parts, (0, 32, 64), strict=True):
        a, b = adapters.matrices(spec)
        assert a.shape == (32, 2)
        assert b[0].tolist() == list(range(first, first + 32))


REFUSED: dict[str, Any] = {
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "bias": "lora_only",
    "lora_bias": True,
    "fan_in_fan_out": True,
    "rank_pattern": {"q_proj": 8},
    "alpha_pattern": {"q_proj": 8},
    "trainable_token_indices": [3],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "layer_replication": [[0, 2]],
    "init_lora_weights": "pissa_niter_4",
    "peft_type": "IA3",
    "r": 0,
    "lora_alpha": None,
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_a_configuration_asks_for_besides_is_refused_by_name(tmp_path: Path, field: str) -> None:
    tensors = random_adapter(np.random.default_rng(0), {"model.layers.0.mlp.up_proj.weight": np.zeros((8, 6))}, ["up_proj"], 4)
    write_adapter(tmp_path, {**config_of(["up_proj"], 4, 8), field: REFUSED[field]}, tensors)
    with pytest.raises(ValueError, match=rf"adapter_config\.json.*{field}"):
        read_adapter("mine", tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("base_model.model.lm_head.lora_embedding_A", np.ones((4, 6)), "lora_embedding_A, part of embeddings"),
        (f"{UP}.lora_magnitude_vector", np.ones(8), "part of DoRA"),
        (f"{UP}.lora_A.weight", np.ones((3, 6)), r"expected \[4, inputs\], found \[3, 6\]"),
        (f"{UP}.lora_A.weight", np.full((4, 6), np.nan), "infinity or NaN"),
        (f"{UP}.lora_A.weight", np.ones((4, 6), np.int8), "expected F32, F16, BF16"),
        (f"{UP.replace('0', '1')}.lora_A.weight", np.ones((4, 6)), "only one for model.layers.1.mlp.up_proj"),
    ],
)
def test_tensors_that_are_no_low_rank_products_are_refused(tmp_path: Path, name: str, value: np.ndarray, said: str) -> None:
    tensors = random_adapter(np.random.default_rng(0), {"model.layers.0.mlp.up_proj.weight": np.zeros((8, 6))}, ["up_proj"], 4)
    other = value if value.dtype == np.int8 else value.astype(np.float32)
    write_adapter(tmp_path, config_of(["up_proj"], 4, 8), {**tensors, name: other})
    with pytest.raises(ValueError, match=said):
        read_adapter("mine", tmp_path)


def test_folders_that_are_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected adapter_config\.json in .*, found none"):
        read_adapters({"mine": tmp_path})
    (tmp_path / "adapter_config.json").write_text(json.dumps(config_of(["up_proj"], 4, 8)))
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"expected adapter_model.safetensors.*\.bin"):
        read_adapter("mine", tmp_path)
    save_file({}, tmp_path / "adapter_model.safetensors")
    assert not load_file(tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="at least one module"):
        read_adapter("mine", tmp_path)
    with pytest.raises(ValueError, match="expected a name"):
        read_adapter("", tmp_path)


def test_an_adapter_of_another_model_is_refused() -> None:
    specs = declare(config_from_hf(CONFIG))
    params = replace(specs, layers=(Layer(None, None, None, None, None, None, None, None),))
    rng = np.random.default_rng(0)
    ops = operations(kernels="xla")
    for module, said in (("model.layers.7.mlp.up_proj", "found model.layers.7.mlp.up_proj"), ("lm_head", "found lm_head")):
        with pytest.raises(ValueError, match=said):
            Adapters((Adapter("a", 2, {module: pair(rng, 2)}),)).apply(ops, specs, params, jnp.float32)
    with pytest.raises(ValueError, match=r"up_proj: expected A \[2, 32\] and B \[48, 2\], found A \[2, 32\] and B \[47, 2\]"):
        Adapters((Adapter("a", 2, {"model.layers.0.mlp.up_proj": pair(rng, 2, 47)}),)).apply(ops, specs, params, jnp.float32)
