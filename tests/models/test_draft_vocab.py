"""Draft vocabularies: the maps of files, and both directions of ids."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.models import dflash, dflash2
from tilewright.models.dflash import DFlashConfig
from tilewright.models.draft_vocab import draft_ids, maps_from_target_ids, target_ids_from_maps

SIZES = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "block_size": 4,
    "mask_token_id": 23,
    "target_layer_ids": (0,),
    "num_target_layers": 2,
}


@given(st.sets(st.integers(0, 23), min_size=1))
def test_ids_go_there_and_back(chosen: set[int]):
    ids = np.asarray(sorted(chosen), np.int32)
    back = np.asarray(draft_ids(jnp.asarray(ids), 24))
    np.testing.assert_array_equal(back[ids], np.arange(len(ids)))
    assert all(back[token] == len(ids) for token in range(24) if token not in chosen)
    np.testing.assert_array_equal(target_ids_from_maps(len(ids), 24, maps_from_target_ids(ids, 24), "here"), ids)


@pytest.mark.parametrize("kind", [dflash, dflash2])
def test_a_configuration_says_how_many_tokens_can_be_proposed(kind: object):
    config = DFlashConfig(**SIZES, draft_vocab_size=10)
    model: Any = dflash
    if kind is dflash2:
        model = dflash2
        config = dflash2.DFlash2Config(
            **vars(config), conv_kernel_size=2, conv_group_size=16, selector_rank=4, selector_top_k=3
        )
        shapes = dflash2.declare(config).selector
        assert (shapes.predecessor.shape, shapes.successor.shape) == ((24, 4), (10, 4))
    fields = model.config_to_hf(config)
    assert fields["dflash_config"]["draft_vocab_size"] == 10
    assert model.config_from_hf(fields) == config
    fields["dflash_config"]["draft_vocab_size"] = 25
    with pytest.raises(ValueError, match="draft_vocab_size 25 exceeds vocab_size 24"):
        model.config_from_hf(fields)


def test_a_configuration_says_what_drafts_are_expected_to_give():
    config = DFlashConfig(**SIZES, expected_acceptance=(0.5, 0.25, 1.0))
    fields = dflash.config_to_hf(config)
    assert fields["dflash_config"]["expected_acceptance"] == [0.5, 0.25, 1.0]
    assert dflash.config_from_hf(fields) == config
    for wrong in ([0.5, 1.5], [True], "much", 0.5):
        fields["dflash_config"]["expected_acceptance"] = wrong
        with pytest.raises(ValueError, match="expected_acceptance must be a list of numbers from 0 to 1"):
            dflash.config_from_hf(fields)
