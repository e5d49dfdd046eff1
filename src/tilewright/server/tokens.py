"""Texts, bytes and character offsets of single tokens, for log-probabilities."""

import json
import re
from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer

from tilewright.models.tokenizer import StreamDecoder

CACHED_TOKENS = 65_536
"""Size of the cache of token bytes."""


def byte_letters() -> dict[str, int]:
    """Returns the byte of each letter of byte-level BPE (GPT-2's `bytes_to_unicode`).

    Bytes that are printable in Latin-1 are written as themselves, the unprintable as the letters from U+0100, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(unprintable)}


class TokenTexts:
    """Texts and bytes of a tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.letters = byte_letters() if '"ByteLevel"' in json.dumps(json.loads(tokenizer.to_str())["decoder"]) else None
        self.added = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
        self.bytes = lru_cache(CACHED_TOKENS)(self.find_bytes)

    def find_bytes(self, token: int) -> bytes:
        """Returns the bytes that a token adds to a text; none for an id without an entry in the tokenizer."""
        if token in self.added:
            return self.added[token].encode()
        entry = self.tokenizer.id_to_token(token)
        if entry is None:
            return b""
        if self.letters is not None and all(letter in self.letters for letter in entry):
            return bytes(self.letters[letter] for letter in entry)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", entry):  # a byte that SentencePiece has no token for
            return bytes([int(entry[3:5], 16)])
        # SentencePiece decoders strip the leading space of the first token.
        space = "\N{LOWER ONE EIGHTH BLOCK}"
        return entry.replace(space, " ").encode() if space in entry else self.tokenizer.decode([token]).encode()

    def text(self, token: int) -> str:
        r"""Returns a token's text; for incomplete characters, "bytes:" and the bytes, as `bytes:\xe2\x82`."""
        found = self.bytes(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


class Offsets:
    """Character offsets of streamed tokens.

    A character of several tokens begins at the last of them, because the unprintable add no text.

    Args:
        start: offset of the first token.
        prompt: ids of the tokens before.
        verbatim: the tokens follow a grammar.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        start: int = 0,
        skip_special_tokens: bool = True,
        prompt: Sequence[int] = (),
        verbatim: bool = False,
    ):
        self.decoder = StreamDecoder(tokenizer, skip_special_tokens, prompt, verbatim)
        self.offset = start

    def push(self, tokens: Sequence[int]) -> list[int]:
        """Returns the offsets of the next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self.offset)
            self.offset += len(self.decoder.push([token]))
        return offsets
