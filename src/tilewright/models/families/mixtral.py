"""Mixtral (arXiv 2401.04088): Mistral's layers with a mixture of experts."""

from typing import Any

from tilewright.models.config import ConfigReader
from tilewright.models.experts import ExpertNames
from tilewright.models.family import Family, mixture, windows, write_balance, write_windows


def read(reader: ConfigReader) -> dict[str, Any]:
    return {**windows(reader), **mixture(reader, "num_local_experts", "intermediate_size")}


def write(config: Any) -> dict[str, Any]:
    return {
        **write_windows(config),
        "num_local_experts": config.mixture.experts,
        "num_experts_per_tok": config.mixture.chosen,
        **write_balance(config),
    }


EXPERTS = "block_sparse_moe.experts.*"
MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    read=read,
    write=write,
    defaults={"num_experts_per_tok": 2, "num_local_experts": 8},
    windows=True,
    gguf="llama",
    pairwise=True,
    experts=ExpertNames("block_sparse_moe.gate", (f"{EXPERTS}.w1.weight", f"{EXPERTS}.w3.weight"), f"{EXPERTS}.w2.weight"),
)
