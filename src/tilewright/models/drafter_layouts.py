"""Layouts that drafters' checkpoints come in besides the published one, and what each is in its words.

`as_published` turns a `config.json` of another layout into one of the published layout, which alone the readers of each kind
know; `plain_name` does so for the name of a tensor.

- **speculators** (vllm-project/speculators; RedHatAI's checkpoints): sizes in `transformer_layer_config`, everything else at
  the top. Tapped layers count the embedding, too: number i is the output of layer i - 1.
- **Muse Glimmer's assistant** (transformers, `muse_glimmer_assistant`): a DFlash drafter with all fields at the top, without
  the vocabulary's size, and with `encoder.` before what makes the features. A query also sees the position that lies
  `sliding_window` before its own, which others do not.
"""

from collections.abc import Mapping
from typing import Any

SPECULATORS = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
    "eagle3": "LlamaForCausalLMEagle3",
}
"""Kinds of speculators' that are read, and the published architecture of each."""
NON_CAUSAL = "sliding_window_non_causal"
MUSE = ("MuseGlimmerAssistantModel", "DFlashMuseGlimmerAssistantModel")
ALONGSIDE = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.")
"""Beginnings of the names of tensors that serve training alone, or that repeat the configuration."""


def as_published(fields: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The fields of a `config.json` as the published layout has them; those of that layout as they are.

    Raises:
        ValueError: a kind of speculators' that is not read, or what it must have is missing.
    """
    if fields.get("architectures") in [[name] for name in MUSE]:
        return _from_muse(fields)
    if "speculators_model_type" in fields or "speculators_config" in fields:
        return _from_speculators(fields, where)
    return fields


def is_drafter(fields: Mapping[str, Any], where: str) -> bool:
    """True if a `config.json` declares a drafter of any kind, also one that is not read."""
    if "speculators_model_type" in fields or "speculators_config" in fields:
        return True
    names = [str(name).lower() for name in as_published(fields, where).get("architectures") or ()]
    declared = any(kind in name for kind in ("dflash", "dspark", "lilicorr", "eagle") for name in names)
    return declared or "dflash_config" in fields or "draft_vocab_size" in fields


def _from_muse(fields: Mapping[str, Any]) -> dict[str, Any]:
    window = fields.get("sliding_window")
    published = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "is_causal": False, "use_sliding_window": None}
    return {**fields, **published, "sliding_window": window + 1 if isinstance(window, int) else window}


def _from_speculators(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    sizes = fields.get("transformer_layer_config")
    about = fields.get("speculators_config") or {}
    if not isinstance(sizes, Mapping) or not isinstance(about, Mapping):
        raise ValueError(
            f"{where}: transformer_layer_config and speculators_config must be objects, found {sizes!r}, {about!r}"
        )
    kind = fields.get("speculators_model_type") or about.get("algorithm")
    if kind not in SPECULATORS:
        raise ValueError(f"{where}: speculators_model_type must be one of {', '.join(SPECULATORS)}, found {kind!r}")
    own = ("speculators_model_type", "speculators_config", "transformer_layer_config", "architectures", NON_CAUSAL)
    rest = {name: value for name, value in fields.items() if name not in own and value is not None}
    found = {**sizes, **rest, "architectures": [SPECULATORS[kind]]}
    if found.get("draft_vocab_size") == found.get("vocab_size"):
        found.pop("draft_vocab_size", None)
    taps = "eagle_aux_hidden_state_layer_ids" if kind == "eagle3" else "aux_hidden_state_layer_ids"
    layers = found.pop(taps, None)
    if kind == "eagle3":
        return found if layers is None else {**found, "eagle_config": {taps: _outputs(layers, taps, where)}}
    both_ways = fields.get(NON_CAUSAL, kind == "dflash2")
    if layers is None:
        raise ValueError(f"{where}: {taps} is missing")
    return {**found, "target_layer_ids": _outputs(layers, taps, where), **({"is_causal": False} if both_ways else {})}


def _outputs(layers: Any, name: str, where: str) -> list[int]:
    """The layers, from 0, whose outputs are what speculators counts."""
    if not isinstance(layers, list) or not all(isinstance(layer, int) and layer >= 1 for layer in layers):
        raise ValueError(f"{where}: {name} must be a list of integers from 1 on (0 is the embedding), found {layers!r}")
    return [layer - 1 for layer in layers]


RENAMED = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
    "mask_embedding.weight": "mask_embedding",
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
}


def plain_name(name: str) -> str:
    """The published name of a stored tensor, without the `model.` that some files begin names with."""
    name = name.removeprefix("model.")
    return RENAMED.get(name, name)


def is_alongside(name: str) -> bool:
    """True for a stored tensor that is not read."""
    plain = plain_name(name)
    return plain.startswith(ALONGSIDE) or plain.endswith("rotary_emb.inv_freq")
