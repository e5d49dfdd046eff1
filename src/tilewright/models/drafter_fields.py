"""Fields of drafters' configurations that are no sizes: which layers see what, and what other fields may say.

A field is read (`SIZES`, `READ`, and what each kind adds), changes nothing here (`HARMLESS`), or may have one value alone
because others change the maths (`ONLY`). Any other field is an error inside `dflash_config`, which holds nothing else but
maths, and gets a warning at the top, where whoever trained a drafter may have noted anything.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from tilewright.models.config import ConfigReader
from tilewright.models.drafter_layouts import as_published

log = logging.getLogger("tilewright.models")

SIZES = frozenset(
    "architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim v_head_dim rms_norm_eps rope_theta rope_scaling rope_parameters partial_rotary_factor "
    "rope_dim target_hidden_size quantization_config dflash_config".split()
)
"""Fields that are read at the top."""
READ = frozenset(
    "layer_types sliding_window use_sliding_window use_swa swa_window_size is_causal causal target_layer_ids mask_token_id "
    "block_size num_target_layers input_embedding_scale output_multiplier final_logit_softcapping sample_from_anchor "
    "last_tap_before_norm draft_vocab_size expected_acceptance attention_sink_bias add_swa_attention_sink_bias "
    "attention_value_scale".split()
)
"""Fields that are read there or in `dflash_config`; not all values of all of them are supported."""
TOP_ALONE = ("is_causal", "layer_types", "sliding_window", "use_sliding_window")
"""Fields that the published code looks for at the top alone: inside `dflash_config` they say nothing."""
HARMLESS = frozenset(
    "_name_or_path attention_dropout auto_map backbone_rotary_base bos_token_id chunk_size_feed_forward dtype eos_token_id "
    "initializer_range max_anchors max_position_embeddings max_window_layers name_or_path num_anchors pad_token_id "
    "pretraining_tp speculators_version tie_word_embeddings torch_dtype transformers_version use_cache".split()
)
ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "add_full_attention_sink_bias": False,
    "logit_scale": 1,
    "use_aux_hidden_state": True,
    "draft_ffn_type": "dense",
    "hc_mult": 1,
    "norm_before_fc": False,
    "fc_norm": False,
}
"""Fields that change the maths, each with the one value that does not."""
FULL = "full_attention"
SLIDING = "sliding_attention"


def open_config(fields: Mapping[str, Any], where: str) -> tuple[ConfigReader, Mapping[str, Any]]:
    """A reader of a drafter's `config.json`, where `dflash_config` goes before the top level; and `dflash_config` itself."""
    fields = as_published(fields, where)
    inner = fields.get("dflash_config") or {}
    if not isinstance(inner, Mapping):
        raise ValueError(f"{where}: dflash_config must be an object, found {inner!r}")
    if misplaced := [name for name in TOP_ALONE if inner.get(name) is not None]:
        log.warning("%s: %s in dflash_config is not read: it belongs to the top level", where, ", ".join(misplaced))
    merged = dict(fields) | {name: value for name, value in inner.items() if value is not None and name not in TOP_ALONE}
    return ConfigReader({name: value for name, value in merged.items() if value is not None}, where), inner


def check_fields(read: ConfigReader, inner: Mapping[str, Any], own: Collection[str]) -> None:
    """Notes fields whose values change the maths, and unknown ones of `dflash_config`; warns of unknown ones at the top.

    Args:
        own: fields that a kind reads besides `READ`.
    """
    for name, only in ONLY.items():
        read.expect(name, only)
    known = {*READ, *own, *ONLY, *HARMLESS}
    strange = sorted(inner.keys() - known)
    read.require(not strange, f"dflash_config has unknown fields: {', '.join(strange)}")
    if ignored := sorted(read.fields.keys() - known - SIZES - inner.keys()):
        log.warning("%s: fields that are not known, and not read: %s", read.where, ", ".join(ignored))


def read_attention(read: ConfigReader, layers: int, slots: int) -> dict[str, Any]:
    """Layers that have a window, and those in which a block's slots see only those before them, by the names of `DFlashConfig`.

    The rules are those of the published code and, for `use_swa` and `causal`, of vLLM: layers that `layer_types` calls sliding
    are causal unless something says otherwise.
    """
    kinds = read.fields.get("layer_types")
    kinds = [FULL] * layers if kinds is None else kinds
    good = isinstance(kinds, list) and len(kinds) == layers and all(kind in (FULL, SLIDING) for kind in kinds)
    read.require(good, f"layer_types must name {FULL} or {SLIDING} for each of {layers} layers, found {kinds!r}")
    named = tuple(n for n, kind in enumerate(kinds) if kind == SLIDING) if good else ()
    everywhere = tuple(range(layers))
    sliding = everywhere if read.flag("use_swa", default=False) and not named else named
    causal = read.flag("is_causal", default=read.flag("causal", default=False))
    said = read.fields.keys() & {"is_causal", "causal"}
    found: dict[str, Any] = {"causal_layers": (everywhere if causal else ()) if said else named}
    used = read.flag("use_sliding_window", default=bool(sliding))
    if not sliding:
        # A window that no layer has is one that is not used, unless nothing says which layers have it.
        read.require(not used or "layer_types" in read.fields, "use_sliding_window needs layer_types, which say where")
        if not read.fields.keys() & {"use_sliding_window", "layer_types"}:
            read.expect("sliding_window", None)
        return found
    read.require(used, "use_sliding_window is false, but layer_types has sliding_attention")
    name = "swa_window_size" if "swa_window_size" in read.fields else "sliding_window"
    window = read.integer(name)
    read.require(window >= slots, f"{name} must be at least the block's {slots}, found {window}")
    return {**found, "sliding_window": window, "sliding_layers": sliding}


def write_attention(config: Any) -> dict[str, Any]:
    """The fields that `read_attention` finds again; none where every layer sees everything."""
    if not config.sliding_layers and not config.causal_layers:
        return {"layer_types": [FULL] * config.num_layers}
    causal = len(config.causal_layers) == config.num_layers
    said = causal if causal or not config.causal_layers else None  # of some layers alone, where these are the sliding ones
    return {
        "layer_types": [SLIDING if n in config.sliding_layers else FULL for n in range(config.num_layers)],
        "sliding_window": config.sliding_window,
        "use_sliding_window": bool(config.sliding_layers),
        "is_causal": said,
    }
