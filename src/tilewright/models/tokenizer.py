"""Reads a model's tokenizer, and turns token ids that arrive in pieces into text."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder puts in the place of bytes that are no character, or not yet."""


def load_tokenizer(folder: Path) -> Tokenizer:
    """Reads `tokenizer.json`. Truncation and padding that the file asks for are switched off: they would alter prompts.

    Raises:
        ValueError: the folder has no `tokenizer.json`, or it is not one.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder} is a folder without a tokenizer: it has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{path} is not a readable tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class StreamDecoder:
    """Turns token ids that arrive in pieces into text that can be shown at once, never half a character.

    The pieces, with what `flush` returns, add up to `tokenizer.decode` of all ids, for every tokenizer that does not take back
    text when more tokens come (byte-level BPE, as Qwen and Llama 3 have it, never does).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        # The ids still needed: `_context` of them whose text is out (some decoders treat the first token of a text in their
        # own way, so that new ids need some before them), and those that came since. `_shown` characters of their text are out.
        self._ids: list[int] = []
        self._context = 0
        self._shown = 0

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=self.skip_special_tokens)

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next ids; returns the text that they complete, possibly none."""
        self._ids.extend(ids)
        text = self._decode(self._ids)
        # A decoder may show the bytes of one unfinished character as several replacements, so that all at the end may change.
        whole = len(text.rstrip(REPLACEMENT))
        piece = text[self._shown : whole]
        self._shown += len(piece)
        if piece and whole == len(text):
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._shown = len(self._decode(self._ids))
        return piece

    def flush(self) -> str:
        """The rest, when no more ids come: bytes that never became a character show as U+FFFD. Starts afresh after it."""
        piece = self._decode(self._ids)[self._shown :]
        self._ids, self._context, self._shown = [], 0, 0
        return piece
