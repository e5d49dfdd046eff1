"""Keywords of JSON schemas that the matcher does not know, in words that it does: those that change nothing are left out.

What validators and their libraries write (pydantic, zod) is full of such: `uniqueItems` of false, `propertyNames` of strings,
formats of their own. A keyword whose meaning has no other words stays, and the matcher refuses it by name.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
"""Formats that the matcher holds texts to. Others are annotations, as in JSON Schema."""
EXACT = 2**53
"""Magnitude up to which the matcher takes numbers exactly: it holds them as float64."""
TYPES = ("null", "boolean", "number", "string", "array", "object")

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minContains", "maxContains", "minProperties", "maxProperties")
ONLY_OF = {
    "number": (*BOUNDS, "multipleOf"),
    "array": ("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
    "object": ("propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
    "string": ("format",),
}
"""Keywords that say nothing about values of other types."""
ONE = (
    "items",
    "additionalItems",
    "contains",
    "unevaluatedItems",
    "additionalProperties",
    "propertyNames",
    "unevaluatedProperties",
    "not",
    "if",
    "then",
    "else",
)
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords with schemas in them: one, a list of them, or one under each name."""
APPLICATORS = {
    "$ref",
    "$dynamicRef",
    "allOf",
    "anyOf",
    "oneOf",
    "if",
    "then",
    "else",
    "not",
    "dependentSchemas",
    "dependencies",
}
"""Keywords whose schemas describe the value itself, and so may know of further properties and items."""


def plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema with the same texts, without the keywords that change nothing; one that goes too deep stays as it is."""
    try:
        found = PlainSchema(schema).part(schema)
    except RecursionError:  # the matcher refuses it
        return dict(schema)
    return {"enum": []} if found is False else found


def subschemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and all within it."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    for key, value in schema.items():
        if key in ONE:
            yield from subschemas(value)
        if key in LISTS and isinstance(value, list):
            for each in value:
                yield from subschemas(each)
        if key in MAPS and isinstance(value, Mapping):
            for each in value.values():
                yield from subschemas(each)


def has_wide_numbers(schema: Any) -> bool:
    """True if a schema names numbers that the matcher would round, or one within it does."""
    return any(map(names_wide_numbers, subschemas(schema)))


def names_wide_numbers(schema: Mapping[str, Any]) -> bool:
    return any(is_wide(schema[key]) for key in schema.keys() & {*BOUNDS, "const", "enum", "multipleOf"})


def is_wide(value: Any) -> bool:
    """True for a number beyond what float64 holds exactly, and for what has one in it."""
    if isinstance(value, Mapping):
        return any(map(is_wide, value.values()))
    if isinstance(value, list):
        return any(map(is_wide, value))
    return isinstance(value, int | float) and abs(value) > EXACT


def whole(value: Any) -> Any:
    """A number, as an integer where it is one: JSON knows one kind."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    exact = Decimal(repr(value))
    return int(exact) if exact == exact.to_integral_value() else value


class PlainSchema:
    """Reads the parts of one schema.

    Args:
        root: what references point into.
    """

    def __init__(self, root: Any):
        self.root = root
        self.referred = [each["$ref"] for each in subschemas(root) if isinstance(each.get("$ref"), str)]

    def part(self, schema: Any) -> Any:
        """A schema within the root, or the root; False for what no value satisfies."""
        if not isinstance(schema, Mapping):
            return schema
        found: dict[str, Any] = {}
        for key, value in schema.items():
            if key in LISTS and isinstance(value, list):
                value = [self.part(each) for each in value]
            elif key in MAPS and isinstance(value, Mapping):
                value = {name: self.part(each) for name, each in value.items()}
            elif key in ONE:
                value = self.part(value)
            elif key in COUNTS or key in BOUNDS or key == "multipleOf":
                value = whole(value)
            found[key] = value
        self.drop_of_other_types(found)
        self.numbers(found)
        self.strings(found)
        self.arrays(found)
        self.objects(found)
        self.conditions(found)
        self.alternatives(found)
        return self.negated(found)

    def drop_of_other_types(self, found: dict[str, Any]) -> None:
        declared = found.get("type")
        kinds = declared if isinstance(declared, list) else [declared]
        if not declared or not all(isinstance(kind, str) for kind in kinds):
            return
        for kind, keys in ONLY_OF.items():
            if kind not in kinds and not (kind == "number" and "integer" in kinds):
                drop(found, *keys)

    def numbers(self, found: dict[str, Any]) -> None:
        """Takes bounds that are excluded as draft 4 writes it for what they mean."""
        for bound, excluded in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if found.get(excluded) is True and bound in found:
                found[excluded] = found.pop(bound)
            elif isinstance(found.get(excluded), bool):
                drop(found, excluded)

    def strings(self, found: dict[str, Any]) -> None:
        if isinstance(found.get("format"), str) and found["format"] not in FORMATS:
            drop(found, "format")
        pattern = found.get("pattern")
        if isinstance(pattern, str) and pattern.startswith("^(?=") and isinstance(found.get("allOf", []), list):
            end = group_end(pattern, 1)
            if end is not None and "|" not in pattern[end:]:  # what begins with the one and with the other matches both
                found["allOf"] = [*found.get("allOf", []), {"pattern": f"^(?:{pattern[4 : end - 1]})"}]
                found["pattern"] = f"^{pattern[end:]}"

    def arrays(self, found: dict[str, Any]) -> None:
        most = found.get("maxItems")
        if found.get("uniqueItems") is False or (isinstance(most, int) and most <= 1):
            drop(found, "uniqueItems")
        if "contains" not in found or found["contains"] in (True, {}):
            least = found.pop("minContains", 1)
            most = found.pop("maxContains", None)
            if found.pop("contains", None) is not None:  # any item is one that is wanted
                raise_bound(found, "minItems", least)
                lower_bound(found, "maxItems", most)
        elif found.get("minContains") == 0 and "maxContains" not in found:
            drop(found, "contains", "minContains")
        rest = found.get("unevaluatedItems")
        described = isinstance(found.get("items"), Mapping | bool)
        if rest in (True, {}) or described:
            drop(found, "unevaluatedItems")
        elif rest is False and not found.keys() & (APPLICATORS | {"contains", "items"}):
            found["items"] = found.pop("unevaluatedItems")

    def objects(self, found: dict[str, Any]) -> None:
        if "propertyNames" in found:
            self.names(found)
        needed = found.get("required")
        needed = needed if isinstance(needed, list) else []
        for key in ("dependentRequired", "dependencies", "dependentSchemas"):
            if isinstance(found.get(key), Mapping) and all(is_inert(each, needed) for each in found[key].values()):
                drop(found, key)
        rest = found.get("unevaluatedProperties")
        if rest in (True, {}) or "additionalProperties" in found:
            drop(found, "unevaluatedProperties")
        elif rest is False and not found.keys() & APPLICATORS:
            found["additionalProperties"] = found.pop("unevaluatedProperties")

    def names(self, found: dict[str, Any]) -> None:
        """Says what names may be by `properties` and `patternProperties`, where these can."""
        names = self.resolved(found["propertyNames"])
        if names is True or (isinstance(names, Mapping) and not names.keys() - {"type", "title", "description"}):
            if names is True or names.get("type") in (None, "string"):
                drop(found, "propertyNames")
            return
        if not isinstance(names, Mapping) or names.get("type", "string") != "string":
            return
        if any("additionalProperties" in place for place in self.referred):
            return  # which would have another meaning
        said = names.keys() - {"type", "title", "description"}
        listed = names["enum"] if said == {"enum"} else [names["const"]] if said == {"const"} else None
        if isinstance(listed, list) and "patternProperties" not in found:
            known = mapping(found.get("properties"))
            others = found.get("additionalProperties", True)
            kept = {name: each if name in listed else False for name, each in known.items()}
            found["properties"] = kept | {name: others for name in listed if isinstance(name, str) and name not in known}
            found["additionalProperties"] = False
            drop(found, "propertyNames")
        elif not found.keys() & {"properties", "patternProperties"} and (pattern := pattern_of(names, said)) is not None:
            found["patternProperties"] = {pattern: found.get("additionalProperties", True)}
            found["additionalProperties"] = False
            drop(found, "propertyNames")

    def resolved(self, schema: Any) -> Any:
        """The schema that a reference within the root names, or the schema itself where it is none."""
        if not isinstance(schema, Mapping) or schema.keys() != {"$ref"} or not str(schema["$ref"]).startswith("#/"):
            return schema
        found = self.root
        for key in schema["$ref"].split("/")[1:]:
            found = found.get(key) if isinstance(found, Mapping) else None
        return schema if found is None else found

    def conditions(self, found: dict[str, Any]) -> None:
        drop(found, "$dynamicAnchor")  # a name for `$dynamicRef`, which the matcher refuses
        outcomes = [found.get(key, True) for key in ("then", "else")]
        if "if" not in found or all(each in (True, {}) for each in outcomes):
            drop(found, "if", "then", "else")

    def alternatives(self, found: dict[str, Any]) -> None:
        """Says that any of several schemas holds, where no value has two of them."""
        options = found.get("oneOf")
        if isinstance(options, list) and options and "anyOf" not in found:
            each = [self.resolved(option) for option in options]
            if all(self.are_disjoint(one, other) for n, one in enumerate(each) for other in each[:n]):
                found["anyOf"] = found.pop("oneOf")

    def are_disjoint(self, one: Any, other: Any, depth: int = 0) -> bool:
        """True if certainly no value has both schemas."""
        if one is False or other is False:
            return True
        if not isinstance(one, Mapping) or not isinstance(other, Mapping) or depth > 4:
            return False
        values = values_of(one)
        others = values_of(other)
        if values is not None and others is not None:
            return not any(value in others for value in values)
        if values is not None or others is not None:
            listed, rest = (values, other) if values is not None else (others or [], one)
            return all(is_excluded(value, rest) for value in listed)
        kinds = types_of(one)
        other_kinds = types_of(other)
        if kinds.isdisjoint(other_kinds):
            return True
        required = [each if isinstance(each := schema.get("required"), list) else [] for schema in (one, other)]
        needed = [name for name in required[0] if isinstance(name, str) and name in required[1]]
        if kinds | other_kinds != {"object"} or not needed:
            return False
        mine = mapping(one.get("properties"))
        theirs = mapping(other.get("properties"))
        return any(
            self.are_disjoint(self.resolved(mine.get(name, True)), self.resolved(theirs.get(name, True)), depth + 1)
            for name in needed
        )

    def negated(self, found: dict[str, Any]) -> Any:
        """Says what a value is instead of what it is not, where that is a type."""
        if "not" not in found:
            return found
        negated = found["not"]
        if negated is True or negated == {}:
            return False
        if negated is False:
            drop(found, "not")
        elif isinstance(negated, Mapping) and negated.keys() == {"type"}:
            declared = found.get("type", [*TYPES])
            excluded = negated["type"]
            kinds, without = (each if isinstance(each, list) else [each] for each in (declared, excluded))
            if not ("integer" in without and "number" in kinds):  # numbers that are none have no name
                drop(found, "not")
                without = [*without, *(["integer"] if "number" in without else [])]
                left = [kind for kind in kinds if kind not in without]
                if not left:
                    return False
                found["type"] = left[0] if len(left) == 1 else left
        return found


def group_end(pattern: str, start: int) -> int | None:
    """End of the group that begins at a place of a regular expression; None if it has none."""
    depth = 0
    within = False
    for found in re.finditer(r"\\.|[][()]", pattern[start:]):
        if found[0] in "[]":
            within = found[0] == "["
        elif not within and found[0] in "()":
            depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return start + found.end()
    return None


def values_of(schema: Mapping[str, Any]) -> list[str | None] | None:
    """Values of a schema that lists texts and null; None for any other schema."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    plain = isinstance(listed, list) and all(each is None or isinstance(each, str) for each in listed)
    return listed if plain else None


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """Types of a schema's values, integers among numbers."""
    declared = schema.get("type", [*TYPES])
    kinds = {kind for kind in (declared if isinstance(declared, list) else [declared]) if isinstance(kind, str)}
    return {"number" if kind == "integer" else kind for kind in kinds}


def is_excluded(value: str | None, schema: Mapping[str, Any]) -> bool:
    """True if a text or null certainly has not a schema, by its type, or by a pattern that Python reads as others do."""
    if ("null" if value is None else "string") not in types_of(schema):
        return True
    pattern = schema.get("pattern")
    if value is None or not isinstance(pattern, str) or not value.isascii() or re.search(r"\\[^dws.^$+*?()|/-]|\(\?", pattern):
        return False
    try:
        return re.search(pattern, value, re.ASCII) is None
    except re.error:
        return False


def mapping(value: Any) -> Mapping[str, Any]:
    """An object of JSON, or an empty one for what is none."""
    return value if isinstance(value, Mapping) else {}


def drop(found: dict[str, Any], *keys: str) -> None:
    for key in keys:
        found.pop(key, None)


def raise_bound(found: dict[str, Any], key: str, least: Any) -> None:
    if isinstance(least, int) and isinstance(found.get(key, 0), int):
        found[key] = max(least, found.get(key, 0))


def lower_bound(found: dict[str, Any], key: str, most: Any) -> None:
    if isinstance(most, int) and isinstance(found.get(key, most), int):
        found[key] = min(most, found.get(key, most))


def is_inert(dependency: Any, needed: list[Any]) -> bool:
    """True for what a property wants that is so anyway: nothing, or properties that are always there."""
    if isinstance(dependency, list):
        return all(name in needed for name in dependency)
    return dependency is True or dependency == {}


def pattern_of(names: Mapping[str, Any], said: Any) -> str | None:
    """The pattern of names that are described by a pattern, or by their lengths; None for others."""
    if said == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    least = names.get("minLength", 0)
    most = names.get("maxLength", "")
    if said <= {"minLength", "maxLength"} and isinstance(least, int):
        return rf"^[\s\S]{{{least},{json.dumps(most) if most != '' else ''}}}$"
    return None
