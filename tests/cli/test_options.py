"""Options `KEY=VALUE,...`: the values of each type, errors, and the help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
from cyclopts import App

from tilewright.cli.options import setting_types, settings, value_kind


@dataclass(frozen=True)
class Settings:
    """Settings of a test.

    Attributes:
        mode: which positions are computed, of
            a few.
        modes: modes to compile.
        sizes: lengths in tokens.
        tau: threshold.
        folder: input.
        fast: skip checks.
    """

    mode: Literal["dense", "sparse"] = "dense"
    modes: tuple[Literal["dense", "sparse"], ...] | None = None
    sizes: tuple[int, ...] = ()
    tau: float | None = None
    folder: Path | None = None
    fast: bool = False

    def __post_init__(self) -> None:
        if self.tau == 0:
            raise ValueError("expected tau above 0, found 0")


def parsed(text: str) -> Settings:
    """Settings of an option on a command line."""
    app = App(result_action="return_value")

    @app.default
    def command(*, option: Annotated[Settings, settings(Settings, "Settings of a test")] = Settings()) -> Settings:
        return option

    return app(["--option", text], exit_on_error=False, print_error=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mode=sparse", Settings("sparse")),
        ("modes=dense,sparse,tau=0.9", Settings(modes=("dense", "sparse"), tau=0.9)),
        ("tau=1e-2,sizes=4,8", Settings(sizes=(4, 8), tau=0.01)),
        ("folder=/a=b/c,fast=yes", Settings(folder=Path("/a=b/c"), fast=True)),
        ("fast=False", Settings()),
    ],
)
def test_values_have_the_types_of_their_fields(text: str, expected: Settings):
    assert parsed(text) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "taw=1",
            "expected KEY=VALUE with a key among mode, modes, sizes, tau, folder, fast, found 'taw=1'. Did you mean tau?",
        ),
        ("sparse", "expected KEY=VALUE with a key among mode, modes, sizes, tau, folder, fast, found 'sparse'"),
        ("", "found ''"),
        ("mode", "expected mode=dense|sparse once, found 'mode'"),
        ("mode=fast", "expected mode=dense|sparse, found mode=fast"),
        ("mode=dense,mode=sparse", "expected mode=dense|sparse once, found 'mode=dense,mode=sparse'"),
        ("modes=dense,fast", "expected modes=dense|sparse,..., found modes=dense,fast"),
        ("tau=high", "expected tau=NUMBER, found tau=high"),
        ("tau=", "expected tau=NUMBER, found tau="),
        ("sizes=1.5", "expected sizes=INTEGER,..., found sizes=1.5"),
        ("fast=2", "expected fast=true|false, found fast=2"),
        ("folder=", "expected folder=PATH, found folder="),
        ("tau=0", "expected tau above 0, found 0"),
    ],
)
def test_errors_say_which_value_was_expected(text: str, problem: str):
    with pytest.raises(Exception, match="--option") as caught:
        parsed(text)
    assert problem in str(caught.value)


def test_the_help_lists_every_key_with_its_text():
    text = settings(Settings, "Settings of a test").help
    assert text is not None
    assert text.startswith("Settings of a test:\n\n- mode=dense|sparse: which positions are computed, of a few.\n")
    assert text.endswith("- fast=true|false: skip checks.")


def test_kinds_follow_the_types():
    kinds = {name: value_kind(type_) for name, type_ in setting_types(Settings).items()}
    assert kinds["modes"] == "dense|sparse,..."
    assert (kinds["sizes"], kinds["folder"]) == ("INTEGER,...", "PATH")
