"""Registry of decoder families, and errors for unsupported families."""

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

from tilewright.models.families.diffusion_gemma import DIFFUSION_GEMMA
from tilewright.models.families.fast_dllm import FAST_DLLM
from tilewright.models.families.gemma import GEMMA2, GEMMA3
from tilewright.models.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from tilewright.models.families.gpt_oss import GPT_OSS
from tilewright.models.families.llada2 import LLADA2
from tilewright.models.families.llama import LLAMA
from tilewright.models.families.mistral import MINISTRAL, MISTRAL
from tilewright.models.families.mixtral import MIXTRAL
from tilewright.models.families.nemotron_diffusion import NEMOTRON_DIFFUSION
from tilewright.models.families.phi3 import PHI3
from tilewright.models.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from tilewright.models.families.qwen_hybrid import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from tilewright.models.families.sdar import SDAR, SDAR_MOE
from tilewright.models.families.smollm3 import SMOLLM3
from tilewright.models.family import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        QWEN3,
        QWEN3_MOE,
        QWEN2,
        LLAMA,
        MISTRAL,
        MINISTRAL,
        PHI3,
        SMOLLM3,
        GEMMA2,
        GEMMA3,
        GEMMA4,
        GEMMA4_UNIFIED,
        MIXTRAL,
        GPT_OSS,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        NEMOTRON_DIFFUSION,
        SDAR,
        SDAR_MOE,
        FAST_DLLM,
        LLADA2,
        DIFFUSION_GEMMA,
    )
}
"""Families by `model_type`. A new family needs a file in `families/` and a line here."""

UNSUPPORTED = {
    "hc_count": "hyper-connections",
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "latent attention (MLA)",
    "ssm_cfg": "state-space layers",
    "mamba_d_state": "state-space layers",
    "hidden_size_per_layer_input": "per-layer embeddings",
    "attention_multiplier": "multipliers of scores, residuals and logits",
    "logit_scale": "scaled logits",
    "layer_norm_eps": "LayerNorm",
    "layernorm_epsilon": "LayerNorm",
}
"""Configuration fields of unsupported features, by which errors name the first missing feature."""


def nearest(model_type: object) -> Family:
    """Returns the family with the most similar name."""
    return max(FAMILIES.values(), key=lambda family: SequenceMatcher(None, family.name, str(model_type)).ratio())


def family_of(fields: Mapping[str, Any], where: str) -> Family:
    """Returns the family of a `config.json`.

    Raises:
        ValueError: the family is not supported; names the first unsupported feature, and the nearest family.
    """
    model_type = fields.get("model_type")
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    found = f"{where}: model_type must be one of {', '.join(FAMILIES)}, found {model_type!r}"
    if not isinstance(model_type, str):
        raise ValueError(found)
    missing = next((f"{feature} ({name})" for name, feature in UNSUPPORTED.items() if fields.get(name)), None)
    unsupported = "" if missing is None else f"{missing} is not supported; "
    raise ValueError(f"{found}; {unsupported}the nearest family is {nearest(model_type).name}")
