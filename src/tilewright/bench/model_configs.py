"""Shapes of published models, for benchmarks that need no checkpoint."""

import json
from pathlib import Path
from typing import Any

from tilewright.bench.round import QWEN3_4B
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig


def llama3(**sizes: Any) -> DecoderConfig:
    """A Llama 3 configuration with what all its sizes share (arXiv 2407.21783, table 3, and their config.json)."""
    common = {"vocab_size": 128256, "head_dim": 128, "num_kv_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
    return DecoderConfig(family="llama", max_position_embeddings=8192, **{**common, **sizes})


def qwen3(**sizes: Any) -> DecoderConfig:
    """A dense Qwen3 configuration with what all its sizes share (arXiv 2505.09388, table 1, and their config.json)."""
    return DecoderConfig(family="qwen3", vocab_size=151936, head_dim=128, num_kv_heads=8, **sizes)


MODELS = {
    # huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, config.json
    "smollm2-135m": DecoderConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    ),
    # huggingface.co/meta-llama/Meta-Llama-3-8B and -70B, config.json
    "llama3-8b": llama3(hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32),
    "llama3-70b": llama3(hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64),
    # huggingface.co/meta-llama/Llama-3.2-1B, config.json
    "llama3.2-1b": llama3(
        hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32, head_dim=64, tie_word_embeddings=True
    ),
    # huggingface.co/Qwen/Qwen3-0.6B, -8B and -32B, config.json
    "qwen3-0.6b": qwen3(hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, tie_word_embeddings=True),
    "qwen3-4b": QWEN3_4B,
    "qwen3-8b": qwen3(hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32),
    "qwen3-32b": qwen3(hidden_size=5120, intermediate_size=25600, num_layers=64, num_heads=64),
}
"""By name."""


def model_config(name: str) -> DecoderConfig:
    """The shapes of a model in `MODELS`, or of the `config.json` in a folder.

    Raises:
        ValueError: it is neither, or the file holds what is no decoder.
    """
    if name in MODELS:
        return MODELS[name]
    file = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not file.is_file():
        raise ValueError(f"expected a model of {', '.join(MODELS)}, or a folder with a config.json; found {name!r}")
    return decoder.config_from_hf(json_fields(file), str(file))


def json_fields(file: Path) -> dict[str, Any]:
    """The fields of a config.json.

    Raises:
        ValueError: it holds no JSON object.
    """
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{file}: expected a JSON object, found {type(fields).__name__}")
    return fields
