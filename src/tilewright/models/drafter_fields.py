"""Configuration fields of drafters other than sizes: attention of layers, and rules for all other fields.

A field is read (`SIZES`, `READ`, and those of each kind), has no effect here (`HARMLESS`), or has one supported value (`ONLY`)
because others change the maths. Any other field is an error inside `dflash_config`, which holds only maths, and a warning at
the top level, where training tools may write anything.
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
"""Fields that are read at the top level."""
READ = frozenset(
    "layer_types sliding_window use_sliding_window use_swa swa_window_size is_causal causal target_layer_ids mask_token_id "
    "block_size num_target_layers input_embedding_scale output_multiplier final_logit_softcapping sample_from_anchor "
    "last_tap_before_norm draft_vocab_size expected_acceptance attention_sink_bias add_swa_attention_sink_bias "
    "attention_value_scale".split()
)
"""Fields that are read at the top level or in `dflash_config`; some of their values may be unsupported."""
TOP_LEVEL_ONLY = ("is_causal", "layer_types", "sliding_window", "use_sliding_window")
"""Fields that the published code reads only at the top level; inside `dflash_config` they have no effect."""
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
"""Fields that change the maths, each with its only supported value."""
FULL = "full_attention"
SLIDING = "sliding_attention"


def open_config(fields: Mapping[str, Any], where: str) -> tuple[ConfigReader, Mapping[str, Any]]:
    """Returns a reader of a `config.json` in which `dflash_config` overrides the top level, and `dflash_config` itself."""
    fields = as_published(fields, where)
    inner = fields.get("dflash_config") or {}
    if not isinstance(inner, Mapping):
        raise ValueError(f"{where}: dflash_config must be an object, found {inner!r}")
    if misplaced := [name for name in TOP_LEVEL_ONLY if inner.get(name) is not None]:
        log.warning("%s: ignoring %s in dflash_config; expected at the top level", where, ", ".join(misplaced))
    merged = dict(fields) | {name: value for name, value in inner.items() if value is not None and name not in TOP_LEVEL_ONLY}
    return ConfigReader({name: value for name, value in merged.items() if value is not None}, where), inner


def check_fields(read: ConfigReader, inner: Mapping[str, Any], kind_fields: Collection[str]) -> None:
    """Notes unsupported values, and unknown fields of `dflash_config`; warns of unknown fields at the top level.

    Args:
        kind_fields: fields of the kind of drafter besides `READ`.
    """
    for name, only in ONLY.items():
        read.expect(name, only)
    allowed = {*READ, *kind_fields, *ONLY, *HARMLESS}
    unknown = sorted(inner.keys() - allowed)
    read.require(not unknown, f"dflash_config has unknown fields: {', '.join(unknown)}")
    if ignored := sorted(read.fields.keys() - allowed - SIZES - inner.keys()):
        log.warning("%s: ignoring unknown fields: %s", read.where, ", ".join(ignored))


def read_attention(read: ConfigReader, layers: int, slots: int) -> dict[str, Any]:
    """Reads the layers with a window and those with causal order within a block, by the names of `DFlashConfig`.

    The rules are those of the published code, and those of vLLM for `use_swa` and `causal`: layers that `layer_types` calls
    sliding are causal unless a field overrides it.
    """
    kinds = read.fields.get("layer_types")
    kinds = [FULL] * layers if kinds is None else kinds
    good = isinstance(kinds, list) and len(kinds) == layers and all(kind in (FULL, SLIDING) for kind in kinds)
    read.require(good, f"layer_types must name {FULL} or {SLIDING} for each of {layers} layers, found {kinds!r}")
    named = tuple(n for n, kind in enumerate(kinds) if kind == SLIDING) if good else ()
    all_layers = tuple(range(layers))
    sliding = all_layers if read.flag("use_swa", default=False) and not named else named
    causal = read.flag("is_causal", default=read.flag("causal", default=False))
    has_flag = read.fields.keys() & {"is_causal", "causal"}
    found: dict[str, Any] = {"causal_layers": (all_layers if causal else ()) if has_flag else named}
    used = read.flag("use_sliding_window", default=bool(sliding))
    if not sliding:
        # A window without sliding layers is unused; without `layer_types` its layers are unknown.
        read.require(not used or "layer_types" in read.fields, "use_sliding_window needs layer_types, which name its layers")
        if not read.fields.keys() & {"use_sliding_window", "layer_types"}:
            read.expect("sliding_window", None)
        return found
    read.require(used, "use_sliding_window is false, but layer_types has sliding_attention")
    name = "swa_window_size" if "swa_window_size" in read.fields else "sliding_window"
    window = read.integer(name)
    read.require(window >= slots, f"{name} must be at least the block's {slots}, found {window}")
    return {**found, "sliding_window": window, "sliding_layers": sliding}


def write_attention(config: Any) -> dict[str, Any]:
    """Returns the fields that `read_attention` reads."""
    if not config.sliding_layers and not config.causal_layers:
        return {"layer_types": [FULL] * config.num_layers}
    causal = len(config.causal_layers) == config.num_layers
    is_causal = causal if causal or not config.causal_layers else None  # None: only the sliding layers are causal
    return {
        "layer_types": [SLIDING if n in config.sliding_layers else FULL for n in range(config.num_layers)],
        "sliding_window": config.sliding_window,
        "use_sliding_window": bool(config.sliding_layers),
        "is_causal": is_causal,
    }
