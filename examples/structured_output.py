"""Generates JSON that matches a schema, with drafts, and parses it.

    python examples/structured_output.py

Needs the extra `grammar`. The grammar masks every token that would leave the schema, so the answer always parses.
"""

import argparse
import json

import tilewright as tw

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Italy", "Spain"]},
        "population": {"type": "integer", "minimum": 1, "maximum": 40000000},
    },
    "required": ["city", "country", "population"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt", default="Describe the capital of France as JSON.")
    options = parser.parse_args()

    lm = tw.load(options.model, drafter="ngram")
    grammar = tw.Grammar.json_schema(SCHEMA)
    result = lm.generate(options.prompt, tw.Sampling(max_new_tokens=96), grammar=grammar)[0]
    print(result.text)
    print(f"ended by: {result.finish_reason}")
    answer = json.loads(result.text)
    print(f"parsed: {answer['city']!r} in {answer['country']}")


if __name__ == "__main__":
    main()
