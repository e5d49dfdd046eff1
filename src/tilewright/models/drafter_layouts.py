"""Layouts of drafters' checkpoints other than the published one, and their conversion.

`as_published` converts a `config.json` of another layout to the published layout, which is the only one that the readers of
each kind know; `plain_name` does so for the name of a tensor.

- **speculators** (vllm-project/speculators; RedHatAI's checkpoints): sizes in `transformer_layer_config`, all other fields at
  the top level. Tapped layers count the embedding: number i is the output of layer i - 1.
- **Muse Glimmer's assistant** (transformers, `muse_glimmer_assistant`): a DFlash drafter with all fields at the top level,
  without the vocabulary size, and with `encoder.` before the tensors of features. A query also attends to the position
  `sliding_window` before its own, unlike in other drafters.
"""

from collections.abc import Mapping
from typing import Any

SPECULATORS = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
    "eagle3": "LlamaForCausalLMEagle3",
}
"""Supported kinds of speculators, and the published architecture of each."""
NON_CAUSAL = "sliding_window_non_causal"
MUSE = ("MuseGlimmerAssistantModel", "DFlashMuseGlimmerAssistantModel")
DECLARED = ("dflash", "dspark", "lilicorr", "eagle", "mtpdraft", "assistantfor")
"""Parts of the names of drafters' architectures, in lower case."""
ALONGSIDE = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.")
"""Prefixes of tensors that are used only in training, or repeat the configuration."""


def as_published(fields: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Converts the fields of a `config.json` to the published layout; those in the published layout stay unchanged.

    Raises:
        ValueError: a kind of speculators is not supported, or a required field is missing.
    """
    if fields.get("architectures") in [[name] for name in MUSE]:
        return _from_muse(fields)
    if "speculators_model_type" in fields or "speculators_config" in fields:
        return _from_speculators(fields, where)
    return fields


def is_drafter(fields: Mapping[str, Any], where: str) -> bool:
    """True if a `config.json` declares a drafter of any kind, even an unsupported one."""
    if "speculators_model_type" in fields or "speculators_config" in fields:
        return True
    names = [str(name).lower() for name in as_published(fields, where).get("architectures") or ()]
    declared = any(kind in name for kind in DECLARED for name in names)
    return declared or "dflash_config" in fields or "draft_vocab_size" in fields


def _from_muse(fields: Mapping[str, Any]) -> dict[str, Any]:
    window = fields.get("sliding_window")
    published = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "is_causal": False, "use_sliding_window": None}
    return {**fields, **published, "sliding_window": window + 1 if isinstance(window, int) else window}


def _from_speculators(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    sizes = fields.get("transformer_layer_config")
    settings = fields.get("speculators_config") or {}
    if not isinstance(sizes, Mapping) or not isinstance(settings, Mapping):
        raise ValueError(
            f"{where}: transformer_layer_config and speculators_config must be objects, found {sizes!r}, {settings!r}"
        )
    kind = fields.get("speculators_model_type") or settings.get("algorithm")
    if kind not in SPECULATORS:
        raise ValueError(f"{where}: speculators_model_type must be one of {', '.join(SPECULATORS)}, found {kind!r}")
    converted = ("speculators_model_type", "speculators_config", "transformer_layer_config", "architectures", NON_CAUSAL)
    rest = {name: value for name, value in fields.items() if name not in converted and value is not None}
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
    """Converts numbers of layer outputs in speculators, where 0 is the embedding, to layers from 0."""
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
    """Returns the published name of a stored tensor, without the `model.` prefix of some files."""
    name = name.removeprefix("model.")
    return RENAMED.get(name, name)


def is_alongside(name: str) -> bool:
    """True if a stored tensor is ignored."""
    plain = plain_name(name)
    return plain.startswith(ALONGSIDE) or plain.endswith("rotary_emb.inv_freq")
