"""Regular expressions that can become automata: a subset of Rust's syntax, over Unicode characters.

The parser raises `NotRegular` for anything outside the subset; the masks are then made by the matcher on the host. The subset
excludes anchors, look-around, flags, set operations, and classes that differ between versions of Unicode.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from string import hexdigits

Ranges = tuple[tuple[int, int], ...]
"""Code points, as inclusive ranges in ascending order that do not touch."""

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
DEEPEST = 64
"""Largest nesting depth of groups."""
LARGEST_COUNT = 10_000
"""Largest bound of a repetition."""

CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
SPACES: Ranges = (
    (9, 13),
    (32, 32),
    (0x85, 0x85),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
)
"""Characters with the Unicode property White_Space."""


class NotRegular(ValueError):
    """Raised for a grammar that cannot become an automaton."""


class TooLarge(NotRegular):
    """Raised for a grammar whose expression or automaton would be too large."""


@dataclass(frozen=True)
class CharacterClass:
    """Single character from a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Concatenation:
    """Sequence of parts."""

    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Alternation:
    """Choice between parts."""

    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Repetition:
    """A part repeated `least` to `most` times (None: unbounded)."""

    part: "Node"
    least: int
    most: int | None


@dataclass(frozen=True)
class Separated:
    """A part repeated once or more, with separators between."""

    part: "Node"
    separator: "Node"


@dataclass(frozen=True)
class Undescribed:
    """Text that the expression does not describe, up to the bracket that closes the part. Only the matcher has masks for it."""


@dataclass(frozen=True)
class Lark:
    """Text of a rule of a Lark grammar. Cannot become an automaton."""

    rule: str


Node = CharacterClass | Concatenation | Alternation | Repetition | Separated | Undescribed | Lark
NOTHING = Concatenation(())
"""The empty text."""


def literal(text: str) -> Node:
    """Matches exactly this text."""
    return Concatenation(tuple(CharacterClass(((ord(each), ord(each)),)) for each in text))


def optional(part: Node) -> Node:
    """Matches a part or the empty text."""
    return Repetition(part, 0, 1)


def merge_ranges(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Sorts ranges and merges those that overlap or touch."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    """Returns the characters outside ranges, without surrogates."""
    found = []
    start = 0
    for low, high in merge_ranges([*ranges, SURROGATES]):
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    return (*found, (start, LAST)) if start <= LAST else tuple(found)


@lru_cache(maxsize=1)
def decimal_digits() -> Ranges:
    """Returns the characters of category Nd, in this Python's version of Unicode."""
    digits = [point for point in range(LAST + 1) if unicodedata.category(chr(point)) == "Nd"]
    return merge_ranges([(point, point) for point in digits])


ASCII_CLASSES: dict[str, Ranges] = {"d": ((48, 57),), "w": ((48, 57), (65, 90), (95, 95), (97, 122))}


def named_class(name: str, ascii_only: bool) -> Ranges:
    """Returns the characters of an escape such as `\\d`. A capital letter names the complement.

    Args:
        ascii_only: `\\d` and `\\w` match ASCII characters only, as in patterns of JSON schemas.
    """
    kind = name.lower()
    if ascii_only and kind in ASCII_CLASSES:
        ranges = ASCII_CLASSES[kind]
    elif not ascii_only and kind in "ds":
        ranges = decimal_digits() if kind == "d" else SPACES
    else:
        raise NotRegular(f"the class \\{name}")
    return ranges if name == kind else complement(ranges)


class ExpressionParser:
    """Recursive-descent parser of regular expressions. Raises `NotRegular` for expressions outside the subset."""

    def __init__(self, text: str, ascii_only: bool):
        self.text = text
        self.ascii_only = ascii_only
        self.at = 0
        self.depth = 0

    @property
    def ahead(self) -> str:
        """Next character; empty at the end."""
        return self.text[self.at : self.at + 1]

    def take(self) -> str:
        if not self.ahead:
            raise NotRegular("an expression that ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def parse(self) -> Node:
        node = self.either()
        if self.ahead:
            raise NotRegular(f"{self.ahead!r} at {self.at}")
        return node

    def either(self) -> Node:
        parts = [self.sequence()]
        while self.ahead == "|":
            self.take()
            parts.append(self.sequence())
        return parts[0] if len(parts) == 1 else Alternation(tuple(parts))

    def sequence(self) -> Node:
        parts = []
        while self.ahead and self.ahead not in "|)":
            parts.append(self.repeated(self.atom()))
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def repeated(self, part: Node) -> Node:
        bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if self.ahead == "{":
            least, most = self.counts()
        elif self.ahead and self.ahead in bounds:
            least, most = bounds[self.take()]
        else:
            return part
        if self.ahead and self.ahead in "*+?{":
            raise NotRegular("a nested or lazy repetition")
        return Repetition(part, least, most)

    def counts(self) -> tuple[int, int | None]:
        end = self.text.find("}", self.at)
        low, comma, high = self.text[self.at + 1 : end].partition(",")
        if end < 0 or not all(each.isascii() and each.isdigit() for each in ([low, high] if high else [low])):
            raise NotRegular("a repetition without numbers")
        self.at = end + 1
        least = int(low)
        most = int(high) if high else (None if comma else int(low))
        if max(least, most or 0) > LARGEST_COUNT or (most is not None and most < least):
            raise NotRegular(f"a repetition from {least} to {most}")
        return least, most

    def atom(self) -> Node:
        char = self.take()
        if char == "(":
            return self.group()
        if char == "[":
            return CharacterClass(self.bracketed())
        if char == ".":
            return CharacterClass(complement(((10, 10),)))
        if char == "\\":
            return CharacterClass(self.escaped())
        if char in "^${*+?":
            raise NotRegular(f"{char!r} at {self.at - 1}")
        return literal(char)

    def group(self) -> Node:
        if self.ahead == "?":
            self.take()
            if self.take() != ":":
                raise NotRegular("a group with flags, a name or look-around")
        self.depth += 1
        if self.depth > DEEPEST:
            raise NotRegular("groups that are nested too deeply")
        node = self.either()
        if self.take() != ")":
            raise NotRegular("an unclosed group")
        self.depth -= 1
        return node

    def escaped(self) -> Ranges:
        char = self.take()
        if char in CONTROLS:
            code = ord(CONTROLS[char])
        elif char == "x" and len(digits := self.text[self.at : self.at + 2]) == 2 and set(digits) <= {*hexdigits}:
            self.at = self.at + 2
            code = int(digits, 16)
        elif char.lower() in "dws":
            return named_class(char, self.ascii_only)
        elif char.isascii() and not char.isalnum() and char.isprintable() and char not in "<> ":
            code = ord(char)
        else:
            raise NotRegular(f"the escape \\{char}")
        return ((code, code),)

    def bracketed(self) -> Ranges:
        """Parses a character class after its opening bracket."""
        negated = self.ahead == "^"
        self.at += negated
        ranges: list[tuple[int, int]] = []
        while not ranges or self.ahead != "]":
            low = self.member()
            if self.ahead == "-" and self.text[self.at + 1 : self.at + 2] != "]":
                self.take()
                high = self.member()
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or high[0][0] != high[0][1] or high < low:
                    raise NotRegular("an invalid range in a class")
                low = ((low[0][0], high[0][0]),)
            ranges += low
        self.take()
        found = complement(merge_ranges(ranges)) if negated else merge_ranges(ranges)
        if not found or any(low <= SURROGATES[1] and high >= SURROGATES[0] for low, high in found):
            raise NotRegular("a class that is empty or contains surrogates")
        return found

    def member(self) -> Ranges:
        char = self.take()
        if char == "\\":
            return self.escaped()
        # A bracket may begin a nested class, and doubled signs are set operations.
        if char in "[]" or (char in "&-~" and self.ahead == char):
            raise NotRegular("a class with set operations")
        return ((ord(char), ord(char)),)


def parse_regex(text: str, ascii_only: bool = False) -> Node:
    """Parses a regular expression.

    Args:
        ascii_only: `\\d` and `\\w` match ASCII characters only.

    Raises:
        NotRegular: the expression is outside the subset.
    """
    return ExpressionParser(text, ascii_only).parse()


def to_regex(node: Node) -> str:
    """Formats a node as a regular expression in Rust's syntax. Raises `NotRegular` for undescribed parts and Lark rules."""
    match node:
        case CharacterClass():
            ranges = [rf"\x{{{low:x}}}-\x{{{high:x}}}" for low, high in node.ranges]
            return f"[{''.join(ranges)}]"
        case Concatenation():
            return "".join(map(to_regex, node.parts))
        case Alternation():
            return f"(?:{'|'.join(map(to_regex, node.parts))})"
        case Repetition():
            most = "" if node.most is None else node.most
            return f"(?:{to_regex(node.part)}){{{node.least},{most}}}"
        case Separated():
            part = to_regex(node.part)
            return f"{part}(?:{to_regex(node.separator)}{part})*"
        case Undescribed() | Lark():
            raise NotRegular("recursive schemas")
