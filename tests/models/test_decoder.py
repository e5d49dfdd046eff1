"""The decoder against goldens that transformers wrote (`tests/golden/make_decoder_goldens.py`), and its declarations."""

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from safetensors.numpy import load_file

from tilewright.kernels.operations import Heads, Joined, Operations
from tilewright.kernels.select import PLAIN, operations, training_operations
from tilewright.models import decoder
from tilewright.models.checkpoint import load_decoder
from tilewright.models.config import LayerKind
from tilewright.models.decoder import DecoderConfig, DecoderParams, Layer, causal_attend, declare, forward, forward_full
from tilewright.models.params import abstract, count, initialise, spec_leaves, to_tensors
from tilewright.models.stack import SINGLE_DEVICE, TRACED_ONCE, Strategy
from tilewright.models.stored import read_headers, stacked

GOLDENS = Path(__file__).parents[1] / "golden" / "decoders"
NAMES = [
    "gemma2-tied",
    "gemma3-tied",
    "gemma4-moe",
    "gemma4-tied",
    "gpt-oss",
    "llama-scaled",
    "llama-untied",
    "mistral-linear",
    "mistral-window",
    "mixtral-untied",
    "phi3-partial",
    "qwen2-untied",
    "qwen3-moe",
    "qwen3-moe-sparse",
    "qwen3-next",
    "qwen3-next-moe",
    "qwen3-tied",
    "qwen3-untied",
    "qwen3-window",
    "qwen3-yarn",
    "qwen3.5-moe",
    "qwen3.5-tied",
    "smollm3-tied",
]
TOLERANCE = 1e-4

SMALL = DecoderConfig(
    family="qwen3",
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
)


class Golden:
    """A golden checkpoint, loaded, with what transformers made of its tokens."""

    def __init__(self, name: str):
        self.folder = GOLDENS / name
        self.config, self.params = load_decoder(self.folder, jnp.float32)
        with np.load(self.folder / "outputs.npz") as outputs:
            self.tokens = jnp.asarray(outputs["tokens"])
            self.hidden = outputs["hidden"]
            self.logits = outputs["logits"]

    def stored(self) -> dict[str, np.ndarray]:
        return {name: value for file in self.folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.fixture(scope="module", params=NAMES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


@functools.cache
def drawn(config: DecoderConfig, dtype: Any = jnp.float32) -> DecoderParams:
    return jax.jit(lambda key: initialise(declare(config), key, dtype))(jax.random.key(0))


def run(config: DecoderConfig, params: DecoderParams, tokens: Array, taps: tuple[int, ...] = ()) -> tuple[Any, Array]:
    def both(params: DecoderParams, tokens: Array) -> tuple[Any, Array]:
        out = forward_full(config, PLAIN, params, tokens, taps)
        return out, decoder.logits(config, PLAIN, params, out.hidden)

    return jax.jit(both)(params, tokens)


def test_all_goldens_are_tested():
    assert sorted(path.name for path in GOLDENS.iterdir()) == NAMES


def test_logits_and_taps_equal_transformers(golden: Golden):
    """Taps in the order asked for, not in that of the layers."""
    taps = tuple(reversed(range(golden.config.num_layers)))
    out, logits = run(golden.config, golden.params, golden.tokens, taps)
    np.testing.assert_allclose(logits, golden.logits, rtol=0, atol=TOLERANCE)
    assert len(out.taps) == len(taps)
    for layer, tap in zip(taps, out.taps, strict=True):
        np.testing.assert_allclose(tap, golden.hidden[layer], rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(out.hidden, out.taps[0])


@pytest.mark.parametrize(
    "name", ["gpt-oss", "llama-untied", "phi3-partial", "qwen2-untied", "qwen3-moe", "qwen3-next", "qwen3-tied"]
)
def test_every_array_matters(name: str):
    """A golden that did not move with some weight could not tell whether that weight is used rightly."""
    golden = Golden(name)
    leaves, structure = jax.tree.flatten(golden.params)

    def loss(params: DecoderParams) -> Array:
        out = forward_full(golden.config, PLAIN, params, golden.tokens)
        return jnp.sum(jnp.square(decoder.logits(golden.config, PLAIN, params, out.hidden)))

    gradients = structure.flatten_up_to(jax.jit(jax.grad(loss))(golden.params))
    assert len(gradients) == len(leaves)
    names = [spec.name for spec in spec_leaves(declare(golden.config))]
    for name, gradient in zip(names, gradients, strict=True):
        if not name.endswith("k_proj.bias"):  # adds the same to all scores of a query but for the rotation: it moves little
            assert float(jnp.max(jnp.abs(gradient))) > 1e-2, name


def test_rope_scaling_bites_at_the_golden_length():
    """Without it the logits are far off, so that the comparison above can fail."""
    golden = Golden("llama-scaled")
    plain = DecoderConfig(**{**vars(golden.config), "rope_scaling": None})
    assert golden.config.rope_scaling is not None
    _, logits = run(plain, golden.params, golden.tokens)
    assert float(np.max(np.abs(logits - golden.logits))) > 0.1


def test_a_later_token_leaves_earlier_logits_alone(golden: Golden):
    at = 17
    changed = golden.tokens.at[:, at].set((golden.tokens[:, at] + 1) % golden.config.vocab_size)
    _, before = run(golden.config, golden.params, golden.tokens)
    _, after = run(golden.config, golden.params, changed)
    np.testing.assert_array_equal(before[:, :at], after[:, :at])
    windows = golden.config.windows
    reach = golden.tokens.shape[1] if None in windows else at + 1 + sum(window - 1 for window in windows if window is not None)
    np.testing.assert_array_equal(before[:, reach:], after[:, reach:])
    assert (np.abs(before - after)[:, at:reach].max(axis=-1) > 1e-5).all()


def test_a_row_gives_what_it_gives_alone(golden: Golden):
    _, logits = run(golden.config, golden.params, golden.tokens[1:])
    np.testing.assert_allclose(logits[0], golden.logits[1], rtol=0, atol=TOLERANCE)


def test_only_distances_count():
    """Rotary positions are relative: a sequence that starts at 100 has the same logits."""
    golden = Golden("qwen3-tied")
    positions = jnp.broadcast_to(jnp.arange(100, 140), golden.tokens.shape)

    def moved(params: DecoderParams) -> Array:
        out = forward(golden.config, PLAIN, params, golden.tokens, positions, causal_attend)
        return decoder.logits(golden.config, PLAIN, params, out.hidden)

    logits = jax.jit(moved)(golden.params)
    np.testing.assert_allclose(logits, golden.logits, rtol=0, atol=5e-4)


def test_bfloat16(golden: Golden):
    """Float32 logits from bfloat16 weights, close to the golden ones as far as 8 bits of mantissa carry."""
    config, params = load_decoder(golden.folder, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    out, logits = run(config, params, golden.tokens)
    assert (out.hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    errors = np.mean(np.square(logits - golden.logits), axis=-1) / np.mean(np.square(golden.logits))
    # Scores that are rounded choose other experts now and then, and what follows such a position sees it.
    assert np.sqrt(np.mean(errors) if config.mixture is None else np.median(errors)) < 0.05


def test_a_head_of_bfloat16_is_not_rounded_to_it():
    """Tied or not, logits keep float32's resolution: rounding would make ties among the best tokens."""
    params = drawn(DecoderConfig(**{**vars(SMALL), "tie_word_embeddings": False}), jnp.bfloat16)
    logits = decoder.logits(SMALL, PLAIN, params, jnp.linspace(-1, 1, 24).astype(jnp.bfloat16)[None])
    assert float(jnp.max(jnp.abs(logits - logits.astype(jnp.bfloat16).astype(jnp.float32)))) > 0


@pytest.mark.parametrize(("schedule", "times"), [(SINGLE_DEVICE, 2), (TRACED_ONCE, 1)])
def test_each_layer_attends_in_order_with_rotated_keys(schedule: Strategy, times: int):
    """Layers that are alike may be traced once."""
    tokens = jnp.arange(6).reshape(2, 3)
    positions = jnp.broadcast_to(jnp.arange(3), (2, 3))
    traced = []

    def attend(ops: Any, projection: Any, heads: Any, attn_metadata: Any, kv_cache: Array) -> tuple[Array, Any]:
        q, k, v = ops.heads(projection, heads)
        traced.append((q.shape, k.shape, v.shape))
        return causal_attend(ops, projection, heads, None, kv_cache)[0], (kv_cache + attn_metadata, k)

    def kept(params: DecoderParams, at: Array) -> Any:
        return forward(SMALL, PLAIN, params, tokens, at, attend, jnp.int32(10), (0, 1), schedule=schedule).caches

    here, there = (jax.jit(kept)(drawn(SMALL), positions + moved) for moved in (0, 1))
    assert traced == [((2, 3, 4, 8), (2, 2, 3, 8), (2, 2, 3, 8))] * times
    assert [int(index) for index, _ in here] == [10, 11]
    assert np.any(here[0][1] != here[1][1])
    # The same key at another position: turned, but of the same length.
    assert float(np.max(np.abs(here[0][1] - there[0][1]))) > 1e-3
    np.testing.assert_allclose(np.linalg.norm(here[0][1], axis=-1), np.linalg.norm(there[0][1], axis=-1), rtol=1e-5)


def test_something_kept_for_each_layer():
    zeros = jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match="zip"):
        jax.eval_shape(lambda p: forward(SMALL, PLAIN, p, zeros, zeros, causal_attend, caches=(None,)), drawn(SMALL))


def test_declaration_is_the_checkpoint(golden: Golden):
    """Names and shapes are exactly those that transformers stores, and `count` counts them."""
    specs = declare(golden.config)
    stored = golden.stored()
    headers = stacked(read_headers(golden.folder.glob("*.safetensors")))
    assert {spec.name: spec.stored_shape for spec in spec_leaves(specs)} == {each.name: each.shape for each in headers}
    assert count(specs) == sum(value.size for value in stored.values())


def test_params_go_back_to_the_stored_tensors(golden: Golden):
    stored = golden.stored()
    written = dict(to_tensors(declare(golden.config), golden.params, np.float32))
    assert written.keys() == stored.keys()
    offset = {spec.name for spec in spec_leaves(declare(golden.config)) if spec.offset}
    for name, value in written.items():
        # Norms of Gemma's are kept with one added, which takes their last bits.
        np.testing.assert_allclose(value, stored[name], rtol=0, atol=3e-7 if name in offset else 0)


def test_logical_axes(golden: Golden):
    """Every dim has an axis whose size is that of the configuration, so that a schedule can shard by name alone."""
    config = golden.config
    sizes = {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "mlp": config.intermediate_size,
        "query_heads": config.num_heads,
        "single": 1,
        **delta_axes(config),
    }
    if (mixture := config.mixture) is not None:
        both = 2 * mixture.size if mixture.clamped else mixture.size  # of gate and up, where one array has them
        sizes |= {"experts": mixture.experts, "router": mixture.experts, "expert": mixture.size, "gate_up": both}
        sizes |= {"shared_expert": mixture.shared}
    declared = declare(config)
    for part in (replace(declared, layers=()), *declared.layers):
        heads = config.heads(part.kind if isinstance(part, Layer) else LayerKind())
        own = {"heads": config.num_heads * heads.head_dim, "kv_heads": heads.kv_heads * heads.head_dim, "head": heads.head_dim}
        for spec in spec_leaves(part):
            assert spec.shape == tuple((sizes | own)[axis] for axis in spec.axes), spec.name


def delta_axes(config: DecoderConfig) -> dict[str, int]:
    if config.delta is None:
        return {}
    sizes = config.delta
    return {
        "delta_channels": 2 * sizes.key_heads * sizes.key_dim + sizes.value_heads * sizes.value_dim,
        "delta_values": sizes.value_heads * sizes.value_dim,
        "delta_heads": sizes.value_heads,
        "delta_head": sizes.value_dim,
        "taps": sizes.taps,
    }


def test_families_and_heads_differ_in_their_arrays_alone():
    llama = declare(DecoderConfig(**{**vars(SMALL), "family": "llama", "tie_word_embeddings": False}))
    qwen = declare(SMALL)
    names = {spec.name for spec in spec_leaves(llama)}
    extra = {f"model.layers.{n}.self_attn.{which}_norm.weight" for n in (0, 1) for which in "qk"}
    assert {spec.name for spec in spec_leaves(qwen)} == (names | extra) - {"lm_head.weight"}
    assert (qwen.head, llama.layers[0].q_norm) == (None, None)


@pytest.mark.parametrize("ops", [PLAIN, operations(), training_operations("float32")], ids=lambda ops: ops.name)
@pytest.mark.parametrize("first", [0, 1])
def test_biases_follow_their_matrices(ops: Operations, first: int):
    """Also where a projection is of keys and values alone."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(24, 16 * n)).astype(np.float32) for n in (2, 1, 1))
    bias = tuple(jnp.asarray(rng.normal(size=w.shape[1]), jnp.float32) for w in (q, k, v))
    x = jnp.asarray(rng.normal(size=(2, 3, 24)), jnp.float32)
    joined = ops.prepare_joined(Joined(tuple(map(jnp.asarray, (q, k, v)))), "qkv")
    still = Heads(16, None, None, (jnp.ones((2, 3, 8)), jnp.zeros((2, 3, 8))))
    queries, keys, values = ops.heads(ops.project(x, joined, first=first, bias=bias), still)
    assert (queries is None) is bool(first)
    found = [*([] if queries is None else [queries]), keys.swapaxes(1, 2), values.swapaxes(1, 2)]
    for part, w, b in zip(found, (q, k, v)[first:], bias[first:], strict=True):
        np.testing.assert_allclose(part.reshape(2, 3, -1), np.asarray(x) @ w + np.asarray(b), rtol=0, atol=1e-4)


def test_abstract_has_the_shapes_of_initialise():
    specs = declare(SMALL)
    shapes = abstract(specs, jnp.bfloat16)
    params = drawn(SMALL, jnp.bfloat16)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), params)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes))
    assert count(specs) == sum(x.size for x in jax.tree.leaves(params))


def test_initialise():
    """Norms are ones, matrices are truncated normals of their declared scale, no two alike, and a key decides them."""
    specs = declare(DecoderConfig(**{**vars(SMALL), "hidden_size": 64, "intermediate_size": 128}))
    draw = jax.jit(lambda key: initialise(specs, key))
    params = draw(jax.random.key(3))
    again = draw(jax.random.key(3))
    other = draw(jax.random.key(4))
    for spec, x, y in zip(spec_leaves(specs), jax.tree.leaves(params), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(x, y)
        if spec.name.endswith("norm.weight"):
            np.testing.assert_array_equal(x, 1.0)
        else:
            assert float(jnp.max(jnp.abs(x))) <= 3 * spec.scale
            assert float(jnp.std(x)) == pytest.approx(spec.scale, rel=0.06)
    first, second = params.layers
    for unlike in (second, other.layers[0]):
        assert float(jnp.mean(jnp.abs(first.gate_up.parts[0] - unlike.gate_up.parts[0]))) > 0.01
    assert spec_leaves(specs.layers[0].down)[0].scale == pytest.approx(0.02 / math.sqrt(2 * SMALL.num_layers))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scaled_embedding_is_rounded_before_it_is_added(dtype: str):
    """Programs of other widths would contract product and sum to one rounding in other places."""
    config = DecoderConfig(**{**vars(SMALL), "embedding_scale": 25.298})
    rng = np.random.default_rng(0)
    embedded, added = (jnp.asarray(rng.standard_normal((1, 16, 640)), dtype) for _ in range(2))
    found = jax.jit(lambda x, y: decoder.scaled(config, x) + y)(embedded, added)
    product = np.asarray(embedded) * np.asarray(config.embedding_scale, embedded.dtype)
    np.testing.assert_array_equal(found, product + np.asarray(added))
