"""EAGLE-3's maths against the NumPy reference, its configuration, and its checkpoints."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import Array
from safetensors.numpy import load_file, save_file

from reference.dflash_numpy import Target, random_pair
from reference.eagle3_numpy import Chain, Draft, as_folder, random_eagle3
from tilewright.kernels import native
from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.operations import KeyValueRows, Operations
from tilewright.kernels.select import PLAIN, operations
from tilewright.models import decoder, draft_vocab, eagle3
from tilewright.models.eagle3 import Eagle3Config, Eagle3Params
from tilewright.models.layers import Llama3Scaling
from tilewright.models.params import count, initialise
from tilewright.speculation.drafters.eagle3 import Eagle3

PAIR = random_pair(5)
TARGET = decoder.config_from_hf(PAIR.target_config)
TOKENS = np.random.default_rng(1).integers(0, 40, (2, 9)).astype(np.int32)
VARIANTS: dict[str, dict[str, Any]] = {
    "published": {},
    "norm before residual": {"norm_before_residual": True, "rope_theta": 1e6},
    "own embedding": {"hidden_size": 24, "taps": (3, 1), "draft_vocab_size": 40},
}


def reference(seed: int = 0, **changes: Any) -> Chain:
    return Chain(*random_eagle3(seed, PAIR.target_config, **changes), Target(PAIR.target_config, PAIR.target_tensors))


def loaded(folder: Path, chain: Chain, dtype: Any = jnp.float32, **options: Any) -> tuple[Eagle3Config, Eagle3Params]:
    return eagle3.load(as_folder(folder, chain.config, chain.tensors, **options), TARGET, dtype)


def features_of(chain: Chain) -> np.ndarray:
    """The reference's features of both rows of `TOKENS`."""
    return np.stack([chain.fuse(chain.target.run(row.tolist())[1]) for row in TOKENS])


def table_of(chain: Chain) -> np.ndarray:
    """The embedding that the drafter reads."""
    return chain.embed(range(40)).astype(np.float32)


def causal(projection: Any, heads: Any) -> Array:
    return decoder.causal_attend(PLAIN, projection, heads, None, None)[0]


def draft(
    config: Eagle3Config,
    ops: Operations,
    params: Eagle3Params,
    table: Array,
    tokens: Array,
    features: Array,
    known: Array,
    steps: int,
) -> tuple[Array, Array, Array]:
    """Chains of every row from its own known token: proposals `[B, steps]`, logits, outputs; by keys kept from before."""
    rows = jnp.arange(len(tokens))
    length = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length - 1), (len(tokens), length - 1))
    cache = eagle3.keys(config, ops, params, features[:, :-1], table[tokens[:, 1:]], positions)
    h = features[rows, known - 1][:, None]
    token = tokens[rows, known][:, None]
    at = known[:, None] - 1
    chain_kv: list[tuple[Array, Array]] = []
    proposed = []
    logits = []
    outputs = []
    for _ in range(steps):

        def attend(projection: Any, heads: Any) -> Array:
            q, k, v = ops.heads(projection, heads)
            chain_kv.append((k, v))
            mine = tuple(jnp.concatenate(parts, axis=2) for parts in zip(*chain_kv, strict=True))
            mask = AttentionMask(known[:, None] - 1, "full")
            return ops.attend(q, KeyValueRows(*cache), mask, (mine[0], mine[1])).reshape(*q.shape[:2], -1)

        h = eagle3.step(config, ops, params, h, table[token], at, attend)
        scores = eagle3.draft_logits(config, ops, params, h)[:, 0]
        token = eagle3.best_tokens(config, ops, params, h, 1)[0][:, :, 0]
        at = at + 1
        proposed.append(token[:, 0])
        logits.append(scores)
        outputs.append(h[:, 0])
    return jnp.stack(proposed, 1), jnp.stack(logits, 1), jnp.stack(outputs, 1)


compiled_draft = jax.jit(draft, static_argnums=(0, 1, 7))


def drafted(
    config: Eagle3Config, params: Eagle3Params, chain: Chain, known: list[int], steps: int, ops: Operations = PLAIN
) -> tuple[Any, Any, Any]:
    table = jnp.asarray(table_of(chain))
    features = jnp.asarray(features_of(chain), jnp.float32)
    return compiled_draft(config, ops, params, table, jnp.asarray(TOKENS), features, jnp.asarray(known), steps)


def expected(chain: Chain, known: list[int], steps: int) -> list[Draft]:
    pairs = zip(TOKENS, features_of(chain), known, strict=True)
    return [chain.draft(row[: at + 1].tolist(), features, steps) for row, features, at in pairs]


@pytest.mark.parametrize("name", list(VARIANTS))
def test_chains_equal_the_reference(tmp_path: Path, name: str):
    """Rows of different lengths; every step after the first reads what the drafter itself made."""
    chain = reference(**VARIANTS[name])
    known = [8, 3]
    steps = 4
    config, params = loaded(tmp_path, chain)
    proposed, logits, outputs = drafted(config, params, chain, known, steps)
    for row, want in enumerate(expected(chain, known, steps)):
        best = np.sort(want.logits, axis=1)
        assert np.min(best[:, -1] - best[:, -2]) > 1e-3, "no choice hangs on rounding"
        assert proposed[row].tolist() == want.tokens
        np.testing.assert_allclose(logits[row], want.logits, rtol=0, atol=5e-4)
        np.testing.assert_allclose(outputs[row], want.outputs, rtol=0, atol=5e-4)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_features_equal_the_reference(tmp_path: Path, name: str):
    """Through our own target, tapped in the order that the configuration lists."""
    chain = reference(**VARIANTS[name])
    config, params = loaded(tmp_path / "drafter", chain)
    stored = dict(PAIR.target_tensors)
    target = decoder.declare(TARGET)
    tree = jax.tree.map(lambda s: jnp.asarray(stored[s.name].T if s.transposed else stored[s.name]), target)

    def run(tree: Any, params: Any) -> Array:
        return eagle3.fuse(
            config, PLAIN, params, decoder.forward_full(TARGET, PLAIN, tree, jnp.asarray(TOKENS), config.target_layer_ids).taps
        )

    np.testing.assert_allclose(jax.jit(run)(tree, params), features_of(chain), rtol=0, atol=5e-4)


def test_a_step_over_a_sequence_equals_the_reference_and_leaves_the_keys(tmp_path: Path):
    chain = reference()
    config, params = loaded(tmp_path, chain)
    features = features_of(chain)[:, :-1]
    tokens = TOKENS[:, 1:]
    embeds = jnp.asarray(table_of(chain)[tokens])
    positions = jnp.broadcast_to(jnp.arange(8), (2, 8))

    def run(params: Eagle3Params) -> tuple[Array, list[Array]]:
        left = []

        def attend(projection: Any, heads: Any) -> Array:
            left.extend(PLAIN.heads(projection, heads)[1:])
            return causal(projection, heads)

        return eagle3.step(config, PLAIN, params, h, embeds, positions, attend), left

    h = jnp.asarray(features, jnp.float32)
    out, left = jax.jit(run)(params)
    kept = jax.jit(lambda params: eagle3.keys(config, PLAIN, params, h, embeds, positions))(params)
    for row in range(2):
        np.testing.assert_allclose(out[row], chain.layer(features[row], tokens[row].tolist()), rtol=0, atol=5e-4)
    for mine, theirs in zip(left, kept, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)


def test_only_distances_between_positions_count(tmp_path: Path):
    """So whether a pair stands at the position of its feature or of its token makes no difference."""
    config, params = loaded(tmp_path, reference())
    h, embeds = (jnp.asarray(np.random.default_rng(n).normal(size=(1, 6, 32)), jnp.float32) for n in range(2))
    run = jax.jit(lambda first: eagle3.step(config, PLAIN, params, h, embeds, first + jnp.arange(6)[None], causal))
    np.testing.assert_allclose(run(0), run(1), rtol=0, atol=1e-4)
    uneven = eagle3.step(config, PLAIN, params, h, embeds, jnp.arange(6)[None] ** 2, causal)
    assert float(jnp.abs(uneven - run(0)).max()) > 1e-2


def test_rope_scaling_is_read_and_bites(tmp_path: Path):
    chain = reference()
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    chain.config = {**chain.config, "rope_scaling": {**scaling, "original_max_position_embeddings": 16}}
    config, params = loaded(tmp_path, chain)
    assert isinstance(config.rope_scaling, Llama3Scaling)
    assert config.rope_scaling.factor == 8.0
    scaled = drafted(config, params, chain, [8, 3], 1)[1]
    assert float(np.abs(scaled - drafted(replace(config, rope_scaling=None), params, chain, [8, 3], 1)[1]).max()) > 1e-2


def test_every_array_matters(tmp_path: Path):
    config, params = loaded(tmp_path, reference(hidden_size=24))
    ids = jnp.asarray(TOKENS)
    taps = [jnp.cos(jnp.arange(2 * 9 * 32.0) * n).reshape(2, 9, 32) for n in range(1, 4)]

    def loss(params: Eagle3Params) -> Array:
        h = eagle3.fuse(config, PLAIN, params, taps)
        out = eagle3.step(config, PLAIN, params, h, params.embed[ids], jnp.arange(9)[None].repeat(2, 0), causal)
        return jnp.sum(jnp.square(eagle3.draft_logits(config, PLAIN, params, out)))

    gradients = jax.jit(jax.grad(loss))(replace(params, target_ids=None))
    assert all(float(jnp.abs(g).max()) > 1e-2 for g in jax.tree.leaves(gradients))
    assert len(jax.tree.leaves(gradients)) == 14


def test_bfloat16_keeps_logits_in_float32(tmp_path: Path):
    chain = reference()
    config, params = loaded(tmp_path, chain, jnp.bfloat16)
    features = features_of(chain)[0, :8]
    tokens = TOKENS[0, 1:]
    h, embeds = (jnp.asarray(x, jnp.bfloat16)[None] for x in (features, table_of(chain)[tokens]))
    out = eagle3.step(config, PLAIN, params, h, embeds, jnp.arange(8)[None], causal)
    logits = eagle3.draft_logits(config, PLAIN, params, out)
    assert (out.dtype, logits.dtype, params.target_ids.dtype) == (jnp.bfloat16, jnp.float32, jnp.int32)
    assert not np.array_equal(logits, logits.astype(jnp.bfloat16).astype(jnp.float32))
    want = chain.logits(chain.layer(features, tokens.tolist()))
    assert np.sqrt(np.mean(np.square(logits[0] - want)) / np.mean(np.square(want))) < 0.05


@pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
def test_packed_chains_equal_plain_ones(tmp_path: Path):
    chain = reference()
    config, params = loaded(tmp_path, chain)
    ops = operations()
    drafter = Eagle3(config, config.block_size)
    assert ops.name.startswith("cpu")
    plain = drafted(config, params, chain, [8, 3], 3)
    packed = drafted(config, ops.prepare(drafter.declared, params), chain, [8, 3], 3, ops)
    np.testing.assert_array_equal(plain[0], packed[0])
    np.testing.assert_allclose(plain[1], packed[1], rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", list(VARIANTS))
@pytest.mark.parametrize("model_prefix", [False, True])
def test_checkpoints_go_out_as_they_came_in(tmp_path: Path, name: str, model_prefix: bool):
    chain = reference(**VARIANTS[name])
    config, params = loaded(tmp_path / "in", chain, model_prefix=model_prefix)
    assert config.own_embedding == (name == "own embedding") == (params.embed is not None)
    eagle3.save(tmp_path / "out", config, params, jnp.float32)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == chain.tensors.keys()
    for key, tensor in chain.tensors.items():
        assert stored[key].dtype == tensor.dtype
        np.testing.assert_array_equal(stored[key], tensor)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {**chain.config, "eagle_config": fields["eagle_config"], "torch_dtype": "float32"} == fields
    again = eagle3.load(tmp_path / "out", TARGET, jnp.float32)
    assert again[0] == config
    assert jax.tree.all(jax.tree.map(np.array_equal, again[1], params))


def test_a_full_vocabulary_needs_no_maps(tmp_path: Path):
    chain = reference(draft_vocab_size=40)
    kept = {name: tensor for name, tensor in chain.tensors.items() if name not in draft_vocab.MAPS}
    config, params = eagle3.load(as_folder(tmp_path, chain.config, kept), TARGET, jnp.float32)
    assert params.target_ids.tolist() == list(range(40))
    assert config.draft_vocab_size == 40


@given(st.integers(1, 20), st.integers(0, 1000))
def test_maps_and_ids_are_the_same_thing(size: int, seed: int):
    ids = np.sort(np.random.default_rng(seed).permutation(20)[:size])
    maps = draft_vocab.maps_from_target_ids(ids, 20)
    assert maps["d2t"].dtype == np.int64
    assert maps["t2d"].dtype == np.bool_
    config = eagle3.config_from_hf(random_eagle3(0, {**PAIR.target_config, "vocab_size": 20}, draft_vocab_size=size)[0], 5)
    np.testing.assert_array_equal(
        draft_vocab.target_ids_from_maps(config.draft_vocab_size, config.vocab_size, maps, "here"), ids
    )
    assert [draft + int(shift) for draft, shift in enumerate(maps["d2t"])] == np.flatnonzero(maps["t2d"]).tolist()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"d2t": None}, "expected the tensor d2t, as draft_vocab_size 24 is not vocab_size 40"),
        ({"d2t": np.zeros(23, np.int64)}, r"expected d2t to hold 24 integers, found int64 \[23\]"),
        ({"d2t": np.zeros(24, np.float32)}, r"expected d2t to hold 24 integers, found float32 \[24\]"),
        ({"d2t": -np.arange(24)}, "expected d2t to map to 24 different ids below 40"),
        ({"d2t": np.full(24, 17)}, "expected d2t to map to 24 different ids below 40"),
        ({"t2d": np.ones(40, bool)}, "expected t2d to be true for the 24 ids that d2t maps to, found 40"),
        ({"norm.weight": None, "extra.weight": np.zeros(3, np.float32)}, r"1 missing: norm.weight; 1 unknown: extra.weight"),
        ({"fc.weight": np.zeros((32, 64), np.float32)}, r"fc.weight \(expected \[32, 96\], found \[32, 64\]\)"),
        ({"midlayer.self_attn.q_norm.weight": np.ones(16, np.float32)}, "1 unknown: midlayer.self_attn.q_norm.weight"),
    ],
)
def test_tensors_that_do_not_fit_stop_the_load(tmp_path: Path, change: dict[str, Any], problem: str):
    chain = reference()
    as_folder(tmp_path, chain.config, chain.tensors)
    tensors = {name: tensor for name, tensor in ({**chain.tensors, **change}).items() if tensor is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=problem):
        eagle3.load(tmp_path, TARGET, jnp.float32)


CONFIG = random_eagle3(0, PAIR.target_config)[0]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model_type": "gemma2"}, "model_type='gemma2' is not supported"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2 is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
        ({"sliding_window": 512}, "sliding_window=512 is not supported"),
        ({"use_sliding_window": True, "sliding_window": 512}, "use_sliding_window=True is not supported"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "rope_scaling type 'ntk' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} is not supported"),
        ({"norm_before_fc": True}, "norm_before_fc=True is not supported"),
        ({"is_neox_style": False}, "is_neox_style=False is not supported"),
        ({"attention_sink_bias": True}, "attention_sink_bias=True is not supported"),
        ({"eagle_config": {"norm_output": True}}, "eagle_config.norm_output=True is not supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state=False is not supported"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "eagle_config.use_mtp_layernorm=True is not supported"),
        ({"eagle_config": {"surprise": 1, "another": 2}}, "eagle_config has unknown fields: another, surprise"),
        ({"eagle_config": [1]}, r"eagle_config must be an object, found \[1\]"),
        ({"eagle_config": {}, "eagle_aux_hidden_state_layer_ids": [2, 5]}, "must be in eagle_config"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1]}}, r"must be a token id or a list of them, found \[-1\]"),
        ({"eagle_config": {"block_size": 1}}, "block_size must be at least 2, found 1"),
        ({"draft_vocab_size": 41}, "draft_vocab_size 41 exceeds vocab_size 40"),
        ({"hidden_size": None, "head_dim": 15}, "hidden_size must be a positive integer, found None; head_dim must be even"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        eagle3.config_from_hf({**CONFIG, **change}, 5)


def test_fields_of_published_configurations_are_read():
    """Fields of training tools: unused ones, no taps, or taps with flags for the only supported behaviour."""
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
        "draft_vocab_size": 32000,
    }
    config = eagle3.config_from_hf(fields, 36)
    assert config.target_layer_ids == (1, 17, 32), "after these, so the inputs of layers 2, 18 and 33"
    assert (config.rope_theta, config.head_dim, config.block_size, config.target_hidden_size) == (1e6, 128, 8, 4096)
    named = {"eagle_aux_hidden_state_layer_ids": [1, 46, 90], "use_aux_hidden_state": True, "use_mtp_layernorm": False}
    assert eagle3.config_from_hf({**fields, "eagle_config": named}, 94).target_layer_ids == (1, 46, 90)
    del fields["head_dim"], fields["rope_theta"]
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    config = eagle3.config_from_hf({**fields, "norm_before_residual": True, "eagle_config": None}, 36)
    assert (config.rope_theta, config.head_dim, config.norm_before_residual) == (5e5, 128, True)


@given(st.integers(1, 100))
def test_default_taps_are_distinct_and_inside(depth: int):
    taps = eagle3.default_target_layers(depth)
    assert list(taps) == sorted(set(taps))
    assert len(taps) == min(3, depth)
    assert taps[0] >= 0
    assert taps[-1] < depth
    if depth == 4:
        assert taps == (1, 2, 3)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"vocab_size": 41}, "vocab_size is 41 but the target's is 40"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64 but the target's is 32"),
        ({"hidden_size": 24}, "hidden_size, without an embedding of its own, is 24 but the target's is 32"),
        ({"target_layer_ids": (1, 5, 7)}, r"target_layer_ids \[5, 7\] lie outside the target's 5 layers"),
    ],
)
def test_what_does_not_fit_its_target_is_named(change: dict[str, Any], problem: str):
    config = eagle3.config_from_hf(CONFIG, 5)
    eagle3.check_fits(config, TARGET)
    with pytest.raises(ValueError, match=problem):
        eagle3.check_fits(replace(config, **change), TARGET)


def test_declared_arrays_are_counted_and_drawn():
    config = eagle3.config_from_hf(CONFIG, 5)
    drawn = initialise(eagle3.declare(config), jax.random.key(0))
    assert drawn.target_ids is None
    assert drawn.layer.qkv.parts[0].shape == (64, 64)
    assert count(eagle3.declare(config)) == sum(leaf.size for leaf in jax.tree.leaves(drawn))
