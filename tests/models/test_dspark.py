"""DSpark: what a checkpoint says and how it is checked, the maths against NumPy, and the walk's distribution."""

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
from reference.dflash_numpy import Pair, as_folders, random_pair
from reference.dspark_numpy import as_dspark, build_dspark
from tilewright.kernels.select import PLAIN
from tilewright.models import decoder, dflash, dflash2, dspark
from tilewright.models.checkpoint import read_config, save_params
from tilewright.models.dspark import DSparkConfig, DSparkParams
from tilewright.models.params import initialise
from tilewright.speculation.drafters.dspark import DSpark
from tilewright.speculation.drafters.load import block_kind, load_dflash

PLAIN_PAIR = random_pair(0, vocab_size=16, target_layers=2, drafter_layers=2, taps=[0, 1], block_size=4)
PAIR = as_dspark(PLAIN_PAIR)

pytestmark = pytest.mark.usefixtures("quick_compiles")


def loaded(folder: Path, pair: Pair = PAIR) -> tuple[DSparkConfig, DSparkParams]:
    _, drafter = as_folders(folder, pair)
    return load_dflash(drafter, read_config(drafter), decoder.config_from_hf(pair.target_config), "float32", None)


PUBLISHED = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "layer_types": ["full_attention"] * 5,
    "sliding_window": None,
    "use_sliding_window": False,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "block_size": 7,
    "mask_token_id": 151669,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "num_anchors": 512,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
}
"""The fields that the published code writes for Qwen3-4B."""


def test_a_published_configuration():
    config = dspark.config_from_hf(PUBLISHED)
    assert (config.block_size, config.slots, config.first_slot) == (8, 7, 0), "seven slots draft seven tokens"
    assert (config.markov_rank, config.candidate_top_k) == (256, 16)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    written = dspark.config_to_hf(config)
    assert dspark.config_from_hf(written) == config
    assert written["block_size"] == 7
    assert "dflash_config" not in written
    shapes = {spec.name: list(spec.stored_shape) for spec in jax.tree.leaves(dspark.declare(config))}
    backbone = {spec.name for spec in jax.tree.leaves(dflash.declare(config))}
    added = {f"markov_head.{name}.weight": [151936, 256] for name in ("markov_w1", "markov_w2")}
    assert {name: shape for name, shape in shapes.items() if name not in backbone} == added


def test_fields_inside_dflash_config_are_read():
    """Under the name of files that others train."""
    names = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head")
    inner = {name: PUBLISHED[name] for name in names}
    outer = {name: value for name, value in PUBLISHED.items() if name not in names}
    fields = outer | {"architectures": ["DSparkDraftModel"], "dflash_config": inner | {"projector_type": "dspark"}}
    assert dspark.config_from_hf(fields) == dspark.config_from_hf(PUBLISHED)
    assert block_kind(fields).drafter is DSpark


def test_a_block_whose_first_slot_does_not_draft():
    config = dspark.config_from_hf(PUBLISHED | {"sample_from_anchor": False, "block_size": 8})
    assert (config.block_size, config.slots, config.first_slot) == (8, 8, 1)
    assert dspark.config_from_hf(dspark.config_to_hf(config)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"markov_head_type": "gated"}, r"markov_head_type='gated' is not supported \(only 'vanilla'\)"),
        ({"markov_head_type": "rnn"}, "markov_head_type='rnn' is not supported"),
        ({"markov_rank": 0}, "markov_rank must be a positive integer, found 0"),
        ({"markov_rank": None}, "markov_rank must be a positive integer, found None"),
        ({"candidate_top_k": 200000}, "candidate_top_k 200000 exceeds the 151936 tokens that can be proposed"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
        ({"is_causal": "no"}, "is_causal must be true or false, found 'no'"),
        ({"layer_types": ["sliding_attention"] * 5}, "use_sliding_window is false, but layer_types has sliding_attention"),
        ({"dspark_bonus_anchor": True, "sample_from_anchor": True}, "dspark_bonus_anchor=True is not supported .only False."),
        ({"sample_from_anchor": 1}, "sample_from_anchor must be true or false, found 1"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"dflash_config": {"selector_rank": 4}}, "dflash_config has unknown fields: selector_rank"),
        ({"architectures": ["DFlashDraftModel"]}, "only Qwen3DSparkModel or DSparkDraftModel"),
    ],
)
def test_a_field_that_does_not_fit_is_named(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        dspark.config_from_hf(PUBLISHED | change)


@pytest.mark.parametrize("plain_names", [False, True])
def test_names_and_values_survive_a_round_trip(tmp_path: Path, plain_names: bool):
    """With or without `.weight`; a confidence head is passed over."""
    pair = as_dspark(PLAIN_PAIR, plain_names=plain_names, enable_confidence_head=True)
    _, folder = as_folders(tmp_path, pair, model_prefix=plain_names)
    tensors = load_file(folder / "model.safetensors")
    more = {"confidence_head.proj.weight": (1, 38), "confidence_head.proj.bias": (1,)}
    save_file(tensors | {name: np.ones(shape, np.float32) for name, shape in more.items()}, folder / "model.safetensors")
    config, params = load_dflash(folder, read_config(folder), decoder.config_from_hf(pair.target_config), "float32", None)
    save_params(tmp_path / "saved", dspark.config_to_hf(config), dspark.declare(config), params, jnp.float32)
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    assert stored.keys() == PAIR.drafter_tensors.keys()
    for name, tensor in PAIR.drafter_tensors.items():
        np.testing.assert_array_equal(stored[name], tensor)
    assert dspark.config_from_hf(json.loads((tmp_path / "saved" / "config.json").read_text())) == config


def test_every_tensor_that_does_not_fit_is_named_at_once(tmp_path: Path):
    _, folder = as_folders(tmp_path, PAIR)
    tensors = load_file(folder / "model.safetensors")
    tensors["markov_head.gate_proj.weight"] = tensors.pop("markov_head.markov_w1.weight")
    save_file(tensors, folder / "model.safetensors")
    target = decoder.config_from_hf(PAIR.target_config | {"num_hidden_layers": 3})
    with pytest.raises(ValueError, match="num_target_layers is 2 but the target's is 3") as caught:
        load_dflash(folder, read_config(folder), target, "float32", None)
    for named in ("1 missing: markov_head.markov_w1.weight", "1 unknown: markov_head.gate_proj.weight"):
        assert named in str(caught.value)


def test_a_fresh_serial_head_adds_nothing():
    config = dspark.config_from_hf(PAIR.drafter_config)
    params = initialise(dspark.declare(config), jax.random.key(0))
    assert np.any(np.asarray(params.selector.predecessor))
    assert not np.any(dspark.serial_logits(PLAIN, params.selector, jnp.arange(6).reshape(2, 3)))


def block(pair: Pair, folder: Path, seed: int = 1) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, int]:
    """The reference, hidden states of a block, and the package's scores and candidates of it."""
    config, params = loaded(folder, pair)
    _, drafter = build_dspark(pair)
    hidden = np.random.default_rng(seed).normal(size=(3, 32))
    known = 6
    logits = drafter.target.head(hidden)
    candidates = np.argsort(-logits, axis=-1, kind="stable")[:, : config.candidate_top_k]
    unary = np.take_along_axis(logits, candidates, axis=-1)
    arrays = [jnp.asarray(x[None], jnp.float32) for x in (hidden, unary)]
    before = jnp.asarray([known], jnp.int32), jnp.asarray(candidates[None], jnp.int32)
    scores = dflash2.transition_scores(PLAIN, params.selector, arrays[0], *before, arrays[1])
    return drafter, hidden, np.asarray(scores[0]), candidates, known


def test_scores_equal_the_reference(tmp_path: Path):
    drafter, hidden, scores, candidates, known = block(PAIR, tmp_path)
    choose = drafter.chooser(hidden, np.zeros((0, 32)), 0)
    for slot in range(3):
        for place in range(5):
            before = known if slot == 0 else int(candidates[slot - 1, place])
            tokens, want = choose(slot, before)
            assert tokens == candidates[slot].tolist()
            np.testing.assert_allclose(scores[slot, place], want, rtol=1e-4, atol=1e-4)


def test_the_serial_logits_are_those_of_the_candidates(tmp_path: Path):
    """Training adds the serial head for all tokens, drafting only for the candidates."""
    _, params = loaded(tmp_path)
    before = jnp.asarray([[3, 1, 15]], jnp.int32)
    whole = dspark.serial_logits(PLAIN, params.selector, before)
    candidates = jnp.asarray([[[0, 4], [9, 2], [15, 7]]], jnp.int32)
    hidden = jnp.zeros((1, 3, 32))
    pairs = dflash2.pair_scores(PLAIN, params.selector, hidden, before[..., None], candidates)[:, :, 0]
    np.testing.assert_allclose(jnp.take_along_axis(whole, candidates, axis=-1), pairs, rtol=1e-5)
    _, drafter = build_dspark(PAIR)
    np.testing.assert_allclose(whole[0], [drafter.serial(token) for token in (3, 1, 15)], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[tuple[int, ...], float], tuple[np.ndarray, np.ndarray]]:
    pair = as_dspark(replace(PLAIN_PAIR), top_k=3, strength=0.7)
    drafter, hidden, scores, candidates, known = block(pair, tmp_path_factory.mktemp("walks"))
    return drafter.walk_distribution(hidden, known, TEMPERATURE), (scores, candidates)


def test_the_sampled_walk_has_its_exact_distribution(walks: Any):
    exact, drawn_from = walks
    assert len(exact) == 27
    assert sum(exact.values()) == pytest.approx(1)
    assert excess(exact, draw_walks(*drawn_from)) < 1


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_walk_is_rejected(walks: Any, rule: Draw):
    exact, (scores, candidates) = walks
    assert excess(exact, draw_walks(scores, candidates, rule)) > 1
