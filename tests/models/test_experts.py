"""Mixtures of experts: routing against NumPy in float64, a row's result, which does not depend on the other rows, and how
checkpoints hold experts."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from models.test_gguf import CONFIGS, make
from tilewright.kernels import native
from tilewright.kernels.grouped_linear import cpu
from tilewright.kernels.operations import Operations, Weights
from tilewright.kernels.select import PLAIN, operations, training_operations
from tilewright.models.checkpoint import load_decoder, save_params
from tilewright.models.decoder import DecoderConfig, config_to_hf, declare, declare_layer
from tilewright.models.experts import ClampedGate, Mixture, grouped, route, routed_product, routed_weights
from tilewright.models.mxfp4 import read_mxfp4
from tilewright.models.params import initialise
from tilewright.models.registry import FAMILIES

needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
EXPERTS = 7
HIDDEN = 64
SIZE = 32
ROWS = 12


def mixture_mlp(ops: Operations, router: Any, gate_up: Any, down: Any, h: jax.Array, count: Any = None) -> jax.Array:
    return routed_product(router.mixture)(ops, h, routed_weights(router, gate_up, down), count)


def softmax(x: np.ndarray) -> np.ndarray:
    exp = np.exp(x - x.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


@settings(max_examples=25)
@given(st.integers(0, 2**31 - 1), st.integers(1, EXPERTS), st.booleans(), st.floats(0.1, 30))
def test_routing(seed: int, chosen: int, normalised: bool, scale: float):
    """Qwen3-MoE's routing: softmax of all scores, the largest of these, normalised or not."""
    scores = (scale * np.random.default_rng(seed).standard_normal((ROWS, EXPERTS))).astype(np.float32)
    experts, weights = jax.jit(functools.partial(route, Mixture(EXPERTS, chosen, SIZE, normalised)))(scores)
    shares = softmax(scores.astype(np.float64))
    order = np.argsort(-shares, axis=-1, kind="stable")[:, :chosen]
    want = np.take_along_axis(shares, order, axis=-1)
    np.testing.assert_array_equal(experts, order)
    np.testing.assert_allclose(weights, want / want.sum(axis=-1, keepdims=True) if normalised else want, rtol=2e-5, atol=1e-7)


def test_the_softmax_of_the_chosen_is_what_normalised_means():
    """gpt-oss' convention."""
    scores = np.random.default_rng(0).standard_normal((ROWS, EXPERTS), np.float32)
    experts, weights = route(Mixture(EXPERTS, 3, SIZE), jnp.asarray(scores))
    chosen = np.take_along_axis(scores.astype(np.float64), np.asarray(experts), axis=-1)
    np.testing.assert_allclose(weights, softmax(chosen), rtol=1e-6)


def test_equal_scores_go_to_the_first():
    experts, _ = route(Mixture(EXPERTS, 2, SIZE), jnp.zeros((1, EXPERTS)))
    assert experts.tolist() == [[0, 1]]


@settings(max_examples=25)
@given(st.data())
def test_rows_in_the_order_of_their_experts(data: st.DataObject):
    """Each once for each of its experts that is here and counts; the others behind them."""
    chosen = data.draw(st.integers(1, 4))
    choices = st.lists(st.integers(0, EXPERTS - 1), min_size=chosen, max_size=chosen, unique=True)
    experts = np.asarray(data.draw(st.lists(choices, min_size=ROWS, max_size=ROWS)), np.int32)
    held = data.draw(st.integers(1, EXPERTS))
    first = data.draw(st.integers(0, EXPERTS - held))
    count = data.draw(st.integers(0, ROWS))
    run = jax.jit(grouped, static_argnums=1)
    groups = run(experts, held, first, count)
    here = (experts >= first) & (experts < first + held) & (np.arange(ROWS) < count)[:, None]
    total = int(here.sum())
    np.testing.assert_array_equal(groups.sizes, [np.sum(here & (experts == first + n)) for n in range(held)])
    listed = np.repeat(np.arange(held), groups.sizes)
    np.testing.assert_array_equal(groups.experts[:total], listed)
    for row, slot in np.ndindex(experts.shape):
        place = int(groups.places[row, slot])
        assert int(groups.rows[place]) == row
        assert (place < total) == here[row, slot]
        if here[row, slot]:
            assert listed[place] == experts[row, slot] - first
    assert sorted(np.asarray(groups.places).reshape(-1)) == list(range(experts.size))


def test_experts_that_rows_are_expected_to_read():
    """Against as many rows as chance has it."""
    mixture = Mixture(16, 3, SIZE)
    rng = np.random.default_rng(0)
    drawn = [len(set(np.concatenate([rng.permutation(16)[:3] for _ in range(5)]))) for _ in range(2000)]
    assert mixture.expected_experts(5) == pytest.approx(np.mean(drawn), rel=0.02)
    assert (mixture.expected_experts(0), mixture.expected_experts(1)) == (0, pytest.approx(3))


def test_more_experts_for_a_token_than_there_are():
    with pytest.raises(ValueError, match="expected from 1 to 7 experts for each token, found 8"):
        Mixture(EXPERTS, 8, SIZE)


CASES: dict[str, Mixture] = {
    "qwen3_moe": Mixture(EXPERTS, 3, SIZE, normalised=False),
    "gpt_oss": Mixture(EXPERTS, 3, SIZE, clamped=ClampedGate(1.702, 1.0)),
}


def small(family: str) -> DecoderConfig:
    return DecoderConfig(
        family=family,
        vocab_size=32,
        hidden_size=HIDDEN,
        intermediate_size=SIZE,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        mixture=CASES[family],
    )


def drawn(family: str, dtype: Any = jnp.float32) -> tuple[Any, Any]:
    """The declaration of a layer with experts, and its arrays, large enough to make a difference."""
    config = small(family)
    specs = declare_layer(config, "model.layers.0", FAMILIES[family], kind=config.kind(0))
    specs = jax.tree.map(lambda spec: replace(spec, scale=0.3), specs)
    return specs, initialise(specs, jax.random.key(0), dtype)


@functools.cache
def layer(family: str, ops: Operations, dtype: Any) -> Any:
    """Returns a layer's experts for rows `[R, H]`, computed by these operations and by the plain ones."""
    specs, params = drawn(family, dtype)
    plain = functools.partial(mixture_mlp, PLAIN, params.router, params.gate_up, params.down)
    made = ops.prepare(specs, params)
    return jax.jit(functools.partial(mixture_mlp, ops, made.router, made.gate_up, made.down)), jax.jit(plain)


@pytest.mark.parametrize("family", CASES)
def test_a_layer_against_numpy(family: str):
    """Each row by itself, expert by expert, in float64."""
    mixture, (_, params) = CASES[family], drawn(family)
    x = np.random.default_rng(1).standard_normal((ROWS, HIDDEN), np.float32)
    found = jax.jit(functools.partial(mixture_mlp, PLAIN))(params.router, params.gate_up, params.down, x)

    wide = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    scores = x @ wide.router.weight + (0 if wide.router.bias is None else wide.router.bias)
    want = np.zeros((ROWS, HIDDEN))
    for row, score in enumerate(scores):
        chosen = np.argsort(-score, kind="stable")[: mixture.chosen]
        shares = softmax(score[chosen]) if mixture.normalised else softmax(score)[chosen]
        for expert, share in zip(chosen, shares, strict=True):
            if mixture.clamped is None:
                gate, up = (x[row] @ w[expert] for w in wide.gate_up.parts)
                inner = gate / (1 + np.exp(-gate)) * up
                bias = 0.0
            else:
                both = x[row] @ wide.gate_up[expert] + wide.router.expert_bias[0][expert]
                gate = np.minimum(both[::2], 1.0)
                up = np.clip(both[1::2], -1.0, 1.0)
                inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
                bias = wide.router.expert_bias[1][expert]
            want[row] += share * (inner @ wide.down[expert] + bias)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-4)


@needs_native
@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize(
    ("dtype", "weights"), [("float32", "auto"), ("bfloat16", "auto"), ("float32", "int8"), ("bfloat16", "int4")]
)
@settings(max_examples=6)
@given(st.integers(0, 2**31 - 1), st.data())
def test_a_row_has_the_bits_that_it_has_alone(family: str, dtype: Any, weights: Weights, seed: int, data: st.DataObject):
    """Whatever other rows there are, how many, and in which order; so speculation stays exact."""
    run, plain = layer(family, operations("cpu", weights), jnp.dtype(dtype))
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((ROWS, HIDDEN), np.float32), dtype)
    order = np.asarray(data.draw(st.permutations(range(ROWS))))
    whole = np.asarray(run(x))
    np.testing.assert_array_equal(run(x[order]), whole[order])
    for size in (1, 5):
        np.testing.assert_array_equal(run(x[order[:size]]), whole[order[:size]])
    count = data.draw(st.integers(0, ROWS))
    np.testing.assert_array_equal(run(x, jnp.int32(count))[:count], whole[:count])
    if weights == "auto":
        np.testing.assert_allclose(whole, plain(x), rtol=0, atol=1e-4 if dtype == "float32" else 0.5)


@needs_native
def test_gradients_of_the_training_bundle_are_the_plain_ones():
    _, params = drawn("qwen3_moe")
    x = jnp.asarray(np.random.default_rng(2).standard_normal((ROWS, HIDDEN), np.float32))

    def loss(ops: Operations, router: Any, gate_up: Any, down: Any) -> jax.Array:
        return jnp.sum(jnp.square(mixture_mlp(ops, router, gate_up, down, x)))

    found, want = (
        jax.jit(jax.grad(functools.partial(loss, ops), argnums=(0, 1, 2)))(params.router, params.gate_up, params.down)
        for ops in (training_operations("float32"), PLAIN)
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert np.abs(other).max() > 1e-3
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def saved(folder: Path, family: str) -> dict[str, np.ndarray]:
    """Writes a checkpoint. Returns its tensors."""
    config = small(family)
    specs = declare(config)
    save_params(folder, config_to_hf(config), specs, initialise(specs, jax.random.key(1)), jnp.float32)
    return load_file(folder / "model.safetensors")


def test_a_missing_expert_is_named(tmp_path: Path):
    tensors = saved(tmp_path, "qwen3_moe")
    del tensors["model.layers.0.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"experts whose tensors are missing.*: model.layers.0.mlp.experts.\*.up_proj.weight"):
        load_decoder(tmp_path, jnp.float32)


def test_mxfp4_as_gpt_oss_is_published(tmp_path: Path):
    """Bytes of two weights, and shared scales, transposed; kept as they are where the weights are asked for in 4 bits."""
    tensors = saved(tmp_path, "gpt_oss")
    rng = np.random.default_rng(0)
    want = {}
    for name in ("gate_up_proj", "down_proj"):
        whole = f"model.layers.0.mlp.experts.{name}"
        experts, inputs, outputs = tensors.pop(whole).shape
        pairs = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(118, 126, pairs.shape[:-1], np.uint8)
        tensors |= {f"{whole}_blocks": pairs, f"{whole}_scales": scales}
        want[name] = read_mxfp4(pairs, scales).swapaxes(1, 2)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    _, params = load_decoder(tmp_path, jnp.float32)
    np.testing.assert_array_equal(params.layers[0].gate_up, want["gate_up_proj"])
    np.testing.assert_array_equal(params.layers[0].down, want["down_proj"])
    if native.kernels().isa is not None:
        _, kept = load_decoder(tmp_path, jnp.float32, ops=operations("cpu", "int4"))
        assert kept.layers[0].down.matrix.panels.dtype == jnp.uint8
        np.testing.assert_array_equal(cpu.unpack(kept.layers[0].gate_up)[:, :HIDDEN], want["gate_up_proj"])
        np.testing.assert_array_equal(cpu.unpack(kept.layers[0].down)[:, :SIZE], want["down_proj"])


@needs_native
@pytest.mark.parametrize(("family", "kind"), [("qwen3_moe", Kind.Q4_1), ("gpt_oss", Kind.MXFP4)])
def test_a_gguf_files_experts_keep_their_bits(family: str, kind: Kind, tmp_path: Path):
    file, folder = make(tmp_path, CONFIGS[family], kind)
    ops = operations("cpu", "int4")
    (_, kept), (_, want) = (load_decoder(path, jnp.float32, ops=kernels) for path, kernels in ((file, ops), (folder, None)))
    inputs = want.layers[0].down.shape[1]
    np.testing.assert_array_equal(cpu.unpack(kept.layers[0].down)[:, :inputs], want.layers[0].down)
    if family == "gpt_oss":  # whose gates and ups take turns
        np.testing.assert_array_equal(cpu.unpack(kept.layers[0].gate_up)[:, :64], want.layers[0].gate_up)
