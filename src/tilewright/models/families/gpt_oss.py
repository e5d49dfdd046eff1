"""gpt-oss (arXiv 2508.10925): experts with biases and a clamped gate, attention sinks, a window in every other layer."""

from dataclasses import replace
from typing import Any

from tilewright.models.config import ConfigReader
from tilewright.models.experts import ClampedGate, ExpertNames
from tilewright.models.family import Family, mixture, windows, write_balance, write_windows


def read(reader: ConfigReader) -> dict[str, Any]:
    gate = ClampedGate(reader.number("swiglu_alpha", default=1.702), reader.number("swiglu_limit", default=7.0))
    found = mixture(reader, "num_local_experts", "intermediate_size", balance=0.9)
    return {
        **windows(reader, lambda layer: layer % 2 == 0),
        **found,
        "mixture": replace(found["mixture"], clamped=gate),
    }


def write(config: Any) -> dict[str, Any]:
    return {
        **write_windows(config),
        "num_local_experts": config.mixture.experts,
        "num_experts_per_tok": config.mixture.chosen,
        "swiglu_alpha": config.mixture.clamped.alpha,
        "swiglu_limit": config.mixture.clamped.limit,
        **write_balance(config),
    }


GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    read=read,
    write=write,
    defaults={
        "num_experts_per_tok": 4,
        "num_local_experts": 128,
        "sliding_window": 128,
        "head_dim": 64,
        "rope_theta": 150000.0,
    },
    qkv_bias=True,
    output_bias=True,
    sinks=True,
    windows=True,
    gguf="gpt-oss",
    yarn_ramp="between",
    experts=ExpertNames("mlp.router", ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj", biased=True),
)
