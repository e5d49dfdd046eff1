"""DFlash 2: what a checkpoint says and how it is checked, the maths against NumPy, and the walk's distribution."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.walks import BROKEN, TEMPERATURE, Draw, draw_walks, excess
from reference.dflash2_numpy import as_dflash2, build2
from reference.dflash_numpy import Pair, as_folders, random_pair
from tilewright.kernels.select import PLAIN
from tilewright.models import convolution, decoder, dflash, dflash2
from tilewright.models.checkpoint import read_config, save_params
from tilewright.models.convolution import AFTER, BEFORE
from tilewright.models.dflash2 import DFlash2Config, DFlash2Params
from tilewright.models.params import count, initialise, to_tensors
from tilewright.speculation.drafters.load import load_dflash

PLAIN_PAIR = random_pair(0, vocab_size=16, target_layers=1, drafter_layers=2, taps=[0], block_size=4)
FIELDS: dict[str, Any] = {"output_multiplier": 0.5, "final_logit_softcapping": 8.0, "input_embedding_scale": 0.75}
PAIR = as_dflash2(PLAIN_PAIR, window=6, sliding=[0], **FIELDS)

pytestmark = pytest.mark.usefixtures("quick_compiles")


def loaded(folder: Path, pair: Pair = PAIR) -> tuple[DFlash2Config, DFlash2Params]:
    _, drafter = as_folders(folder, pair)
    return load_dflash(drafter, read_config(drafter), decoder.config_from_hf(pair.target_config), "float32", None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[DFlash2Config, DFlash2Params]:
    return loaded(tmp_path_factory.mktemp("model"))


# Configuration and checkpoint

MUSE = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "is_causal": False,
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "vocab_size": 202048,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_target_layers": 52,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 5e5},
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": 2048,
    "use_sliding_window": True,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "dflash_config": {
        "block_size": 16,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
        "mask_token_id": 201818,
        "target_layer_ids": [1, 13, 25, 37, 49],
        "output_multiplier": 0.19611613513818404,
        "final_logit_softcapping": 20.0,
    },
}
"""The published configuration for Muse-Glimmer-30B."""


def test_a_published_configuration():
    config = dflash2.config_from_hf(MUSE)
    assert config.windows == (2048,) * 5
    assert (config.block_size, config.conv_kernel_size, convolution.num_groups(config)) == (16, 2, 416)
    assert (config.output_multiplier, config.final_logit_softcapping) == (0.19611613513818404, 20.0)
    assert config.target_layer_ids == (1, 13, 25, 37, 49)
    assert dflash2.config_from_hf(dflash2.config_to_hf(config)) == config
    shapes = {spec.name: list(spec.stored_shape) for spec in jax.tree.leaves(dflash2.declare(config))}
    backbone = {spec.name for spec in jax.tree.leaves(dflash.declare(config))}
    conv = {"base_kernel": [2, 2, 6656], "kernel_projection.weight": [1664, 6656]}
    added = {
        f"layers.{n}.{side}_conv.{name}": shape
        for n in range(5)
        for side in ("attention", "mlp")
        for name, shape in conv.items()
    }
    added |= {f"candidate_selector.{name}_codebook": [202048, 256] for name in ("predecessor", "successor")}
    added |= {"candidate_selector.hidden_projection.weight": [256, 6656]}
    assert {name: shape for name, shape in shapes.items() if name not in backbone} == added


def test_sizes_of_the_additions():
    """The published account of a 4B drafter's: 16.5 M parameters in the convolutions."""
    fields = {**MUSE, "hidden_size": 2560, "vocab_size": 151936}
    config = dflash2.config_from_hf(fields | {"dflash_config": MUSE["dflash_config"] | {"mask_token_id": 1}})
    declared = dflash2.declare(config)
    assert round(count((declared.attention_convs, declared.mlp_convs)) / 1e6, 2) == 16.49
    assert dflash2.is_dflash2(fields)
    assert not dflash2.is_dflash2(PLAIN_PAIR.drafter_config)


def test_what_may_be_absent():
    fields = {
        name: value for name, value in MUSE.items() if name not in ("layer_types", "sliding_window", "use_sliding_window")
    }
    inner = {name: value for name, value in MUSE["dflash_config"].items() if not name.startswith(("output", "final"))}
    config = dflash2.config_from_hf(fields | {"dflash_config": inner, "is_causal": None})
    assert (config.windows, config.output_multiplier, config.final_logit_softcapping) == ((None,) * 5, 1.0, None)
    assert dflash2.config_from_hf(dflash2.config_to_hf(config)) == config


@pytest.mark.parametrize(
    ("change", "inside", "message"),
    [
        ({}, {"conv_kernel_size": None, "selector_rank": None}, "conv_kernel_size must be a positive integer, found None"),
        ({}, {"conv_kernel_size": None, "selector_rank": None}, "selector_rank must be a positive integer, found None"),
        ({}, {"conv_group_size": 7}, "conv_group_size 7 does not divide hidden_size 6656"),
        ({}, {"selector_top_k": 300000}, "selector_top_k 300000 exceeds the 202048 tokens that can be proposed"),
        ({}, {"output_multiplier": -1}, "output_multiplier must be a positive number, found -1"),
        ({}, {"final_logit_softcapping": "x"}, "final_logit_softcapping must be a positive number, found 'x'"),
        ({}, {"markov_rank": 256}, "dflash_config has unknown fields: markov_rank"),
        ({"is_causal": 1}, {}, "is_causal must be true or false, found 1"),
        ({"is_neox_style": False}, {}, "is_neox_style=False is not supported"),
        ({"rope_dim": 64}, {}, "rope_dim=64 is not supported .only 128."),
        ({"v_head_dim": 64}, {}, "v_head_dim=64 is not supported .only 128."),
        ({"logit_scale": 0.5}, {}, "logit_scale=0.5 is not supported"),
        ({}, {"attention_value_scale": -1}, "attention_value_scale must be a positive number, found -1"),
        ({}, {"attention_sink_bias": "x"}, "attention_sink_bias must be true or false, found 'x'"),
        ({"layer_types": ["sliding_attention"] * 4}, {}, "layer_types must name full_attention or sliding_attention for"),
        ({"layer_types": ["chunked"] * 5}, {}, "layer_types must name full_attention or sliding_attention for"),
        ({"layer_types": None}, {}, "use_sliding_window needs layer_types"),
        ({"layer_types": None, "use_sliding_window": None}, {}, "sliding_window=2048 is not supported"),
        ({"use_sliding_window": False}, {}, "use_sliding_window is false, but layer_types has sliding_attention"),
        ({"sliding_window": None}, {}, "sliding_window must be a positive integer, found None"),
        ({"sliding_window": 15}, {}, "sliding_window must be at least the block's 16, found 15"),
        ({"architectures": ["DFlashDraftModel"]}, {}, "architectures=.'DFlashDraftModel'. is not supported"),
    ],
)
def test_a_field_that_does_not_fit_is_named(change: dict[str, Any], inside: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        dflash2.config_from_hf(MUSE | change | {"dflash_config": MUSE["dflash_config"] | inside})


def test_every_field_that_does_not_fit_is_named_at_once():
    fields = {**MUSE, "is_causal": "yes", "hidden_size": 100, "model_type": "llama", "num_attention_heads": 0}
    fields["dflash_config"] = MUSE["dflash_config"] | {"selector_rank": "r", "markov_rank": 1, "block_size": 1}
    with pytest.raises(ValueError, match="markov_rank") as caught:
        dflash2.config_from_hf(fields)
    named = (
        "is_causal",
        "conv_group_size 16 does not divide",
        "model_type",
        "num_attention_heads",
        "selector_rank",
        "block_size",
    )
    assert all(name in str(caught.value) for name in named)


def test_every_tensor_that_does_not_fit_is_named_at_once(tmp_path: Path):
    """And how the sizes do not fit the target."""
    _, folder = as_folders(tmp_path, PAIR)
    tensors = load_file(folder / "model.safetensors")
    gone = "layers.0.mlp_conv.base_kernel"
    wide = "layers.1.attention_conv.base_kernel"
    del tensors[gone]
    tensors[wide] = np.zeros((2, 3, 32), np.float32)
    tensors["candidate_selector.extra"] = np.zeros(3, np.float32)
    save_file(tensors, folder / "model.safetensors")
    target = decoder.config_from_hf(PAIR.target_config | {"num_hidden_layers": 3})
    with pytest.raises(ValueError, match="num_target_layers is 1 but the target's is 3") as caught:
        load_dflash(folder, read_config(folder), target, "float32", None)
    for named in (f"1 missing: {gone}", "candidate_selector.extra", f"{wide} (expected [2, 2, 32], found [2, 3, 32])"):
        assert named in str(caught.value)


@pytest.mark.parametrize("prefix", [False, True])
def test_names_and_values_survive_a_round_trip(tmp_path: Path, prefix: bool):
    _, folder = as_folders(tmp_path, PAIR, model_prefix=prefix, block_size_inside=True)
    config, params = load_dflash(folder, read_config(folder), decoder.config_from_hf(PAIR.target_config), "float32", None)
    save_params(tmp_path / "saved", dflash2.config_to_hf(config), dflash2.declare(config), params, jnp.float32)
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    assert stored.keys() == PAIR.drafter_tensors.keys()
    for name, tensor in PAIR.drafter_tensors.items():
        np.testing.assert_array_equal(stored[name], tensor)
    fields = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert dflash2.config_from_hf(fields) == config


# Maths


def test_the_convolution_by_hand():
    config = dflash2.config_from_hf(PAIR.drafter_config)
    config = replace(config, hidden_size=4, conv_group_size=2, conv_kernel_size=2)
    base = np.zeros((2, 2, 4), np.float32)
    base[BEFORE, 0] = 1
    base[BEFORE, 1] = [10, 20, 30, 40]
    base[AFTER, 1] = 1
    dynamic = np.zeros((1, 3, 2, 2, 2), np.float32)
    dynamic[0, 1, BEFORE, 1] = [1, 2]  # slot 1 takes more of slot 0, each group of two channels its own
    y = jnp.asarray(np.arange(12, dtype=np.float32).reshape(1, 3, 4))
    conv = convolution.Convolution(jnp.asarray(base), None)
    before, after = (convolution.convolve(config, conv, jnp.asarray(dynamic), side, y)[0] for side in (BEFORE, AFTER))
    np.testing.assert_array_equal(before[0], [0, 1, 2, 3])
    np.testing.assert_array_equal(before[1], [4 + 11 * 0, 5 + 21 * 1, 6 + 32 * 2, 7 + 42 * 3])
    np.testing.assert_array_equal(before[2], [8 + 10 * 4, 9 + 20 * 5, 10 + 30 * 6, 11 + 40 * 7])
    np.testing.assert_array_equal(after, [[0, 0, 0, 0], [0, 1, 2, 3], [4, 5, 6, 7]])


def test_fresh_parameters_do_what_dflash_does(model: tuple[DFlash2Config, DFlash2Params]):
    config, _ = model
    params = dflash2.fresh(config, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 4, 32))
    positions = jnp.arange(4)[None] + jnp.zeros((2, 1), jnp.int32)

    def attend(ops: Any, projection: Any, heads: Any, attn_metadata: Any, kv_cache: Any) -> tuple[jax.Array, Any]:
        q = ops.heads(projection, heads)[0]
        return q.reshape(*q.shape[:2], -1), kv_cache

    arguments = (x, positions, (None, None), attend, None)
    got = convolution.run_block(config, PLAIN, params, *arguments)
    np.testing.assert_allclose(got, dflash.run_block(config, PLAIN, params.backbone, *arguments), atol=1e-6)
    tokens = jnp.arange(12).reshape(2, 3, 2) % 16
    assert not np.any(dflash2.pair_scores(PLAIN, params.selector, x[:, 1:], tokens, tokens))
    assert np.any(np.asarray(params.selector.predecessor))


@pytest.mark.parametrize("fields", [{}, FIELDS])
def test_scores_and_walk_equal_the_reference(tmp_path: Path, fields: dict[str, Any]):
    pair = as_dflash2(PLAIN_PAIR, **fields)
    config, params = loaded(tmp_path, pair)
    _, drafter = build2(pair)
    hidden = np.random.default_rng(0).normal(size=(5, 3, 32)).astype(np.float32)
    known = np.arange(5)
    logits = np.stack([drafter.target.head(h.astype(np.float64)) for h in hidden])
    candidates = np.argsort(-logits, axis=-1, kind="stable")[..., :5]
    unary = np.take_along_axis(logits, candidates, axis=-1).astype(np.float32)

    @jax.jit
    def run(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden, known, candidates, logits = arrays
        scaled = dflash2.scaled_logits(config, logits)
        scores = dflash2.transition_scores(PLAIN, params.selector, hidden, known, candidates, scaled)
        return scores, dflash2.walk(scores, candidates)

    scores, walked = run(*(jnp.asarray(x) for x in (hidden, known, candidates, unary)))
    for row in range(5):
        reference_logits = drafter.logits(hidden[row].astype(np.float64))
        before = int(known[row])
        for slot in range(3):
            tokens, want = drafter.choices(hidden[row, slot].astype(np.float64), reference_logits[slot], before)
            assert tokens == candidates[row, slot].tolist()
            place = 0 if slot == 0 else candidates[row, slot - 1].tolist().index(before)
            np.testing.assert_allclose(scores[row, slot, place], want, rtol=1e-4, atol=1e-4)
            before = tokens[int(np.argmax(want))]
            assert walked[row, slot] == before


def test_the_first_of_equal_candidates_is_taken():
    candidates = jnp.asarray([[[7, 3], [5, 9]]])
    assert dflash2.walk(jnp.zeros((1, 2, 2, 2)), candidates).tolist() == [[7, 5]]


# The sampled walk


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[tuple[int, ...], float], tuple[np.ndarray, np.ndarray]]:
    """The exact distribution of the walks over three slots; and what they are drawn from, scores and candidates."""
    pair = as_dflash2(PLAIN_PAIR, top_k=3, **FIELDS)
    config, params = loaded(tmp_path_factory.mktemp("walks"), pair)
    _, drafter = build2(pair)
    hidden = np.random.default_rng(1).normal(size=(3, 32))
    known = 6
    exact = drafter.walk_distribution(hidden, known, TEMPERATURE)
    logits = drafter.target.head(hidden)
    candidates = np.argsort(-logits, axis=-1, kind="stable")[None, :, :3]
    unary = np.take_along_axis(logits[None], candidates, axis=-1)
    arrays = (hidden[None], np.array([known]), candidates, unary)
    states, before, tokens, unary_logits = (jnp.asarray(x, jnp.int32 if x.dtype.kind == "i" else jnp.float32) for x in arrays)
    scaled = dflash2.scaled_logits(config, unary_logits)
    scores = dflash2.transition_scores(PLAIN, params.selector, states, before, tokens, scaled)
    return exact, (np.asarray(scores[0]), candidates[0])


def test_the_sampled_walk_has_its_exact_distribution(walks: Any):
    exact, block = walks
    assert len(exact) == 27
    assert sum(exact.values()) == pytest.approx(1)
    found = draw_walks(*block)
    assert excess(exact, found) < 1
    assert len({tuple(walk) for walk in found.tolist()}) > 15


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_walk_is_rejected(walks: Any, rule: Draw):
    exact, (scores, candidates) = walks
    assert excess(exact, draw_walks(scores, candidates, rule)) > 1


def test_rows_of_temperature_zero_walk_greedily():
    scores = jax.random.normal(jax.random.key(0), (4, 3, 5, 5))
    candidates = jnp.broadcast_to(jnp.arange(5), (4, 3, 5))
    noise = 50 * jax.random.normal(jax.random.key(1), (4, 3, 5))
    mixed = dflash2.walk(scores, candidates, jnp.asarray([0.0, 1.0, 0.0, 1.0]), noise)
    greedy = dflash2.walk(scores, candidates)
    np.testing.assert_array_equal(mixed[::2], greedy[::2])
    assert np.any(np.asarray(mixed[1::2]) != np.asarray(greedy[1::2]))


def test_fresh_needs_its_own_start(model: tuple[DFlash2Config, DFlash2Params]):
    """A plain initialisation would leave convolutions that let nothing through."""
    plain = initialise(dflash2.declare(model[0]), jax.random.key(0))
    assert not np.any(np.asarray(plain.attention_convs[0].base_kernel))
    stored = dict(to_tensors(dflash2.declare(model[0]), dflash2.fresh(model[0], jax.random.key(0)), np.float32))
    kernel = stored["layers.1.mlp_conv.base_kernel"]
    assert (kernel[:, 0] == 1).all()
    assert not kernel[:, 1:].any()
