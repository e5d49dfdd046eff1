"""Llama 3 (arXiv 2407.21783 §3.2), and models with the same layers."""

from tilewright.models.family import Family

LLAMA = Family(name="llama", architecture="LlamaForCausalLM", gguf="llama", pairwise=True)
