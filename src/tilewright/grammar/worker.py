"""A process that compiles grammars on trial, so that one that takes too long or too much is ended with it.

The first line of its input is a `CompilerSettings`, each further one what is asked of a grammar, as (asked, kind, text,
seconds). It answers each with a line: to "refusal" why the grammar cannot be used, in the matcher's words, or nothing; to
"automaton" the grammar's, as `token_automaton.automaton_text` writes it. All of it is JSON. JAX is not imported.

The signal SIGPROF ends the process where an answer takes more than `seconds` of a processor, 0 for no such bound: the matcher
does not look at a clock, and a clock would say how busy the machine is.
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
    expression,
)
from tilewright.grammar.schema import ON_ONE_LINE, exact_node, json_rule

LEXER_STATES = 20_000
"""Of a compiled grammar, each of one or two kB."""


class CompilerSettings(NamedTuple):
    """Tokens and bounds over which grammars are compiled.

    Attributes:
        tokenizer: as JSON.
        vocab: tokens of the model, which may be more than the tokenizer has.
        eos: the tokens that end a text.
        most_bytes: of memory that a process may take besides what it takes at first; 0 for no bound.
    """

    tokenizer: str
    vocab: int
    eos: list[int]
    most_bytes: int = 0


def made_tokenizer(setting: CompilerSettings) -> Any:
    """The tokenizer as the matcher has it."""
    from llguidance import LLTokenizer

    return LLTokenizer(setting.tokenizer, n_vocab=setting.vocab, eos_token=list(setting.eos))


def compiled(tokenizer: Any, kind: str, text: str) -> tuple[Any, str]:
    """The matcher of a grammar, and why it cannot be used, or nothing."""
    try:
        matcher = matcher_of(tokenizer, kind, text)
    except ValueError as error:
        return None, str(error)
    except RecursionError:
        return None, "it goes too deep: recursion limit"
    if not matcher.is_error():
        matcher.compute_bitmask()  # what nothing satisfies may show only now
    return matcher, matcher.get_error() or "; ".join(matcher.get_grammar_warnings())


def matcher_of(tokenizer: Any, kind: str, text: str) -> Any:
    """The matcher of a grammar, which may be in error. Raises a `ValueError` for what is none."""
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
    """One of several texts, as a Lark grammar."""
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def lark_of_tagged(options: list[list[Any]], repeats: bool, other: Any = None) -> str:
    """Tagged JSON texts, each as begin, schema and end, or another one without tags, as a Lark grammar."""
    rules = list[str]()
    texts = list[str]()
    for number, (begin, schema, end) in enumerate(options):
        around = [json.dumps(each) if each else "" for each in (begin, end)]
        texts.append(f"{around[0]} json_{number} {around[1]}")
        rules += json_rules(schema, f"json_{number}")
    start = 'start: text ("\\n" text)*' if repeats else "start: text"
    if other is not None:
        start += " | other"
        rules += json_rules(other, "other")
    return "\n".join([start, f"text: {' | '.join(texts)}", *rules])


def json_rules(schema: Mapping[str, Any], name: str) -> list[str]:
    """Rules of a Lark grammar for JSON of a schema: the first has the name, further ones begin with it.

    Raises:
        NotRegular: the schema has numbers that cannot be kept as they are.
    """
    if has_wide_numbers(schema):
        return lark_of_node(exact_node(schema), name)
    return [f"{name}: {json_rule(schema).rule}"]


def lark_of_node(node: Node, name: str) -> list[str]:
    """Rules of a Lark grammar for a node: the first has the name, those of its parts begin with it.

    Terminals are those of the matcher's own JSON, brackets, separators and values without parts. Were one the beginning of
    another, the lexer would know the longer one alone.
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
        return f"/{expression(node)}/" if node != NOTHING else '""'

    first = f"{name}: {written(node)}"
    return [first, *rules]


def bound_memory(most_bytes: int) -> None:
    """Lets this process take so much more memory, where the system can say so."""
    if sys.platform != "linux" or not most_bytes:
        return
    import resource

    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + most_bytes, held + most_bytes))


def main() -> None:
    setting = CompilerSettings(*json.loads(sys.stdin.readline()))
    tokenizer = made_tokenizer(setting)
    bound_memory(setting.most_bytes)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # whatever this process was started with
    vocabulary = None
    for line in sys.stdin:
        asked, kind, text, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        if asked == "refusal":
            answer = compiled(tokenizer, kind, text)[1]
        else:
            from tilewright.grammar.token_automaton import Vocabulary, automaton_text

            vocabulary = vocabulary or Vocabulary.of(tokenizer, setting.vocab, setting.eos)
            answer = automaton_text(tokenizer, vocabulary, kind, text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
