"""Sizes for tests and benchmarks: the heads of real models."""

from dataclasses import dataclass

from tilewright.kernels.linear import cases


@dataclass(frozen=True)
class HeadCase:
    """An output head from `hidden` to `vocab`; `transposed` if the model ties it to the embedding `[vocab, hidden]`."""

    hidden: int
    vocab: int
    transposed: bool


CASES = {
    model: HeadCase(layers["head"].inputs, layers["head"].outputs, transposed=model != "demo")
    for model, layers in cases.CASES.items()
}  # The config.json of the published Qwen3 models up to 4 B parameters has tie_word_embeddings.
"""The head of each model of `linear/cases.py`."""

ROWS = (1, 15, 16, 128)
"""Numbers of rows: a decode step, the drafts of a block of 16, the block itself, and a wide block."""
