"""The NumPy reference of EAGLE-3 against itself, against hand-made cases, and against what the method promises."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from reference.dflash_numpy import Target, random_pair, rms_norm
from reference.eagle3_numpy import Chain, as_folder, random_eagle3

PAIR = random_pair(11)
TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 40, 9)]


def chain(seed: int = 0, **changes: Any) -> Chain:
    config, tensors = random_eagle3(seed, PAIR.target_config, **changes)
    return Chain(config, tensors, Target(PAIR.target_config, PAIR.target_tensors))


def features(drafter: Chain) -> Any:
    return drafter.fuse(drafter.target.run(TOKENS)[1])


def test_a_single_pair_by_hand():
    """Attention over one key returns its value for all queries, so the test writes out the rest."""
    drafter = chain()
    weight = {name.removesuffix(".weight"): tensor.astype(np.float64) for name, tensor in drafter.tensors.items()}
    tapped = [x[:1] for x in drafter.target.run(TOKENS)[1]]
    h = np.concatenate([tapped[0], tapped[2], tapped[3]], axis=1) @ weight["fc"].T
    embedded = PAIR.target_tensors["model.embed_tokens.weight"].astype(np.float64)[TOKENS[1]]
    normed = rms_norm(embedded, weight["midlayer.input_layernorm"], 1e-6)
    both = np.concatenate([normed, rms_norm(h[0], weight["midlayer.hidden_norm"], 1e-6)])
    value = (weight["midlayer.self_attn.v_proj"] @ both).reshape(2, 16)
    x = h[0] + weight["midlayer.self_attn.o_proj"] @ np.concatenate([value[0], value[0], value[1], value[1]])
    inner = rms_norm(x, weight["midlayer.post_attention_layernorm"], 1e-6)
    gate = weight["midlayer.mlp.gate_proj"] @ inner
    x = x + weight["midlayer.mlp.down_proj"] @ (gate / (1 + np.exp(-gate)) * (weight["midlayer.mlp.up_proj"] @ inner))
    logits = weight["lm_head"] @ rms_norm(x, weight["norm"], 1e-6)
    got = drafter.draft(TOKENS[:2], features(drafter), 1)
    np.testing.assert_allclose(got.outputs[0], x, rtol=1e-12)
    np.testing.assert_allclose(got.logits[0], logits, rtol=1e-12)
    best = int(logits.argmax())
    assert got.tokens == [best + int(drafter.tensors["d2t"][best])]


@pytest.mark.parametrize("before", [False, True])
def test_the_residual_is_the_feature_as_it_is_or_normed(before: bool):
    drafter = chain(norm_before_residual=before)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        drafter.tensors[f"midlayer.{name}.weight"][:] = 0
    h = features(drafter)
    want = drafter.norm(h, "midlayer.hidden_norm") if before else h
    np.testing.assert_array_equal(drafter.layer(h[:8], TOKENS[1:]), want[:8])


def test_a_chain_goes_on_as_if_its_outputs_were_features():
    drafter = chain()
    whole = drafter.draft(TOKENS[:5], features(drafter), 4)
    again = np.concatenate([features(drafter)[:4], whole.outputs[:2]])
    rest = drafter.draft([*TOKENS[:5], *whole.tokens[:2]], again, 2)
    np.testing.assert_allclose(rest.logits, whole.logits[2:], rtol=1e-12)
    assert rest.tokens == whole.tokens[2:]


def test_forced_tokens_take_the_place_of_drafts():
    drafter = chain()
    free = drafter.draft(TOKENS[:5], features(drafter), 3)
    same = drafter.draft(TOKENS[:5], features(drafter), 3, free.tokens[:2])
    np.testing.assert_array_equal(same.logits, free.logits)
    other = drafter.draft(TOKENS[:5], features(drafter), 3, [(free.tokens[0] + 1) % 40])
    np.testing.assert_array_equal(other.logits[0], free.logits[0])
    assert np.abs(other.logits[1] - free.logits[1]).max() > 1e-3


def test_the_feature_of_the_known_token_is_never_read():
    drafter = chain()
    h = features(drafter)
    want = drafter.draft(TOKENS[:5], h, 3)
    for position, same in ((3, False), (4, True), (5, True)):
        marked = h.copy()
        marked[position] += 1
        assert np.array_equal(drafter.draft(TOKENS[:5], marked, 3).logits, want.logits) == same
    with pytest.raises(ValueError, match="all 4 earlier positions, got 3"):
        drafter.draft(TOKENS[:5], h[:3], 1)


def test_only_distances_count_and_they_do():
    drafter = chain()
    h = features(drafter)[:8]
    here, there = (drafter.layer(h, TOKENS[1:], first) for first in (0, 50))
    np.testing.assert_allclose(here, there, rtol=1e-9, atol=1e-9)
    drafter.config = {**drafter.config, "rope_theta": 100.0}
    assert np.abs(drafter.layer(h, TOKENS[1:]) - here).max() > 1e-3


def test_proposals_are_in_the_draft_vocabulary():
    drafter = chain(draft_vocab_size=3)
    kept = set(np.flatnonzero(drafter.tensors["t2d"]).tolist())
    assert kept == set(drafter.map)
    assert len(kept) == 3
    proposed = {token for n in range(2, 9) for token in drafter.draft(TOKENS[:n], features(drafter), 4).tokens}
    assert proposed <= kept
    assert len(proposed) > 1


@pytest.mark.parametrize(("model_prefix", "hidden_size"), [(False, None), (True, 24)])
def test_a_folder_holds_the_drafter(tmp_path: Path, model_prefix: bool, hidden_size: int | None):
    drafter = chain(4, hidden_size=hidden_size)
    folder = as_folder(tmp_path, drafter.config, drafter.tensors, model_prefix=model_prefix)
    stored = load_file(folder / "model.safetensors")
    assert ("model.midlayer.hidden_norm.weight" in stored, "d2t" in stored) == (model_prefix, True)
    tensors = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    again = Chain(json.loads((folder / "config.json").read_text()), tensors, drafter.target)
    want = drafter.draft(TOKENS, features(drafter), 2)
    np.testing.assert_array_equal(again.draft(TOKENS, features(drafter), 2).logits, want.logits)
