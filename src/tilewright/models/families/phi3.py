"""Phi-3 (arXiv 2404.14219) and Phi-4: Llama's layers, with joined projections in the checkpoint."""

from tilewright.models.family import Family, windows, write_windows

PHI3 = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    read=windows,
    write=write_windows,
    windows=True,
    joined=("qkv", "gate_up"),
    gguf="phi3",
)
