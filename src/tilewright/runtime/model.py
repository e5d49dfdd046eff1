"""A model as the runtime serves it: a target, what drafts for it, and how text becomes tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from jax.typing import DTypeLike
from tokenizers import Tokenizer

from tilewright.models.tokenizer import encode
from tilewright.runtime.interfaces import Drafter
from tilewright.runtime.state import Models, Target


@dataclass(frozen=True, eq=False)
class Model:
    """A target and its drafter, with their parameters.

    Attributes:
        models: the parameters, prepared for the operations that the target and the drafter name.
        dtype: of the target's weights and activations, and of its caches unless `Target.kv_dtype` says otherwise.
        drafter: None for plain decoding.
    """

    target: Target
    models: Models
    dtype: DTypeLike
    drafter: Drafter | None
    tokenizer: Tokenizer

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """The tokens of a prompt, which may be tokens already.

        Raises:
            ValueError: it is empty, or holds an id outside the vocabulary.
        """
        tokens = encode(self.tokenizer, prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        if not tokens:
            raise ValueError("expected a prompt of at least one token, found an empty one")
        vocab = self.target.config.vocab_size
        outside = [t for t in tokens if not 0 <= t < vocab]
        if outside:
            raise ValueError(f"expected token ids below the vocabulary size {vocab}, found {outside[0]}")
        return tokens
