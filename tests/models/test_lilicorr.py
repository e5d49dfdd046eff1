"""LiLiCorr: what a checkpoint says and how it is checked, the maths against NumPy, and the walk's distribution."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from models.walks import BROKEN, TEMPERATURE, Draw, draw_walks, excess
from reference.dflash_numpy import Pair, as_folders, random_pair
from reference.lilicorr_numpy import LiLiCorr, as_lilicorr, build_lilicorr
from tilewright.kernels.select import PLAIN
from tilewright.models import decoder, dflash, lilicorr
from tilewright.models.checkpoint import read_config, save_params
from tilewright.models.lilicorr import LiLiCorrConfig, LiLiCorrParams
from tilewright.models.params import count, initialise
from tilewright.speculation.drafters import lilicorr as drafting
from tilewright.speculation.drafters.load import block_kind, load_dflash

PLAIN_PAIR = random_pair(0, vocab_size=16, target_layers=2, drafter_layers=1, taps=[0, 1], block_size=4)
PAIR = as_lilicorr(PLAIN_PAIR)

pytestmark = pytest.mark.usefixtures("quick_compiles")


def loaded(folder: Path, pair: Pair = PAIR) -> tuple[LiLiCorrConfig, LiLiCorrParams]:
    _, drafter = as_folders(folder, pair)
    return load_dflash(drafter, read_config(drafter), decoder.config_from_hf(pair.target_config), "float32", None)


PUBLISHED = {
    "architectures": ["LiLiCorrDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "layer_types": ["full_attention"] * 5,
    "attention_bias": False,
    "block_size": 16,
    "dflash_config": {
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "projector_type": "lilicorr",
        "lilicorr_candidate_topk": 8,
        "lilicorr_hidden_size": 1024,
        "lilicorr_factor_dim": 1024,
        "lilicorr_num_layers": 2,
        "lilicorr_num_heads": 8,
        "lilicorr_mlp_ratio": 2.0,
        "lilicorr_logit_scale": 8.0,
        "lilicorr_vector_eps": 1e-4,
    },
}
"""The sizes of the published recipe for Qwen3-8B."""


def test_a_published_configuration():
    config = lilicorr.config_from_hf(PUBLISHED)
    assert (config.block_size, config.slots, config.candidate_top_k) == (16, 16, 8)
    assert (config.lattice_size, config.lattice_heads, config.vector_size, config.mlp_size) == (1024, 8, 1024, 2048)
    assert (config.logit_scale, config.vector_eps) == (8.0, 1e-4)
    assert lilicorr.config_from_hf(lilicorr.config_to_hf(config)) == config
    assert block_kind(PUBLISHED).drafter is drafting.LiLiCorr
    shapes = {spec.name: list(spec.stored_shape) for spec in jax.tree.leaves(lilicorr.declare(config))}
    backbone = {spec.name for spec in jax.tree.leaves(dflash.declare(config))}
    added = {name.removeprefix("lilicorr."): shape for name, shape in shapes.items() if name not in backbone}
    assert all(name.startswith("lilicorr.") for name in shapes.keys() - backbone)
    assert len(added) == 46
    wanted = {
        "token_proj.weight": [1024, 4096],
        "context_proj.bias": [1024],
        "feature_norm.weight": [5],
        "feature_mlp.up_proj.weight": [1024, 5],
        "slot_embedding": [1, 1, 15, 1, 1024],
        "rank_embedding": [1, 1, 1, 8, 1024],
        "relative_slot_bias": [8, 31],
        "same_slot_bias": [8],
        "layers.1.attn.in_proj_weight": [3072, 1024],
        "layers.1.attn.in_proj_bias": [3072],
        "layers.1.attn.out_proj.weight": [1024, 1024],
        "layers.0.mlp.up_proj.weight": [2048, 1024],
        "layers.0.mlp.down_proj.weight": [1024, 2048],
        "factor_input_proj.weight": [1024, 3072],
        "anchor_out_head.weight": [1024, 1024],
        "output_norm.weight": [1024],
    }
    assert wanted.items() <= added.items()


def test_a_lattice_as_wide_as_the_drafter_projects_no_embeddings():
    for width in (4096, 0, None):
        inner = {**PUBLISHED["dflash_config"], "lilicorr_hidden_size": width}
        config = lilicorr.config_from_hf(PUBLISHED | {"dflash_config": inner})
        assert config.lattice_size == 4096
        assert lilicorr.declare(config).lattice.token is None


def test_convolutions_of_size_zero_are_none():
    inner = {**PUBLISHED["dflash_config"], "conv_kernel_size": 0, "conv_group_size": 0, "lilicorr_enabled": True}
    assert lilicorr.config_from_hf(PUBLISHED | {"dflash_config": inner}) == lilicorr.config_from_hf(PUBLISHED)


@pytest.mark.parametrize(
    ("change", "inside", "message"),
    [
        ({}, {"lilicorr_logit_scale": None}, "lilicorr_logit_scale is missing"),
        ({}, {"lilicorr_vector_eps": None}, "lilicorr_vector_eps is missing"),
        ({}, {"lilicorr_vector_eps": 0.5}, "lilicorr_vector_eps must be below 0.5, found 0.5"),
        ({}, {"lilicorr_candidate_topk": None}, "lilicorr_candidate_topk must be a positive integer, found None"),
        ({}, {"lilicorr_candidate_topk": 200000}, "lilicorr_candidate_topk 200000 exceeds the 151936 tokens that"),
        ({}, {"lilicorr_num_heads": 7}, "lilicorr_num_heads 7 does not divide lilicorr_hidden_size 1024"),
        ({}, {"lilicorr_hidden_size": -1}, "lilicorr_hidden_size must be a positive integer, found -1"),
        ({}, {"lilicorr_mlp_ratio": 1e-9}, "lilicorr_mlp_ratio 1e-09 leaves nothing of lilicorr_hidden_size 1024"),
        ({}, {"lilicorr_enabled": False}, "lilicorr_enabled=False is not supported"),
        ({}, {"projector_type": "dspark"}, "projector_type='dspark' is not supported"),
        ({}, {"conv_kernel_size": 2}, "conv_group_size must be a positive integer, found None"),
        ({}, {"conv_kernel_size": 2, "conv_group_size": 7}, "conv_group_size 7 does not divide hidden_size 4096"),
        ({}, {"conv_kernel_size": 0, "conv_group_size": 16}, "conv_kernel_size must be a positive integer, found 0"),
        ({}, {"selector_rank": 256}, "dflash_config has unknown fields: selector_rank"),
        ({}, {"sample_from_anchor": True}, "sample_from_anchor=True is not supported"),
        ({"final_logit_softcapping": 30.0}, {}, "final_logit_softcapping=30.0 is not supported"),
        ({"is_causal": 2}, {}, "is_causal must be true or false, found 2"),
    ],
)
def test_a_field_that_does_not_fit_is_named(change: dict[str, Any], inside: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        lilicorr.config_from_hf(PUBLISHED | change | {"dflash_config": PUBLISHED["dflash_config"] | inside})


def older_name(name: str) -> str:
    """The name of a tensor in checkpoints whose MLPs are sequences of numbered layers."""
    for newer, older in (
        ("feature_norm.", "feature_mlp.0."),
        ("feature_mlp.up_proj.", "feature_mlp.1."),
        ("feature_mlp.down_proj.", "feature_mlp.3."),
        (".mlp.up_proj.", ".mlp.0."),
        (".mlp.down_proj.", ".mlp.2."),
    ):
        name = name.replace(newer, older) if name.startswith("lilicorr.") else name
    return name


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("size", [12, 32])
def test_names_and_values_survive_a_round_trip(tmp_path: Path, prefix: bool, size: int):
    """The narrower one has convolutions. The one with a prefix has the names of older checkpoints."""
    pair = as_lilicorr(PLAIN_PAIR, size=size, heads=4, conv=size == 12)
    stored = {older_name(name) if prefix else name: tensor for name, tensor in pair.drafter_tensors.items()}
    assert (stored.keys() != pair.drafter_tensors.keys()) == prefix
    _, folder = as_folders(tmp_path, replace(pair, drafter_tensors=stored), model_prefix=prefix, block_size_inside=True)
    config, params = load_dflash(folder, read_config(folder), decoder.config_from_hf(pair.target_config), "float32", None)
    save_params(tmp_path / "saved", lilicorr.config_to_hf(config), lilicorr.declare(config), params, jnp.float32)
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    assert stored.keys() == pair.drafter_tensors.keys()
    for name, tensor in pair.drafter_tensors.items():
        np.testing.assert_array_equal(stored[name], tensor)
    assert lilicorr.config_from_hf(json.loads((tmp_path / "saved" / "config.json").read_text())) == config


# Maths


def scored(
    folder: Path, pair: Pair, slots: int = 3, anchored: bool = True, seed: int = 1
) -> tuple[LiLiCorr, Any, Any, Any, Any]:
    """The reference; hidden states and the anchor's feature, in blocks of two rows; the package's scores and candidates."""
    config, params = loaded(folder, pair)
    target, drafter = build_lilicorr(pair)
    rng = np.random.default_rng(1)
    hidden = rng.normal(size=(2, slots, 32))
    feature = rng.normal(size=(2, 32))
    logits = target.head(hidden)
    candidates = np.argsort(-logits, axis=-1, kind="stable")[..., : config.candidate_top_k]
    log_probs = np.take_along_axis(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)), candidates, axis=-1)
    embedded = target.embed(candidates.reshape(-1).tolist()).reshape(*candidates.shape, -1)
    arrays = [jnp.asarray(x, jnp.float32) for x in (embedded, log_probs, hidden, feature)]
    run = jax.jit(lambda *x: lilicorr.transition_scores(config, PLAIN, params.lattice, *x))
    return drafter, hidden, feature, np.asarray(run(*arrays, jnp.full(2, anchored))), candidates


@pytest.mark.parametrize(
    ("fields", "slots", "anchored"),
    [({}, 3, True), ({}, 2, True), ({}, 3, False), ({"size": 32, "heads": 4, "top_k": 1}, 3, True), ({"layers": 1}, 1, True)],
)
def test_scores_equal_the_reference(tmp_path: Path, fields: dict[str, Any], slots: int, anchored: bool):
    drafter, hidden, feature, scores, candidates = scored(tmp_path, as_lilicorr(PLAIN_PAIR, **fields), slots, anchored)
    for row in range(2):
        want = drafter.scores(hidden[row], drafter.target.head(hidden[row]), feature[row] if anchored else None)
        np.testing.assert_allclose(scores[row, 0], np.broadcast_to(want.first, scores[row, 0].shape), rtol=1e-3, atol=2e-4)
        assert np.ptp(scores[row, 0], axis=0).max() == 0, "before the first slot stands the anchor, whatever the row"
        for slot in range(1, slots):
            np.testing.assert_allclose(scores[row, slot], want.later[slot - 1], rtol=1e-3, atol=2e-4)
        assert [drafter.candidates(x) for x in drafter.target.head(hidden[row])] == candidates[row].tolist()
    assert np.abs(scores).max() <= 8.0 * (1 + 1e-6), "a cosine times its scale"


def test_features_by_hand():
    log_probs = jnp.log(jnp.asarray([[[0.5, 0.25, 0.125]]]))
    found = np.asarray(lilicorr.candidate_features(log_probs))[0, 0]
    np.testing.assert_allclose(found[:, 1], [0.5, 0.25, 0.125], rtol=1e-6)
    np.testing.assert_allclose(found[:, 2], -np.log(2) * np.arange(3), rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(found[:, 3:], [[0, 1], [0.5, 0], [1, 0]])
    assert np.asarray(lilicorr.candidate_features(log_probs[..., :1]))[0, 0, 0, 3:].tolist() == [0, 1]


def test_the_bias_of_the_attention_by_hand():
    config = lilicorr.config_from_hf(PAIR.drafter_config)
    table = jnp.arange(21.0).reshape(3, 7)
    same = jnp.asarray([100.0, 200.0, 300.0])
    lattice = initialise(lilicorr.declare(config), jax.random.key(0)).lattice
    bias = lilicorr.attention_bias(config, replace(lattice, slot_bias=table, same_slot_bias=same), 2)
    assert bias.shape == (3, 8, 8)
    assert bias[1, 0, 0] == 200 + 7 + 3, "distance 0 is the table's middle"
    assert bias[1, 0, 3] == bias[1, 0, 0], "nodes of one slot"
    assert bias[1, 0, 4] == 7 + 2, "from slot 0 to slot 1"
    assert bias[1, 4, 0] == 7 + 4


def test_a_fresh_lattice_is_of_two_minds():
    """Published heads start from small vectors' directions: scores far below their bound, and a gradient for everything."""
    config = lilicorr.config_from_hf(PAIR.drafter_config)
    params = initialise(lilicorr.declare(config), jax.random.key(0))
    assert not np.any(np.asarray(params.lattice.slots))
    assert np.all(np.asarray(params.lattice.norm) == 1)
    assert count(lilicorr.declare(config).lattice) == sum(x.size for x in jax.tree.leaves(params.lattice))
    x = jax.random.normal(jax.random.key(1), (1, 3, 4, 32))
    log_probs = -jnp.abs(jax.random.normal(jax.random.key(2), (1, 3, 4)))

    def total(lattice: Any, anchored: jax.Array) -> jax.Array:
        scores = lilicorr.transition_scores(config, PLAIN, lattice, x, log_probs, x[:, :, 0], x[:, 0, 0], anchored)
        return jnp.sum(scores**2)

    for anchored in (True, False):
        grads = jax.tree.leaves(jax.jit(jax.grad(total))(params.lattice, jnp.asarray([anchored])))
        assert all(np.isfinite(np.asarray(g)).all() for g in grads), "also without an anchor, whose vector is zero"


# The sampled walk


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[tuple[int, ...], float], tuple[np.ndarray, np.ndarray]]:
    pair = as_lilicorr(PLAIN_PAIR, top_k=3, lilicorr_logit_scale=16.0)
    drafter, hidden, feature, scores, candidates = scored(tmp_path_factory.mktemp("walks"), pair)
    exact = drafter.walk_distribution(hidden[0], 6, TEMPERATURE, feature[:1], 1)
    return exact, (scores[0], candidates[0])


def test_the_sampled_walk_has_its_exact_distribution(walks: Any):
    exact, drawn_from = walks
    assert len(exact) == 27
    assert sum(exact.values()) == pytest.approx(1)
    assert excess(exact, draw_walks(*drawn_from)) < 1


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_walk_is_rejected(walks: Any, rule: Draw):
    exact, (scores, candidates) = walks
    assert excess(exact, draw_walks(scores, candidates, rule)) > 1
