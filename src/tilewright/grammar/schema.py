"""Converts JSON schemas to expressions that match the same texts as llguidance: JSON on one line (`ON_ONE_LINE`).

Schemas with unsupported keywords raise `NotRegular`. Values of any type and recursive schemas are described up to a limited
depth of nested brackets; deeper brackets become `Undescribed`.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from tilewright.grammar.keywords import BOUNDS, EXACT, as_integer, is_wide, names_wide_numbers, subschemas
from tilewright.grammar.regular import (
    NOTHING,
    Alternation,
    CharacterClass,
    Concatenation,
    Lark,
    Node,
    NotRegular,
    Repetition,
    Separated,
    TooLarge,
    Undescribed,
    complement,
    literal,
    merge_ranges,
    optional,
    parse_regex,
    to_regex,
)

ON_ONE_LINE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Whitespace of the JSON, as Python's `json.dumps` writes it. Flexible whitespace would allow endless spaces and force fewer
tokens."""
ANNOTATIONS = {
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
"""Keywords without effect on validation."""
DEFINITIONS = {"$defs", "definitions"}
DEEPEST = 32
"""Largest nesting depth of schemas."""
MOST_SCHEMAS = 10_000
"""Largest number of subschemas, counted once per reference."""
ANY_TYPE = ["null", "boolean", "number", "string", "array", "object"]
MOST_DIGITS = 400
"""Largest number of digits of a bound: more than float64 can represent."""
QUOTED = {*'"\\'} | {chr(code) for code in [*range(32), 127]}
"""Characters that JSON writes as escapes, in several equivalent forms."""

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
    *ANNOTATIONS,
    *DEFINITIONS,
}
"""Keywords that `close_objects` supports: with these alone, each object is described by one subschema."""

PLAIN_CHARACTER = CharacterClass(complement(((0, 31), (34, 34), (92, 92), (127, 127))))
ESCAPE = parse_regex(r'\\(?:["\\bfnrt]|u00(?:[01][0-9a-fA-F]|7[fF]))')
HEX = "[0-9a-fA-F]"
PAIR = rf"\\u[dD][89abAB]{HEX}{{2}}\\u[dD][c-fC-F]{HEX}{{2}}"
ANY_ESCAPE = parse_regex(rf'\\(?:["\\bfnrt]|u(?:[0-9a-ce-fA-CE-F]{HEX}|[dD][0-7]){HEX}{{2}})|{PAIR}')
"""Escapes in an additional property name, which has to differ from the declared names."""
STRING_CHARACTER = Alternation((PLAIN_CHARACTER, ESCAPE))
NUMBER = parse_regex(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
QUOTE = literal('"')
COMMA = literal(", ")
COLON = literal(": ")


def schema_node(schema: Any, most: int) -> Node:
    """Converts a schema to an expression.

    Args:
        most: nesting depth of brackets up to which values without a bound in the schema are described.

    Raises:
        NotRegular: the schema cannot become an expression.
    """
    return SchemaReader(schema, most).node(schema, Place())


def exact_node(schema: Any) -> Node:
    """Converts a schema with numbers that the matcher would round. Subschemas without such numbers become Lark rules.

    Raises:
        NotRegular: a subschema that contains such numbers cannot become an expression.
    """
    try:
        return SchemaReader(schema, 0, exact=True).node(schema, Place())
    except NotRegular as error:
        raise NotRegular(f"numbers beyond {EXACT} are not supported together with {error}") from None
    except (AttributeError, TypeError):  # keywords with values of invalid types
        raise NotRegular(f"numbers beyond {EXACT} are not supported together with keywords of invalid types") from None


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Sets `additionalProperties` to false in all objects that leave it unset.

    Returns the schema unchanged if several subschemas may describe one object, such as in `allOf`: closed subschemas would
    exclude each other's properties.
    """
    try:
        return close_part(schema, 0)
    except NotRegular:
        return dict(schema)


def close_part(schema: Any, depth: int) -> Any:
    """Closes the objects of a subschema. Raises `NotRegular` if several subschemas may describe one object."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping) or depth > DEEPEST or not schema.keys() <= PLAIN_KEYS:
        raise NotRegular("unsupported keywords, or schemas that are nested too deeply")
    found = dict(schema)
    for key in schema.keys() & {"properties", *DEFINITIONS}:
        if not isinstance(schema[key], Mapping):
            raise NotRegular(f"{key} of another type than object")
        found[key] = {name: close_part(each, depth + 1) for name, each in schema[key].items()}
    for key in schema.keys() & {"items", "additionalProperties"}:
        found[key] = close_part(schema[key], depth + 1)
    if "anyOf" in schema:
        found["anyOf"] = [close_part(each, depth + 1) for each in non_empty_list(schema["anyOf"])]
    if "properties" in schema:
        required = schema.get("required") or []
        described = isinstance(required, list) and all(
            isinstance(name, str) and name in found["properties"] for name in required
        )
        if not described or schema.keys() & {"anyOf", "$ref"}:
            raise NotRegular("an object that several subschemas describe")
        found.setdefault("additionalProperties", False)
    return found


class Place(NamedTuple):
    """Position of a subschema in its schema.

    Attributes:
        depth: number of enclosing schemas.
        references: references that led to the enclosing schemas.
        left: number of brackets that may still be opened; None where the schema bounds the depth.
    """

    depth: int = 0
    references: frozenset[str] = frozenset()
    brackets_left: int | None = None

    def inside(self) -> "Place":
        """Returns the position of a subschema of this schema."""
        return self._replace(depth=self.depth + 1)

    def bracketed(self) -> "Place":
        """Returns the position of a subschema inside one more bracket."""
        return self.inside()._replace(brackets_left=None if self.brackets_left is None else self.brackets_left - 1)

    def unbounded(self, most: int) -> "Place":
        """Returns the position with a limit on the brackets, for a subschema that sets none."""
        return self._replace(brackets_left=most if self.brackets_left is None else self.brackets_left)


class SchemaReader:
    """Converts the parts of one schema.

    Args:
        root: the whole schema, into which references point.
        most: nesting depth of brackets up to which values of any type and recursive schemas are described.
        exact: convert only subschemas with wide numbers, and leave the others to the matcher.
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
            raise NotRegular("a schema of another type than object")
        self.read += 1
        if place.depth > DEEPEST or self.read > MOST_SCHEMAS:
            raise TooLarge("a schema that is too large, or nested too deeply")
        if self.exact and not self.has_wide_numbers(schema, set()):
            return json_rule({key: self.root[key] for key in DEFINITIONS & self.root.keys()} | dict(schema))
        hidden = ANNOTATIONS if place.depth else ANNOTATIONS | DEFINITIONS
        keywords = {key: value for key, value in schema.items() if key not in hidden}
        if not keywords:
            return self.node({"type": ANY_TYPE}, place.unbounded(self.most).inside())
        if "$ref" in keywords:
            return self.referred(keyword_values(keywords, "$ref")[0], place)
        if "anyOf" in keywords:
            options = keyword_values(keywords, "anyOf")[0]
            return Alternation(tuple(self.node(each, place.inside()) for each in non_empty_list(options)))
        if "const" in keywords:
            return self.scalar(constant(keyword_values(keywords, "const", "type")[0], keywords.get("type")))
        if "enum" in keywords:
            options = non_empty_list(keyword_values(keywords, "enum", "type")[0])
            return Alternation(tuple(self.scalar(constant(each, keywords.get("type"))) for each in options))
        kind = keywords.pop("type", None)
        if isinstance(kind, list):
            return Alternation(tuple(self.node({**keywords, "type": each}, place.inside()) for each in non_empty_list(kind)))
        return self.typed_node(kind, keywords, place)

    def has_wide_numbers(self, schema: Any, references: set[str]) -> bool:
        """True if a schema, or a schema that it references, has numbers that the matcher would round."""
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
        """Returns the subschema of the root that a reference names."""
        found = self.root
        if not isinstance(reference, str) or not reference.startswith("#") or "%" in reference or "~" in reference:
            raise NotRegular("a reference to another document")
        if self.exact and reference.split("/")[1:2] not in [[each] for each in DEFINITIONS]:
            raise NotRegular("a reference outside definitions")
        for key in reference.split("/")[1:]:
            if not isinstance(found, Mapping) or key not in found:
                raise NotRegular("an unresolved reference")
            found = found[key]
        return found

    def referred(self, reference: Any, place: Place) -> Node:
        """Converts the subschema that a reference names."""
        found = self.target(reference)
        is_recursive = reference in place.references
        if self.exact and is_recursive:
            raise NotRegular("recursive schemas")
        inside = place.unbounded(self.most).inside() if is_recursive else place.inside()
        return self.node(found, inside._replace(references=place.references | {reference}))

    def typed_node(self, kind: Any, keywords: dict[str, Any], place: Place) -> Node:
        match kind:
            case "null":
                return literal("null") if not keywords else refuse(keywords)
            case "boolean":
                return Alternation((literal("true"), literal("false"))) if not keywords else refuse(keywords)
            case "number":
                return self.scalar(NUMBER if not keywords else number(*keyword_values(keywords, *BOUNDS)))
            case "integer":
                return self.scalar(integer(*keyword_values(keywords, *BOUNDS)))
            case "string":
                return string(*keyword_values(keywords, "minLength", "maxLength", "pattern"))
            case "array":
                return self.array(place, *keyword_values(keywords, "items", "minItems", "maxItems"))
            case "object":
                return self.object_(place, *keyword_values(keywords, "properties", "required", "additionalProperties"))
            case None:
                return refuse(keywords)
            case _:
                raise NotRegular(f"the type {kind!r:.40}")

    def scalar(self, node: Node) -> Node:
        """Returns the expression of a scalar value, as a Lark terminal if the matcher handles other parts of the schema."""
        return Lark(f"/{to_regex(node)}/") if self.exact else node

    def array(self, place: Place, items: Any, least: Any, most: Any) -> Node:
        if place.brackets_left == 0:
            return Concatenation((literal("["), Undescribed()))
        least = bound(least, 0)
        most = bound(most, None)
        if most is not None and most < max(1, least):
            raise NotRegular("an array that allows no items")
        item = self.node({} if items is None else items, place.bracketed())
        more = Repetition(Concatenation((COMMA, item)), max(0, least - 1), None if most is None else most - 1)
        filled = Separated(item, COMMA) if most is None and least <= 1 else Concatenation((item, more))
        return Concatenation((literal("["), filled if least else optional(filled), literal("]")))

    def object_(self, place: Place, properties: Any, required: Any, more: Any) -> Node:
        if place.brackets_left == 0:
            return Concatenation((literal("{"), Undescribed()))
        described = {} if properties is None else properties
        names = [] if required is None else required
        if not isinstance(described, Mapping) or not isinstance(names, list):
            raise NotRegular("properties of another type than object, or required of another type than array")
        if any(name not in described for name in names):
            raise NotRegular("a required property that is not declared")
        inside = place.bracketed()
        fields = [
            (Concatenation((literal_string(name), COLON, self.node(each, inside))), name in names)
            for name, each in described.items()
        ]
        if more is False:
            return Concatenation((literal("{"), listed(fields), literal("}")))
        name = self.scalar(other_strings(described))
        additional = Concatenation((name, COLON, self.node({} if more is None else more, inside)))
        return Concatenation((literal("{"), listed(fields, additional), literal("}")))


def json_rule(schema: Mapping[str, Any]) -> Lark:
    """Returns the Lark rule for JSON of a schema, on one line."""
    return Lark(f"%json {json.dumps({'x-guidance': ON_ONE_LINE} | dict(schema), ensure_ascii=False)}")


def listed(fields: Sequence[tuple[Node, bool]], additional: Node | None = None) -> Node:
    """Joins fields with commas, in order. Optional fields may be missing.

    Args:
        fields: expressions, and whether they are required.
        additional: expression of an additional field, any number of which may follow; None for no additional fields.
    """
    tails: list[Node] = [  # expressions for the fields from each field on, after a previous field
        NOTHING if additional is None else Repetition(Concatenation((COMMA, additional)), 0, None)
    ]
    for field, is_required in reversed(fields):
        following = Concatenation((COMMA, field))
        tails.append(Concatenation((following if is_required else optional(following), tails[-1])))
    starts: list[Node] = []  # expressions that start with each field that can be the first
    for n, (field, is_required) in enumerate(fields):
        starts.append(Concatenation((field, tails[len(fields) - n - 1])))
        if is_required:
            return Alternation(tuple(starts))
    return Alternation((*starts, *([] if additional is None else [Separated(additional, COMMA)]), NOTHING))


def other_strings(names: Collection[str]) -> Node:
    """Matches JSON strings other than `names`."""
    return Concatenation((QUOTE, other_texts(names))) if names else string(None, None, None)


def other_texts(names: Iterable[str]) -> Node:
    """Matches the characters of a JSON string and its closing quote, for strings other than `names`."""
    suffixes: dict[str, list[str]] = {}
    for name in names:
        suffixes.setdefault(name[:1], []).append(name[1:])
    has_empty = suffixes.pop("", None) is not None
    prefixed = tuple(Concatenation((literal(first), other_texts(rest))) for first, rest in sorted(suffixes.items()))
    firsts = merge_ranges([(ord(first), ord(first)) for first in suffixes])
    character = CharacterClass(complement(merge_ranges([*complement(PLAIN_CHARACTER.ranges), *firsts])))
    rest = Repetition(Alternation((PLAIN_CHARACTER, ANY_ESCAPE)), 0, None)
    free = Concatenation((Alternation((character, ANY_ESCAPE)), rest, QUOTE))
    return Alternation((*prefixed, free, *([] if has_empty else [QUOTE])))


def keyword_values(schema: Mapping[str, Any], *supported: str) -> list[Any]:
    """Returns the values of the supported keywords, None for missing ones. Raises `NotRegular` for any other keyword."""
    if not schema.keys() <= {*supported}:
        refuse({key: value for key, value in schema.items() if key not in supported})
    return [schema.get(key) for key in supported]


def refuse(keys: Iterable[str]) -> Any:
    raise NotRegular(f"the keywords {', '.join(map(repr, keys))}")


def non_empty_list(options: Any) -> list[Any]:
    if not isinstance(options, list) or not options:
        raise NotRegular("options of another type than a non-empty array")
    return options


def bound(value: Any, otherwise: int | None) -> Any:
    """Returns a count of a schema, or `otherwise` if it is missing. Raises `NotRegular` for an invalid count."""
    if value is None:
        return otherwise
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise NotRegular(f"the bound {value!r:.40}")
    return value


def integer(least: Any, most: Any, above: Any = None, below: Any = None) -> Node:
    """Matches integers between optional bounds: `least` and `most` inclusive, `above` and `below` exclusive."""
    bounds = [each for each in (least, most, above, below) if each is not None]
    if not all(isinstance(each, int) and not isinstance(each, bool) and len(str(each)) <= MOST_DIGITS for each in bounds):
        raise NotRegular("a bound that is not an integer, or has too many digits")
    low = max((each for each in (least, None if above is None else above + 1) if each is not None), default=None)
    high = min((each for each in (most, None if below is None else below - 1) if each is not None), default=None)
    if low is not None and high is not None and low > high:
        raise NotRegular("a lower bound above the upper bound")
    parts = list[Node]()
    if low is None or low < 0:
        zero = 0 if (low is None) == (high is None) else 1  # the matcher allows "-0" with no bound and with two bounds
        magnitudes = naturals(zero if high is None else max(zero, -high), None if low is None else -low)
        parts.append(Concatenation((literal("-"), magnitudes)))
    if high is None or high >= 0:
        parts.append(naturals(max(0, low) if low is not None else 0, high))
    return Alternation(tuple(parts))


def number(least: Any, most: Any, above: Any, below: Any) -> Node:
    """Matches numbers without exponents between optional bounds, for bounds that the matcher would round."""
    bounds = [each for each in (least, most, above, below) if each is not None]
    if not is_wide(bounds) or not all(isinstance(each, int | float) and not isinstance(each, bool) for each in bounds):
        raise NotRegular("a number with bounds")
    exact = [None if each is None else Decimal(repr(as_integer(each))) for each in (least, most, above, below)]
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
"""Bound of a number, and whether the bound is exclusive."""


def limit(choose: Any, included: Decimal | None, excluded: Decimal | None) -> Limit | None:
    """Returns the tighter of an inclusive and an exclusive bound. `choose`: `max` for lower bounds, `min` for upper bounds."""
    if included is None or excluded is None:
        return next(((each, each is excluded) for each in (included, excluded) if each is not None), None)
    return (included, False) if choose(included, excluded) != excluded else (excluded, True)


def decimals(low: Limit, high: Limit | None) -> Node:
    """Matches non-negative decimal numbers between limits, with or without a fraction; `high` None: no upper limit."""
    (least, above), first = low, int(low[0])
    last = None if high is None else int(high[0])
    if high is not None and first == last:
        if above or least != first:
            raise NotRegular("bounds with equal integral parts")
        return Concatenation((literal(str(first)), fraction_to(*high)))
    parts: list[Node] = [Concatenation((literal(str(first)), fraction_from(least, above)))]
    if last is None or last - first > 1:
        parts.append(Concatenation((naturals(first + 1, None if last is None else last - 1), fraction_from(Decimal(0), False))))
    if high is not None and high != (last, True):
        parts.append(Concatenation((literal(str(last)), fraction_to(*high))))
    return Alternation(tuple(parts))


def fraction_digits(value: Decimal) -> str:
    """Returns the digits after the decimal point, without trailing zeros."""
    return f"{value:f}".partition(".")[2].rstrip("0")


def fraction_from(value: Decimal, above: bool) -> Node:
    """Matches fractions (with the decimal point, or empty) not less than the fraction of `value`; greater with `above`."""
    any_digits = Repetition(digit("0", "9"), 0, None)
    tail = fraction_digits(value)
    if not tail and not above:
        return optional(Concatenation((literal("."), digit("0", "9"), any_digits)))
    larger = [
        Concatenation((literal(tail[:place]), digit(str(int(each) + 1), "9"), any_digits))
        for place, each in enumerate(tail)
        if each != "9"
    ]
    nonzero = Concatenation((Repetition(literal("0"), 0, None), digit("1", "9"), any_digits)) if above else any_digits
    return Concatenation((literal("."), Alternation((*larger, Concatenation((literal(tail), nonzero))))))


def fraction_to(value: Decimal, below: bool) -> Node:
    """Matches fractions (with the decimal point, or empty) not greater than the fraction of `value`; less with `below`."""
    any_digits = Repetition(digit("0", "9"), 0, None)
    zeros = Repetition(literal("0"), 0, None)
    tail = fraction_digits(value)
    smaller = [
        Concatenation((literal(tail[:place]), digit("0", str(int(each) - 1)), any_digits))
        for place, each in enumerate(tail)
        if each != "0"
    ]
    beginnings = [literal(tail[:place]) for place in range(1, len(tail))]
    exact = [] if below else [Concatenation((literal(tail or "0"), zeros))]
    return optional(Concatenation((literal("."), Alternation((*smaller, *beginnings, *exact)))))


def naturals(low: int, high: int | None) -> Node:
    """Matches natural numbers from `low` to `high` (None: unbounded), without leading zeros."""
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
    """Matches digit strings between two bounds of equal length."""
    common = next((place for place, (one, other) in enumerate(zip(low, high, strict=True)) if one != other), len(low))
    if common == len(low):
        return literal(low)
    parts = list[Node]()

    def free(start: str, least: int, most: int) -> None:
        """Adds digit strings that begin with `start` and a digit from `least` to `most`."""
        if least <= most:
            rest = len(low) - len(start) - 1
            parts.append(Concatenation((literal(start), digit(str(least), str(most)), Repetition(digit("0", "9"), rest, rest))))

    lowest = set(low[common + 1 :]) <= {"0"}
    highest = set(high[common + 1 :]) <= {"9"}
    free(low[:common], int(low[common]) + (not lowest), int(high[common]) - (not highest))
    if not lowest:
        for place in range(common + 1, len(low)):
            free(low[:place], int(low[place]) + 1, 9)
        parts.append(literal(low))
    if not highest:
        for place in range(common + 1, len(high)):
            free(high[:place], 0, int(high[place]) - 1)
        parts.append(literal(high))
    return Alternation(tuple(parts))


def digit(low: str, high: str) -> Node:
    return CharacterClass(((ord(low), ord(high)),))


def string(least: Any, most: Any, pattern: Any) -> Node:
    """Matches JSON strings with bounds on the length, or strings that match an anchored pattern."""
    if pattern is None:
        return Concatenation((QUOTE, Repetition(STRING_CHARACTER, bound(least, 0), bound(most, None)), QUOTE))
    if least is not None or most is not None or not isinstance(pattern, str):
        raise NotRegular("a pattern and a length")
    if not pattern.startswith("^") or not pattern.endswith("$") or pattern.endswith("\\$"):
        raise NotRegular("a pattern without anchors")
    inside = parse_regex(f"(?:{pattern[1:-1]})" if "|" not in pattern else refuse({"pattern": pattern}), ascii_only=True)
    if not is_plain(inside):
        raise NotRegular("a pattern with characters that JSON escapes")
    return Concatenation((QUOTE, inside, QUOTE))


def is_plain(node: Node) -> bool:
    """True if an expression matches no character that JSON escapes."""
    match node:
        case CharacterClass():
            return not any(low <= ord(each) <= high for low, high in node.ranges for each in QUOTED)
        case Repetition():
            return is_plain(node.part)
        case Concatenation() | Alternation():
            return all(map(is_plain, node.parts))
        case Separated():
            return is_plain(node.part) and is_plain(node.separator)
        case Undescribed() | Lark():
            return False


def literal_string(text: str) -> Node:
    """Matches one JSON string."""
    if QUOTED & {*text}:
        raise NotRegular("a string with characters that JSON escapes")
    return literal(f'"{text}"')


def constant(value: Any, kind: Any) -> Node:
    """Matches one JSON scalar of the type `kind` (None: any type)."""
    names = {str: "string", bool: "boolean", type(None): "null", int: "integer"}
    value = as_integer(value) if is_wide(value) else value
    found = names.get(type(value))
    if found is None or kind not in (None, found, *(["number"] if found == "integer" else [])):
        raise NotRegular("a constant that is not a scalar, or has another type")
    return literal_string(value) if isinstance(value, str) else literal(json.dumps(value))
