"""Expressions and their automata over bytes, against Python's `re`."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.grammar.dfa import ByteAutomaton, Deadline, byte_automaton, byte_ranges
from tilewright.grammar.regular import LAST, NotRegular, complement, merge_ranges, parse_regex
from tilewright.grammar.schema import close_objects, schema_node

ATOMS = st.sampled_from(["a", "b", "ä", "€", "[ab]", "[^a]", "[a-ä]", r"\.", "x?", "[b-]", "😀"])
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda part: st.one_of(
        st.lists(part, min_size=1, max_size=3).map("".join),
        st.lists(part, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(part, st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{0,2}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=5,
)


def automaton(expression: str) -> ByteAutomaton:
    return byte_automaton(parse_regex(expression), Deadline(20.0))


def accepts(found: ByteAutomaton, text: bytes) -> bool:
    state = 0
    for byte in text:
        state = found.transitions[state, byte]
        if state < 0:
            return False
    return bool(found.accepts[state])


@given(EXPRESSIONS, st.lists(st.text("abxä€😀.-", max_size=6), min_size=4, max_size=4))
def test_texts_are_those_of_python(expression: str, texts: list[str]):
    found = automaton(expression)
    for text in ["", *texts]:
        assert accepts(found, text.encode()) == (re.fullmatch(expression, text) is not None), text
    assert not accepts(found, "ä".encode()[:1]), "half a character is none"


@given(EXPRESSIONS)
def test_every_state_reaches_the_end(expression: str):
    found = automaton(expression)
    live = found.accepts.copy()
    before = None
    while before is None or live.sum() > before:
        before = live.sum()
        live |= np.any((found.transitions >= 0) & live[found.transitions], axis=1)
    assert live.all()


@given(st.integers(0, LAST), st.integers(0, LAST), st.lists(st.integers(0, LAST), max_size=8))
def test_bytes_of_ranges(one: int, other: int, points: list[int]):
    low, high = sorted((one, other))
    products = list(byte_ranges(low, high))
    for point in {low, high, *points} - {*range(0xD800, 0xE000)}:
        encoded = chr(point).encode()
        holding = [
            each
            for each in products
            if len(each) == len(encoded)
            and all(first <= byte <= last for (first, last), byte in zip(each, encoded, strict=True))
        ]
        assert len(holding) == (low <= point <= high)


def test_ranges():
    assert merge_ranges([(5, 6), (1, 2), (3, 3), (6, 9)]) == ((1, 3), (5, 9))
    assert complement(((0, 9), (20, 0xD7FF))) == ((10, 19), (0xE000, LAST))
    assert complement(complement(((3, 4),))) == ((3, 4),)


@pytest.mark.parametrize(
    "expression",
    [
        "^a",
        "a$",
        "(?i)a",
        "(?=a)",
        r"\b",
        r"\w",
        r"\pL",
        r"(a)\1",
        "a**",
        "a*?",
        "a{2",
        "a{x}",
        "a{3,2}",
        "[",
        "(a",
        "a)",
        "a\\",
        "[a&&b]",
        "[[:alpha:]]",
        "[z-a]",
        r"[\d-z]",
        r"\<",
        r"[^\x00-\xff\u0100]",
        "*a",
        "(" * 100 + ")" * 100,
        "a{99999}",
    ],
)
def test_what_is_outside_is_refused(expression: str):
    with pytest.raises(NotRegular):
        parse_regex(expression)


@pytest.mark.parametrize("expression", ["((){10000}){10000}", "(.*a.{20}){3}", "([ab]*a[ab]{14})"])
def test_what_is_too_large_is_refused(expression: str):
    with pytest.raises(NotRegular, match=r"too large|takes too long"):
        automaton(expression)


def test_time_is_bounded():
    with pytest.raises(NotRegular, match="takes too long"):
        byte_automaton(parse_regex("[a-z]{1000}"), Deadline(0.0))


PERSON = {
    "title": "Person",
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"type": ["integer", "null"]}},
}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            PERSON,
            ['{"name": "ä\\n€", "age": null}', '{"name": ""}'],
            ['{"name": "abcd"}', '{"age": 1}', '{"name": "a","age": 1}'],
        ),
        ({"type": "number"}, ["-0.5e+3", "7", "0"], ["01", ".5", "1.", "+1", "1e"]),
        ({"type": "integer", "minimum": -3, "maximum": 12}, ["-3", "-0", "0", "12"], ["13", "-4", "03", "1.0"]),
        (
            {"type": "integer", "minimum": 98, "exclusiveMaximum": 1203},
            ["98", "99", "100", "999", "1202"],
            ["97", "1203", "098", "-1"],
        ),
        ({"enum": ["red", 3, None, True]}, ['"red"', "3", "null", "true"], ["red", "30", "false"]),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}, ["[true, false]"], ["[]", "[true]"]),
        ({"type": "array", "items": {"const": 1}, "maxItems": 2}, ["[]", "[1]", "[1, 1]"], ["[1, 1, 1]", "[1 ,1]"]),
        ({"type": "string", "pattern": r"^\d{2}-\w+$"}, ['"12-a_9"'], ['"1-a"', '"12-"', '"12-ä"']),
        ({"type": "object", "properties": {}, "additionalProperties": False}, ["{}"], ["{ }", '{"a": 1}']),
        ({"type": "object", "properties": {"ab": {}}}, ['{"ab": [], "a": {}}', '{"\\ud83d\\ude00": 1}'], ['{"a": 1, "ab": 2}']),
        ({"$ref": "#/$defs/b", "$defs": {"b": {"anyOf": [{"type": "null"}, {"const": "b"}]}}}, ["null", '"b"'], ["b"]),
    ],
)
def test_texts_of_schemas(schema: dict[str, object], right: list[str], wrong: list[str]):
    found = byte_automaton(schema_node(schema, 1), Deadline(20.0))
    for text in right:
        assert accepts(found, text.encode()), text
        json.loads(text)
    for text in wrong:
        assert not accepts(found, text.encode()), text


def test_texts_go_beyond_an_automaton_behind_one_more_bracket_than_it_has():
    chain = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}
    for schema, inside, beyond in (
        ({"type": "object"}, '{"a": [1, {"b": 2}]}', '{"a": [1, {"b": ['),
        (chain, "[[[]], []]", "[[[["),
    ):
        found = byte_automaton(schema_node(schema, 2), Deadline(20.0))
        assert accepts(found, inside.encode())
        state = 0
        for byte in beyond.encode():
            assert not found.undescribed[state]
            state = found.transitions[state, byte]
        assert found.undescribed[state]
        assert (found.transitions[state] == state).all()


@given(EXPRESSIONS)
def test_no_two_states_of_an_automaton_are_alike(expression: str):
    """Each two of them are told apart by some text (the table-filling algorithm)."""
    found = automaton(expression)
    apart = found.accepts[:, None] != found.accepts[None]
    apart = np.pad(apart, (0, 1), constant_values=True)  # and from the state behind bytes that may not come
    apart[-1, -1] = False
    after = np.unique(np.pad(found.transitions, ((0, 1), (0, 0)), constant_values=-1), axis=1)
    before = None
    while before is None or apart.sum() > before:
        before = apart.sum()
        for piece in after.T:
            apart |= apart[piece[:, None], piece[None]]
    assert np.array_equal(apart, ~np.eye(len(apart), dtype=bool))


DOUBLED = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 4} for n in range(20)}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "object", "required": ["a"]}, "not declared"),
        ({"type": "object", "properties": [], "additionalProperties": False}, "another type than object"),
        ({"type": "string", "format": "date"}, "the keywords 'format'"),
        ({"type": "string", "pattern": "a"}, "without anchors"),
        ({"type": "string", "pattern": '^"$'}, "JSON escapes"),
        ({"type": "string", "pattern": "^a|b$"}, "the keywords 'pattern'"),
        ({"const": "a\nb"}, "JSON escapes"),
        ({"const": 1.5}, "not a scalar"),
        ({"type": "integer", "minimum": 0.5}, "not an integer"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "above the upper bound"),
        ({"$ref": "x#"}, "another document"),
        ({"$ref": "#"}, "too deeply"),
        ({"$ref": "#/$defs/b"}, "unresolved"),
        ({"$ref": "#/$defs/0", "$defs": DOUBLED}, "too large"),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 0}, "allows no items"),
        ({"anyOf": []}, "non-empty array"),
        ({"not": {}}, "the keywords 'not'"),
    ],
)
def test_other_schemas_are_refused(schema: dict[str, object], why: str):
    with pytest.raises(NotRegular, match=why):
        schema_node(schema, 3)


def test_schemas_are_closed_where_each_object_stands_by_itself():
    point = {"type": "object", "properties": {"x": {"type": "number"}}}
    shut = {**point, "additionalProperties": False}
    for schema, want in (
        (point, shut),
        ({"type": "object"}, {"type": "object"}),
        ({**point, "additionalProperties": True}, {**point, "additionalProperties": True}),
        ({"type": "array", "items": point}, {"type": "array", "items": shut}),
        ({"anyOf": [point, {"type": "null"}]}, {"anyOf": [shut, {"type": "null"}]}),
        ({"$ref": "#/$defs/p", "$defs": {"p": point}}, {"$ref": "#/$defs/p", "$defs": {"p": shut}}),
        ({"properties": {"a": point}}, {"properties": {"a": shut}, "additionalProperties": False}),
    ):
        assert close_objects(schema) == want
    for mixed in (
        {"allOf": [point, {"properties": {"y": {}}}]},
        {**point, "anyOf": [{"properties": {"y": {}}}, {}]},
        {**point, "properties": {"a": {"allOf": [{"$ref": "#/$defs/p"}, {}]}}, "$defs": {"p": point}},
        {**point, "required": ["y"]},
        {**point, "required": [[]]},
        {"properties": []},
    ):
        assert close_objects(mixed) == mixed
