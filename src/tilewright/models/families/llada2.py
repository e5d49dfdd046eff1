"""LLaDA2.0 and LLaDA2.1 (arXiv 2512.15745, 2602.08676): mixtures of experts whose blocks are denoised one after the other.

Part of each head is rotated, queries and keys have norms, and experts are chosen within groups by sigmoids. Names and maths are
those of the published `modeling_llada2_moe.py`.
"""

from typing import Any

from tilewright.models.config import ConfigReader, MaskedBlocks
from tilewright.models.experts import ExpertNames, Mixture, SigmoidRouting
from tilewright.models.families.qwen import EXPERTS
from tilewright.models.family import Family, full_attention, mask_token

MASK = 156895
"""Mask token of published models, whose configurations name none."""
END = 156892
"""End-of-sequence token of the published loop, for configurations that name none."""
LENGTH = 32
"""Block length of published models."""
THRESHOLD = 0.95
"""Threshold of LLaDA2.0's published loop."""
LEVENSHTEIN = ("expert_capacity", "delete_token_id", "split_token_id")
"""Fields of LLaDA2.2: blocks share a set of experts, and tokens are deleted and inserted."""


def read(reader: ConfigReader) -> dict[str, Any]:
    for name in LEVENSHTEIN:
        found = reader.fields.get(name)
        reader.require(not found, f"{name}={found!r} is not supported (LLaDA2.2, which inserts and deletes tokens)")
    reader.expect("use_bias", False)
    reader.expect("use_qkv_bias", False)
    reader.expect("use_qk_norm", True)
    reader.expect("score_function", "sigmoid")
    reader.expect("norm_topk_prob", True)
    reader.expect("moe_router_enable_expert_bias", True)
    dense = reader.fields.get("first_k_dense_replace", 0)
    layers = reader.integer("num_hidden_layers")
    good = isinstance(dense, int) and 0 <= dense < layers
    reader.require(good, f"first_k_dense_replace must be from 0 to {layers - 1}, found {dense!r}")
    return {
        **full_attention(reader),
        "masked_blocks": MaskedBlocks(mask_token(reader), reader.integer("block_size"), causal=False, threshold=THRESHOLD),
        "mixture": read_mixture(reader),
        "dense_layers": tuple(range(dense)) if good else (),
        "balance": 0.0,
    }


def read_mixture(reader: ConfigReader) -> Mixture | None:
    """Reads the experts. Notes a problem and returns None if their groups do not fit."""
    size = reader.integer("moe_intermediate_size")
    shared = reader.fields.get("num_shared_experts") or 0
    good = isinstance(shared, int) and shared >= 0
    reader.require(good, f"num_shared_experts must be a number of experts, found {shared!r}")
    routing = reader.integer("n_group"), reader.integer("topk_group"), reader.number("routed_scaling_factor", default=1.0)
    chosen = reader.integer("num_experts_per_tok")
    sizes = {"shared": shared * size if good else 0, "sigmoid": SigmoidRouting(*routing)}
    try:
        # A single expert's weight is its affinity.
        return Mixture(reader.integer("num_experts"), chosen, size, normalised=chosen > 1, **sizes)
    except ValueError as error:
        reader.require(False, f"num_experts, num_experts_per_tok, n_group and topk_group: {error}")
        return None


def write(config: Any) -> dict[str, Any]:
    mixture: Mixture = config.mixture
    sigmoid = mixture.sigmoid
    assert sigmoid is not None, "expected routing by sigmoids"
    return {
        "num_experts": mixture.experts,
        "num_experts_per_tok": mixture.chosen,
        "moe_intermediate_size": mixture.size,
        "num_shared_experts": mixture.shared // mixture.size,
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "n_group": sigmoid.groups,
        "topk_group": sigmoid.chosen_groups,
        "routed_scaling_factor": sigmoid.scale,
        "first_k_dense_replace": len(config.dense_layers),
        "partial_rotary_factor": config.partial_rotary_factor,
        "mask_token_id": config.masked_blocks.mask_token_id,
        "block_size": config.masked_blocks.length,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_bias": False,
    }


LLADA2 = Family(
    name="llada2_moe",
    architecture="LLaDA2MoeModelLM",
    read=read,
    write=write,
    defaults={
        "mask_token_id": MASK,
        "eos_token_id": END,
        "block_size": LENGTH,
        "partial_rotary_factor": 0.5,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
    qk_norm=True,
    joined=("qkv",),
    experts=ExpertNames(
        "mlp.gate",
        (f"{EXPERTS}.gate_proj.weight", f"{EXPERTS}.up_proj.weight"),
        f"{EXPERTS}.down_proj.weight",
        shared="mlp.shared_experts",
        shared_gated=False,
        correction="mlp.gate.expert_bias",
    ),
    stored_parts=(
        ("model.embed_tokens", "model.word_embeddings"),
        ("self_attn.qkv_proj", "attention.query_key_value"),
        ("self_attn.o_proj", "attention.dense"),
        ("self_attn.q_norm", "attention.query_layernorm"),
        ("self_attn.k_norm", "attention.key_layernorm"),
    ),
)
