"""`tilewright inspect grammar`: size and nesting depth of a grammar's automaton over a model's tokens."""

import time
from pathlib import Path
from typing import Any

from tilewright.cli.common import DEMO
from tilewright.cli.options import Several
from tilewright.cli.outputs import JsonFile, human_console, progress_console, write_json
from tilewright.grammar.grammar import Grammar
from tilewright.grammar.matcher import Compiler
from tilewright.grammar.regular import NotRegular
from tilewright.metrics.grammar import GRAMMAR
from tilewright.metrics.tables import FigureTable, print_table
from tilewright.models.checkpoint import decoder_config
from tilewright.models.hub import resolve
from tilewright.models.tokenizer import load_tokenizer

CAPTION = "brackets: nesting depth of the automaton for grammars without a bound; the host computes the masks of deeper text."


def inspect_grammar(
    files: tuple[Path, ...] = (),
    /,
    *,
    model: str = DEMO,
    regex: Several[str] = (),
    json_file: JsonFile = None,
) -> None:
    """Shows the automaton of each grammar: masks on the device, depth and size, or why the host computes the masks.

    Args:
        files: files of JSON schemas. Without files and --regex: any JSON object.
        model: a folder, a GGUF file, a Hugging Face id or a packaged model, whose tokenizer and sizes are read.
        regex: regular expressions.
    """
    console = human_console(json_file)
    grammars = {str(path): read_schema(path) for path in files} | {text: Grammar.regex(text) for text in regex}
    folder = resolve(model, console=progress_console(console))
    config = decoder_config(folder)
    compiler = Compiler(load_tokenizer(folder), config.vocab_size, config.eos_token_ids)
    rows = [
        {"name": name} | grammar_figures(compiler, grammar)
        for name, grammar in (grammars or {"any JSON object": Grammar.json_object()}).items()
    ]
    tokens = compiler.setting.vocab
    print_table(console, FigureTable(f"Grammars over {tokens:,} tokens", "grammar", {"": rows}, GRAMMAR, caption=CAPTION))
    write_json(json_file, {"model": model, "tokens": tokens, "grammars": rows})


def read_schema(path: Path) -> Grammar:
    """Reads the grammar of a JSON schema. Raises a `ValueError` for other content."""
    try:
        return Grammar.json_schema(path.read_text(encoding="utf-8"))
    except ValueError as error:  # the file is not UTF-8 or no schema
        raise ValueError(f"{path}: {error}") from None


def grammar_figures(compiler: Compiler, grammar: Grammar) -> dict[str, Any]:
    """Compiles a grammar and returns its figures. Raises a `ValueError` for an invalid grammar."""
    compiler.checked(grammar)
    started_at = time.thread_time()
    try:
        compiled = compiler.token_automaton(grammar)
    except NotRegular as error:
        return dict.fromkeys(metric.name for metric in GRAMMAR) | {"masks": "host", "why": str(error)}
    seconds = time.thread_time() - started_at
    found = compiled.automaton
    states, classes = found.after.shape
    return {
        "masks": "device",
        "brackets": compiled.brackets,
        "states": states,
        "classes": classes,
        "different_masks": len(found.masks),
        "automaton_bytes": found.masks.nbytes + 2 * found.after.size,
        "processor_seconds": seconds,
        "why": None,
    }
