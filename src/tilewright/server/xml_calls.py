"""Tool call format of Qwen3-Coder and Qwen3.5: a tag with the function's name, and a tag for each argument.

    <tool_call>
    <function=weather>
    <parameter=place>
    Rome
    </parameter>
    </function>
    </tool_call>

The function's schema determines the types of values. Strings are written as plain text; values that cannot be strings are JSON,
or Python's constants, which published templates write. If a schema allows strings and other types, a value is a string unless
it is null, or begins with the bracket of an allowed object or array.
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
from tilewright.server.call_forms import ParsedCall, Schemas

FUNCTION = "<function="
"""Beginning of a call inside its tags; also identifies the chat templates of this format."""
FUNCTION_END = "</function>"
VALUE_END = "</parameter>"
NEWLINE = "\n"
AFTER_VALUE = f"{NEWLINE}{VALUE_END}"
OPENING = re.compile(r"\s*<function=([^<>\s]+)>")
OPENING_SO_FAR = re.compile(r"<function=[^<>\s]*")
PARAMETER = re.compile(r"<parameter=([^<>\n]*)>|</function>")
"""Matches the next tag in a call."""
NAME = re.compile(r"[^<>\s]+")
"""Matches argument names that can be forced."""

TYPES = frozenset(("string", "null", "boolean", "integer", "number", "object", "array"))
PYTHON = {"True": "true", "False": "false", "None": "null"}
DEEPEST = 16
"""Largest nesting depth of references and alternatives."""
ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"))
OF_ARGUMENTS = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
OF_STRINGS = ANNOTATIONS | {"type", "enum", "const", "minLength", "maxLength", "anyOf", "oneOf"}
"""Schema keywords that this format can enforce for arguments and for strings."""


def resolve(schema: Any, root: Mapping[str, Any]) -> Any:
    """Resolves the references of a schema into the function's schema `root`; None for unresolved references."""
    for _ in range(DEEPEST):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        path = str(schema["$ref"]).split("/")
        schema = root
        for key in path[1:]:
            schema = schema.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return None


def json_type(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return kinds.get(type(value), "null")


def json_types(schema: Any, root: Mapping[str, Any], depth: int = DEEPEST) -> frozenset[str]:
    """Returns the types that a schema allows; all types if the schema does not restrict them."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or not depth:
        return TYPES
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared
    found = TYPES.intersection(each for each in names if isinstance(each, str)) if isinstance(names, list) else TYPES
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found &= frozenset().union(*(json_types(each, root, depth - 1) for each in schema[key]))
    if isinstance(schema.get("allOf"), list):
        found = found.intersection(*(json_types(each, root, depth - 1) for each in schema["allOf"]))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return found & frozenset(map(json_type, values)) if isinstance(values, list) else found


def parameter_schema(schema: Mapping[str, Any], name: str) -> Any:
    """Returns the schema of an argument; None for an undeclared one."""
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def is_open(value: str, types: frozenset[str]) -> bool:
    """True if a value, or the beginning of a value, may be of another type than string."""
    if "string" not in types or (not value and len(types) > 1):
        return True
    bracket = {"{": "object", "[": "array"}.get(value[:1])
    return bracket in types or ("null" in types and any(each.startswith(value) for each in ("null", "None")))


def value_json(value: str, types: frozenset[str]) -> str:
    """Converts a complete value to JSON."""
    if is_open(value, types):
        bare = value.strip()
        bare = PYTHON.get(bare, bare)
        if is_json(bare):
            return bare
    return json.dumps(value, ensure_ascii=False)


def is_json(text: str) -> bool:
    """True for valid JSON, without Python's extensions such as NaN."""
    try:
        json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def no_constant(text: str) -> NoReturn:
    raise ValueError(f"expected JSON, found {text}")


def partial_value_json(value: str, types: frozenset[str]) -> str:
    """Converts the beginning of an incomplete value to the beginning of its JSON."""
    text = value[: len(value) - beginning_of_stop(value, (AFTER_VALUE, VALUE_END))]
    return "" if is_open(text, types) else json.dumps(text, ensure_ascii=False)[:-1]


@dataclass(frozen=True)
class XmlForm:
    """Tool call format of Qwen3-Coder and Qwen3.5; see `server.call_forms.CallForm`."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    repeats: bool = True

    def read(self, text: str, schemas: Schemas) -> ParsedCall:
        if (opening := OPENING.match(text)) is None:
            bare = text.lstrip()
            is_incomplete = FUNCTION.startswith(bare) or OPENING_SO_FAR.fullmatch(bare)
            return ParsedCall(None, end=None if is_incomplete else len(text) - len(bare))
        name = opening[1]
        position = opening.end()
        parts = ["{"]
        schema = schemas.get(name, {})
        while (found := PARAMETER.search(text, position)) is not None:
            if found[0] == FUNCTION_END:
                return ParsedCall(name, "".join([*parts, "}"]), found.end())
            types = json_types(parameter_schema(schema, found[1]), schema)
            parts.append(f"{', ' if len(parts) > 1 else ''}{json.dumps(found[1], ensure_ascii=False)}: ")
            begin = found.end()
            end = text.find(VALUE_END, found.end())
            begin += text.startswith("\n", begin)
            if end < 0:
                return ParsedCall(name, "".join([*parts, partial_value_json(text[begin:], types)]))
            parts.append(value_json(text[begin:end].removesuffix("\n"), types))
            position = end + len(VALUE_END)
        return ParsedCall(name, "".join(parts))

    def parts(self, schema: Mapping[str, Any]) -> Iterator[Grammar]:
        for name, value in argument_schemas(schema).items():
            if "string" in json_types(value, schema):
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
        """Returns the Lark expression of a function's call and its rules, whose names contain the function's number."""
        call = [quoted(f"{self.begin}\n{FUNCTION}{name}>\n")]
        rules = list[str]()
        arguments = argument_schemas(schema)
        for index, (argument, value) in enumerate(arguments.items()):
            rule = f"argument_{number}_{index}"
            text = f"TEXT_{number}_{index}"
            call.append(rule if argument in (schema.get("required") or ()) else f"{rule}?")
            opening = quoted(f"<parameter={argument}>\n")
            if "string" in json_types(value, schema):
                rules += [f"{rule}: {opening} {text} {quoted(NEWLINE)}", f"{text}: {string_rule(argument, value, schema)}"]
            else:
                rules += [f"{rule}: {opening} {rule}_value {quoted(f'{AFTER_VALUE}{NEWLINE}')}"]
                rules += json_rules(json.loads(json_grammar(value, schema).text), f"{rule}_value")
        if not arguments and schema.get("additionalProperties") is not False:
            call.append(f"argument_{number}*")
            rules += [f"argument_{number}: NAME_{number} TEXT_{number} {quoted(NEWLINE)}", f"TEXT_{number}: {text_rule()}"]
            rules += [f"NAME_{number}: /<parameter=[^<>\\s]+>\\n/"]
        return " ".join([*call, quoted(f"{FUNCTION_END}\n{self.end}")]), rules


def quoted(text: str) -> str:
    """Quotes a text for a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def argument_schemas(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schemas of the required and optional arguments, by name.

    Raises:
        ValueError: calls cannot be forced to follow the function's schema.
    """
    if unsupported := sorted(set(schema) - OF_ARGUMENTS):
        raise ValueError(f"expected only properties and required in this model's tool calls, found {unsupported[0]!r}")
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    valid = isinstance(required, list) and all(isinstance(name, str) for name in required)
    if schema.get("type", "object") != "object" or not isinstance(properties, Mapping) or not valid:
        raise ValueError("expected the schema of an object, with properties and a list of required names")
    found = {**properties, **{name: {} for name in required if name not in properties}}
    for name in found:
        if not NAME.fullmatch(name):
            raise ValueError(f"expected argument names without spaces and angle brackets, found {name!r}")
    if not found and isinstance(schema.get("additionalProperties"), Mapping):
        raise ValueError("expected named properties in this model's tool calls, found only 'additionalProperties'")
    return found


def json_grammar(value: Mapping[str, Any], root: Mapping[str, Any]) -> Grammar:
    """Makes the grammar of an argument that is not a string, with the definitions that its schema references."""
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return Grammar.json_schema({**definitions, **value})


def string_rule(name: str, value: Any, root: Mapping[str, Any], depth: int = DEEPEST) -> str:
    """Returns the Lark expression of an argument that may be a string, with the end of the value: a string or null.

    Raises:
        ValueError: the format cannot enforce the schema.
    """
    supported = {"$ref"} if isinstance(value, Mapping) and "$ref" in value else OF_STRINGS
    refuse_keywords(name, value, supported)
    value = resolve(value, root)
    if not isinstance(value, Mapping) or not depth:
        return text_rule(no_brackets=True)
    for key in ("const", "enum", "anyOf", "oneOf"):
        if key in value:
            refuse_keywords(name, value, {"type", key})
            options = [value[key]] if key == "const" else value[key]
            if not isinstance(options, list):
                raise ValueError(f"{name}: expected a list for {key}, found {options!r:.100}")
            if key in ("const", "enum"):
                return listed_values(name, options)
            options = [each for each in options if json_types(each, root) & {"string", "null"}]
            return " | ".join(f"({string_rule(name, each, root, depth - 1)})" for each in options)
    types = json_types(value, root)
    if "string" not in types:
        return quoted(f"null{AFTER_VALUE}")
    refuse_keywords(name, value, OF_STRINGS)
    bounds = value.get("minLength", 0), value.get("maxLength", "")
    if not all(bound == "" or (isinstance(bound, int) and bound >= 0) for bound in bounds):
        raise ValueError(f"{name}: expected minLength and maxLength from 0, found {bounds}")
    return text_rule(*bounds, no_brackets=bool(types & {"object", "array"}))


def refuse_keywords(name: str, schema: Any, supported: AbstractSet[str]) -> None:
    """Raises a `ValueError` for unsupported keywords in a string's schema."""
    found = sorted(set(schema) - supported - ANNOTATIONS) if isinstance(schema, Mapping) else ()
    if found:
        expected = "only lengths or a list of values for strings in this model's tool calls"
        raise ValueError(f"{name}: expected {expected}, found {found[0]!r}")


def listed_values(name: str, values: list[Any]) -> str:
    """Returns the Lark expression of the values that are text or null."""
    texts = ["null" if value is None else value for value in values if value is None or isinstance(value, str)]
    if any(VALUE_END in text for text in texts):
        raise ValueError(f"{name}: expected texts without {VALUE_END}, which ends a value in this model's tool calls")
    return " | ".join(quoted(f"{text}{AFTER_VALUE}") for text in texts)


def text_rule(least: int = 0, most: int | str = "", no_brackets: bool = False) -> str:
    """Returns the Lark expression of a text of `least` to `most` characters, up to the end of the value."""
    end = VALUE_END.replace("/", "\\/")
    parts = [f"/(?s:.{{{least},{most}}})\\n{end}/", f"~/(?s:.*){end}(?s:.+)/"]
    return " & ".join([*parts, *(["~/[\\[{](?s:.*)/"] if no_brackets else [])])


XML = XmlForm()
"""Format of Qwen3-Coder and Qwen3.5."""
