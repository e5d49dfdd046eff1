"""Keywords of schemas that change nothing, or that have other words, and numbers of any size."""

import json
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.grammar.grammar import Grammar, Tagged
from tilewright.grammar.keywords import BOUNDS, COUNTS, LISTS, MAPS, ONE, has_wide_numbers, simplify_schema
from tilewright.grammar.worker import compile_matcher

llguidance = pytest.importorskip("llguidance")
BYTES = llguidance.LLTokenizer("byte")


def refusal(schema: dict[str, Any]) -> str:
    grammar = Grammar.json_schema(schema)
    return compile_matcher(BYTES, grammar.kind, grammar.text)[1]


def accepts(grammar: Grammar, text: str) -> bool:
    """True if a grammar's matcher takes a text as a whole. Raises a `ValueError` for a grammar that it refuses."""
    matcher, why = compile_matcher(BYTES, grammar.kind, grammar.text)
    if why:
        raise ValueError(why)
    accepted = all(not matcher.is_stopped() and matcher.try_consume_tokens([byte]) for byte in text.encode())
    return accepted and matcher.is_accepting()


STRING = {"type": "string"}
INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    ("more", "left"),
    [
        ({"type": "array", "uniqueItems": False}, {"type": "array"}),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, {"type": "array", "maxItems": 1}),
        ({"type": "string", "uniqueItems": True, "propertyNames": {"pattern": "a"}, "minimum": -(2**70)}, STRING),
        ({"type": "array", "minContains": 2, "maxContains": 3}, {"type": "array"}),
        ({"type": "array", "contains": {"type": "null"}, "minContains": 0}, {"type": "array"}),
        ({"type": "array", "contains": True, "minContains": 2}, {"type": "array", "minItems": 2}),
        ({"type": "array", "unevaluatedItems": True}, {"type": "array"}),
        ({"type": "array", "items": INTEGER, "unevaluatedItems": False}, {"type": "array", "items": INTEGER}),
        ({"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False}, {"prefixItems": [INTEGER], "items": False}),
        ({"type": "object", "propertyNames": {"type": "string"}}, {"type": "object"}),
        ({"type": "object", "propertyNames": True, "unevaluatedProperties": {}}, {"type": "object"}),
        ({"type": "object", "unevaluatedProperties": False}, {"type": "object", "additionalProperties": False}),
        ({"type": "object", "dependentRequired": {"a": []}, "dependentSchemas": {}}, {"type": "object"}),
        ({"required": ["b"], "dependentRequired": {"a": ["b"]}}, {"required": ["b"]}),
        ({"if": STRING, "$dynamicAnchor": "node"}, {}),
        ({"if": STRING, "then": True, "else": {}}, {}),
        ({"type": "string", "not": False}, STRING),
        ({"type": "string", "not": {"type": ["number", "null"]}}, STRING),
        ({"type": ["string", "null"], "not": {"type": "null"}}, STRING),
        ({"type": "string", "format": "cuid2"}, STRING),
        ({"type": "integer", "format": "int64", "minimum": 0.0}, {"type": "integer", "minimum": 0}),
        ({"type": "string", "minLength": 1.0}, {"type": "string", "minLength": 1}),
        ({"type": "integer", "exclusiveMinimum": True, "minimum": 5, "exclusiveMaximum": False}, {"exclusiveMinimum": 5}),
        (
            {"oneOf": [{"type": "string", "enum": ["all"]}, {"type": "string", "pattern": "^[1-9][0-9]*$"}]},
            {"anyOf": [{"type": "string", "enum": ["all"]}, {"type": "string", "pattern": "^[1-9][0-9]*$"}]},
        ),
        ({"oneOf": [STRING, INTEGER, {"type": "null"}]}, {"anyOf": [STRING, INTEGER, {"type": "null"}]}),
        ({"properties": {"uniqueItems": STRING, "not": {"not": {}}}}, {"properties": {"uniqueItems": STRING, "not": False}}),
    ],
)
def test_what_changes_nothing_is_left_out(more: dict[str, Any], left: dict[str, Any]):
    assert simplify_schema(more) == ({"type": more["type"]} if "type" in more and "type" not in left else {}) | left
    assert simplify_schema({"anyOf": [{"items": more}]}) == {"anyOf": [{"items": simplify_schema(more)}]}
    assert refusal(more) == ""
    assert simplify_schema({"const": more, "default": more}) == {"const": more, "default": more}


@pytest.mark.parametrize(
    ("schema", "key"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "propertyNames": {"format": "uuid"}}, "propertyNames"),
        ({"type": "object", "propertyNames": {"enum": ["a"]}, "patternProperties": {"b": {}}}, "propertyNames"),
        ({"not": {"const": 1}}, "not"),
        ({"type": "number", "not": {"type": "integer"}}, "not"),
        ({"type": "array", "contains": INTEGER}, "contains"),
        ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"if": STRING, "then": {"minLength": 1}}, "if"),
        ({"oneOf": [{"minimum": 1}, {"const": "a"}], "contains": {"minLength": 1}}, "contains"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ],
)
def test_what_changes_something_is_refused_by_name(schema: dict[str, Any], key: str):
    assert f'"{key}"' in refusal(schema)


NAMES = {
    "listed": (
        {"propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": INTEGER, "required": ["a"]},
        ['{"a": 1}', '{"a": 1, "b": 2}'],
        ["{}", '{"c": 1}', '{"a": "x"}'],
    ),
    "referred": (
        {"$defs": {"E": {"enum": ["x"], "title": "E", "type": "string"}}, "propertyNames": {"$ref": "#/$defs/E"}},
        ['{"x": [1]}', "{}"],
        ['{"y": 1}'],
    ),
    "pattern": (
        {"propertyNames": {"pattern": "^a+$"}, "additionalProperties": INTEGER},
        ['{"aa": 1}'],
        ['{"b": 1}', '{"a": ""}'],
    ),
    "lengths": ({"propertyNames": {"minLength": 1, "maxLength": 2}}, ['{"ab": null, "é": 1}'], ['{"": 1}', '{"abc": 1}']),
    "outside": ({"propertyNames": {"const": "a"}, "properties": {"b": STRING, "a": STRING}}, ['{"a": "x"}'], ['{"b": "x"}']),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_properties(name: str):
    schema, right, wrong = NAMES[name]
    schema = {"type": "object", **schema}
    for text in [*right, *wrong]:
        assert accepts(Grammar.json_schema(schema), text) == (text in right), text
        assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)) == (text in right)


def test_what_libraries_write_is_accepted():
    """Schemas of pydantic 2.12 and zod 4, as they wrote them."""
    written = [
        {"additionalProperties": INTEGER, "propertyNames": {"enum": ["a", "b"]}, "type": "object"},
        {"format": "binary", "type": "string"},
        {"format": "path", "type": "string"},
        {"format": "password", "type": "string", "writeOnly": True},
        {"maximum": 9223372036854775807, "minimum": -9223372036854775808, "type": "integer"},
        {"type": "object", "propertyNames": STRING, "additionalProperties": {"type": "number"}},
        {"type": "string", "format": "ulid", "pattern": "^[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{25}$"},
        {"type": "string", "format": "base64", "contentEncoding": "base64", "pattern": "^[A-Z]*$"},
        {"type": "string", "format": "includes", "allOf": [{"pattern": "^a.*"}, {"pattern": ".*b$"}]},
        {"type": "string", "format": "hostname", "pattern": "^(?=.{1,253}\\.?$)[a-z0-9](?:\\.[a-z]+)*\\.?$"},
        {"type": "object", "properties": {"a": {"default": 1, "type": "integer"}, "b": {"not": {}}}, "required": ["a"]},
        {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
        {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
    ]
    assert [refusal(schema) for schema in written] == [""] * len(written)


WIDE = [
    {"type": "integer", "minimum": -9223372036854775808},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "integer", "minimum": 2**53 + 1, "exclusiveMaximum": 10**30},
    {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
    {"type": "number", "minimum": -(2**63), "exclusiveMaximum": 0.125},
    {"type": "number", "exclusiveMinimum": -3.07, "maximum": 2**63},
    {"type": "number", "minimum": -1e300, "maximum": 0},
]


@pytest.mark.parametrize("number", range(len(WIDE)))
def test_bounds_of_any_size_hold(number: int):
    schema = WIDE[number]
    keys = [key for key in schema if key != "type"]
    exact = {key: Decimal(repr(schema[key])) for key in keys}
    whole = {str(int(value) + more) for value in [*exact.values(), Decimal(5)] for more in (-1, 0, 1)} - {"-0"}
    texts = whole | {f"{each}{fraction}" for each in whole for fraction in (".0", ".124", ".125", ".07", ".0701")} - {"-0.0"}
    holds = {
        "minimum": lambda value, bound: value >= bound,
        "exclusiveMinimum": lambda value, bound: value > bound,
        "maximum": lambda value, bound: value <= bound,
        "exclusiveMaximum": lambda value, bound: value < bound,
    }
    for text in sorted(texts):
        right = all(holds[key](Decimal(text), exact[key]) for key in keys) and ("." not in text or schema["type"] == "number")
        assert accepts(Grammar.json_schema(schema), text) == right, text


def test_wide_numbers_stand_anywhere():
    identity = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    one = {"type": "object", "properties": {"kind": {"const": "a"}, "id": identity}, "required": ["kind", "id"]}
    other = {
        "type": "object",
        "properties": {"kind": {"const": "b"}, "tags": {"type": "array", "items": {"$ref": "#/$defs/T"}}},
    }
    schema = {
        "anyOf": [one, other, {"enum": [2**63, "x", -(2**63)]}, {"type": "array", "items": identity, "minItems": 1}],
        "$defs": {"T": {"type": "object", "properties": {"t": STRING}}},
    }
    right = [
        '{"kind": "a", "id": -9223372036854775808}',
        '{"kind": "a", "id": 5, "more": {"a": [1, null]}}',
        '{"kind": "b"}',
        '{"kind": "b", "tags": [{"t": "u"}, {}], "z": 1.5}',
        "9223372036854775808",
        '"x"',
        "[1, 9223372036854775807]",
    ]
    wrong = ['{"kind": "a"}', '{"kind": "a", "id": 9223372036854775808}', "9223372036854775807", "[]", '{"kind": "c"}', '"y"']
    for grammar, before, behind in (
        (Grammar.json_schema(schema), "", ""),
        (Grammar.tagged([Tagged("<a>", schema, "</a>"), Tagged("<b>", {"type": "null"}, "</b>")]), "<a>", "</a>"),
    ):
        for text in [*right, *wrong]:
            assert accepts(grammar, f"{before}{text}{behind}") == (text in right), text


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "integer", "minimum": 10**500}, "a bound that is not an integer, or has too many digits"),
        ({"type": "integer", "multipleOf": 2**60}, "the keywords 'multipleOf'"),
        ({"type": "object", "properties": {"a": {"const": 2**60}, "next": {"$ref": "#"}}}, "a reference outside definitions"),
        (
            {
                "$defs": {"N": {"properties": {"n": {"$ref": "#/$defs/N"}, "a": {"const": 2**60}}, "type": "object"}},
                "$ref": "#/$defs/N",
            },
            "recursive schemas",
        ),
        ({"oneOf": [{"const": 2**60}, INTEGER]}, "the keywords 'oneOf'"),
        ({"type": "object", "properties": {"a": {"const": 2**60}}, "required": [[]]}, "keywords of invalid types"),
    ],
)
def test_wide_numbers_that_cannot_be_kept_say_why(schema: dict[str, Any], why: str):
    assert why in refusal(schema)
    assert "numbers beyond 9007199254740992" in refusal(schema)


KEYS = sorted(
    {*ONE, *LISTS, *MAPS, *BOUNDS, *COUNTS, "type", "enum", "const", "required", "pattern", "format", "uniqueItems", "$ref"}
)
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(["string", "object", "a", "#/$defs/a", "("]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYS, "a"]), inner, max_size=4),
    max_leaves=12,
)


@given(schema=st.dictionaries(st.sampled_from(KEYS), ODD, max_size=5))
def test_what_is_no_schema_stays_none_without_a_failure(schema: dict[str, Any]):
    assert isinstance(simplify_schema(schema), dict)
    assert isinstance(has_wide_numbers(simplify_schema(schema)), bool)


def test_what_goes_too_deep_is_refused():
    deep: Any = {}
    for _ in range(300):
        deep = {"anyOf": [{"not": deep}]}
    assert isinstance(simplify_schema(deep), dict)
    assert "recursion limit" in refusal(deep) or "not" in refusal(deep)


def test_alternatives_that_exclude_each_other():
    def tagged(kind: str, **more: Any) -> dict[str, Any]:
        return {"type": "object", "properties": {"kind": {"const": kind, "type": "string"}, **more}, "required": ["kind"]}

    identity = {"type": "integer", "minimum": -(2**63)}
    union = {"oneOf": [{"$ref": "#/$defs/A"}, tagged("b")], "$defs": {"A": tagged("a", id=identity)}, "discriminator": {}}
    assert "anyOf" in simplify_schema(union)
    assert accepts(Grammar.json_schema(union), '{"kind": "a", "id": -9223372036854775808}')
    for options in (
        [tagged("a"), tagged("a")],
        [{"type": "number"}, {"type": "integer"}],
        [{"enum": ["x1"]}, {"pattern": "[0-9]"}],
        [{"const": None}, {"type": ["null", "object"]}],
        [{"const": "a"}, {"pattern": "(?=b)"}],
        [{"type": "object", "properties": {"a": {"const": "x"}}}, {"type": "object", "properties": {"a": {"const": "y"}}}],
        [True, STRING],
    ):
        assert "oneOf" in simplify_schema({"oneOf": options}), options
