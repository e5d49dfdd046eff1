"""Single tokens as text and as bytes: for log-probabilities, where every token stands for itself."""

import json
import re
from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer

from tilewright.models.tokenizer import StreamDecoder

KEPT = 65_536
"""Number of tokens that are remembered."""


def byte_letters() -> dict[str, int]:
    """The letter that byte-level BPE writes for each byte, and its byte (GPT-2's table, `bytes_to_unicode` in its code).

    Bytes that are printable in Latin-1 stand for themselves, the others for the letters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class TokenTexts:
    """The tokens of a tokenizer, one by one."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.letters = byte_letters() if '"ByteLevel"' in json.dumps(json.loads(tokenizer.to_str())["decoder"]) else None
        self.added = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
        self.bytes = lru_cache(KEPT)(self.find_bytes)

    def find_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text; an id that the tokenizer has no entry for adds none."""
        if token in self.added:
            return self.added[token].encode()
        entry = self.tokenizer.id_to_token(token)
        if entry is None:
            return b""
        if self.letters is not None and all(letter in self.letters for letter in entry):
            return bytes(self.letters[letter] for letter in entry)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", entry):  # a byte that SentencePiece has no token for
            return bytes([int(entry[3:5], 16)])
        # SentencePiece decoders strip the first token's space: one before it keeps it.
        space = "\N{LOWER ONE EIGHTH BLOCK}"
        return entry.replace(space, " ").encode() if space in entry else self.tokenizer.decode([token]).encode()

    def text(self, token: int) -> str:
        r"""A token's text; where its bytes are no whole characters, "bytes:" and these, as `bytes:\xe2\x82`."""
        found = self.bytes(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


class Offsets:
    """Offsets in characters, in their text, of tokens that come in pieces.

    A character of several tokens begins with the last of them: the others add nothing yet.

    Args:
        start: where the first one begins.
        prompt: ids that come before them.
        verbatim: they follow a grammar.
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
        self.at = start

    def of(self, tokens: Sequence[int]) -> list[int]:
        offsets = []
        for token in tokens:
            offsets.append(self.at)
            self.at += len(self.decoder.push([token]))
        return offsets
