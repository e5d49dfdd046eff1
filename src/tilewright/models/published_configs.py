"""Shapes of published models, for benchmarks and predictions without a checkpoint."""

from pathlib import Path
from typing import Any

from tilewright.models import decoder
from tilewright.models.checkpoint import read_json
from tilewright.models.decoder import DecoderConfig
from tilewright.models.dflash import DFlashConfig


def llama3(**sizes: Any) -> DecoderConfig:
    """Returns a Llama 3 configuration with the values common to all sizes (arXiv 2407.21783, table 3, and config.json)."""
    common = {"vocab_size": 128256, "head_dim": 128, "num_kv_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
    return DecoderConfig(family="llama", max_position_embeddings=8192, **{**common, **sizes})


def qwen3(**sizes: Any) -> DecoderConfig:
    """Returns a dense Qwen3 configuration with the values common to all sizes (arXiv 2505.09388, table 1, and config.json)."""
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
    # huggingface.co/Qwen/Qwen3-0.6B, -4B, -8B and -32B, config.json
    "qwen3-0.6b": qwen3(hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, tie_word_embeddings=True),
    "qwen3-4b": qwen3(hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32, tie_word_embeddings=True),
    "qwen3-8b": qwen3(hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32),
    "qwen3-32b": qwen3(hidden_size=5120, intermediate_size=25600, num_layers=64, num_heads=64),
}
"""Configurations by name."""

DFLASH_B16 = DFlashConfig(
    vocab_size=151936,
    hidden_size=2560,
    intermediate_size=9728,
    num_layers=5,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    block_size=16,
    mask_token_id=151669,
    target_layer_ids=(1, 9, 17, 25, 33),
    num_target_layers=36,
)
"""Drafter for Qwen3-4B: sgl-project/SpecForge, configs/qwen3-4b-dflash.json."""


def model_config(name: str) -> DecoderConfig:
    """Returns the shapes of a model in `MODELS`, or of the `config.json` in a folder.

    Raises:
        ValueError: the name is neither, or the file does not hold a decoder.
    """
    if name in MODELS:
        return MODELS[name]
    file = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not file.is_file():
        raise ValueError(f"expected a model of {', '.join(MODELS)}, or a folder with a config.json; found {name!r}")
    return decoder.config_from_hf(read_json(file), str(file))
