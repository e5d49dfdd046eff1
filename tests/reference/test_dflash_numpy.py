"""The NumPy reference against transformers' outputs, against itself, and against what the method promises."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from reference.dflash_numpy import (
    Array,
    Drafter,
    Layer,
    Target,
    as_folders,
    autoregressive_greedy,
    oracle_like_pair,
    random_pair,
    rms_norm,
    speculative_greedy,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "decoders"
NEW = 24


def prompts(seed: int, lengths: Sequence[int], vocab: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[int(token) for token in rng.integers(0, vocab, length)] for length in lengths]


class MarkedTarget(Target):
    """A target whose hidden states are all wrong at one position: the last one for -1, the one before for -2."""

    row = -1

    def run(self, tokens: Sequence[int]) -> tuple[Array, list[Array]]:
        logits, hidden = super().run(tokens)
        for x in hidden:
            x[self.row] = 7.0 * np.cos(np.arange(x.shape[1]))
        return logits, hidden


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-untied"])
def test_target_equals_transformers(name: str):
    config = json.loads((GOLDEN / name / "config.json").read_text())
    tensors = {key: value for file in (GOLDEN / name).glob("*.safetensors") for key, value in load_file(file).items()}
    target = Target(config | config["rope_parameters"], tensors)
    golden = np.load(GOLDEN / name / "outputs.npz")
    for row, tokens in enumerate(golden["tokens"]):
        logits, hidden = target.run(tokens)
        np.testing.assert_allclose(logits, golden["logits"][row], rtol=0, atol=1e-4)
        np.testing.assert_allclose(np.stack(hidden), golden["hidden"][:, row], rtol=0, atol=1e-4)


@pytest.mark.parametrize("start", [0, 1, 9])
def test_drafter_made_of_a_target_layer_is_the_target(start: int):
    """Where layer 0 does nothing, layer 1 reads embeddings: a drafter of that layer, with a block of one, must do the same."""
    pair = random_pair(3, target_layers=2, drafter_layers=1, taps=[0])
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        pair.target_tensors[f"model.layers.0.{name}.weight"][:] = 0
    layer = "model.layers.1."
    copied = {name[6:].replace("layers.1", "layers.0"): x for name, x in pair.target_tensors.items() if name.startswith(layer)}
    copied |= {
        "fc.weight": np.eye(32, dtype=np.float32),
        "hidden_norm.weight": copied["layers.0.input_layernorm.weight"],
        "norm.weight": pair.target_tensors["model.norm.weight"],
    }
    target = Target(pair.target_config, pair.target_tensors)
    drafter = Drafter(pair.drafter_config, copied, target)
    (tokens,) = prompts(0, [10])
    logits, hidden = target.run(tokens)
    features = drafter.context_features(hidden, range(10))
    x = drafter.hidden(tokens[start], features, start, None, 1)
    got = target.head(rms_norm(x, drafter.weight("norm"), 1e-6))
    np.testing.assert_allclose(got[0], logits[start], rtol=1e-10, atol=1e-10)


def test_heads_share_keys_in_groups_of_neighbours():
    pair = random_pair(5)
    layer = Layer(pair.target_config, pair.target_tensors, "model.layers.0")
    doubled = dict(pair.target_tensors)
    for name in ("k_proj", "v_proj"):
        key = f"model.layers.0.self_attn.{name}.weight"
        doubled[key] = np.repeat(pair.target_tensors[key].reshape(2, 16, 32), 2, axis=0).reshape(64, 32)
    assert layer.keys(np.ones((3, 32)), range(3)).shape == (3, 2, 16)
    tokens = prompts(1, [7])[0]
    want = Target(pair.target_config, pair.target_tensors).run(tokens)[0]
    got = Target(pair.target_config, doubled).run(tokens)[0]
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True, "head_dim": 8}, {"block_size": 16}, {"window": 6}])
def test_speculative_equals_autoregressive(settings: dict[str, Any]):
    """With all kinds of acceptance: none of a block, some, and all of it."""
    accepted: Counter[int] = Counter()
    full = settings.get("block_size", 6) - 1
    for seed in range(3):
        asked = prompts(seed, [1, 2, 7, 12])
        pair = oracle_like_pair(seed, asked, length=NEW, drafter_intermediate_size=320, **settings)
        target, drafter = pair.build()
        for prompt in asked:
            got = speculative_greedy(target, drafter, prompt, NEW, window=settings.get("window"))
            assert got.output == autoregressive_greedy(target, prompt, NEW)
            assert min(r.margin for r in got.rounds) > 1e-6
            accepted.update(r.accepted for r in got.rounds)
    assert accepted[0]
    assert accepted[full]
    assert sum(accepted[count] for count in range(1, full)) >= 3


def test_random_drafter_is_mostly_rejected_and_changes_nothing():
    pair = random_pair(1)
    target, drafter = pair.build()
    for prompt in prompts(2, [1, 5]):
        for block_size in (1, 2, 6):
            got = speculative_greedy(target, drafter, prompt, NEW, block_size)
            assert got.output == autoregressive_greedy(target, prompt, NEW)
            assert len(got.rounds) > NEW // 2
            assert {len(r.block) for r in got.rounds} == {block_size}


def test_rounds_fit_together():
    asked = prompts(0, [4])
    target, drafter = oracle_like_pair(0, asked, length=NEW, skill=0.5).build()
    got = speculative_greedy(target, drafter, asked[0], NEW)
    tokens = list(asked[0])
    for r in got.rounds:
        assert r.start == len(tokens) - 1
        assert r.block[0] == tokens[-1]
        assert r.draft_logits.shape == (5, 40)
        assert r.block[1:] == r.draft_logits.argmax(axis=1).tolist()
        assert r.target_argmax == target.run(tokens[:-1] + r.block)[0][-6:].argmax(axis=1).tolist()
        whole = [*r.block[1 : r.accepted + 1], r.target_argmax[r.accepted]]
        assert r.emitted == whole[: len(r.emitted)]
        assert r is got.rounds[-1] or r.emitted == whole
        tokens += r.emitted
    assert tokens[4:] == got.output
    assert len(got.output) == NEW


def test_a_round_stops_at_the_limit_and_after_eos():
    asked = prompts(0, [4])
    target, drafter = oracle_like_pair(0, asked, length=NEW, skill=1.0).build()
    free = speculative_greedy(target, drafter, asked[0], NEW)
    long = next(r for r in free.rounds if r.accepted == 5 and len(r.emitted) == 6)
    before = long.start - 3
    for limit in range(before + 1, before + 6):
        assert speculative_greedy(target, drafter, asked[0], limit).output == free.output[:limit]
    for eos in set(long.emitted[:4]):
        want = free.output[: free.output.index(eos) + 1]
        assert speculative_greedy(target, drafter, asked[0], NEW, eos={eos, 1000}).output == want
        assert autoregressive_greedy(target, asked[0], NEW, {eos, 1000}) == want


def test_window():
    pair = random_pair(4)
    target, drafter = pair.build()
    tokens = prompts(3, [12])[0]
    features = drafter.context_features(target.run(tokens)[1], range(11))
    whole = drafter.draft(tokens, features, 11)[1]
    for window in (11, 12, 500):
        np.testing.assert_array_equal(drafter.draft(tokens, features, 11, window)[1], whole)
    for window in (10, 4, 1, 0):
        assert np.abs(drafter.draft(tokens, features, 11, window)[1] - whole).max() > 1e-3
    changed = features.copy()
    changed[:7] += 1
    np.testing.assert_array_equal(drafter.draft(tokens, changed, 11, 4)[1], drafter.draft(tokens, features, 11, 4)[1])
    assert np.abs(drafter.draft(tokens, changed, 11, 5)[1] - drafter.draft(tokens, features, 11, 5)[1]).max() > 1e-3


def test_feature_of_the_known_token_is_never_read():
    pair = random_pair(6)
    _, drafter = pair.build()
    prompt = prompts(4, [5])[0]
    want = speculative_greedy(drafter.target, drafter, prompt, 8)
    marked = MarkedTarget(pair.target_config, pair.target_tensors)
    for row, same in ((-1, True), (-2, False)):
        marked.row = row
        got = speculative_greedy(marked, drafter, prompt, 8)
        assert got.output == want.output
        assert np.array_equal(got.rounds[0].draft_logits, want.rounds[0].draft_logits) == same
    features = np.random.default_rng(0).normal(size=(5, 32))
    drafted = drafter.draft(prompt[:4], features, 3)[1]
    features[3:] = np.nan
    np.testing.assert_array_equal(drafter.draft(prompt[:4], features, 3)[1], drafted)


def test_block_is_bidirectional():
    """Were slots causal, slots 1 and 2 would not notice how many masks follow them."""
    target, drafter = random_pair(7).build()
    tokens = prompts(5, [6])[0]
    features = drafter.context_features(target.run(tokens)[1], range(5))
    short, long = (drafter.draft(tokens, features, 5, None, size)[1] for size in (3, 6))
    assert np.all(np.abs(short - long[:2]).max(axis=1) > 1e-3)


def test_features_are_the_tapped_layers_in_the_order_listed():
    pair = random_pair(8, taps=[3, 1])
    target, drafter = pair.build()
    hidden = target.run(prompts(6, [4])[0])[1]
    features = drafter.context_features(hidden, range(4))
    for layer in range(5):
        changed = [x + (n == layer) * np.linspace(-1, 1, 32) for n, x in enumerate(hidden)]
        assert np.allclose(drafter.context_features(changed, range(4)), features) == (layer not in (3, 1))
    swapped = np.concatenate(np.split(pair.drafter_tensors["fc.weight"], 2, axis=1)[::-1], axis=1)
    config = pair.drafter_config | {"dflash_config": pair.drafter_config["dflash_config"] | {"target_layer_ids": [1, 3]}}
    same = Drafter(config, pair.drafter_tensors | {"fc.weight": swapped}, target)
    np.testing.assert_allclose(same.context_features(hidden, [2, 0]), features[[2, 0]], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("model_prefix", "block_size_inside"), [(False, False), (True, True)])
def test_folders_hold_the_pair(tmp_path: Path, model_prefix: bool, block_size_inside: bool):
    pair = random_pair(9, eos_token_id=3)
    target_folder, drafter_folder = as_folders(tmp_path, pair, model_prefix=model_prefix, block_size_inside=block_size_inside)
    fields = json.loads((drafter_folder / "config.json").read_text())
    assert ("block_size" in fields, "block_size" in fields["dflash_config"]) == (not block_size_inside, block_size_inside)
    tensors = load_file(drafter_folder / "model.safetensors")
    assert all(name.startswith("model.") == model_prefix for name in tensors)
    target = Target(json.loads((target_folder / "config.json").read_text()), load_file(target_folder / "model.safetensors"))
    drafter = Drafter(fields, {name.removeprefix("model."): x for name, x in tensors.items()}, target)
    prompt = prompts(7, [5])[0]
    got = speculative_greedy(target, drafter, prompt, 6)
    want = speculative_greedy(*pair.build(), prompt, 6)
    for mine, theirs in zip(got.rounds, want.rounds, strict=True):
        np.testing.assert_array_equal(mine.draft_logits, theirs.draft_logits)
    tokenizer = Tokenizer.from_file(str(target_folder / "tokenizer.json"))
    assert tokenizer.encode("t5 t39 t0").ids == [5, 39, 0]
    assert tokenizer.get_vocab_size() == 40


def test_drafters_of_another_kind_are_refused():
    pair = random_pair(0)
    with pytest.raises(ValueError, match="without is_causal, got True"):
        Drafter(pair.drafter_config | {"is_causal": True}, pair.drafter_tensors, pair.build()[0])
