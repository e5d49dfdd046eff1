"""Measures the size of automata over the tokens of a model, and the processor time to build them.

    python benchmarks/automata.py TOKENIZER [--json FILE]

TOKENIZER is a `tokenizer.json`; `tilewright inspect grammar` prints the same figures. Schemas are closed, as OpenAI's
structured outputs require, open, as pydantic generates them, or recursive.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tilewright.cli.inspect_grammar import grammar_figures
from tilewright.grammar.grammar import Grammar
from tilewright.grammar.matcher import Compiler

TEXT: dict[str, Any] = {"type": "string"}


def record(properties: dict[str, Any], closed: bool = True, **more: Any) -> dict[str, Any]:
    """Returns the schema of an object with required properties."""
    additional = {"additionalProperties": False} if closed else {}
    return {"type": "object", "properties": properties, "required": list(properties), **additional, **more}


def listed(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


PERSON = {
    "first name": {"type": "string", "maxLength": 12},
    "favourite colour": {"enum": ["red", "green", "blue", "violet"]},
    "age in years": {"type": "integer", "minimum": 0, "maximum": 120},
}
EVENT = {"name": TEXT, "date": TEXT, "participants": listed(TEXT)}
LINE = {"item": TEXT, "count": {"type": "integer", "minimum": 0, "maximum": 999}, "price": {"type": "number"}}
INVOICE = {
    "number": {"type": "string", "maxLength": 20},
    "total": {"type": "number"},
    "currency": {"enum": ["EUR", "USD", "GBP"]},
    "lines": listed(record(LINE), minItems=1),
    "paid": {"type": "boolean"},
}
WEATHER = {"location": TEXT, "unit": {"enum": ["celsius", "fahrenheit"]}}
WIDGET = {
    "type": {"enum": ["div", "button", "header", "section", "field", "form"]},
    "label": TEXT,
    "children": listed({"$ref": "#"}),
    "attributes": listed(record({"name": TEXT, "value": TEXT})),
}
SCHEMAS = {
    "two people": listed(record(PERSON), minItems=2, maxItems=2),
    "steps of a proof": record({"steps": listed(record({"explanation": TEXT, "output": TEXT})), "answer": TEXT}),
    "event": record(EVENT),
    "invoice": record(INVOICE),
    "event, open": record(EVENT, closed=False),
    "weather, open": record(WEATHER, closed=False),
    "widgets, recursive": record(WIDGET),
    "tree, recursive": record({"value": {"type": "integer"}, "children": listed({"$ref": "#"})}),
    "json_object": {"type": "object"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    size = tokenizer.get_vocab_size()
    eos = [tokenizer.token_to_id("<|im_end|>") or 0]
    compiler = Compiler(tokenizer, size, eos)
    found = {name: grammar_figures(compiler, Grammar.json_schema(schema)) for name, schema in SCHEMAS.items()}
    for name, each in found.items():
        print(f"{name:20}", "  ".join(f"{key} {value}" for key, value in each.items() if value is not None))
    if options.json is not None:
        options.json.write_text(json.dumps({"tokens": size, "schemas": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
