"""Mistral 7B (arXiv 2310.06825) and its successors: Llama's layers, some or all with a sliding window."""

from tilewright.models.family import Family, windows, write_windows


def like_llama(name: str, architecture: str) -> Family:
    return Family(
        name=name, architecture=architecture, read=windows, write=write_windows, windows=True, gguf="llama", pairwise=True
    )


MISTRAL = like_llama("mistral", "MistralForCausalLM")
MINISTRAL = like_llama("ministral", "MinistralForCausalLM")
