"""Published layouts of drafters: each is loaded, drafts as its reference does, and gives plain decoding's tokens."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from llm.support import check_same_as_autoregressive, prompts, tokens_of
from reference.dflash2_numpy import as_dflash2
from reference.dflash_numpy import Pair, Target, as_folders, random_pair
from reference.dspark_numpy import as_dspark
from reference.eagle3_numpy import random_eagle3
from reference.layouts_numpy import Rules, Varied, Varied2, VariedDSpark, as_muse, as_speculators, with_own
from tilewright.llm.language_model import load
from tilewright.models import decoder, dflash, eagle3
from tilewright.models.checkpoint import load_decoder, read_config
from tilewright.runtime.cache import Sliding
from tilewright.runtime.layout import Layout, rows_of
from tilewright.runtime.sampling import Sampling, row_sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.runtime.state import DecodeState, Models
from tilewright.runtime.state import Target as Running
from tilewright.speculation.drafters.dflash import DFlash
from tilewright.speculation.drafters.eagle3 import Eagle3
from tilewright.speculation.drafters.load import DrafterOptions, block_kind, load_dflash, load_drafter

VOCAB = 24
BLOCK = 5
LAYERS = 2
PAIR = random_pair(3, vocab_size=VOCAB, target_layers=6, drafter_layers=LAYERS, taps=(1, 3, 4), block_size=BLOCK)
IDS = (0, 2, 3, 7, 9, 11, 12, 15, 19, 22)
KNOWN = (11, 2, 6)
"""Positions of the known tokens of three rows: behind a window's end, and before it."""
FULL = "full_attention"
SLIDING = "sliding_attention"
TARGET = decoder.config_from_hf(PAIR.target_config)
PLAIN_RULES = Rules((1, 3, 4), BLOCK, VOCAB - 1, (None,) * LAYERS, (False,) * LAYERS)

pytestmark = pytest.mark.usefixtures("quick_compiles")


@dataclass(frozen=True)
class Variant:
    """A layout's files, and what they mean.

    Attributes:
        files: the pair as its checkpoint says it.
        rules: by hand.
        reads: the pair as the reference reads it, where names differ.
        reference: the class that drafts.
    """

    files: Pair
    rules: Rules = PLAIN_RULES
    reads: Pair | None = None
    reference: type[Varied] = Varied


def changed(pair: Pair, inside: dict[str, Any] | None = None, without: Sequence[str] = (), **fields: Any) -> Pair:
    """The pair with other fields in its drafter's configuration, at the top and in `dflash_config`."""
    config = {name: value for name, value in (pair.drafter_config | fields).items() if name not in without}
    if inside is not None:
        kept = {name: value for name, value in config["dflash_config"].items() if name not in without}
        config["dflash_config"] = kept | inside
    return replace(pair, drafter_config=config)


def flat(pair: Pair) -> Pair:
    """All fields at the top."""
    config = dict(pair.drafter_config)
    return replace(pair, drafter_config=config | config.pop("dflash_config"))


def windowed(pair: Pair, kinds: Sequence[str], window: int, **fields: Any) -> Pair:
    return changed(pair, layer_types=list(kinds), sliding_window=window, use_sliding_window=True, **fields)


def sizes(**other: Any) -> Pair:
    usual: dict[str, Any] = {"vocab_size": VOCAB, "target_layers": 6, "taps": (1, 3, 4), "block_size": BLOCK}
    return random_pair(4, **(usual | other))


WIDE = sizes(drafter_layers=8, taps=(0, 1, 2, 2, 3, 4, 4, 1, 0))
HEADS_96 = sizes(head_dim=96, num_heads=2, num_kv_heads=1)
OWN = with_own(PAIR, "embedding", "head", "mask")
MIMO = with_own(PAIR, "mask", "sinks")
PAIR2 = as_dflash2(PAIR)
SIZES_2: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
DSPARK = as_dspark(PAIR)


def narrow(pair: Pair, size: int) -> Pair:
    """The pair with a drafter of another hidden size than its target's."""
    other = random_pair(5, hidden_size=size, vocab_size=VOCAB, target_layers=6, taps=(1, 3, 4), block_size=BLOCK)
    rng = np.random.default_rng(8)
    fc = rng.normal(size=(size, 3 * 32)).astype(np.float32) / 10
    config = other.drafter_config | {"target_hidden_size": 32}
    return with_own(
        replace(pair, drafter_config=config, drafter_tensors=other.drafter_tensors | {"fc.weight": fc}), "embedding", "head"
    )


def selector_2(pair: Pair) -> Pair:
    """For the reference: the selector's sizes at the top, and rows of the successors' codebook for the tokens proposed."""
    selector_fields = {name: pair.drafter_config["dflash_config"][name] for name in ("conv_group_size", "selector_top_k")}
    return changed(pair, **selector_fields)


VARIANTS: dict[str, Variant] = {
    "dflash_config": Variant(PAIR),
    "top level": Variant(flat(PAIR)),
    "8 layers, 9 taps": Variant(
        WIDE, replace(PLAIN_RULES, taps=(0, 1, 2, 2, 3, 4, 4, 1, 0), windows=(None,) * 8, causal=(False,) * 8)
    ),
    "heads of 96": Variant(HEADS_96),
    "published defaults": Variant(
        changed(sizes(taps=(1, 3), block_size=16), {}, without=("block_size", "target_layer_ids")),
        replace(PLAIN_RULES, taps=(1, 3), block=16),
    ),
    "sliding layers are causal": Variant(
        windowed(PAIR, [SLIDING, FULL], 6), replace(PLAIN_RULES, windows=(6, None), causal=(True, False))
    ),
    "sliding layers, not causal": Variant(
        windowed(PAIR, [FULL, SLIDING], 7, is_causal=False), replace(PLAIN_RULES, windows=(None, 7))
    ),
    "all causal": Variant(changed(PAIR, is_causal=True), replace(PLAIN_RULES, causal=(True, True))),
    "dflash_config.causal": Variant(
        windowed(changed(PAIR, {"causal": False}), [SLIDING] * 2, 6), replace(PLAIN_RULES, windows=(6, 6))
    ),
    "dflash_config.is_causal says nothing": Variant(
        windowed(changed(PAIR, {"is_causal": False}), [SLIDING] * 2, 6),
        replace(PLAIN_RULES, windows=(6, 6), causal=(True, True)),
    ),
    "MiMo": Variant(
        changed(
            MIMO,
            {"use_swa": True, "swa_window_size": 6, "attention_value_scale": 0.6, "attention_sink_bias": True},
            without=("layer_types",),
            partial_rotary_factor=0.5,
            sliding_window=1000,
            v_head_dim=16,
        ),
        replace(PLAIN_RULES, windows=(6, 6), rotated=8, value_scale=0.6),
    ),
    "sinks in layers that see everything": Variant(changed(with_own(PAIR, "sinks"), add_swa_attention_sink_bias=True)),
    "own embedding and head, mask embedding": Variant(OWN),
    "another hidden size": Variant(narrow(PAIR, 24)),
    "draft vocabulary, own head": Variant(changed(with_own(PAIR, "head", ids=IDS), draft_vocab_size=len(IDS))),
    "slot 0 drafts": Variant(changed(PAIR, sample_from_anchor=True), replace(PLAIN_RULES, first_slot=0)),
    "speculators, dflash": Variant(
        as_speculators(with_own(PAIR, "embedding", "head", ids=IDS), "dflash", [SLIDING, FULL], 6, draft_vocab_size=len(IDS)),
        replace(PLAIN_RULES, windows=(6, None), causal=(True, False)),
    ),
    "speculators, sample_from_anchor": Variant(
        as_speculators(PAIR, "dflash", [SLIDING] * 2, 6, sample_from_anchor=True, sliding_window_non_causal=True),
        replace(PLAIN_RULES, windows=(6, 6), first_slot=0),
    ),
    "Muse Glimmer": Variant(as_muse(PAIR, 6), replace(PLAIN_RULES, windows=(7, 7)), changed(PAIR)),
    "dflash2, causal windows": Variant(
        windowed(PAIR2, [SLIDING, FULL], 6, is_causal=None),
        replace(PLAIN_RULES, windows=(6, None), causal=(True, False)),
        selector_2(PAIR2),
        Varied2,
    ),
    "speculators, dflash2": Variant(
        as_speculators(PAIR2, "dflash2", [SLIDING] * 2, 6, **SIZES_2),
        replace(PLAIN_RULES, windows=(6, 6)),
        selector_2(PAIR2),
        Varied2,
    ),
    "speculators, dspark": Variant(
        as_speculators(DSPARK, "dspark", block_size=BLOCK - 1, markov_rank=6, markov_head_type="vanilla", candidate_top_k=5),
        replace(PLAIN_RULES, block=BLOCK - 1, first_slot=0),
        DSPARK,
        VariedDSpark,
    ),
    "dspark, anchor is a bonus": Variant(
        changed(
            windowed(with_own(DSPARK, "sinks"), [SLIDING] * 2, 6),
            block_size=BLOCK,
            dspark_bonus_anchor=True,
            dflash_config={"causal": True, "attention_sink_bias": True},
        ),
        replace(PLAIN_RULES, windows=(6, 6), causal=(True, True)),
        None,
        VariedDSpark,
    ),
}


def drafts(folder: Path, variant: Variant, known: Sequence[int], text: np.ndarray) -> tuple[list[list[int]], DFlash]:
    """What the package drafts after each row's known token, from the target's own hidden states."""
    target_folder, drafter_folder = as_folders(folder, variant.files)
    config, target_params = load_decoder(target_folder, jnp.float32)
    drafter, params = load_drafter(str(drafter_folder), config, "float32", DrafterOptions(), None)
    assert isinstance(drafter, DFlash)
    if hasattr(drafter, "walk"):
        drafter = replace(drafter, walk="greedy")  # type: ignore[call-arg]
    params = drafter.with_head(params, lambda ids: target_params.head[:, ids])
    layout = Layout.full(len(known), 16)
    target = Running(config)
    cache = rows_of(
        drafter.allocate(layout, target, jnp.float32), jnp.arange(len(known)), jnp.arange(len(known))[None, :, None]
    )
    at = jnp.asarray(known, jnp.int32)
    state = DecodeState(
        jnp.asarray(text), at, at + 20, at < 0, at < 0, row_sampling([Sampling()] * len(known), [1] * len(known)), (), cache
    )
    models = Models(target_params, params)
    reference = Target(variant.files.target_config, variant.files.target_tensors)
    states = [reference.run(row.tolist())[1] for row in text]
    taps = tuple(jnp.asarray(np.stack([row[tap] for row in states]), jnp.float32) for tap in drafter.tap_layers)
    state = drafter.extend(target, models, state, taps, jnp.zeros_like(at), at)
    return np.asarray(drafter.propose(target, models, state).block)[:, 1:].tolist(), drafter


DEAR = ("published defaults", "8 layers, 9 taps", "heads of 96", "dflash2, causal windows", "speculators, dspark")
"""Variants of shapes that no other has."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in DEAR else n for n in VARIANTS])
def test_drafts_equal_the_reference(tmp_path: Path, name: str):
    """Rows of different lengths, drafted together, from hidden states of float64."""
    variant = VARIANTS[name]
    text = np.random.default_rng(0).integers(0, VOCAB, (len(KNOWN), 12))
    got, drafter = drafts(tmp_path, variant, KNOWN, text)
    pair = variant.reads or variant.files
    target = Target(pair.target_config, pair.target_tensors)
    config = {**pair.drafter_config.get("transformer_layer_config", {}), **pair.drafter_config}
    reference = variant.reference(variant.rules, config, pair.drafter_tensors, target)
    assert drafter.block_size == reference.block_size
    for row, at in enumerate(KNOWN):
        tokens = text[row].tolist()
        features = reference.context_features(target.run(tokens)[1], range(at))
        want, logits = reference.draft(tokens[: at + 1], features, at)
        best = np.sort(logits, axis=1)
        if variant.reference is Varied:
            assert np.min(best[:, -1] - best[:, -2]) > 1e-4, "no choice hangs on rounding"
        assert got[row] == want, f"row {row}"


# Plain decoding's tokens

NEW = 24
SMALL = random_pair(6, vocab_size=16, target_layers=3, drafter_layers=2, taps=(0, 1), block_size=4)
EVERYTHING = changed(
    with_own(SMALL, "embedding", "head", "mask", "sinks", ids=(0, 1, 2, 4, 5, 7, 8, 11, 13, 14)),
    {"use_swa": True, "swa_window_size": 5, "attention_value_scale": 0.6, "attention_sink_bias": True, "draft_vocab_size": 10},
    without=("layer_types",),
    partial_rotary_factor=0.5,
    sample_from_anchor=True,
)
ENGINES: dict[str, Pair] = {
    "everything at once": EVERYTHING,
    "causal": windowed(SMALL, [SLIDING, FULL], 5, is_causal=True),
    "speculators, dflash2": as_speculators(as_dflash2(SMALL), "dflash2", **SIZES_2),
}
TABLE = ShapeTable(batches=(1, 8), capacities=(64,), chunks=(8,))
PROMPTS = prompts(0, [1, 2, 3, 9, 14, 21, 33, 5], vocab=16)
MIXED = [replace(Sampling(NEW, temperature=1.0), seed=n) if n % 2 else Sampling(NEW) for n in range(8)]


@pytest.mark.parametrize(
    ("name", "batches"), [("everything at once", [8]), *(pytest.param(n, [1, 8], marks=pytest.mark.slow) for n in ENGINES)]
)
def test_speculative_decoding_equals_plain_decoding(tmp_path: Path, name: str, batches: list[int]):
    """Greedy and sampled rows, of which some drafts are accepted."""
    lm = load(*as_folders(tmp_path, ENGINES[name]), table=TABLE, block_size=4)
    want = tokens_of(lm, PROMPTS, MIXED, speculative=False)
    lengths = [n for batch in batches for n in check_same_as_autoregressive(lm, PROMPTS, MIXED, batch, want)]
    assert max(lengths) >= 2


def test_published_defaults():
    config = dflash.config_from_hf(changed(PAIR, {}, without=("block_size", "target_layer_ids")).drafter_config)
    assert (config.block_size, config.target_layer_ids) == (16, dflash.default_target_layers(6, LAYERS))


# What the checkpoint has of its own


def test_copies_of_the_targets_arrays_are_left_to_the_target(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
    tensors = SMALL.drafter_tensors | {name: SMALL.target_tensors[other] for name, other in copies.items()}
    more = {"verifier_norm.weight": np.ones(32, np.float32), "verifier_lm_head.weight": np.ones((16, 32), np.float32)}
    target, folder = as_folders(tmp_path, replace(SMALL, drafter_tensors=tensors | more))
    lm = load(target, folder, table=TABLE, block_size=4)
    assert isinstance(lm.drafter, DFlash)
    assert lm.drafter.reads_target_head
    assert not lm.drafter.config.own_embedding
    assert lm.model.models.drafter.embed is lm.model.models.drafter.vocab is None
    other = replace(SMALL, drafter_tensors=tensors | {"lm_head.weight": 2 * tensors["lm_head.weight"]})
    changed = load(*as_folders(tmp_path / "other", other), table=TABLE, block_size=4).drafter
    assert isinstance(changed, DFlash)
    assert (changed.config.own_head, changed.config.own_embedding) == (True, False)


def test_a_window_that_no_query_comes_to_the_end_of_is_kept_in_pages(tmp_path: Path):
    target, folder = as_folders(tmp_path, windowed(SMALL, [SLIDING] * 2, 1000, is_causal=False))
    drafter, _ = load_drafter(str(folder), load_decoder(target, jnp.float32)[0], "float32", DrafterOptions(), None)
    assert isinstance(drafter, DFlash)
    for capacity, rings in ((64, 0), (2048, 2)):
        caches = [drafter.allocate_layer(n, Layout.full(1, capacity)) for n in range(2)]
        assert sum(isinstance(cache, Sliding) for cache in caches) == rings


# The mask's embedding

GOLDEN = Path(__file__).parents[1] / "golden" / "torch"


def with_mask_file(folder: Path, name: str) -> Path:
    """A drafter for the mask token 23 with a file that torch wrote beside its tensors."""
    _, drafter = as_folders(folder, PAIR)
    (drafter / "mask_embedding.pt").write_bytes((GOLDEN / f"{name}.pt").read_bytes())
    return drafter


@pytest.mark.parametrize("name", ["mapping", "row", "parameter"])
def test_the_masks_embedding_from_a_file_of_torch(tmp_path: Path, name: str):
    folder = with_mask_file(tmp_path, name)
    config, params = load_dflash(folder, read_config(folder), TARGET, "float32", None)
    assert config.mask_embedding
    np.testing.assert_allclose(params.mask, np.load(GOLDEN / "row.npy"), rtol=2**-7)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mapping", {"mask_token_id": 22}, "mask_embedding.pt is for token 23, but mask_token_id is 22"),
        ("columns", {}, "mask_embedding.pt: expected plain tensors, found a tensor that is not contiguous"),
        ("module", {}, "mask_embedding.pt: expected plain tensors, found the instruction NEWOBJ"),
    ],
)
def test_a_masks_embedding_that_cannot_be_used(tmp_path: Path, name: str, change: dict[str, Any], message: str):
    folder = with_mask_file(tmp_path, name)
    with pytest.raises(ValueError, match=message):
        load_dflash(folder, changed(PAIR, change).drafter_config, TARGET, "float32", None)


def test_a_masks_embedding_of_another_size(tmp_path: Path):
    tensors = PAIR.drafter_tensors | {"mask_embedding.weight": np.ones((1, 7), np.float32)}
    _, folder = as_folders(tmp_path, replace(PAIR, drafter_tensors=tensors))
    with pytest.raises(ValueError, match=r"mask_embedding: expected 32 finite numbers, found float32 \[1, 7\]"):
        load_dflash(folder, read_config(folder), TARGET, "float32", None)


def test_quantised_matrices_are_dequantised(tmp_path: Path):
    """Of the layers; `fc` and norms are as they are."""
    tensors: dict[str, Any] = dict(SMALL.drafter_tensors)
    for name, tensor in SMALL.drafter_tensors.items():
        if name.startswith("layers.") and tensor.ndim == 2:
            tensors[name] = tensor.astype(jnp.float8_e4m3fn)
            tensors[f"{name}_scale"] = np.full((1,), 0.5, np.float32)
    made = changed(replace(SMALL, drafter_tensors=tensors), quantization_config={"quant_method": "fp8"})
    target, folder = as_folders(tmp_path, made)
    _, params = load_dflash(folder, read_config(folder), load_decoder(target, jnp.float32)[0], "float32", None)
    stored = SMALL.drafter_tensors["layers.1.mlp.down_proj.weight"].astype(jnp.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(params.layers[1].down, 0.5 * stored.T)
    np.testing.assert_array_equal(params.fc, SMALL.drafter_tensors["fc.weight"].T)


# What is said of a configuration


def test_everything_that_does_not_fit_is_listed_at_once(tmp_path: Path):
    """Of a wrong configuration its fields and how it does not fit the target; of a good one that, and its tensors."""
    config = changed(
        PAIR, {"selector": 1, "target_layer_ids": [1, 9], "mask_token_id": 99}, is_neox_style=False, hidden_size=48
    )
    _, folder = as_folders(tmp_path, config)
    with pytest.raises(ValueError, match="is_neox_style=False is not supported") as caught:
        load_dflash(folder, read_config(folder), replace(TARGET, vocab_size=40), "float32", None)
    for named in (
        "dflash_config has unknown fields: selector",
        "vocab_size is 24 but the target's is 40",
        "hidden_size is 48 but the target's is 32",
        "target_layer_ids [9] lie outside the target's 6 layers",
        "mask_token_id 99 lies outside",
    ):
        assert named in str(caught.value)
    with pytest.raises(ValueError, match="hidden_size is 48 but the target's is 32") as caught:
        load_dflash(folder, changed(PAIR, hidden_size=48).drafter_config, TARGET, "float32", None)
    assert "fc.weight (expected [48, 144], found [32, 96])" in str(caught.value)


def test_a_drafter_of_another_hidden_size_needs_an_embedding_and_a_head(tmp_path: Path):
    pair = narrow(PAIR, 24)
    tensors = {name: tensor for name, tensor in pair.drafter_tensors.items() if name != "lm_head.weight"}
    _, folder = as_folders(tmp_path, replace(pair, drafter_tensors=tensors))
    with pytest.raises(ValueError, match="hidden_size is not target_hidden_size, and the drafter has no head of its own"):
        load_dflash(folder, read_config(folder), TARGET, "float32", None)


def test_what_is_read_over_is_said(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        dflash.config_from_hf(changed(PAIR, trained_by="someone", use_cache=True).drafter_config, "here")
        dflash.config_from_hf(changed(PAIR, {"is_causal": False, "layer_types": [FULL] * 2}).drafter_config, "there")
    assert caplog.messages == [
        "here: ignoring unknown fields: trained_by",
        "there: ignoring is_causal, layer_types in dflash_config; expected at the top level",
    ]


@pytest.mark.parametrize(
    ("pair", "drafter"),
    [(PAIR, "dflash"), (flat(PAIR), "dflash"), (PAIR2, "dflash2"), (DSPARK, "dspark"), (flat(PAIR2), "dflash2")],
)
def test_a_draft_vocabulary_makes_no_eagle3(pair: Pair, drafter: str):
    fields = pair.drafter_config | {"draft_vocab_size": 10}
    assert block_kind(fields).drafter.name == drafter
    assert not eagle3.is_eagle3(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"speculators_model_type": "mtp"},
            "speculators_model_type must be one of dflash, dflash2, dspark, eagle3, found 'mtp'",
        ),
        ({"transformer_layer_config": None}, "transformer_layer_config and speculators_config must be objects, found None"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is missing"),
        ({"aux_hidden_state_layer_ids": [0, 3]}, "must be a list of integers from 1 on .0 is the embedding., found"),
        ({"draft_ffn_type": "moe"}, "draft_ffn_type='moe' is not supported"),
    ],
)
def test_speculators_files_that_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        dflash.config_from_hf(as_speculators(PAIR, "dflash").drafter_config | change, "here", TARGET)


def test_default_taps_that_the_target_does_not_have(tmp_path: Path):
    config = dflash.config_from_hf(changed(PAIR, {}, without=("target_layer_ids",), num_target_layers=2).drafter_config)
    with pytest.raises(ValueError, match=r"target_layer_ids \[-1\] lie outside the target's 2 layers"):
        dflash.check_fits(config, replace(TARGET, num_layers=2))


@pytest.mark.parametrize("pair", [EVERYTHING, ENGINES["causal"], windowed(SMALL, [SLIDING, FULL], 6)])
def test_a_configuration_survives_a_round_trip(pair: Pair):
    config = dflash.config_from_hf(pair.drafter_config)
    assert dflash.config_from_hf(dflash.config_to_hf(config)) == config


# EAGLE-3


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_speculators_eagle3(tmp_path: Path, family: str):
    """The layer is number 0, the tapped layers count the embedding; Qwen3's layer norms its queries and keys."""
    config, tensors = random_eagle3(0, SMALL.target_config, taps=[0, 2], draft_vocab_size=12)
    inner = ("architectures", "eagle_config", "draft_vocab_size", "target_hidden_size", "norm_before_residual")
    fields = {name: value for name, value in config.items() if name not in inner} | {"model_type": family}
    made = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 12,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "eagle_aux_hidden_state_layer_ids": [1, 3],
        "speculators_config": {"algorithm": "eagle3"},
        "transformer_layer_config": fields,
    }
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    if family == "qwen3":
        named |= {f"layers.0.self_attn.{name}_norm.weight": np.full(16, 1.5, np.float32) for name in "qk"}
    target, _ = as_folders(tmp_path, SMALL)
    folder = tmp_path / "eagle3"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(made))
    save_file(named | {"verifier_norm.weight": np.ones(32, np.float32)}, folder / "model.safetensors")
    drafter, params = load_drafter(str(folder), load_decoder(target, jnp.float32)[0], "float32", DrafterOptions(), None)
    assert isinstance(drafter, Eagle3)
    assert (drafter.config.target_layer_ids, drafter.config.norm_before_residual) == ((0, 2), True)
    assert (params.layer.q_norm is None) == (family == "llama")
    assert eagle3.config_from_hf(eagle3.config_to_hf(drafter.config), 3) == drafter.config
