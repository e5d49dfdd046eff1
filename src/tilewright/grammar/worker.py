"""A process that compiles grammars on trial, so that one that takes too long or too much is ended with it.

It imports llguidance alone. The first line of its input is a `CompilerSettings`, each further one a grammar as (kind, text). It
answers each with a line: why the grammar cannot be used, in the matcher's words, or nothing. All of it is JSON.
"""

import json
import sys
from typing import Any, NamedTuple

LEXER_STATES = 20_000
"""Of a compiled grammar, each of one or two kB."""
ON_ONE_LINE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Form of JSON: Python's. Were any space allowed, a model could go on with spaces for ever, and less would be
forced."""


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
    from llguidance import LLMatcher, LLParserLimits

    make = {"regex": LLMatcher.grammar_from_regex, "lark": LLMatcher.grammar_from_lark}
    make["json_schema"] = lambda text: LLMatcher.grammar_from_json_schema(text, defaults=ON_ONE_LINE)
    try:
        source = make[kind](text)
    except ValueError as error:
        return None, str(error)
    limits = LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # what nothing satisfies may show only now
    return matcher, matcher.get_error() or "; ".join(matcher.get_grammar_warnings())


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
    for line in sys.stdin:
        print(json.dumps(compiled(tokenizer, *json.loads(line))[1]), flush=True)


if __name__ == "__main__":
    main()
