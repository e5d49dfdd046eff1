"""Rewrites JSON schemas with the keywords that llguidance supports, and removes keywords without effect.

Libraries such as pydantic and zod write unsupported keywords that have no effect (`uniqueItems: false`, `propertyNames` of
strings, formats of their own). An unsupported keyword that has an effect and no equivalent stays, and llguidance refuses it.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
"""Formats that the matcher enforces. Other formats are annotations, as in JSON Schema."""
EXACT = 2**53
"""Largest magnitude of integers that the matcher represents exactly: it stores numbers as float64."""
TYPES = ("null", "boolean", "number", "string", "array", "object")

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minContains", "maxContains", "minProperties", "maxProperties")
ONLY_OF = {
    "number": (*BOUNDS, "multipleOf"),
    "array": ("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
    "object": ("propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
    "string": ("format",),
}
"""Keywords that apply to values of one type only, by type."""
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
"""Keywords that contain subschemas: one schema (ONE), a list of schemas (LISTS), or a schema under each name (MAPS)."""
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
"""Keywords whose subschemas describe the same value, and can therefore evaluate further properties and items."""


def simplify_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrites a schema with supported keywords and equal meaning. Returns schemas that are nested too deeply unchanged."""
    try:
        found = SchemaSimplifier(schema).part(schema)
    except RecursionError:  # the matcher refuses it
        return dict(schema)
    return {"enum": []} if found is False else found


def subschemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yields a schema and all of its subschemas."""
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
    """True if a schema or one of its subschemas has numbers that the matcher would round."""
    return any(map(names_wide_numbers, subschemas(schema)))


def names_wide_numbers(schema: Mapping[str, Any]) -> bool:
    return any(is_wide(schema[key]) for key in schema.keys() & {*BOUNDS, "const", "enum", "multipleOf"})


def is_wide(value: Any) -> bool:
    """True for a number of a magnitude above `EXACT`, and for a list or an object that contains such a number."""
    if isinstance(value, Mapping):
        return any(map(is_wide, value.values()))
    if isinstance(value, list):
        return any(map(is_wide, value))
    return isinstance(value, int | float) and abs(value) > EXACT


def as_integer(value: Any) -> Any:
    """Returns a float with an integral value as an int (JSON has one number type), and any other value unchanged."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    exact = Decimal(repr(value))
    return int(exact) if exact == exact.to_integral_value() else value


class SchemaSimplifier:
    """Rewrites the parts of one schema.

    Args:
        root: the whole schema, into which references point.
    """

    def __init__(self, root: Any):
        self.root = root
        self.referred = [each["$ref"] for each in subschemas(root) if isinstance(each.get("$ref"), str)]

    def part(self, schema: Any) -> Any:
        """Rewrites the root or one of its subschemas. Returns False for a schema that no value satisfies."""
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
                value = as_integer(value)
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
        """Rewrites draft 4's boolean `exclusiveMinimum` and `exclusiveMaximum` as numbers."""
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
            if end is not None and "|" not in pattern[end:]:  # the lookahead becomes a second pattern that has to match, too
                found["allOf"] = [*found.get("allOf", []), {"pattern": f"^(?:{pattern[4 : end - 1]})"}]
                found["pattern"] = f"^{pattern[end:]}"

    def arrays(self, found: dict[str, Any]) -> None:
        most = found.get("maxItems")
        if found.get("uniqueItems") is False or (isinstance(most, int) and most <= 1):
            drop(found, "uniqueItems")
        if "contains" not in found or found["contains"] in (True, {}):
            least = found.pop("minContains", 1)
            most = found.pop("maxContains", None)
            if found.pop("contains", None) is not None:  # every item satisfies `contains`
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
        required = found.get("required")
        required = required if isinstance(required, list) else []
        for key in ("dependentRequired", "dependencies", "dependentSchemas"):
            if isinstance(found.get(key), Mapping) and all(is_inert(each, required) for each in found[key].values()):
                drop(found, key)
        rest = found.get("unevaluatedProperties")
        if rest in (True, {}) or "additionalProperties" in found:
            drop(found, "unevaluatedProperties")
        elif rest is False and not found.keys() & APPLICATORS:
            found["additionalProperties"] = found.pop("unevaluatedProperties")

    def names(self, found: dict[str, Any]) -> None:
        """Rewrites `propertyNames` with `properties` and `patternProperties`, where they can express it."""
        names = self.resolved(found["propertyNames"])
        if names is True or (isinstance(names, Mapping) and not names.keys() - {"type", "title", "description"}):
            if names is True or names.get("type") in (None, "string"):
                drop(found, "propertyNames")
            return
        if not isinstance(names, Mapping) or names.get("type", "string") != "string":
            return
        if any("additionalProperties" in place for place in self.referred):
            return  # the rewritten `additionalProperties` would change the meaning of that reference
        keys = names.keys() - {"type", "title", "description"}
        listed = names["enum"] if keys == {"enum"} else [names["const"]] if keys == {"const"} else None
        if isinstance(listed, list) and "patternProperties" not in found:
            declared = mapping(found.get("properties"))
            additional = found.get("additionalProperties", True)
            allowed = {name: each if name in listed else False for name, each in declared.items()}
            found["properties"] = allowed | {
                name: additional for name in listed if isinstance(name, str) and name not in declared
            }
            found["additionalProperties"] = False
            drop(found, "propertyNames")
        elif not found.keys() & {"properties", "patternProperties"} and (pattern := name_pattern(names, keys)) is not None:
            found["patternProperties"] = {pattern: found.get("additionalProperties", True)}
            found["additionalProperties"] = False
            drop(found, "propertyNames")

    def resolved(self, schema: Any) -> Any:
        """Resolves a schema that is only a reference into the root. Returns any other schema unchanged."""
        if not isinstance(schema, Mapping) or schema.keys() != {"$ref"} or not str(schema["$ref"]).startswith("#/"):
            return schema
        found = self.root
        for key in schema["$ref"].split("/")[1:]:
            found = found.get(key) if isinstance(found, Mapping) else None
        return schema if found is None else found

    def conditions(self, found: dict[str, Any]) -> None:
        drop(found, "$dynamicAnchor")  # only `$dynamicRef` refers to it, and the matcher refuses `$dynamicRef`
        outcomes = [found.get(key, True) for key in ("then", "else")]
        if "if" not in found or all(each in (True, {}) for each in outcomes):
            drop(found, "if", "then", "else")

    def alternatives(self, found: dict[str, Any]) -> None:
        """Rewrites `oneOf` as `anyOf` where no value satisfies two of its schemas."""
        options = found.get("oneOf")
        if isinstance(options, list) and options and "anyOf" not in found:
            each = [self.resolved(option) for option in options]
            if all(self.are_disjoint(one, other) for n, one in enumerate(each) for other in each[:n]):
                found["anyOf"] = found.pop("oneOf")

    def are_disjoint(self, one: Any, other: Any, depth: int = 0) -> bool:
        """True if provably no value satisfies both schemas."""
        if one is False or other is False:
            return True
        if not isinstance(one, Mapping) or not isinstance(other, Mapping) or depth > 4:
            return False
        values = listed_values(one)
        other_values = listed_values(other)
        if values is not None and other_values is not None:
            return not any(value in other_values for value in values)
        if values is not None or other_values is not None:
            listed, schema = (values, other) if values is not None else (other_values or [], one)
            return all(is_excluded(value, schema) for value in listed)
        kinds = allowed_types(one)
        other_kinds = allowed_types(other)
        if kinds.isdisjoint(other_kinds):
            return True
        required = [each if isinstance(each := schema.get("required"), list) else [] for schema in (one, other)]
        shared = [name for name in required[0] if isinstance(name, str) and name in required[1]]
        if kinds | other_kinds != {"object"} or not shared:
            return False
        properties = mapping(one.get("properties"))
        other_properties = mapping(other.get("properties"))
        return any(
            self.are_disjoint(
                self.resolved(properties.get(name, True)), self.resolved(other_properties.get(name, True)), depth + 1
            )
            for name in shared
        )

    def negated(self, found: dict[str, Any]) -> Any:
        """Rewrites `not` of a type as the list of the other types. Returns False for a schema that no value satisfies."""
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
            if not ("integer" in without and "number" in kinds):  # JSON Schema has no type for non-integral numbers
                drop(found, "not")
                without = [*without, *(["integer"] if "number" in without else [])]
                remaining = [kind for kind in kinds if kind not in without]
                if not remaining:
                    return False
                found["type"] = remaining[0] if len(remaining) == 1 else remaining
        return found


def group_end(pattern: str, start: int) -> int | None:
    """Returns the index after the group that begins at `start` of a regular expression; None for an unclosed group."""
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


def listed_values(schema: Mapping[str, Any]) -> list[str | None] | None:
    """Returns the values of a schema that lists only texts and null; None for any other schema."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    plain = isinstance(listed, list) and all(each is None or isinstance(each, str) for each in listed)
    return listed if plain else None


def allowed_types(schema: Mapping[str, Any]) -> set[str]:
    """Returns the types that a schema allows. Integers count as numbers."""
    declared = schema.get("type", [*TYPES])
    kinds = {kind for kind in (declared if isinstance(declared, list) else [declared]) if isinstance(kind, str)}
    return {"number" if kind == "integer" else kind for kind in kinds}


def is_excluded(value: str | None, schema: Mapping[str, Any]) -> bool:
    """True if a text or null provably violates a schema: by its type, or by a pattern on which regex dialects agree."""
    if ("null" if value is None else "string") not in allowed_types(schema):
        return True
    pattern = schema.get("pattern")
    if value is None or not isinstance(pattern, str) or not value.isascii() or re.search(r"\\[^dws.^$+*?()|/-]|\(\?", pattern):
        return False
    try:
        return re.search(pattern, value, re.ASCII) is None
    except re.error:
        return False


def mapping(value: Any) -> Mapping[str, Any]:
    """Returns a mapping unchanged, and an empty mapping for any other value."""
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


def is_inert(dependency: Any, required: list[Any]) -> bool:
    """True for a dependency without effect: no condition, or only properties that are required anyway."""
    if isinstance(dependency, list):
        return all(name in required for name in dependency)
    return dependency is True or dependency == {}


def name_pattern(names: Mapping[str, Any], keys: Any) -> str | None:
    """Returns a regular expression for names that a pattern or a length describes; None for any other schema of names."""
    if keys == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    least = names.get("minLength", 0)
    most = names.get("maxLength", "")
    if keys <= {"minLength", "maxLength"} and isinstance(least, int):
        return rf"^[\s\S]{{{least},{json.dumps(most) if most != '' else ''}}}$"
    return None
