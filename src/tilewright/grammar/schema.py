"""JSON schemas whose texts are a regular language, as expressions: what llguidance allows for them, on one line.

The forms are those that `worker.ON_ONE_LINE` asks for. A schema that says anything else is refused by `NotRegular`. Values of
any kind, and schemas that refer to themselves, are described up to so many brackets within one another; behind one more
bracket stands `Beyond`.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tilewright.grammar.regular import (
    NOTHING,
    Alternation,
    Beyond,
    CharacterClass,
    Concatenation,
    Node,
    NotRegular,
    Repetition,
    Separated,
    TooLarge,
    literal,
    optional,
    others,
    parsed,
    united,
)

SAID = {"title", "description", "default", "examples", "$schema", "$comment", "$id", "deprecated", "readOnly", "writeOnly"}
"""Keys that say nothing about the texts."""
DEFINITIONS = {"$defs", "definitions"}
DEEPEST = 32
"""Schemas within one another."""
MOST_SCHEMAS = 10_000
"""Schemas within one, each as often as it is referred to."""
ANY_TYPE = ["null", "boolean", "number", "string", "array", "object"]
MOST_DIGITS = 40
"""Of an integer's bounds."""
QUOTED = {*'"\\'} | {chr(code) for code in [*range(32), 127]}
"""Characters that stand in JSON as escapes, of which there are several."""

PLAIN_KEYS = {
    "type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "anyOf", "enum", "const", "$ref",
    "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    *SAID, *DEFINITIONS,
}  # fmt: skip
"""Keys of schemas that `closed` knows: with them alone, an object is described in one place."""

PLAIN_CHARACTER = CharacterClass(others(((0, 31), (34, 34), (92, 92), (127, 127))))
ESCAPE = parsed(r'\\(?:["\\bfnrt]|u00(?:[01][0-9a-fA-F]|7[fF]))')
HEX = "[0-9a-fA-F]"
PAIR = rf"\\u[dD][89abAB]{HEX}{{2}}\\u[dD][c-fC-F]{HEX}{{2}}"
ANY_ESCAPE = parsed(rf'\\(?:["\\bfnrt]|u(?:[0-9a-ce-fA-CE-F]{HEX}|[dD][0-7]){HEX}{{2}})|{PAIR}')
"""Escapes in a key of an open object, which must not be one of its known keys."""
STRING_CHARACTER = Alternation((PLAIN_CHARACTER, ESCAPE))
NUMBER = parsed(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
QUOTE, COMMA, COLON = literal('"'), literal(", "), literal(": ")


def schema_node(schema: Any, most: int) -> Node:
    """The texts of a schema.

    Args:
        most: brackets within one another that are described where the schema does not bound them.

    Raises:
        NotRegular: it is none of those that become an expression here.
    """
    return SchemaReader(schema, most).node(schema, Place())


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema whose objects have no properties but those described, unless it says that they may have others.

    It stays as it is where an object may be described in several places, such as by `allOf`: closed, these exclude each other.
    """
    try:
        return closed_part(schema, 0)
    except NotRegular:
        return dict(schema)


def closed_part(schema: Any, depth: int) -> Any:
    """A part of a schema, closed. Raises `NotRegular` where objects may be described in several places."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping) or depth > DEEPEST or not schema.keys() <= PLAIN_KEYS:
        raise NotRegular("a schema of other keys, or too deep")
    found = dict(schema)
    for key in schema.keys() & {"properties", *DEFINITIONS}:
        if not isinstance(schema[key], Mapping):
            raise NotRegular(f"{key} that are no object")
        found[key] = {name: closed_part(each, depth + 1) for name, each in schema[key].items()}
    for key in schema.keys() & {"items", "additionalProperties"}:
        found[key] = closed_part(schema[key], depth + 1)
    if "anyOf" in schema:
        found["anyOf"] = [closed_part(each, depth + 1) for each in some(schema["anyOf"])]
    if "properties" in schema:
        needed = schema.get("required") or []
        described = isinstance(needed, list) and all(isinstance(name, str) and name in found["properties"] for name in needed)
        if not described or schema.keys() & {"anyOf", "$ref"}:
            raise NotRegular("an object that is described in several places")
        found.setdefault("additionalProperties", False)
    return found


class Place(NamedTuple):
    """Where a schema stands in another.

    Attributes:
        depth: schemas around it.
        references: those of them that a reference names.
        left: brackets that may still be opened; None where the schema itself bounds them.
    """

    depth: int = 0
    references: frozenset[str] = frozenset()
    left: int | None = None

    def inside(self) -> "Place":
        """In a schema's part."""
        return self._replace(depth=self.depth + 1)

    def bracketed(self) -> "Place":
        """Behind a bracket."""
        return self.inside()._replace(left=None if self.left is None else self.left - 1)

    def unbounded(self, most: int) -> "Place":
        """In a part that may go on for ever, but for a bound of so many brackets."""
        return self._replace(left=most if self.left is None else self.left)


class SchemaReader:
    """Reads the parts of one schema.

    Args:
        root: what references point into.
        most: brackets within one another that are described in values of any kind, and in schemas that refer to themselves.
    """

    def __init__(self, root: Any, most: int):
        self.root, self.most, self.read = root, most, 0

    def node(self, schema: Any, place: Place) -> Node:
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise NotRegular("a schema that is no object")
        self.read += 1
        if place.depth > DEEPEST or self.read > MOST_SCHEMAS:
            raise TooLarge("a schema that is too deep, or too large")
        hidden = SAID if place.depth else SAID | DEFINITIONS
        said = {key: value for key, value in schema.items() if key not in hidden}
        if not said:
            return self.node({"type": ANY_TYPE}, place.unbounded(self.most).inside())
        if "$ref" in said:
            return self.referred(keys_of(said, "$ref")[0], place)
        if "anyOf" in said:
            options = keys_of(said, "anyOf")[0]
            return Alternation(tuple(self.node(each, place.inside()) for each in some(options)))
        if "const" in said:
            return constant(keys_of(said, "const", "type")[0], said.get("type"))
        if "enum" in said:
            return Alternation(tuple(constant(each, said.get("type")) for each in some(keys_of(said, "enum", "type")[0])))
        kind = said.pop("type", None)
        if isinstance(kind, list):
            return Alternation(tuple(self.node({**said, "type": each}, place.inside()) for each in some(kind)))
        return self.of_type(kind, said, place)

    def referred(self, reference: Any, place: Place) -> Node:
        """The schema that a reference within this one names."""
        found = self.root
        if not isinstance(reference, str) or not reference.startswith("#") or "%" in reference or "~" in reference:
            raise NotRegular("a reference to another place")
        for key in reference.split("/")[1:]:
            if not isinstance(found, Mapping) or key not in found:
                raise NotRegular("a reference to nothing")
            found = found[key]
        again = reference in place.references
        inside = place.unbounded(self.most).inside() if again else place.inside()
        return self.node(found, inside._replace(references=place.references | {reference}))

    def of_type(self, kind: Any, said: dict[str, Any], place: Place) -> Node:
        match kind:
            case "null":
                return literal("null") if not said else refused(said)
            case "boolean":
                return Alternation((literal("true"), literal("false"))) if not said else refused(said)
            case "number":
                return NUMBER if not said else refused(said)
            case "integer":
                return integer(*keys_of(said, "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
            case "string":
                return string(*keys_of(said, "minLength", "maxLength", "pattern"))
            case "array":
                return self.array(place, *keys_of(said, "items", "minItems", "maxItems"))
            case "object":
                return self.object_(place, *keys_of(said, "properties", "required", "additionalProperties"))
            case _:
                raise NotRegular(f"the type {kind!r:.40}")

    def array(self, place: Place, items: Any, least: Any, most: Any) -> Node:
        if place.left == 0:
            return Concatenation((literal("["), Beyond()))
        least, most = bound(least, 0), bound(most, None)
        if most is not None and most < max(1, least):
            raise NotRegular("an array without items")
        item = self.node({} if items is None else items, place.bracketed())
        more = Repetition(Concatenation((COMMA, item)), max(0, least - 1), None if most is None else most - 1)
        filled = Separated(item, COMMA) if most is None and least <= 1 else Concatenation((item, more))
        return Concatenation((literal("["), filled if least else optional(filled), literal("]")))

    def object_(self, place: Place, properties: Any, required: Any, more: Any) -> Node:
        if place.left == 0:
            return Concatenation((literal("{"), Beyond()))
        described, needed = {} if properties is None else properties, [] if required is None else required
        if not isinstance(described, Mapping) or not isinstance(needed, list):
            raise NotRegular("properties that are no object, or required ones that are no list")
        if any(name not in described for name in needed):
            raise NotRegular("a required property that is not described")
        inside = place.bracketed()
        fields = [
            (Concatenation((literal_string(name), COLON, self.node(each, inside))), name in needed)
            for name, each in described.items()
        ]
        if more is False:
            return Concatenation((literal("{"), listed(fields), literal("}")))
        others = Concatenation((other_strings(described), COLON, self.node({} if more is None else more, inside)))
        return Concatenation((literal("{"), listed(fields, others), literal("}")))


def listed(fields: Sequence[tuple[Node, bool]], others: Node | None = None) -> Node:
    """Fields in order with commas between them; those that need not be there are left out or not.

    Args:
        others: fields of which any number come behind; None for none.
    """
    tails: list[Node] = [  # of the fields from each on, behind another
        NOTHING if others is None else Repetition(Concatenation((COMMA, others)), 0, None)
    ]
    for field, needed in reversed(fields):
        behind = Concatenation((COMMA, field))
        tails.append(Concatenation((behind if needed else optional(behind), tails[-1])))
    starts: list[Node] = []  # with each field that may be the first
    for n, (field, needed) in enumerate(fields):
        starts.append(Concatenation((field, tails[len(fields) - n - 1])))
        if needed:
            return Alternation(tuple(starts))
    return Alternation((*starts, *([] if others is None else [Separated(others, COMMA)]), NOTHING))


def other_strings(names: Collection[str]) -> Node:
    """Strings but those of some names."""
    return Concatenation((QUOTE, other_texts(names))) if names else string(None, None, None)


def other_texts(names: Iterable[str]) -> Node:
    """Characters of strings and the quote behind them, but for those of some texts."""
    following: dict[str, list[str]] = {}
    for name in names:
        following.setdefault(name[:1], []).append(name[1:])
    ended = following.pop("", None) is not None
    known = tuple(Concatenation((literal(first), other_texts(rest))) for first, rest in sorted(following.items()))
    taken = united([(ord(first), ord(first)) for first in following])
    character = CharacterClass(others(united([*others(PLAIN_CHARACTER.ranges), *taken])))
    rest = Repetition(Alternation((PLAIN_CHARACTER, ANY_ESCAPE)), 0, None)
    free = Concatenation((Alternation((character, ANY_ESCAPE)), rest, QUOTE))
    return Alternation((*known, free, *([] if ended else [QUOTE])))


def keys_of(said: Mapping[str, Any], *known: str) -> list[Any]:
    """The values of known keys, None where there are none. Raises `NotRegular` for any other key."""
    if not said.keys() <= {*known}:
        refused({key: value for key, value in said.items() if key not in known})
    return [said.get(key) for key in known]


def refused(said: Mapping[str, Any]) -> Any:
    raise NotRegular(f"the keys {', '.join(map(repr, said))}")


def some(options: Any) -> list[Any]:
    if not isinstance(options, list) or not options:
        raise NotRegular("options that are no list")
    return options


def bound(value: Any, otherwise: int | None) -> Any:
    """A bound of a schema. Raises `NotRegular` for one that is no count."""
    if value is None:
        return otherwise
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise NotRegular(f"the bound {value!r:.40}")
    return value


def integer(least: Any, most: Any, above: Any = None, below: Any = None) -> Node:
    """Integers between bounds, as far as there are some."""
    bounds = [each for each in (least, most, above, below) if each is not None]
    if not all(isinstance(each, int) and not isinstance(each, bool) and len(str(each)) <= MOST_DIGITS for each in bounds):
        raise NotRegular("a bound that is no integer, or too long")
    low = max((each for each in (least, None if above is None else above + 1) if each is not None), default=None)
    high = min((each for each in (most, None if below is None else below - 1) if each is not None), default=None)
    if low is not None and high is not None and low > high:
        raise NotRegular("integers between bounds of which the first is larger")
    parts = list[Node]()
    if low is None or low < 0:
        zero = 0 if (low is None) == (high is None) else 1  # the matcher takes "-0" but where there is one bound
        magnitudes = naturals(zero if high is None else max(zero, -high), None if low is None else -low)
        parts.append(Concatenation((literal("-"), magnitudes)))
    if high is None or high >= 0:
        parts.append(naturals(max(0, low) if low is not None else 0, high))
    return Alternation(tuple(parts))


def naturals(low: int, high: int | None) -> Node:
    """Natural numbers from `low` to `high`, without leading zeros; None for all from `low` on."""
    if high is None:
        longer = Concatenation((digit("1", "9"), Repetition(digit("0", "9"), len(str(low)), None)))
        return Alternation((naturals(low, 10 ** len(str(low)) - 1), longer))
    parts = list[Node]()
    for length in range(len(str(low)), len(str(high)) + 1):
        first, last = max(low, 10 ** (length - 1) if length > 1 else 0), min(high, 10**length - 1)
        parts.append(digits(str(first), str(last)))
    return Alternation(tuple(parts))


def digits(low: str, high: str) -> Node:
    """Texts of digits, as long as both bounds are, that lie between them."""
    if not low:
        return NOTHING
    rest = len(low) - 1
    if low[0] == high[0]:
        return Concatenation((literal(low[0]), digits(low[1:], high[1:])))
    parts = [
        Concatenation((literal(low[0]), digits(low[1:], "9" * rest))),
        Concatenation((literal(high[0]), digits("0" * rest, high[1:]))),
    ]
    if int(high[0]) - int(low[0]) > 1:
        between = digit(str(int(low[0]) + 1), str(int(high[0]) - 1))
        parts.append(Concatenation((between, Repetition(digit("0", "9"), rest, rest))))
    return Alternation(tuple(parts))


def digit(low: str, high: str) -> Node:
    return CharacterClass(((ord(low), ord(high)),))


def string(least: Any, most: Any, pattern: Any) -> Node:
    """Strings of some length, or that match a pattern from their first to their last character."""
    if pattern is None:
        return Concatenation((QUOTE, Repetition(STRING_CHARACTER, bound(least, 0), bound(most, None)), QUOTE))
    if least is not None or most is not None or not isinstance(pattern, str):
        raise NotRegular("a pattern and a length")
    if not pattern.startswith("^") or not pattern.endswith("$") or pattern.endswith("\\$"):
        raise NotRegular("a pattern without anchors")
    inside = parsed(f"(?:{pattern[1:-1]})" if "|" not in pattern else refused({"pattern": pattern}), ascii_only=True)
    if not is_plain(inside):
        raise NotRegular("a pattern with characters that JSON escapes")
    return Concatenation((QUOTE, inside, QUOTE))


def is_plain(node: Node) -> bool:
    """True if no character of an expression is one that JSON escapes."""
    match node:
        case CharacterClass():
            return not any(low <= ord(each) <= high for low, high in node.ranges for each in QUOTED)
        case Repetition():
            return is_plain(node.part)
        case Concatenation() | Alternation():
            return all(map(is_plain, node.parts))
        case Separated():
            return is_plain(node.part) and is_plain(node.separator)
        case Beyond():
            return False


def literal_string(text: str) -> Node:
    """A string, just this one."""
    if QUOTED & {*text}:
        raise NotRegular("a string with characters that JSON escapes")
    return literal(f'"{text}"')


def constant(value: Any, kind: Any) -> Node:
    """A single value."""
    names = {str: "string", bool: "boolean", type(None): "null", int: "integer"}
    found = names.get(type(value))
    if found is None or kind not in (None, found, *(["number"] if found == "integer" else [])):
        raise NotRegular("a constant that is no plain value, or of another type")
    return literal_string(value) if isinstance(value, str) else literal(json.dumps(value))
