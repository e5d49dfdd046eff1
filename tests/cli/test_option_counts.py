"""Number of options of each command. A command grows only if its number here grows too, up to 25."""

from collections.abc import Iterator

import pytest
from cyclopts import App

from tilewright.cli.main import app

MOST = 25
COUNTS = {
    "demo": 0,
    "generate": 25,
    "diffuse": 16,
    "serve": 25,
    "chat": 23,
    "chips": 5,
    "verify-exact": 14,
    "doctor": 3,
    "train lm": 24,
    "train lora": 25,
    "train drafter": 25,
    "train diffusion": 25,
    "train gnn": 22,
    "plan training": 15,
    "bench diffusion": 24,
    "bench graph": 9,
    "bench overlap": 22,
    "bench serving": 24,
    "bench speculative": 24,
    "inspect overlap": 17,
    "inspect training": 19,
    "inspect run": 2,
    "inspect diff": 16,
    "inspect trace": 7,
    "inspect grammar": 3,
    "neuron plan": 19,
    "neuron simulate": 21,
    "neuron env": 2,
    "neuron calibrate": 2,
}


def commands(group: App, path: tuple[str, ...] = ()) -> Iterator[tuple[str, App]]:
    """Yields the name and the application of each command, with those of subcommands."""
    for name in group:
        if name.startswith("-"):
            continue
        command = group[name]
        if any(not each.startswith("-") for each in command):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


FOUND = dict(commands(app))


def test_the_table_has_every_command():
    assert FOUND.keys() == COUNTS.keys()
    assert max(COUNTS.values()) <= MOST


@pytest.mark.parametrize("name", COUNTS)
def test_a_command_has_no_more_options_than_the_table_and_a_text_for_each(name: str):
    arguments = FOUND[name].assemble_argument_collection(parse_docstring=True)
    options = {
        argument.names[0]: argument.parameter.help or ""
        for argument in arguments
        if argument.show and any(each.startswith("--") for each in argument.names)
    }
    assert len(options) <= COUNTS[name], f"{len(options)} options: {', '.join(options)}"
    assert not [option for option, text in options.items() if not text.strip()], "options without a text"
    keys = [line for text in options.values() for line in text.splitlines() if line.startswith("- ")]
    assert not [line for line in keys if line.endswith(": ")], "keys without a text"
