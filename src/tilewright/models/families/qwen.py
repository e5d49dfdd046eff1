"""Qwen3 (arXiv 2505.09388 §2), and Qwen2 (arXiv 2407.10671 §2.2), which Qwen2.5 follows."""

from typing import Any

from tilewright.models.config import ConfigReader
from tilewright.models.family import Family, full_attention, windows, write_windows

FIRST_WINDOW = 28
"""The first layer with a window, where a configuration with windows names none."""


def read(read: ConfigReader) -> dict[str, Any]:
    if not read.flag("use_sliding_window", default=False):
        return full_attention(read)
    first = read.fields.get("max_window_layers", FIRST_WINDOW)
    good = isinstance(first, int) and first >= 0
    read.require(good, f"max_window_layers must be a number of layers, found {first!r}")
    return windows(read, (lambda layer: layer >= first) if good else lambda layer: True)


def write(config: Any) -> dict[str, Any]:
    return {"use_sliding_window": True, **write_windows(config)} if config.sliding_layers else {}


# Qwen3's heads have 128 unless it says otherwise (Qwen3-4B: 2560 / 32 = 80, but heads of 128).
QWEN3 = Family(name="qwen3", architecture="Qwen3ForCausalLM", read=read, write=write, head_dim=128, qk_norm=True, gguf="qwen3")
QWEN2 = Family(name="qwen2", architecture="Qwen2ForCausalLM", read=read, write=write, qkv_bias=True, gguf="qwen2")
