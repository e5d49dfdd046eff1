"""A model as the runtime serves it: a target, what drafts for it, and how text becomes tokens."""

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
    """A target and its drafter, with their parameters.

    Attributes:
        models: the parameters, prepared for the operations that the target and the drafter name.
        dtype: of the target's weights and activations, and of its caches unless `Target.kv_dtype` says otherwise.
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
        """The number of an adapter, 0 for none. Raises a `ValueError` for a name that there is not."""
        if name is None:
            return 0
        if name not in self.adapters:
            raise ValueError(f"expected an adapter among {', '.join(self.adapters) or 'none at all'}, found {name!r}")
        return self.adapters.index(name) + 1

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """The tokens of a prompt, which may be tokens already.

        Raises:
            ValueError: it is empty, neither a text nor token ids, or holds an id outside the vocabulary.
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
    """Token ids of a prompt that is no text. Raises a `ValueError` where it holds anything but integers."""
    if isinstance(prompt, Mapping) or (isinstance(prompt, list | tuple) and any(isinstance(one, Mapping) for one in prompt)):
        raise ValueError("expected a prompt, a text or token ids, found messages of a chat: `chat` takes them")
    try:
        return [index(token) for token in cast(Iterable[SupportsIndex], prompt)]
    except TypeError:
        raise ValueError(f"expected a prompt, a text or token ids, found {reprlib.repr(prompt)}") from None
