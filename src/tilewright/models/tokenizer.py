"""Reads a model's tokenizer, and decodes streams of token ids."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tilewright.models import gguf
from tilewright.models.checkpoint import read_json
from tilewright.models.gguf_tokenizer import SPACE, WORDS

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Character that decoders write for bytes that are not a character, or not yet."""


WHOLE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
VOCAB = "vocab.json"
MERGES = "merges.txt"
ADDED = "added_tokens.json"
SPECIAL = "special_tokens_map.json"
BYTE_LEVEL = ("Qwen2Tokenizer", "Qwen2TokenizerFast", "DreamTokenizer")
"""Supported tokenizer classes of transformers, built from a vocabulary and merges: Dream's is Qwen2's."""


def load_tokenizer(folder: Path) -> Tokenizer:
    """Reads `tokenizer.json`, or builds the tokenizer of a GGUF file or of Dream's files.

    Truncation and padding of the file are switched off, because they would alter prompts.

    Raises:
        ValueError: the folder has neither `tokenizer.json` nor all of the other files, or a file is malformed.
    """
    if (file := gguf.gguf_file(folder)) is not None:
        return gguf.open_gguf(file).tokenizer()
    path = folder / WHOLE
    if not path.is_file():
        return build_tokenizer(folder)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{path} is not a readable tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


GUARD = "\ufdd1"
"""Noncharacter that `guarded` puts into text that looks like a special token; `encode` removes it."""
ALIAS = "\ufdd0"
"""Noncharacter that begins the aliases of special tokens in `guarding_tokenizer`."""


def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
    """Encodes a text while other threads run. (`Tokenizer.encode` would hold the interpreter's lock, for seconds.)

    Text that `guarded` has marked is encoded as text, even if it spells a special token.

    Raises:
        ValueError: the tokenizer makes a special token of marked text, as tokenizers without merges may.
    """
    if GUARD not in text:
        return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    literal, aliases = guarding_tokenizer(tokenizer)
    # Longest first, because the tokenizer takes the longest special token at a place.
    special = re.compile("|".join(re.escape(each) for each in sorted(aliases, key=len, reverse=True)) or "(?!)")
    text = special.sub(lambda match: aliases[match[0]][0], text.replace(ALIAS, REPLACEMENT)).replace(GUARD, "")
    ids = literal.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    numbers = {literal.token_to_id(alias): number for alias, number in aliases.values()}
    control = {number: token for token, (_, number) in aliases.items()}
    if (found := next((token for token in ids if token in control), None)) is not None:
        raise ValueError(f"expected messages without {control[found]!r}, which this tokenizer always takes for a special token")
    return [numbers.get(token, token) for token in ids]


@lru_cache(maxsize=4)
def guarding_tokenizer(tokenizer: Tokenizer) -> tuple[Tokenizer, dict[str, tuple[str, int]]]:
    """Copies a tokenizer so that it takes special tokens for text, and aliases of them for tokens.

    Returns:
        the copy; and the alias and the id of each special token, by its text.
    """
    literal = Tokenizer.from_str(tokenizer.to_str())
    literal.encode_special_tokens = True
    aliases = {}
    for n, (number, token) in enumerate(sorted(tokenizer.get_added_tokens_decoder().items())):
        if token.special:
            alias = f"{ALIAS}{chr(0xF0000 + n)}"
            edges = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
            literal.add_tokens([AddedToken(alias, normalized=False, special=False, **edges)])
            aliases[token.content] = alias, number
    return literal, aliases


def guarded(text: str, special: tuple[str, ...]) -> str:
    """Marks everything in a text that `encode` would take for one of the special tokens, so that it stays text.

    The beginning of a special token at the end of the text is marked too, because other text could complete it. A special token
    of one character cannot be marked.
    """
    pairs, beginnings = beginnings_of(special)
    if any(pair in text for pair in pairs):
        for token in special:
            if token in text:
                text = text.replace(token, f"{token[0]}{GUARD}{token[1:]}")
    longest = max(map(len, beginnings), default=0)
    begun = any(text[-length:] in beginnings for length in range(1, min(longest, len(text)) + 1))
    return text + GUARD if begun else text


@lru_cache(maxsize=4)
def beginnings_of(special: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the first two characters of the special tokens, and all their prefixes.

    A vocabulary may have thousands of special tokens.
    """
    longer = [token for token in special if len(token) > 1]
    beginnings = frozenset(token[:length] for token in longer for length in range(1, len(token)))
    return frozenset(token[:2] for token in longer), beginnings


def special_texts(folder: Path) -> list[str]:
    """Returns the special tokens of a folder or a GGUF file, without building the tokenizer if that is slow."""
    if (file := gguf.gguf_file(folder)) is not None:
        return gguf.open_gguf(file).control_texts
    if not (folder / WHOLE).is_file():
        tokens = added_tokens(folder, read_json(folder / CONFIG)).values() if (folder / CONFIG).is_file() else ()
        return [token.content for token in tokens if token.special]
    return [token["content"] for token in read_json(folder / WHOLE).get("added_tokens", []) if token["special"]]


def build_tokenizer(folder: Path) -> Tokenizer:
    """Builds the byte-level BPE of `vocab.json` and `merges.txt`, as transformers' Qwen2 tokenizer does.

    Raises:
        ValueError: a file is missing or malformed, or `tokenizer_config.json` names another class.
    """
    if missing := [name for name in (VOCAB, MERGES, CONFIG) if not (folder / name).is_file()]:
        parts = f"{VOCAB}, {MERGES} and {CONFIG}"
        raise ValueError(f"{folder} has no tokenizer: expected {WHOLE}, or {parts}; found no {' and no '.join(missing)}")
    config = read_json(folder / CONFIG)
    if config.get("tokenizer_class") not in BYTE_LEVEL:
        classes = f"expected a tokenizer_class among {', '.join(BYTE_LEVEL)}, found {config.get('tokenizer_class')!r}"
        raise ValueError(f"{folder} has no {WHOLE}, and {CONFIG}: {classes}")
    added = added_tokens(folder, config)
    # The library numbers added tokens consecutively, except those that the vocabulary already has.
    vocab = read_json(folder / VOCAB) | {token.content: number for number, token in added.items()}
    lines = (folder / MERGES).read_text(encoding="utf-8").split("\n")
    pairs = [line.rstrip("\r").partition(" ") for line in lines[lines[0].startswith("#version") :] if line.strip()]
    try:
        tokenizer = Tokenizer(models.BPE(vocab, [(first, second) for first, _, second in pairs]))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{folder}: {VOCAB} and {MERGES} are no tokenizer: {error}") from error
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([added[number] for number in sorted(added)])
    return tokenizer


def added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Returns the tokens that are found in a text before all others, by id.

    The tokens are those of `added_tokens_decoder` in `tokenizer_config.json`, and others of `added_tokens.json`. The latter are
    special if the configuration or `special_tokens_map.json` has them as special tokens.
    """
    where = folder / CONFIG
    decoder = config.get("added_tokens_decoder", {})
    if not isinstance(decoder, dict) or not all(number.isdigit() and texts(each) for number, each in decoder.items()):
        raise ValueError(f"{where}: added_tokens_decoder must map ids to tokens with their content")
    flags = ("single_word", "lstrip", "rstrip", "special")
    found = {
        int(number): AddedToken(each["content"], normalized=False, **{name: bool(each.get(name)) for name in flags})
        for number, each in decoder.items()
    }
    if (folder / ADDED).is_file():
        names = {**config} | (read_json(folder / SPECIAL) if (folder / SPECIAL).is_file() else {})
        special = [each for name, value in names.items() if name.endswith(("_token", "_tokens")) for each in texts(value)]
        for content, number in read_json(folder / ADDED).items():
            found.setdefault(number, AddedToken(content, normalized=False, special=content in special))
    return found


def texts(value: Any) -> list[str]:
    """Returns the contents of a special token of a configuration, or of a list of them."""
    if isinstance(value, list):
        return [text for each in value for text in texts(each)]
    content = value.get("content") if isinstance(value, dict) else value
    return [content] if isinstance(content, str) else []


BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
"""Token for a single byte, which has no other token (SentencePiece's byte fallback)."""
WHOLE_REPLACEMENTS = (REPLACEMENT, "\N{LATIN SMALL LETTER I WITH DIAERESIS}¿½", "<0xEF><0xBF><0xBD>")
"""Endings of tokens whose text does end with U+FFFD: the character, or its bytes in byte-level BPE or byte fallback."""
HELD = 16
"""Maximum number of replacement characters at the end of a text that wait for more ids; byte-level BPE needs one."""


def prefixes_every_part(tokenizer: Tokenizer) -> bool:
    """True if encoding puts a space before each part of a text, not only before the whole."""
    normalizer = tokenizer.normalizer
    pre_tokenizer = tokenizer.pre_tokenizer
    if normalizer is not None and normalizer.normalize_str("a").startswith(SPACE):
        return True
    steps = [] if pre_tokenizer is None else [json.loads(pre_tokenizer.__getstate__())]
    steps += steps[0].get("pretokenizers", []) if steps else []
    return any(step["type"] == "Metaspace" and step.get("prepend_scheme") == "always" for step in steps)


class StreamDecoder:
    """Decodes token ids that arrive in pieces after a prompt, never showing half a character.

    The pieces and the result of `flush` add up to the text that `tokenizer.decode` adds when the ids follow the prompt. A
    SentencePiece decoder strips the space before a text's first token, so an answer decoded alone would lose it. A character
    that the prompt begins and the ids complete belongs wholly to the pieces.

    A decoder with byte fallback replaces all adjacent bytes if they are no valid text together, so such bytes wait for the
    token after them. The cost of a token does not depend on the number of tokens before it.

    A tokenizer may put a space before each part of a text when it encodes, also after an added token (Llama 2's and Phi-3's
    do). That space is not part of an answer that follows an added token, such as `<|assistant|>`.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt: Sequence[int] = (), verbatim: bool = False
    ):
        """Args:
        prompt: ids before the others; their text is not shown.
        verbatim: keep a space after an added token, as in the text of a grammar.
        """
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        decoder = tokenizer.decoder
        self.falls_back = decoder is not None and decoder.decode(["<0x41>"]) == "A"
        self._restart()
        # Enough of the prompt to find the next start of a character of up to four bytes.
        tail = list(prompt[-4 * HELD :])
        if verbatim:
            shown = any(not self._is_left_out(token) for token in tail)
            tail = tail if shown else tokenizer.encode("a", add_special_tokens=False).ids
        elif tail and prefixes_every_part(tokenizer):
            added = tokenizer.get_added_tokens_decoder()
            tail = tail[max((n for n, token in enumerate(tail, 1) if token in added), default=0) :]
        self._ids = [token for token in tail if not self._is_left_out(token)]
        text = self._decode(self._ids)
        self._shown = len(without_unfinished(tokenizer, self._ids, text))
        self._context = len(self._ids) if self._shown == len(text) else 0
        self._complete = max((n for n, token in enumerate(self._ids, 1) if not self._is_byte(token)), default=0)

    def _restart(self) -> None:
        # Ids that are still needed: the first `_context`, whose text is shown (some decoders treat the first token of a text
        # differently, so new ids need some before them), and later ones. Later ids do not change the text of the first
        # `_complete` ids, of which `_shown` characters are shown.
        self._ids: list[int] = []
        self._context = self._complete = self._shown = 0

    def _decode(self, ids: Sequence[int], skip: bool | None = None) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=self.skip_special_tokens if skip is None else skip)

    def _is_left_out(self, token: int) -> bool:
        """True if `decode` ignores an id: a special token, or an id without a token."""
        special = self.skip_special_tokens and not self._decode([token]) and bool(self._decode([token], False))
        return special or self.tokenizer.id_to_token(token) is None

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next ids; returns the text that they complete, possibly empty."""
        complete = self._complete
        for token in ids:
            if not self._is_left_out(token):
                self._ids.append(token)
                if not self._is_byte(token):
                    self._complete = len(self._ids)
        return self._show() if self._complete > complete else ""

    def _is_byte(self, token: int) -> bool:
        """True if a token stands for one byte of a text."""
        return self.falls_back and BYTE.fullmatch(self.tokenizer.id_to_token(token) or "") is not None

    def _show(self) -> str:
        text = self._decode(self._ids[: self._complete])
        # The bytes of an unfinished character show as a replacement until a later token completes them.
        whole = max(len(text.rstrip(REPLACEMENT)), len(text) - HELD, self._shown)
        piece = text[self._shown : whole]
        self._shown = whole
        if piece and whole == len(text):
            self._forget(self._context, 0)
        elif self._complete - self._context > 8 * HELD:  # enough to find the next start of a character
            self._forget(self._complete - 4 * HELD, len(text) - whole)
        return piece

    def _forget(self, first: int, hidden: int) -> None:
        """Drops the ids before `first`; the last `hidden` characters of the complete ids' text are not shown yet."""
        self._ids = self._ids[first:]
        self._complete = self._complete - first
        self._context = self._complete
        self._shown = len(self._decode(self._ids[: self._complete])) - hidden

    def flush(self) -> str:
        """Returns the remaining text, with unfinished characters as U+FFFD, and resets the decoder."""
        piece = self._decode(self._ids)[self._shown :]
        self._restart()
        return piece


def without_unfinished(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> str:
    """Removes the replacement characters of an unfinished character from the end of the text of `ids`."""
    ending = "".join(tokenizer.id_to_token(token) or "" for token in ids[-3:])
    return text if ending.endswith(WHOLE_REPLACEMENTS) else text.rstrip(REPLACEMENT)


def decode_after(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """Decodes ids that follow a prompt to the text that they add."""
    decoder = StreamDecoder(tokenizer, skip_special_tokens, prompt)
    return decoder.push(ids) + decoder.flush()
