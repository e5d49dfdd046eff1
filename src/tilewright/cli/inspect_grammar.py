"""`tilewright inspect grammar`: where masks of grammars come from with a model's tokens, and how deep texts may go."""

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

CAPTION = "brackets: within one another where a grammar sets no bound; behind one more the host makes the masks."


def inspect_grammar(
    files: tuple[Path, ...] = (),
    /,
    *,
    model: str = DEMO,
    regex: Several[str] = (),
    json_file: JsonFile = None,
) -> None:
    """Shows for each grammar whether a device makes its masks, how deep and how large it is, or why the host makes them.

    Args:
        files: JSON schemas, a file each. Without one, and without --regex, any JSON object.
        model: a folder, a GGUF file, a hub id or a name of a model, of which the tokenizer and the sizes are read.
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
    """The grammar of a file with a JSON schema. Raises a `ValueError` for one that has none."""
    try:
        return Grammar.json_schema(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8, or no schema
        raise ValueError(f"{path}: {error}") from None


def grammar_figures(compiler: Compiler, grammar: Grammar) -> dict[str, Any]:
    """The figures of a grammar. Raises a `ValueError` for one that cannot be used."""
    compiler.checked(grammar)
    began = time.thread_time()
    try:
        made = compiler.token_automaton(grammar)
    except NotRegular as error:
        return dict.fromkeys(metric.name for metric in GRAMMAR) | {"masks": "host", "why": str(error)}
    seconds = time.thread_time() - began
    found = made.automaton
    states, classes = found.after.shape
    return {
        "masks": "device",
        "brackets": made.brackets,
        "states": states,
        "classes": classes,
        "different_masks": len(found.masks),
        "automaton_bytes": found.masks.nbytes + 2 * found.after.size,
        "processor_seconds": seconds,
        "why": None,
    }
