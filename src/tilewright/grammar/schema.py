"""JSON schemas whose texts are a regular language, as expressions: what llguidance allows for them, on one line.

The forms are those that `ON_ONE_LINE` asks for. A schema that says anything else is refused by `NotRegular`. Values of
any kind, and schemas that refer to themselves, are described up to so many brackets within one another; behind one more
bracket stands `Beyond`.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from tilewright.grammar.keywords import BOUNDS, EXACT, is_wide, names_wide_numbers, subschemas, whole
from tilewright.grammar.regular import (
    NOTHING,
    Alternation,
    Beyond,
    CharacterClass,
    Concatenation,
    Lark,
    Node,
    NotRegular,
    Repetition,
    Separated,
    TooLarge,
    expression,
    literal,
    optional,
    others,
    parsed,
    united,
)

ON_ONE_LINE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Form of JSON: Python's. Were any space allowed, a model could go on with spaces for ever, and less would be
forced."""
SAID = {
    "title",
    "description",
    "default",
    "examples",
    "example",
    "$schema",
    "$comment",
    "$id",
    "$anchor",
    "deprecated",
    "readOnly",
    "writeOnly",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "discriminator",
    "nullable",
    "enumNames",
}
"""Keys that say nothing about the texts."""
DEFINITIONS = {"$defs", "definitions"}
DEEPEST = 32
"""Schemas within one another."""
MOST_SCHEMAS = 10_000
"""Schemas within one, each as often as it is referred to."""
ANY_TYPE = ["null", "boolean", "number", "string", "array", "object"]
MOST_DIGITS = 400
"""Largest number of digits of a bound: more than float64 reaches."""
QUOTED = {*'"\\'} | {chr(code) for code in [*range(32), 127]}
"""Characters that stand in JSON as escapes, of which there are several."""

PLAIN_KEYS = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "minItems",
    "maxItems",
    "anyOf",
    "enum",
    "const",
    "$ref",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    *SAID,
    *DEFINITIONS,
}
"""Keys of schemas that `closed` knows: with them alone, an object is described in one place."""

PLAIN_CHARACTER = CharacterClass(others(((0, 31), (34, 34), (92, 92), (127, 127))))
ESCAPE = parsed(r'\\(?:["\\bfnrt]|u00(?:[01][0-9a-fA-F]|7[fF]))')
HEX = "[0-9a-fA-F]"
PAIR = rf"\\u[dD][89abAB]{HEX}{{2}}\\u[dD][c-fC-F]{HEX}{{2}}"
ANY_ESCAPE = parsed(rf'\\(?:["\\bfnrt]|u(?:[0-9a-ce-fA-CE-F]{HEX}|[dD][0-7]){HEX}{{2}})|{PAIR}')
"""Escapes in a key of an open object, which must not be one of its known keys."""
STRING_CHARACTER = Alternation((PLAIN_CHARACTER, ESCAPE))
NUMBER = parsed(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
QUOTE = literal('"')
COMMA = literal(", ")
COLON = literal(": ")


def schema_node(schema: Any, most: int) -> Node:
    """The texts of a schema.

    Args:
        most: brackets within one another that are described where the schema does not bound them.

    Raises:
        NotRegular: it is none of those that become an expression here.
    """
    return SchemaReader(schema, most).node(schema, Place())


def exact_node(schema: Any) -> Node:
    """The texts of a schema with numbers that the matcher would round; its parts without such numbers are left to the matcher.

    Raises:
        NotRegular: what stands around these numbers does not become an expression.
    """
    try:
        return SchemaReader(schema, 0, exact=True).node(schema, Place())
    except NotRegular as error:
        raise NotRegular(f"numbers beyond {EXACT} are not offered beside {error}") from None
    except (AttributeError, TypeError):  # of values that no schema has there
        raise NotRegular(f"numbers beyond {EXACT} are not offered beside keywords with values of other types") from None


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
        exact: describe what has wide numbers, and nothing else.
    """

    def __init__(self, root: Any, most: int, exact: bool = False):
        self.root = root
        self.most = most
        self.exact = exact
        self.read = 0

    def node(self, schema: Any, place: Place) -> Node:
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise NotRegular("a schema that is no object")
        self.read += 1
        if place.depth > DEEPEST or self.read > MOST_SCHEMAS:
            raise TooLarge("a schema that is too deep, or too large")
        if self.exact and not self.has_wide_numbers(schema, set()):
            return json_rule({key: self.root[key] for key in DEFINITIONS & self.root.keys()} | dict(schema))
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
            return self.scalar(constant(keys_of(said, "const", "type")[0], said.get("type")))
        if "enum" in said:
            options = some(keys_of(said, "enum", "type")[0])
            return Alternation(tuple(self.scalar(constant(each, said.get("type"))) for each in options))
        kind = said.pop("type", None)
        if isinstance(kind, list):
            return Alternation(tuple(self.node({**said, "type": each}, place.inside()) for each in some(kind)))
        return self.of_type(kind, said, place)

    def has_wide_numbers(self, schema: Any, references: set[str]) -> bool:
        """True if a schema, or one that it refers to, names numbers that the matcher would round."""
        for each in subschemas(schema):
            reference = each.get("$ref")
            if names_wide_numbers(each):
                return True
            if reference is not None and reference not in references:
                target = self.target(reference)
                references.add(reference)
                if self.has_wide_numbers(target, references):
                    return True
        return False

    def target(self, reference: Any) -> Any:
        """The schema that a reference within this one names."""
        found = self.root
        if not isinstance(reference, str) or not reference.startswith("#") or "%" in reference or "~" in reference:
            raise NotRegular("a reference to another place")
        if self.exact and reference.split("/")[1:2] not in [[each] for each in DEFINITIONS]:
            raise NotRegular("a reference to another place than definitions")
        for key in reference.split("/")[1:]:
            if not isinstance(found, Mapping) or key not in found:
                raise NotRegular("a reference to nothing")
            found = found[key]
        return found

    def referred(self, reference: Any, place: Place) -> Node:
        """The schema that a reference within this one names."""
        found = self.target(reference)
        again = reference in place.references
        if self.exact and again:
            raise NotRegular("schemas within themselves")
        inside = place.unbounded(self.most).inside() if again else place.inside()
        return self.node(found, inside._replace(references=place.references | {reference}))

    def of_type(self, kind: Any, said: dict[str, Any], place: Place) -> Node:
        match kind:
            case "null":
                return literal("null") if not said else refused(said)
            case "boolean":
                return Alternation((literal("true"), literal("false"))) if not said else refused(said)
            case "number":
                return self.scalar(NUMBER if not said else number(*keys_of(said, *BOUNDS)))
            case "integer":
                return self.scalar(integer(*keys_of(said, *BOUNDS)))
            case "string":
                return string(*keys_of(said, "minLength", "maxLength", "pattern"))
            case "array":
                return self.array(place, *keys_of(said, "items", "minItems", "maxItems"))
            case "object":
                return self.object_(place, *keys_of(said, "properties", "required", "additionalProperties"))
            case None:
                return refused(said)
            case _:
                raise NotRegular(f"the type {kind!r:.40}")

    def scalar(self, node: Node) -> Node:
        """A value without parts, which is a terminal of its own where the matcher reads some of the schema."""
        return Lark(f"/{expression(node)}/") if self.exact else node

    def array(self, place: Place, items: Any, least: Any, most: Any) -> Node:
        if place.left == 0:
            return Concatenation((literal("["), Beyond()))
        least = bound(least, 0)
        most = bound(most, None)
        if most is not None and most < max(1, least):
            raise NotRegular("an array without items")
        item = self.node({} if items is None else items, place.bracketed())
        more = Repetition(Concatenation((COMMA, item)), max(0, least - 1), None if most is None else most - 1)
        filled = Separated(item, COMMA) if most is None and least <= 1 else Concatenation((item, more))
        return Concatenation((literal("["), filled if least else optional(filled), literal("]")))

    def object_(self, place: Place, properties: Any, required: Any, more: Any) -> Node:
        if place.left == 0:
            return Concatenation((literal("{"), Beyond()))
        described = {} if properties is None else properties
        needed = [] if required is None else required
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
        others = Concatenation((self.scalar(other_strings(described)), COLON, self.node({} if more is None else more, inside)))
        return Concatenation((literal("{"), listed(fields, others), literal("}")))


def json_rule(schema: Mapping[str, Any]) -> Lark:
    """JSON that a schema describes, on one line."""
    return Lark(f"%json {json.dumps({'x-guidance': ON_ONE_LINE} | dict(schema), ensure_ascii=False)}")


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


def number(least: Any, most: Any, above: Any, below: Any) -> Node:
    """Numbers without exponents between bounds of which one is wide: the others are left to the matcher."""
    bounds = [each for each in (least, most, above, below) if each is not None]
    if not is_wide(bounds) or not all(isinstance(each, int | float) and not isinstance(each, bool) for each in bounds):
        raise NotRegular("a number with bounds")
    exact = [None if each is None else Decimal(repr(whole(each))) for each in (least, most, above, below)]
    low = limit(max, exact[0], exact[2])
    high = limit(min, exact[1], exact[3])
    parts = list[Node]()
    if low is None or low[0] < 0:
        nearest = (Decimal(0), True) if high is None or high[0] >= 0 else (-high[0], high[1])
        parts.append(Concatenation((literal("-"), decimals(nearest, None if low is None else (-low[0], low[1])))))
    if high is None or high[0] > 0 or high == (0, False):
        parts.append(decimals((Decimal(0), False) if low is None or low[0] < 0 else low, high))
    return Alternation(tuple(parts))


Limit = tuple[Decimal, bool]
"""A bound, and whether it is excluded itself."""


def limit(choose: Any, included: Decimal | None, excluded: Decimal | None) -> Limit | None:
    """The tighter of two bounds."""
    if included is None or excluded is None:
        return next(((each, each is excluded) for each in (included, excluded) if each is not None), None)
    return (included, False) if choose(included, excluded) != excluded else (excluded, True)


def decimals(low: Limit, high: Limit | None) -> Node:
    """Decimal numbers from 0 on between limits, with or without a fraction; None for no upper limit."""
    (least, above), first = low, int(low[0])
    last = None if high is None else int(high[0])
    if high is not None and first == last:
        if above or least != first:
            raise NotRegular("bounds that lie close together")
        return Concatenation((literal(str(first)), fraction_to(*high)))
    parts: list[Node] = [Concatenation((literal(str(first)), fraction_from(least, above)))]
    if last is None or last - first > 1:
        parts.append(Concatenation((naturals(first + 1, None if last is None else last - 1), fraction_from(Decimal(0), False))))
    if high is not None and high != (last, True):
        parts.append(Concatenation((literal(str(last)), fraction_to(*high))))
    return Alternation(tuple(parts))


def fraction_of(value: Decimal) -> str:
    """Digits behind the point, without zeros at their end."""
    return f"{value:f}".partition(".")[2].rstrip("0")


def fraction_from(value: Decimal, above: bool) -> Node:
    """Fractions, with their point or empty, of at least that of a value; with `above`, of more than that."""
    any_digits = Repetition(digit("0", "9"), 0, None)
    tail = fraction_of(value)
    if not tail and not above:
        return optional(Concatenation((literal("."), digit("0", "9"), any_digits)))
    larger = [
        Concatenation((literal(tail[:place]), digit(str(int(each) + 1), "9"), any_digits))
        for place, each in enumerate(tail)
        if each != "9"
    ]
    behind = Concatenation((Repetition(literal("0"), 0, None), digit("1", "9"), any_digits)) if above else any_digits
    return Concatenation((literal("."), Alternation((*larger, Concatenation((literal(tail), behind))))))


def fraction_to(value: Decimal, below: bool) -> Node:
    """Fractions, with their point or empty, of at most that of a value; with `below`, of less than that."""
    any_digits = Repetition(digit("0", "9"), 0, None)
    zeros = Repetition(literal("0"), 0, None)
    tail = fraction_of(value)
    smaller = [
        Concatenation((literal(tail[:place]), digit("0", str(int(each) - 1)), any_digits))
        for place, each in enumerate(tail)
        if each != "0"
    ]
    beginnings = [literal(tail[:place]) for place in range(1, len(tail))]
    whole = [] if below else [Concatenation((literal(tail or "0"), zeros))]
    return optional(Concatenation((literal("."), Alternation((*smaller, *beginnings, *whole)))))


def naturals(low: int, high: int | None) -> Node:
    """Natural numbers from `low` to `high`, without leading zeros; None for all from `low` on."""
    if high is None:
        longer = Concatenation((digit("1", "9"), Repetition(digit("0", "9"), len(str(low)), None)))
        return Alternation((naturals(low, 10 ** len(str(low)) - 1), longer))
    shortest = len(str(low))
    longest = len(str(high))
    if shortest == longest:
        return digits(str(low), str(high))
    parts = [digits(str(low), "9" * shortest), digits(f"1{'0' * (longest - 1)}", str(high))]
    if longest - shortest > 1:
        parts.append(Concatenation((digit("1", "9"), Repetition(digit("0", "9"), shortest, longest - 2))))
    return Alternation(tuple(parts))


def digits(low: str, high: str) -> Node:
    """Texts of digits, as long as both bounds are, that lie between them."""
    same = next((place for place, (one, other) in enumerate(zip(low, high, strict=True)) if one != other), len(low))
    if same == len(low):
        return literal(low)
    parts = list[Node]()

    def free(start: str, least: int, most: int) -> None:
        """Adds texts that begin so, with a digit from `least` to `most` behind it, and any others behind that."""
        if least <= most:
            rest = len(low) - len(start) - 1
            parts.append(Concatenation((literal(start), digit(str(least), str(most)), Repetition(digit("0", "9"), rest, rest))))

    lowest = set(low[same + 1 :]) <= {"0"}
    highest = set(high[same + 1 :]) <= {"9"}
    free(low[:same], int(low[same]) + (not lowest), int(high[same]) - (not highest))
    if not lowest:
        for place in range(same + 1, len(low)):
            free(low[:place], int(low[place]) + 1, 9)
        parts.append(literal(low))
    if not highest:
        for place in range(same + 1, len(high)):
            free(high[:place], 0, int(high[place]) - 1)
        parts.append(literal(high))
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
        case Beyond() | Lark():
            return False


def literal_string(text: str) -> Node:
    """A string, just this one."""
    if QUOTED & {*text}:
        raise NotRegular("a string with characters that JSON escapes")
    return literal(f'"{text}"')


def constant(value: Any, kind: Any) -> Node:
    """A single value."""
    names = {str: "string", bool: "boolean", type(None): "null", int: "integer"}
    value = whole(value) if is_wide(value) else value
    found = names.get(type(value))
    if found is None or kind not in (None, found, *(["number"] if found == "integer" else [])):
        raise NotRegular("a constant that is no plain value, or of another type")
    return literal_string(value) if isinstance(value, str) else literal(json.dumps(value))
