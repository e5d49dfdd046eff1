"""Regular expressions of the kind that becomes an automaton: a subset of Rust's, over Unicode characters.

What stands outside the subset is refused by `NotRegular`, which only means that masks are made in another way. So nothing is
guessed: anchors, look-around, flags, set operations, and classes whose members depend on a version of Unicode are left out.
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
"""Groups within one another."""
LARGEST_COUNT = 10_000

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
"""Characters with the property White_Space."""


class NotRegular(ValueError):
    """A grammar outside of what becomes an automaton here."""


class TooLarge(NotRegular):
    """A grammar whose automaton, or what it is made of, would be too large."""


@dataclass(frozen=True)
class CharacterClass:
    """One character out of some."""

    ranges: Ranges


@dataclass(frozen=True)
class Concatenation:
    """Parts one behind the other."""

    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Alternation:
    """One of several parts."""

    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Repetition:
    """A part, from `least` to `most` times; None for no bound."""

    part: "Node"
    least: int
    most: int | None


@dataclass(frozen=True)
class Separated:
    """A part once or more, with a separator between each two of them."""

    part: "Node"
    separator: "Node"


@dataclass(frozen=True)
class Beyond:
    """Text that the expression does not describe, up to where a bracket closes that is open before it.

    The grammar's matcher alone knows what may come in it.
    """


@dataclass(frozen=True)
class Lark:
    """Text that a rule of a Lark grammar describes, for the matcher alone."""

    rule: str


Node = CharacterClass | Concatenation | Alternation | Repetition | Separated | Beyond | Lark
NOTHING = Concatenation(())
"""The empty text."""


def literal(text: str) -> Node:
    """Just this text."""
    return Concatenation(tuple(CharacterClass(((ord(each), ord(each)),)) for each in text))


def optional(part: Node) -> Node:
    """A part, or nothing."""
    return Repetition(part, 0, 1)


def united(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Ranges in order, those that touch as one."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return tuple(found)


def others(ranges: Ranges) -> Ranges:
    """All characters that are not in these ranges."""
    found = []
    start = 0
    for low, high in united([*ranges, SURROGATES]):
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    return (*found, (start, LAST)) if start <= LAST else tuple(found)


@lru_cache(maxsize=1)
def decimal_digits() -> Ranges:
    """Characters of the category Nd, in the Unicode of this Python."""
    digits = [point for point in range(LAST + 1) if unicodedata.category(chr(point)) == "Nd"]
    return united([(point, point) for point in digits])


ASCII_CLASSES: dict[str, Ranges] = {"d": ((48, 57),), "w": ((48, 57), (65, 90), (95, 95), (97, 122))}


def named_class(name: str, ascii_only: bool) -> Ranges:
    """Characters that an escape such as `\\d` names; a capital letter names all others.

    Args:
        ascii_only: digits and letters are ASCII's, as in patterns of JSON schemas.
    """
    kind = name.lower()
    if ascii_only and kind in ASCII_CLASSES:
        ranges = ASCII_CLASSES[kind]
    elif not ascii_only and kind in "ds":
        ranges = decimal_digits() if kind == "d" else SPACES
    else:
        raise NotRegular(f"the class \\{name}")
    return ranges if name == kind else others(ranges)


class ExpressionParser:
    """Reads an expression. Raises `NotRegular` for what is outside of the subset."""

    def __init__(self, text: str, ascii_only: bool):
        self.text = text
        self.ascii_only = ascii_only
        self.at = 0
        self.depth = 0

    @property
    def ahead(self) -> str:
        """The next character; empty at the end."""
        return self.text[self.at : self.at + 1]

    def take(self) -> str:
        if not self.ahead:
            raise NotRegular("it ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def whole(self) -> Node:
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
            raise NotRegular("a repetition of a repetition, or a lazy one")
        return Repetition(part, least, most)

    def counts(self) -> tuple[int, int | None]:
        end = self.text.find("}", self.at)
        low, comma, high = self.text[self.at + 1 : end].partition(",")
        if end < 0 or not all(each.isascii() and each.isdigit() for each in ([low, high] if high else [low])):
            raise NotRegular("a repetition that names no numbers")
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
            return CharacterClass(others(((10, 10),)))
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
            raise NotRegular("groups too deep within one another")
        node = self.either()
        if self.take() != ")":
            raise NotRegular("a group without an end")
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
        """Characters of a class, behind its opening bracket."""
        negated = self.ahead == "^"
        self.at += negated
        ranges: list[tuple[int, int]] = []
        while not ranges or self.ahead != "]":
            low = self.member()
            if self.ahead == "-" and self.text[self.at + 1 : self.at + 2] != "]":
                self.take()
                high = self.member()
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or high[0][0] != high[0][1] or high < low:
                    raise NotRegular("a range that is none")
                low = ((low[0][0], high[0][0]),)
            ranges += low
        self.take()
        found = others(united(ranges)) if negated else united(ranges)
        if not found or any(low <= SURROGATES[1] and high >= SURROGATES[0] for low, high in found):
            raise NotRegular("a class that is empty, or has surrogates")
        return found

    def member(self) -> Ranges:
        char = self.take()
        if char == "\\":
            return self.escaped()
        # A bracket may begin a class within the class, and doubled signs stand for set operations.
        if char in "[]" or (char in "&-~" and self.ahead == char):
            raise NotRegular("a class with set operations")
        return ((ord(char), ord(char)),)


def parsed(text: str, ascii_only: bool = False) -> Node:
    """A regular expression, read.

    Args:
        ascii_only: `\\d` and `\\w` are ASCII's.

    Raises:
        NotRegular: it is outside of the subset.
    """
    return ExpressionParser(text, ascii_only).whole()


def expression(node: Node) -> str:
    """A node as a regular expression of Rust's. Raises `NotRegular` where it goes beyond what it describes itself."""
    match node:
        case CharacterClass():
            ranges = [rf"\x{{{low:x}}}-\x{{{high:x}}}" for low, high in node.ranges]
            return f"[{''.join(ranges)}]"
        case Concatenation():
            return "".join(map(expression, node.parts))
        case Alternation():
            return f"(?:{'|'.join(map(expression, node.parts))})"
        case Repetition():
            most = "" if node.most is None else node.most
            return f"(?:{expression(node.part)}){{{node.least},{most}}}"
        case Separated():
            part = expression(node.part)
            return f"{part}(?:{expression(node.separator)}{part})*"
        case Beyond() | Lark():
            raise NotRegular("schemas within themselves")
