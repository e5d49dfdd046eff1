"""Model that the runtime serves: a target, its drafter, and their tokenizer."""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import SupportsIndex, cast

from jax.typing import DTypeLike
from tokenizers import Tokenizer

from tilewright.models.tokenizer import encode
from tilewright.runtime.interfaces import Drafter
from tilewright.runtime.state import Models, Target


@dataclass(frozen=True, eq=False)
class Model:
    """Target and drafter, with their parameters.

    Attributes:
        models: the parameters, prepared for the operations of the target and the drafter.
        dtype: dtype of the target's weights and activations, and of its caches unless `Target.kv_dtype` sets another.
        drafter: None for plain decoding.
        adapters: names of its low-rank adapters, in the order of their numbers from 1 on.
    """

    target: Target
    models: Models
    dtype: DTypeLike
    drafter: Drafter | None
    tokenizer: Tokenizer
    adapters: tuple[str, ...] = ()

    def adapter_number(self, name: str | None) -> int:
        """Returns the number of an adapter, 0 for None. Raises a `ValueError` for an unknown name."""
        if name is None:
            return 0
        if name not in self.adapters:
            raise ValueError(f"expected an adapter among {', '.join(self.adapters) or 'none at all'}, found {name!r}")
        return self.adapters.index(name) + 1

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Returns the tokens of a prompt, which may be token ids already.

        Raises:
            ValueError: the prompt is empty, is neither a text nor token ids, or has an id outside of the vocabulary.
        """
        tokens = encode(self.tokenizer, prompt) if isinstance(prompt, str) else token_ids(prompt)
        if not tokens:
            raise ValueError("expected a prompt of at least one token, found an empty one")
        vocab = self.target.config.vocab_size
        outside = [t for t in tokens if not 0 <= t < vocab]
        if outside:
            raise ValueError(f"expected token ids below the vocabulary size {vocab}, found {outside[0]}")
        return tokens


def token_ids(prompt: object) -> list[int]:
    """Returns the token ids of a prompt that is not a text. Raises a `ValueError` for anything but integers."""
    if isinstance(prompt, Mapping) or (isinstance(prompt, list | tuple) and any(isinstance(one, Mapping) for one in prompt)):
        raise ValueError("expected a prompt, a text or token ids, found messages of a chat: `chat` takes them")
    try:
        return [index(token) for token in cast(Iterable[SupportsIndex], prompt)]
    except TypeError:
        raise ValueError(f"expected a prompt, a text or token ids, found {reprlib.repr(prompt)}") from None
