"""The sizes that tests and benchmarks use: the heads of real models."""

from dataclasses import dataclass

from tilewright.kernels.linear import cases


@dataclass(frozen=True)
class HeadCase:
    """A head: `hidden` to `vocab`, and `transposed` where a model shares it with the embedding `[vocab, hidden]`."""

    hidden: int
    vocab: int
    transposed: bool


CASES = {
    model: HeadCase(layers["head"].inputs, layers["head"].outputs, transposed=model != "demo")
    for model, layers in cases.CASES.items()
}  # The published Qwen3 models of up to 4 B parameters say tie_word_embeddings in their config.json.
"""One for each model of `linear/cases.py`."""

ROWS = (1, 15, 16, 128)
"""A plain step, the drafts of a block of 16, the block itself, and a wide one."""
