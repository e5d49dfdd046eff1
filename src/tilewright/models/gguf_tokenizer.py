"""Tokenizers of GGUF files: byte-level BPE by the name of its pre-tokenizer, and SentencePiece's BPE with byte fallback.

A file holds tokens, merges or scores, and the type of each token. The pre-tokenizer is only a name, `tokenizer.ggml.pre`. The
patterns below are those of the models' own `tokenizer.json`, for which the names stand.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

log = logging.getLogger("tilewright.models")

NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
"""Types of tokens. The last three are not found by merging; user-defined tokens are text, control tokens are not."""
END_TEXTS = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>"),
    *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<EOT>", "< EOT >", "_<EOT>", "[EOT]", "[EOS]"),
    *("<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)
"""Tokens that end an answer, from llama.cpp's list, because a file names only one of them (`generation_config.json` lists two
for Qwen3). All are control tokens, even if a file gives them another type (Google's QAT files of Gemma do)."""
MORE_END_TEXTS = ("</s>", "<eos>", "<turn|>", "<|tool_response>", "[e~[")
"""Other tokens of llama.cpp's list, which are text if a file marks them as user-defined: Gemma's `</s>` is HTML."""
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Names of the tokens of a file that end an answer."""
SENTENCE_PIECE_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
"""Default special tokens of a SentencePiece vocabulary, as in llama.cpp."""
UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")
"""Added tokens of Phi-3's SentencePiece vocabulary that do not strip a space after them."""
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's character for a space."""
BASE = 0x9E37_79B9_7F4A_7C15
SCRAMBLING = (0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB)
"""Odd constants of `substring_hashes`."""
FIRST_BITS = 20
"""First bits of a hash, by which it is looked up."""

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PIECES = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}DIGITS| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Pattern of words with the character before them, numbers in pieces of up to DIGITS, punctuation, lines and spaces."""
WORDS = PIECES.replace("DIGITS", "")
"""Qwen2's pattern: every digit is a piece."""
WITH_MARKS = WORDS.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
"""Qwen3.5's pattern: marks belong to the letter before them."""
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BY_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+ENDING|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*ENDING|\p{{N}}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern of words that end before a capital after a small letter, with an optional ENDING; otherwise as `PIECES`."""
TEKKEN = BY_CASE.replace("ENDING", "").replace("DIGITS", "")
O200K = BY_CASE.replace("ENDING", f"{CONTRACTIONS}?").replace("DIGITS", "{1,3}")
"""Pattern of OpenAI's o200k_base, which gpt-oss and Phi-4-mini use."""


@dataclass(frozen=True)
class ByteLevel:
    """Pre-tokenization of a byte-level BPE.

    Attributes:
        pattern: splits text into pieces; None for GPT-2's.
        digits: each digit is a piece of its own, before anything else.
        nfc: text is normalised to Unicode's form C.
        ignore_merges: a piece that is a token is taken as it is, regardless of merges.
        begins: a text begins with the beginning-of-sequence token, unless the file overrides it.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    begins: bool = False


THREES = PIECES.replace("DIGITS", "{1,3}")
"""Llama 3's pattern, that of OpenAI's cl100k_base: numbers in pieces of up to three digits."""
GPT2 = ByteLevel()
LLAMA3 = ByteLevel(THREES, ignore_merges=True, begins=True)
QWEN2 = ByteLevel(WORDS, nfc=True)
SMOLLM = ByteLevel(digits=True)
QWEN35 = ByteLevel(WITH_MARKS, nfc=True)
BYTE_LEVEL = {
    "default": GPT2,
    "gpt-2": GPT2,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "qwen35": QWEN35,
    "deepseek-r1-qwen": QWEN2,
    "smollm": SMOLLM,
    "tekken": ByteLevel(TEKKEN, ignore_merges=True, begins=True),
    "gpt-4o": ByteLevel(O200K),
    "dbrx": ByteLevel(THREES),
    "smaug-bpe": ByteLevel(THREES, ignore_merges=True),
}
"""Pre-tokenization by the file's `tokenizer.ggml.pre`: Phi-4 14B's is "dbrx", SmolLM3's "smaug-bpe"."""


def build_tokenizer(fields: Mapping[str, Any], where: str) -> Tokenizer:
    """Builds the tokenizer that a file's metadata describe.

    Args:
        where: names the file in errors.

    Raises:
        ValueError: metadata are missing, or the kind is not supported.
    """
    kind = fields.get("tokenizer.ggml.model")
    tokens = fields.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"{where}: expected tokenizer.ggml.model to be gpt2 or llama, found {kind!r}")
    if not tokens:
        raise ValueError(f"{where}: expected tokenizer.ggml.tokens, found none")
    types = token_types(fields, where)
    if kind == "gpt2":
        pre = fields.get("tokenizer.ggml.pre", "default")
        if pre not in BYTE_LEVEL:
            supported = ", ".join(BYTE_LEVEL)
            raise ValueError(f"{where}: expected tokenizer.ggml.pre to be one of {supported}, found {pre!r}")
        tokenizer = byte_level(fields, BYTE_LEVEL[pre], where)
    else:
        tokenizer = sentence_piece(fields, types, where)
    # Phi-3's own tokenizer.json does this; files have no field for it.
    strips = kind == "llama" and fields.get("general.architecture") == "phi3"
    for special in (True, False):
        chosen = [
            AddedToken(text, special=special, normalized=False, rstrip=strips and text not in UNSTRIPPED)
            for text, type_ in zip(tokens, types, strict=True)
            if type_ == (CONTROL if special else USER_DEFINED) or (special and type_ == UNKNOWN)
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(chosen)
    if begins_with_bos(fields):
        begin_with(tokenizer, tokens, special_id(fields, "bos_token_id", where), where)
    return tokenizer


def begins_with_bos(fields: Mapping[str, Any]) -> bool:
    """True if texts begin with the beginning-of-sequence token: the file's setting, or the tokenizer's default."""
    pre = BYTE_LEVEL.get(fields.get("tokenizer.ggml.pre", "default"), GPT2)
    default = pre.begins if fields.get("tokenizer.ggml.model") == "gpt2" else True
    return bool(fields.get("tokenizer.ggml.add_bos_token", default))


def token_types(fields: Mapping[str, Any], where: str) -> list[int]:
    """Returns the type of each token, as llama.cpp does.

    All are normal if the file has no types. End-of-turn tokens are always control tokens. So are normal tokens that the file
    names as beginning or end of a text, because chat templates write them.

    Raises:
        ValueError: the numbers of types and tokens differ.
    """
    tokens: Sequence[str] = fields.get("tokenizer.ggml.tokens", [])
    types = fields.get("tokenizer.ggml.token_type")
    if types is None:
        types = [NORMAL] * len(tokens)
        if (unknown := resolved_id(fields, "unknown_token_id")) is not None:
            types[unknown] = UNKNOWN
    if len(types) != len(tokens):
        found = f"{len(tokens)} tokens and {len(types)} types"
        raise ValueError(f"{where}: expected tokenizer.ggml.tokens with a token_type for each, found {found}")
    ends = set(END_TEXTS)
    more_ends = set(MORE_END_TEXTS)
    names = [*ENDS, *(["bos_token_id"] if begins_with_bos(fields) else [])]
    named = {resolved_id(fields, name) for name in names}
    return [
        CONTROL if text in ends or (kind == NORMAL and (n in named or text in more_ends)) else kind
        for n, (text, kind) in enumerate(zip(tokens, types, strict=True))
    ]


def resolved_id(fields: Mapping[str, Any], name: str) -> int | None:
    """Returns the id of a special token such as "bos_token_id": the file's, else SentencePiece's default; None if neither."""
    count = len(fields.get("tokenizer.ggml.tokens", ()))
    number = fields.get(f"tokenizer.ggml.{name}")
    if (number is None or not 0 <= number < count) and fields.get("tokenizer.ggml.model") == "llama":
        number = SENTENCE_PIECE_IDS.get(name)
    return number if number is not None and 0 <= number < count else None


def special_id(fields: Mapping[str, Any], name: str, where: str) -> int | None:
    """Returns the id of a special token; see `resolved_id`.

    An id that is no token's is dropped with a warning. Converters write 4294967295 for "none".
    """
    count = len(fields.get("tokenizer.ggml.tokens", ()))
    number = fields.get(f"tokenizer.ggml.{name}")
    if number is not None and not 0 <= number < count:
        log.warning("%s: ignoring tokenizer.ggml.%s %s, outside of the %s tokens", where, name, number, count)
    return resolved_id(fields, name)


def byte_level(fields: Mapping[str, Any], pretokenization: ByteLevel, where: str) -> Tokenizer:
    """Builds a byte-level BPE without its added tokens."""
    merges = fields.get("tokenizer.ggml.merges")
    if merges is None:
        raise ValueError(f"{where}: expected tokenizer.ggml.merges, found none")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {text: number for number, text in enumerate(fields["tokenizer.ggml.tokens"])}
    try:
        tokenizer = Tokenizer(BPE(vocabulary, pairs, ignore_merges=pretokenization.ignore_merges))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{where}: the tokenizer's merges do not fit its tokens: {error}") from error
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pretokenization.digits else []
    if pretokenization.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pretokenization.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pretokenization.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pretokenization.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_piece(fields: Mapping[str, Any], types: Sequence[int], where: str) -> Tokenizer:
    """Builds SentencePiece's BPE without its control tokens; text without a token becomes bytes."""
    tokens = fields["tokenizer.ggml.tokens"]
    scores = fields.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ValueError(f"{where}: expected tokenizer.ggml.scores, one for each of {len(tokens)} tokens")
    vocabulary = {text: number for number, text in enumerate(tokens)}
    unknown = next((text for text, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    control = {number for number, kind in enumerate(types) if kind in (UNKNOWN, CONTROL)}
    merges = merges_of(vocabulary, scores, control)
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer


def merges_of(vocabulary: Mapping[str, int], scores: Sequence[float], control: Collection[int]) -> list[tuple[str, str]]:
    """Returns all pairs of tokens that make a token, best score first, as SentencePiece merges.

    Pairs that make a control token are left out, because such tokens are not text. Halves of tokens are found by 64-bit hashes,
    for all tokens at once, because a loop over the characters of 262,144 tokens takes seconds. A half that is no token has a
    token's hash with a probability below 1e-7 for a whole vocabulary.

    Raises:
        ValueError: two tokens have one hash.
    """
    texts = list(vocabulary)
    numbers = np.fromiter(vocabulary.values(), np.int64, len(texts))
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    hash_between = substring_hashes("".join(texts))
    hashes = hash_between(starts, ends)
    order = np.argsort(hashes)
    hashes = hashes[order]
    if (hashes[1:] == hashes[:-1]).any():
        raise ValueError("expected tokens with different 64-bit hashes, found two with one hash")

    is_text = ~np.isin(numbers, np.fromiter(control, np.int64, len(control)))
    num_cuts = np.where(is_text, np.maximum(lengths - 1, 0), 0)
    whole = np.repeat(np.arange(len(texts)), num_cuts)
    cuts = starts[whole] + 1 + np.arange(len(whole)) - np.repeat(np.cumsum(num_cuts) - num_cuts, num_cuts)
    left = hash_between(starts[whole], cuts)
    right = hash_between(cuts, ends[whole])
    # Hashes with the same first bits are adjacent. Few share them, so a search from their first one ends after a few steps.
    shift = 64 - FIRST_BITS
    counts = np.bincount((hashes >> shift).astype(np.int64), minlength=1 << FIRST_BITS)
    firsts = np.cumsum(counts) - counts
    possible = np.flatnonzero((counts[left >> shift] > 0) & (counts[right >> shift] > 0))
    places = []
    for half in (left[possible], right[possible]):
        place = firsts[half >> shift]
        for _ in range(counts.max() - 1):
            place += (hashes[place] < half) & (place < len(hashes) - 1)
        places.append(place)
    made = (hashes[places[0]] == left[possible]) & (hashes[places[1]] == right[possible])
    left, right = (order[place[made]] for place in places)
    whole = whole[possible[made]]

    ranks = np.empty(len(texts), np.int64)
    ranks[np.lexsort((numbers, -np.asarray(scores, np.float64)[numbers]))] = np.arange(len(texts))
    # The pairs of one token have different left halves, so that the rank and the number of that half determine the order.
    ranked = np.argsort(ranks[whole] * len(scores) + numbers[left])
    left, right = left[ranked].tolist(), right[ranked].tolist()
    return list(zip(map(texts.__getitem__, left), map(texts.__getitem__, right), strict=True))


def substring_hashes(text: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Returns `(begins, ends) -> hashes`, the 64-bit polynomial hashes of substrings, computed from prefix sums.

    The sum of `code * BASE**i` over a substring, divided by `BASE**begin`, depends on its characters alone. All arithmetic is
    modulo 2**64, in which an odd base has an inverse. Codes are scrambled first (by SplitMix64's finaliser).
    """
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.uint64) + np.uint64(1)
    for multiplier in SCRAMBLING:
        codes *= np.uint64(multiplier)
        codes ^= codes >> 31
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum(codes * powers(BASE, len(codes)), out=sums[1:])
    divisors = powers(pow(BASE, -1, 1 << 64), len(sums))
    return lambda begins, ends: (sums[ends] - sums[begins]) * divisors[begins]


def powers(base: int, count: int) -> np.ndarray:
    """Returns `base**i` for i from 0 on, modulo 2**64."""
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors)


def begin_with(tokenizer: Tokenizer, tokens: Sequence[str], begin: int | None, where: str) -> None:
    """Makes encoded texts begin with a token if special tokens are added.

    Logs a warning if the file names no such token.
    """
    if begin is None:
        log.warning(
            "%s: texts get no beginning-of-sequence token: expected it as tokenizer.ggml.bos_token_id, found none", where
        )
        return
    text = tokens[begin]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{text} $A", pair=f"{text} $A {text} $B:1", special_tokens=[(text, begin)]
    )
