"""Calls as Qwen3-Coder and Qwen3.5 write them: tags with the function's name, and one for each argument with its value.

    <tool_call>
    <function=weather>
    <parameter=place>
    Rome
    </parameter>
    </function>
    </tool_call>

A value bears no type, so the function's schema says what it is. Text stays as it is; what cannot be a string is JSON, or one of
Python's constants, which published templates write. Where a schema allows strings and more, a value is text, but for null, and
for objects and lists, by their brackets.
"""

import json
import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NoReturn

from tilewright.grammar.grammar import Grammar
from tilewright.grammar.worker import json_rules
from tilewright.runtime.output import beginning_of_stop
from tilewright.server.call_forms import Read, Schemas

FUNCTION = "<function="
"""What a call begins with, within its tags; templates that tell of this form have it."""
FUNCTION_END = "</function>"
VALUE_END = "</parameter>"
NEWLINE = "\n"
BEHIND_VALUE = f"{NEWLINE}{VALUE_END}"
OPENING = re.compile(r"\s*<function=([^<>\s]+)>")
OPENING_SO_FAR = re.compile(r"<function=[^<>\s]*")
PARAMETER = re.compile(r"<parameter=([^<>\n]*)>|</function>")
"""What comes next in a call."""
NAME = re.compile(r"[^<>\s]+")
"""Names that calls can be forced to have."""

TYPES = frozenset(("string", "null", "boolean", "integer", "number", "object", "array"))
PYTHON = {"True": "true", "False": "false", "None": "null"}
DEEPEST = 16
"""References and alternatives within one another."""
ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"))
OF_ARGUMENTS = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
OF_STRINGS = ANNOTATIONS | {"type", "enum", "const", "minLength", "maxLength", "anyOf", "oneOf"}
"""Keywords of schemas that this form can force; others have an effect that text cannot be held to here."""


def referred(schema: Any, root: Mapping[str, Any]) -> Any:
    """A schema, or what it refers to within the function's; one that points elsewhere says nothing."""
    for _ in range(DEEPEST):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        path = str(schema["$ref"]).split("/")
        schema = root
        for key in path[1:]:
            schema = schema.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return None


def type_of(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return kinds.get(type(value), "null")


def types_of(schema: Any, root: Mapping[str, Any], depth: int = DEEPEST) -> frozenset[str]:
    """Types that values of a schema may have: all where it says nothing of them."""
    schema = referred(schema, root)
    if not isinstance(schema, Mapping) or not depth:
        return TYPES
    said = schema.get("type")
    names = [said] if isinstance(said, str) else said
    found = TYPES.intersection(each for each in names if isinstance(each, str)) if isinstance(names, list) else TYPES
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found &= frozenset().union(*(types_of(each, root, depth - 1) for each in schema[key]))
    if isinstance(schema.get("allOf"), list):
        found = found.intersection(*(types_of(each, root, depth - 1) for each in schema["allOf"]))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return found & frozenset(map(type_of, values)) if isinstance(values, list) else found


def parameter_of(schema: Mapping[str, Any], name: str) -> Any:
    """The schema of an argument; None for one that nothing is said of."""
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def is_open(value: str, types: frozenset[str]) -> bool:
    """Whether what a value begins with does not say yet that it is text."""
    if "string" not in types or (not value and len(types) > 1):
        return True
    bracket = {"{": "object", "[": "array"}.get(value[:1])
    return bracket in types or ("null" in types and any(each.startswith(value) for each in ("null", "None")))


def as_json(value: str, types: frozenset[str]) -> str:
    """A whole value as JSON."""
    if is_open(value, types):
        bare = value.strip()
        bare = PYTHON.get(bare, bare)
        if is_json(bare):
            return bare
    return json.dumps(value, ensure_ascii=False)


def is_json(text: str) -> bool:
    """Whether a text is JSON, of which Python's reader also takes what is none, such as NaN."""
    try:
        json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def no_constant(text: str) -> NoReturn:
    raise ValueError(f"expected JSON, found {text}")


def as_json_so_far(value: str, types: frozenset[str]) -> str:
    """What is known of a value's JSON, of which more may come."""
    shown = value[: len(value) - beginning_of_stop(value, (BEHIND_VALUE, VALUE_END))]
    return "" if is_open(shown, types) else json.dumps(shown, ensure_ascii=False)[:-1]


@dataclass(frozen=True)
class XmlForm:
    """The form's `server.call_forms.CallForm`."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    repeats: bool = True

    def read(self, text: str, schemas: Schemas) -> Read:
        if (opening := OPENING.match(text)) is None:
            bare = text.lstrip()
            goes_on = FUNCTION.startswith(bare) or OPENING_SO_FAR.fullmatch(bare)
            return Read(None, end=None if goes_on else len(text) - len(bare))
        name = opening[1]
        at = opening.end()
        parts = ["{"]
        schema = schemas.get(name, {})
        while (found := PARAMETER.search(text, at)) is not None:
            if found[0] == FUNCTION_END:
                return Read(name, "".join([*parts, "}"]), found.end())
            types = types_of(parameter_of(schema, found[1]), schema)
            parts.append(f"{', ' if len(parts) > 1 else ''}{json.dumps(found[1], ensure_ascii=False)}: ")
            begin = found.end()
            end = text.find(VALUE_END, found.end())
            begin += text.startswith("\n", begin)
            if end < 0:
                return Read(name, "".join([*parts, as_json_so_far(text[begin:], types)]))
            parts.append(as_json(text[begin:end].removesuffix("\n"), types))
            at = end + len(VALUE_END)
        return Read(name, "".join(parts))

    def parts(self, schema: Mapping[str, Any]) -> Iterator[Grammar]:
        for name, value in arguments_of(schema).items():
            if "string" in types_of(value, schema):
                string_rule(name, value, schema)
            else:
                yield json_grammar(value, schema)

    def grammar(self, functions: Schemas, several: bool, other: Mapping[str, Any] | None = None) -> Grammar:
        found = [self.rules(name, schema, number) for number, (name, schema) in enumerate(functions.items())]
        start = f"start: call{f' ({quoted(NEWLINE)} call)*' if several else ''}"
        calls = " | ".join(call for call, _ in found)
        rules = [rule for _, rules in found for rule in rules]
        if other is not None:
            start += " | other"
            rules += json_rules(json.loads(Grammar.json_schema(other).text), "other")
        return Grammar.lark("\n".join([start, f"call: {calls}", *rules]))

    def rules(self, name: str, schema: Mapping[str, Any], number: int) -> tuple[str, list[str]]:
        """A call of a function in Lark, and the rules that it names, which bear the function's number."""
        call = [quoted(f"{self.begin}\n{FUNCTION}{name}>\n")]
        rules = list[str]()
        arguments = arguments_of(schema)
        for index, (argument, value) in enumerate(arguments.items()):
            own = f"argument_{number}_{index}"
            text = f"TEXT_{number}_{index}"
            call.append(own if argument in (schema.get("required") or ()) else f"{own}?")
            opening = quoted(f"<parameter={argument}>\n")
            if "string" in types_of(value, schema):
                rules += [f"{own}: {opening} {text} {quoted(NEWLINE)}", f"{text}: {string_rule(argument, value, schema)}"]
            else:
                rules += [f"{own}: {opening} {own}_value {quoted(f'{BEHIND_VALUE}{NEWLINE}')}"]
                rules += json_rules(json.loads(json_grammar(value, schema).text), f"{own}_value")
        if not arguments and schema.get("additionalProperties") is not False:
            call.append(f"argument_{number}*")
            rules += [f"argument_{number}: NAME_{number} TEXT_{number} {quoted(NEWLINE)}", f"TEXT_{number}: {text_rule()}"]
            rules += [f"NAME_{number}: /<parameter=[^<>\\s]+>\\n/"]
        return " ".join([*call, quoted(f"{FUNCTION_END}\n{self.end}")]), rules


def quoted(text: str) -> str:
    """A text in a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def arguments_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Each argument that calls are forced to have, or may have, with its schema.

    Raises:
        ValueError: a call cannot be forced to follow the function's schema.
    """
    if others := sorted(set(schema) - OF_ARGUMENTS):
        raise ValueError(f"expected arguments by their names alone, as this model writes them, found {others[0]!r}")
    properties = schema.get("properties") or {}
    needed = schema.get("required") or []
    whole = isinstance(needed, list) and all(isinstance(name, str) for name in needed)
    if schema.get("type", "object") != "object" or not isinstance(properties, Mapping) or not whole:
        raise ValueError("expected the schema of an object, with properties and a list of those that are required")
    found = {**properties, **{name: {} for name in needed if name not in properties}}
    for name in found:
        if not NAME.fullmatch(name):
            raise ValueError(f"expected names of arguments that can stand in a tag, found {name!r}")
    if not found and isinstance(schema.get("additionalProperties"), Mapping):
        raise ValueError("expected arguments by their names, as this model writes them, found 'additionalProperties' alone")
    return found


def json_grammar(value: Mapping[str, Any], root: Mapping[str, Any]) -> Grammar:
    """A value that is no string; what it refers to goes with it."""
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return Grammar.json_schema({**definitions, **value})


def string_rule(name: str, value: Any, root: Mapping[str, Any], depth: int = DEEPEST) -> str:
    """Lark of a value that may be a string, with what ends it: that string, or null.

    Raises:
        ValueError: text cannot be held to what is asked.
    """
    known = {"$ref"} if isinstance(value, Mapping) and "$ref" in value else OF_STRINGS
    refuse_others(name, value, known)
    value = referred(value, root)
    if not isinstance(value, Mapping) or not depth:
        return text_rule(no_brackets=True)
    for key in ("const", "enum", "anyOf", "oneOf"):
        if key in value:
            refuse_others(name, value, {"type", key})
            options = [value[key]] if key == "const" else value[key]
            if not isinstance(options, list):
                raise ValueError(f"{name}: expected a list of what it may be, found {key} of {options!r:.100}")
            if key in ("const", "enum"):
                return one_of(name, options)
            options = [each for each in options if types_of(each, root) & {"string", "null"}]
            return " | ".join(f"({string_rule(name, each, root, depth - 1)})" for each in options)
    types = types_of(value, root)
    if "string" not in types:
        return quoted(f"null{BEHIND_VALUE}")
    refuse_others(name, value, OF_STRINGS)
    bounds = value.get("minLength", 0), value.get("maxLength", "")
    if not all(bound == "" or (isinstance(bound, int) and bound >= 0) for bound in bounds):
        raise ValueError(f"{name}: expected lengths that are whole numbers, found {bounds}")
    return text_rule(*bounds, no_brackets=bool(types & {"object", "array"}))


def refuse_others(name: str, schema: Any, known: AbstractSet[str]) -> None:
    """Raises a `ValueError` if a string's schema has other keywords that mean something."""
    others = sorted(set(schema) - known - ANNOTATIONS) if isinstance(schema, Mapping) else ()
    if others:
        expected = "a string of some length or one of several, as this model writes text"
        raise ValueError(f"{name}: expected {expected}, found {others[0]!r}")


def one_of(name: str, values: list[Any]) -> str:
    """Lark of those values that are text or null."""
    texts = ["null" if value is None else value for value in values if value is None or isinstance(value, str)]
    if any(VALUE_END in text for text in texts):
        raise ValueError(f"{name}: expected texts without {VALUE_END}, which ends a value as this model writes it")
    return " | ".join(quoted(f"{text}{BEHIND_VALUE}") for text in texts)


def text_rule(least: int = 0, most: int | str = "", no_brackets: bool = False) -> str:
    """Lark of a text of so many characters, with what ends it, which stands nowhere within it."""
    end = VALUE_END.replace("/", "\\/")
    parts = [f"/(?s:.{{{least},{most}}})\\n{end}/", f"~/(?s:.*){end}(?s:.+)/"]
    return " & ".join([*parts, *(["~/[\\[{](?s:.*)/"] if no_brackets else [])])


XML = XmlForm()
"""Of Qwen3-Coder and Qwen3.5."""
