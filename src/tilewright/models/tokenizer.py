"""Reads a model's tokenizer, and turns token ids that arrive in pieces into text."""

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
"""What a decoder puts in the place of bytes that are no character, or not yet."""


WHOLE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
VOCAB = "vocab.json"
MERGES = "merges.txt"
ADDED = "added_tokens.json"
SPECIAL = "special_tokens_map.json"
BYTE_LEVEL = ("Qwen2Tokenizer", "Qwen2TokenizerFast", "DreamTokenizer")
"""Classes of transformers whose tokenizers are built alike, of a vocabulary and merges: Dream's is Qwen2's."""


def load_tokenizer(folder: Path) -> Tokenizer:
    """Reads `tokenizer.json`, or builds the tokenizer of a GGUF file, or of what Dream's checkpoints have in its place.

    Truncation and padding that the file asks for are switched off: they would alter prompts.

    Raises:
        ValueError: the folder has no `tokenizer.json` and not all of the others, or a file is not what it should be.
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
"""Noncharacter that `guarded` puts into what looks like a special token and is to stay text; `encode` takes it out again."""
ALIAS = "\ufdd0"
"""Noncharacter that begins the stand-ins for special tokens in `guarding_tokenizer`."""


def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
    """Encodes a text while other threads run: `Tokenizer.encode` would keep the interpreter's lock, for seconds.

    What `guarded` has marked in the text is encoded as text, whatever special tokens it spells.

    Raises:
        ValueError: the tokenizer makes a special token of marked text, as one without merges may.
    """
    if GUARD not in text:
        return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    literal, aliases = guarding_tokenizer(tokenizer)
    # As the tokenizer itself does: of several special tokens that begin at a place, the longest.
    special = re.compile("|".join(re.escape(each) for each in sorted(aliases, key=len, reverse=True)) or "(?!)")
    text = special.sub(lambda found: aliases[found[0]][0], text.replace(ALIAS, REPLACEMENT)).replace(GUARD, "")
    ids = literal.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    numbers = {literal.token_to_id(alias): number for alias, number in aliases.values()}
    control = {number: token for token, (_, number) in aliases.items()}
    if (made := next((token for token in ids if token in control), None)) is not None:
        raise ValueError(f"expected messages without {control[made]!r}, which this tokenizer always takes for a special token")
    return [numbers.get(token, token) for token in ids]


@lru_cache(maxsize=4)
def guarding_tokenizer(tokenizer: Tokenizer) -> tuple[Tokenizer, dict[str, tuple[str, int]]]:
    """Makes a copy of a tokenizer that takes special tokens for text, and stand-ins for them that it takes for tokens.

    Returns:
        The copy; and for the text of each special token its stand-in and its id.
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
    """Marks all in a text that `encode` would take for one of the special tokens, so that it stays text.

    The beginning of a special token at the end of the text has a mark, too: other text could complete it. A special token of
    one character cannot be marked.
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
    """First two characters of special tokens, and all that they begin with. A vocabulary may have thousands of them."""
    longer = [token for token in special if len(token) > 1]
    beginnings = frozenset(token[:length] for token in longer for length in range(1, len(token)))
    return frozenset(token[:2] for token in longer), beginnings


def special_texts(folder: Path) -> list[str]:
    """Special tokens of the tokenizer in a folder or a GGUF file, without building it where that takes long."""
    if (file := gguf.gguf_file(folder)) is not None:
        return gguf.open_gguf(file).control_texts
    if not (folder / WHOLE).is_file():
        tokens = added_tokens(folder, read_json(folder / CONFIG)).values() if (folder / CONFIG).is_file() else ()
        return [token.content for token in tokens if token.special]
    return [token["content"] for token in read_json(folder / WHOLE).get("added_tokens", []) if token["special"]]


def build_tokenizer(folder: Path) -> Tokenizer:
    """The byte-level BPE of `vocab.json` and `merges.txt`, as Qwen2's class of transformers reads them.

    Raises:
        ValueError: a file is missing or malformed, or `tokenizer_config.json` names another class.
    """
    if missing := [name for name in (VOCAB, MERGES, CONFIG) if not (folder / name).is_file()]:
        parts = f"and of {VOCAB}, {MERGES} and {CONFIG}, which would do, not {' nor '.join(missing)}"
        raise ValueError(f"{folder} is a folder without a tokenizer: it has no {WHOLE}, {parts}")
    config = read_json(folder / CONFIG)
    if config.get("tokenizer_class") not in BYTE_LEVEL:
        classes = f"expected a tokenizer_class among {', '.join(BYTE_LEVEL)}, found {config.get('tokenizer_class')!r}"
        raise ValueError(f"{folder} has no {WHOLE}, and {CONFIG}: {classes}")
    added = added_tokens(folder, config)
    # The library numbers added tokens one after the other, but leaves those where they are that the vocabulary has already.
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
    """The tokens that are found in a text before anything else, by id.

    They are those of `added_tokens_decoder` in `tokenizer_config.json`, and others of `added_tokens.json`, of which those are
    special that a special token of the configuration or of `special_tokens_map.json` is.
    """
    where = folder / CONFIG
    said = config.get("added_tokens_decoder", {})
    if not isinstance(said, dict) or not all(number.isdigit() and texts(each) for number, each in said.items()):
        raise ValueError(f"{where}: added_tokens_decoder must map ids to tokens with their content")
    flags = ("single_word", "lstrip", "rstrip", "special")
    found = {
        int(number): AddedToken(each["content"], normalized=False, **{name: bool(each.get(name)) for name in flags})
        for number, each in said.items()
    }
    if (folder / ADDED).is_file():
        names = {**config} | (read_json(folder / SPECIAL) if (folder / SPECIAL).is_file() else {})
        special = [each for name, value in names.items() if name.endswith(("_token", "_tokens")) for each in texts(value)]
        for content, number in read_json(folder / ADDED).items():
            found.setdefault(number, AddedToken(content, normalized=False, special=content in special))
    return found


def texts(value: Any) -> list[str]:
    """The contents of a special token of a configuration, or of a list of them."""
    if isinstance(value, list):
        return [text for each in value for text in texts(each)]
    content = value.get("content") if isinstance(value, dict) else value
    return [content] if isinstance(content, str) else []


BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
"""A token that stands for one byte where a tokenizer has no other for it (SentencePiece's byte fallback)."""
WHOLE_REPLACEMENTS = (REPLACEMENT, "\N{LATIN SMALL LETTER I WITH DIAERESIS}¿½", "<0xEF><0xBF><0xBD>")
"""Endings of tokens whose text really ends with U+FFFD: the character, or its bytes in byte-level BPE or byte fallback."""
HELD = 16
"""The most replacements at the end of a text that wait for what follows; of byte-level BPE one is enough."""


def prefixes_every_part(tokenizer: Tokenizer) -> bool:
    """True if encoding puts a space in front of each part of a text, not only in front of the whole."""
    normalizer = tokenizer.normalizer
    pre_tokenizer = tokenizer.pre_tokenizer
    if normalizer is not None and normalizer.normalize_str("a").startswith(SPACE):
        return True
    steps = [] if pre_tokenizer is None else [json.loads(pre_tokenizer.__getstate__())]
    steps += steps[0].get("pretokenizers", []) if steps else []
    return any(step["type"] == "Metaspace" and step.get("prepend_scheme") == "always" for step in steps)


class StreamDecoder:
    """Decoder of token ids that arrive in pieces, behind a prompt. Its text can be shown at once, without half a character.

    The pieces and the result of `flush` add up to the text that `tokenizer.decode` adds when the ids follow the prompt. A
    SentencePiece decoder strips the space in front of a text's first token, so an answer decoded by itself would lose it. A
    character that the prompt begins and the ids complete belongs to the pieces as a whole.

    A decoder that falls back to bytes replaces all adjacent bytes if they are no valid text together, so such bytes wait for
    the token behind them. The cost of a token does not depend on the number of tokens before it.

    A tokenizer may put a space in front of each part of a text when it encodes, also behind an added token (Llama 2's and
    Phi-3's do). That space is no part of an answer that follows an added token, such as `<|assistant|>`.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt: Sequence[int] = (), verbatim: bool = False
    ):
        """Args:
        prompt: ids that stand in front of the others; their text is not shown.
        verbatim: keep a space behind an added token, as the text of a grammar has it.
        """
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        decoder = tokenizer.decoder
        self.falls_back = decoder is not None and decoder.decode(["<0x41>"]) == "A"
        self._restart()
        # Enough of the prompt that bytes, up to four a character, fall into step again.
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
        self._settled = max((n for n, token in enumerate(self._ids, 1) if not self._is_byte(token)), default=0)

    def _restart(self) -> None:
        # The ids still needed: `_context` of them whose text is out (some decoders treat the first token of a text in their
        # own way, so that new ids need some before them), and those that came since. No later id changes the text of the first
        # `_settled`, of which `_shown` characters are out.
        self._ids: list[int] = []
        self._context = self._settled = self._shown = 0

    def _decode(self, ids: Sequence[int], skip: bool | None = None) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=self.skip_special_tokens if skip is None else skip)

    def _is_left_out(self, token: int) -> bool:
        """Whether `decode` takes no notice of an id: of a special token, or of one that the tokenizer has no entry for."""
        special = self.skip_special_tokens and not self._decode([token]) and bool(self._decode([token], False))
        return special or self.tokenizer.id_to_token(token) is None

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next ids; returns the text that they complete, possibly none."""
        settled = self._settled
        for token in ids:
            if not self._is_left_out(token):
                self._ids.append(token)
                if not self._is_byte(token):
                    self._settled = len(self._ids)
        return self._show() if self._settled > settled else ""

    def _is_byte(self, token: int) -> bool:
        """True for a token that stands for one byte of a text."""
        return self.falls_back and BYTE.fullmatch(self.tokenizer.id_to_token(token) or "") is not None

    def _show(self) -> str:
        text = self._decode(self._ids[: self._settled])
        # The bytes of an unfinished character show as a replacement, and a later token may make a character of them.
        whole = max(len(text.rstrip(REPLACEMENT)), len(text) - HELD, self._shown)
        piece = text[self._shown : whole]
        self._shown = whole
        if piece and whole == len(text):
            self._forget(self._context, 0)
        elif self._settled - self._context > 8 * HELD:  # enough that bytes, up to four a character, fall into step again
            self._forget(self._settled - 4 * HELD, len(text) - whole)
        return piece

    def _forget(self, first: int, hidden: int) -> None:
        """Drops the ids before `first`; the last `hidden` characters of the settled ones' text are still to be shown."""
        self._ids = self._ids[first:]
        self._settled = self._settled - first
        self._context = self._settled
        self._shown = len(self._decode(self._ids[: self._settled])) - hidden

    def flush(self) -> str:
        """The rest, when no more ids come: bytes that never became a character show as U+FFFD. Starts afresh after it."""
        piece = self._decode(self._ids)[self._shown :]
        self._restart()
        return piece


def without_unfinished(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> str:
    """Cuts the replacement characters from the end of the text of `ids` that stand for an unfinished character."""
    ending = "".join(tokenizer.id_to_token(token) or "" for token in ids[-3:])
    return text if ending.endswith(WHOLE_REPLACEMENTS) else text.rstrip(REPLACEMENT)


def decode_after(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """Decodes ids that follow a prompt, into the text that they add to it."""
    decoder = StreamDecoder(tokenizer, skip_special_tokens, prompt)
    return decoder.push(ids) + decoder.flush()
