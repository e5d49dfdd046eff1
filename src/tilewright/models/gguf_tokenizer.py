"""Tokenizers of GGUF files: byte-level BPE by the name of its pre-tokenizer, and SentencePiece's BPE with byte fallback.

A file holds tokens, merges or scores, and the kind of each token. How text is cut before it is merged is only a
name, `tokenizer.ggml.pre`. The patterns below are those of the models' own `tokenizer.json`, which the names stand for.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

log = logging.getLogger("tilewright.models")

NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
"""Types of tokens. The last three are not found by merging: control tokens are no text, user-defined ones are."""
END_TEXTS = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>"),
    *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<EOT>", "< EOT >", "_<EOT>", "[EOT]", "[EOS]"),
    *("<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)
"""Tokens that end an answer, as llama.cpp lists them: a file names one, where `generation_config.json` lists all (Qwen3's two,
say). They are control tokens, also where a file gives them another type (Google's QAT files of Gemma do)."""
MORE_END_TEXTS = ("</s>", "<eos>", "<turn|>", "<|tool_response>", "[e~[")
"""Others of that list, which are text where a file says that users defined them: Gemma's `</s>` is HTML."""
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Names of the tokens of a file that end an answer."""
SENTENCE_PIECE_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
"""Special tokens of a SentencePiece vocabulary where a file names none, as in llama.cpp."""
UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")
"""The added tokens of Phi-3's with SentencePiece's vocabulary that leave a space behind them as it is."""
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What SentencePiece writes for a space."""

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PIECES = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}DIGITS| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Words with what stands before them, numbers in pieces of so many digits, punctuation, lines, spaces."""
WORDS = PIECES.replace("DIGITS", "")
"""Qwen2's pattern: each digit by itself."""
WITH_MARKS = WORDS.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
"""Qwen3.5's: marks go with the letter that they stand on."""
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BY_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+ENDING|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*ENDING|\p{{N}}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words that a capital behind a small letter ends, with what may stand at their end; else as `PIECES`."""
TEKKEN = BY_CASE.replace("ENDING", "").replace("DIGITS", "")
O200K = BY_CASE.replace("ENDING", f"{CONTRACTIONS}?").replace("DIGITS", "{1,3}")
"""That of OpenAI's o200k_base, which gpt-oss and Phi-4-mini have."""


@dataclass(frozen=True)
class ByteLevel:
    """Preparation of text for a byte-level BPE.

    Attributes:
        pattern: what cuts text into pieces; None for GPT-2's.
        digits: each digit is a piece of its own, before anything else.
        nfc: text is brought into Unicode's form C.
        whole: a piece that is a token is taken as it is, whatever its merges.
        begins: a text begins with the beginning-of-sequence token, unless the file says otherwise.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole: bool = False
    begins: bool = False


THREES = PIECES.replace("DIGITS", "{1,3}")
"""Llama 3's pattern, which is that of OpenAI's cl100k_base: numbers in pieces of up to three digits."""
GPT2 = ByteLevel()
LLAMA3 = ByteLevel(THREES, whole=True, begins=True)
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
    "tekken": ByteLevel(TEKKEN, whole=True, begins=True),
    "gpt-4o": ByteLevel(O200K),
    "dbrx": ByteLevel(THREES),
    "smaug-bpe": ByteLevel(THREES, whole=True),
}
"""By the file's `tokenizer.ggml.pre`: Phi-4 14B's is "dbrx", SmolLM3's "smaug-bpe"."""


def build_tokenizer(fields: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer that a file's metadata describe.

    Args:
        where: names the file in errors.

    Raises:
        ValueError: the metadata lack something, or the kind is not here.
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
            known = ", ".join(BYTE_LEVEL)
            raise ValueError(f"{where}: expected tokenizer.ggml.pre to be one of {known}, found {pre!r}")
        tokenizer = byte_level(fields, BYTE_LEVEL[pre], where)
    else:
        tokenizer = sentence_piece(fields, types, where)
    # Of Phi-3's own tokenizer.json; files have no field for it, so that the architecture has to say it.
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
    """True if texts begin with the beginning-of-sequence token: as the file says, else by its kind of tokenizer."""
    pre = BYTE_LEVEL.get(fields.get("tokenizer.ggml.pre", "default"), GPT2)
    default = pre.begins if fields.get("tokenizer.ggml.model") == "gpt2" else True
    return bool(fields.get("tokenizer.ggml.add_bos_token", default))


def token_types(fields: Mapping[str, Any], where: str) -> list[int]:
    """Type of each token, as llama.cpp takes them: all normal where the file has no types, and ends of turns always control.

    Normal tokens that the file names as beginning or end of a text are control tokens, too: a chat template writes them.

    Raises:
        ValueError: there is not one type for each token.
    """
    tokens: Sequence[str] = fields.get("tokenizer.ggml.tokens", [])
    types = fields.get("tokenizer.ggml.token_type")
    if types is None:
        types = [NORMAL] * len(tokens)
        if (unknown := known_id(fields, "unknown_token_id")) is not None:
            types[unknown] = UNKNOWN
    if len(types) != len(tokens):
        found = f"{len(tokens)} tokens and {len(types)} types"
        raise ValueError(f"{where}: expected tokenizer.ggml.tokens with a token_type for each, found {found}")
    ends = set(END_TEXTS)
    others = set(MORE_END_TEXTS)
    names = [*ENDS, *(["bos_token_id"] if begins_with_bos(fields) else [])]
    named = {known_id(fields, name) for name in names}
    return [
        CONTROL if text in ends or (kind == NORMAL and (n in named or text in others)) else kind
        for n, (text, kind) in enumerate(zip(tokens, types, strict=True))
    ]


def known_id(fields: Mapping[str, Any], name: str) -> int | None:
    """Id of a special token, such as "bos_token_id": the file's, else SentencePiece's default; None where there is none."""
    count = len(fields.get("tokenizer.ggml.tokens", ()))
    number = fields.get(f"tokenizer.ggml.{name}")
    if (number is None or not 0 <= number < count) and fields.get("tokenizer.ggml.model") == "llama":
        number = SENTENCE_PIECE_IDS.get(name)
    return number if number is not None and 0 <= number < count else None


def special_id(fields: Mapping[str, Any], name: str, where: str) -> int | None:
    """Id of a special token, by `known_id`.

    An id that is no token's is dropped with a warning. Converters write 4294967295 for "none".
    """
    count = len(fields.get("tokenizer.ggml.tokens", ()))
    number = fields.get(f"tokenizer.ggml.{name}")
    if number is not None and not 0 <= number < count:
        log.warning("%s: tokenizer.ggml.%s is %s, which is none of the %s tokens, and is left out", where, name, number, count)
    return known_id(fields, name)


def byte_level(fields: Mapping[str, Any], how: ByteLevel, where: str) -> Tokenizer:
    """A byte-level BPE without its added tokens."""
    merges = fields.get("tokenizer.ggml.merges")
    if merges is None:
        raise ValueError(f"{where}: expected tokenizer.ggml.merges, found none")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {text: number for number, text in enumerate(fields["tokenizer.ggml.tokens"])}
    try:
        tokenizer = Tokenizer(BPE(vocabulary, pairs, ignore_merges=how.whole))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{where}: the tokenizer's merges do not fit its tokens: {error}") from error
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if how.digits else []
    if how.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(how.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=how.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if how.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_piece(fields: Mapping[str, Any], types: Sequence[int], where: str) -> Tokenizer:
    """A BPE of SentencePiece's without its control tokens; bytes stand in for what is no token."""
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
    """All pairs of tokens that make a token, those of the best score first: SentencePiece merges whatever scores best.

    No pair makes a control token, which no text is.
    """
    found = []
    for text, number in vocabulary.items():
        if number in control:
            continue
        pairs = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        made = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        found += [(-scores[number], number, vocabulary[a], vocabulary[b], (a, b)) for a, b in made]
    return [pair for *_, pair in sorted(found)]


def begin_with(tokenizer: Tokenizer, tokens: Sequence[str], begin: int | None, where: str) -> None:
    """Lets encoded texts begin with a token, where special tokens are asked for; warns where the file names no such token."""
    if begin is None:
        log.warning(
            "%s: texts should begin with a token, and tokenizer.ggml.bos_token_id names none; they begin without", where
        )
        return
    text = tokens[begin]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{text} $A", pair=f"{text} $A {text} $B:1", special_tokens=[(text, begin)]
    )
