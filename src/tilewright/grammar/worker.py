"""Compilation of grammars with llguidance, and the main program of the sandbox process.

The first line of the program's input is a `CompilerSettings`; each further line is a query (query, kind, text, seconds). Each
query is answered by one line. "refusal" returns the reason why the grammar cannot be used, or an empty text; "automaton"
returns the grammar's automaton as `token_automaton.automaton_text` writes it. All lines are JSON. JAX is not imported.

SIGPROF ends the process when an answer takes more than `seconds` CPU seconds (0: no limit). The limit counts CPU seconds
because wall-clock time depends on the machine's load.
"""

import json
import signal
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from tilewright.grammar.keywords import has_wide_numbers
from tilewright.grammar.regular import (
    NOTHING,
    Alternation,
    CharacterClass,
    Concatenation,
    Lark,
    Node,
    Repetition,
    Separated,
    to_regex,
)
from tilewright.grammar.schema import ON_ONE_LINE, exact_node, json_rule

LEXER_STATES = 20_000
"""Largest number of lexer states of a compiled grammar (1 to 2 kB each)."""


class CompilerSettings(NamedTuple):
    """Tokenizer and limits for compiling grammars.

    Attributes:
        tokenizer: tokenizer as JSON (Hugging Face tokenizers).
        vocab: size of the model's vocabulary, which may exceed the tokenizer's.
        eos: ids of the end-of-sequence tokens.
        most_bytes: memory limit of the sandbox process, besides its memory after start; 0 for no limit.
    """

    tokenizer: str
    vocab: int
    eos: list[int]
    most_bytes: int = 0


def made_tokenizer(setting: CompilerSettings) -> Any:
    """Makes the `LLTokenizer` of llguidance."""
    from llguidance import LLTokenizer

    return LLTokenizer(setting.tokenizer, n_vocab=setting.vocab, eos_token=list(setting.eos))


def compile_matcher(tokenizer: Any, kind: str, text: str) -> tuple[Any, str]:
    """Compiles a grammar. Returns the `LLMatcher`, and the reason why it cannot be used (empty if it can)."""
    try:
        matcher = make_matcher(tokenizer, kind, text)
    except ValueError as error:
        return None, str(error)
    except RecursionError:
        return None, "it is nested too deeply: recursion limit"
    if not matcher.is_error():
        matcher.compute_bitmask()  # grammars that no text satisfies may fail only here
    return matcher, matcher.get_error() or "; ".join(matcher.get_grammar_warnings())


def make_matcher(tokenizer: Any, kind: str, text: str) -> Any:
    """Makes the `LLMatcher` of a grammar, which may be in an error state. Raises a `ValueError` for an invalid grammar."""
    from llguidance import LLMatcher, LLParserLimits

    make = {"regex": LLMatcher.grammar_from_regex, "lark": LLMatcher.grammar_from_lark}
    make["json_schema"] = lambda text: (
        LLMatcher.grammar_from_lark(lark_of_tagged([["", json.loads(text), ""]], repeats=False))
        if has_wide_numbers(json.loads(text))
        else LLMatcher.grammar_from_json_schema(text, defaults=ON_ONE_LINE)
    )
    make["choice"] = lambda text: LLMatcher.grammar_from_lark(lark_of_choice(json.loads(text)))
    make["tagged"] = lambda text: LLMatcher.grammar_from_lark(lark_of_tagged(**json.loads(text)))
    limits = LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)
    return LLMatcher(tokenizer, make[kind](text), log_level=0, limits=limits)


def lark_of_choice(texts: list[str]) -> str:
    """Writes a choice of texts as a Lark grammar."""
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def lark_of_tagged(options: list[list[Any]], repeats: bool, other: Any = None) -> str:
    """Writes the arguments of `Grammar.tagged` as a Lark grammar."""
    rules = list[str]()
    texts = list[str]()
    for number, (begin, schema, end) in enumerate(options):
        before, after = (json.dumps(each) if each else "" for each in (begin, end))
        texts.append(f"{before} json_{number} {after}")
        rules += json_rules(schema, f"json_{number}")
    start = 'start: text ("\\n" text)*' if repeats else "start: text"
    if other is not None:
        start += " | other"
        rules += json_rules(other, "other")
    return "\n".join([start, f"text: {' | '.join(texts)}", *rules])


def json_rules(schema: Mapping[str, Any], name: str) -> list[str]:
    """Writes Lark rules for JSON of a schema. The first rule is `name`, the names of further rules begin with `name`.

    Raises:
        NotRegular: the schema has wide numbers that cannot be represented exactly.
    """
    if has_wide_numbers(schema):
        return lark_of_node(exact_node(schema), name)
    return [f"{name}: {json_rule(schema).rule}"]


def lark_of_node(node: Node, name: str) -> list[str]:
    """Writes Lark rules for a node. The first rule is `name`, the names of further rules begin with `name`.

    Terminals are brackets, separators, scalars and the matcher's JSON rules. No terminal is a prefix of another, because the
    lexer would match only the longer one.
    """
    rules = list[str]()

    def written(node: Node) -> str:
        match node:
            case Lark():
                rules.append(f"{name}_{len(rules)}: {node.rule}")
                return f"{name}_{len(rules) - 1}"
            case Concatenation() if not all(isinstance(part, CharacterClass) for part in node.parts):
                return f"({' '.join(map(written, node.parts))})"
            case Alternation():
                return f"({' | '.join(map(written, node.parts))})"
            case Repetition():
                return f"({written(node.part)}){{{node.least},{'' if node.most is None else node.most}}}"
            case Separated():
                part = written(node.part)
                return f"({part} ({written(node.separator)} {part})*)"
        return f"/{to_regex(node)}/" if node != NOTHING else '""'

    first = f"{name}: {written(node)}"
    return [first, *rules]


def bound_memory(most_bytes: int) -> None:
    """Limits this process to `most_bytes` more memory than it has now (Linux only)."""
    if sys.platform != "linux" or not most_bytes:
        return
    import resource

    with open("/proc/self/statm") as file:
        current = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (current + most_bytes, current + most_bytes))


def main() -> None:
    setting = CompilerSettings(*json.loads(sys.stdin.readline()))
    tokenizer = made_tokenizer(setting)
    bound_memory(setting.most_bytes)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the parent may have ignored the signal
    vocabulary = None
    for line in sys.stdin:
        query, kind, text, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        if query == "refusal":
            answer = compile_matcher(tokenizer, kind, text)[1]
        else:
            from tilewright.grammar.token_automaton import Vocabulary, automaton_text

            vocabulary = vocabulary or Vocabulary.from_tokenizer(tokenizer, setting.vocab, setting.eos)
            answer = automaton_text(tokenizer, vocabulary, kind, text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
