"""Options of `tilewright train`: their number, groups, help texts, and short forms."""

from typing import Any

import pytest
from cyclopts import App

from tilewright.cli.train import COMMON, MODEL, PERFORMANCE, TEXT, TRAINING, lm
from tilewright.cli.train_diffusion import diffusion
from tilewright.cli.train_drafter import LOSS, OPTIONS, SIZES, DrafterLoss, DrafterSizes, drafter
from tilewright.cli.train_gnn import DATA, gnn

COUNTS = {lm: 24, drafter: 25, diffusion: 25, gnn: 22}
"""Options of each command, which grow only on purpose; 25 at most."""


def options(command: Any) -> list[Any]:
    app = App(default_command=command)
    return [argument for argument in app.assemble_argument_collection(parse_docstring=True) if argument.name.startswith("-")]


@pytest.mark.parametrize("command", COUNTS)
def test_options_are_few_grouped_and_explained(command: Any):
    found = options(command)
    assert len(found) == COUNTS[command] <= 25
    for option in found:
        assert option.parameter.help, option.name
        assert {*option.parameter.group} <= {COMMON, MODEL, TEXT, TRAINING, PERFORMANCE, DATA}, option.name
    assert 8 <= sum(COMMON in option.parameter.group for option in found) <= 10


@pytest.mark.parametrize(
    ("command", "short"),
    [
        (lm, {"-o", "-m", "-n", "-b", "-l"}),
        (drafter, {"-o", "-m", "-k", "-n", "-b", "-l"}),
        (diffusion, {"-o", "-m", "-n", "-b", "-l"}),
        (gnn, {"-o", "-m", "-d", "-n", "-b", "-t"}),
    ],
)
def test_short_forms(command: Any, short: set[str]):
    assert {name for option in options(command) for name in option.names if len(name) == 2} == short


def test_every_key_of_a_drafter_belongs_to_a_kind():
    assert {name for names in SIZES.values() for name in names} == set(vars(DrafterSizes()))
    assert {name for names in LOSS.values() for name in names} == set(vars(DrafterLoss()))
    for kind, names in LOSS.items():
        assert {*names, "keep_taps"} == set(OPTIONS[kind].__dataclass_fields__)
