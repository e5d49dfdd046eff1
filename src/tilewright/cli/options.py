"""Declarations of options: the decorator of their classes, types that commands share, and checks of their ranges."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar, dataclass_transform

from cyclopts import Parameter, Token

from tilewright.kernels.select import Kernels

C = TypeVar("C")
T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def option_class(cls: type[C]) -> type[C]:
    """The class as a frozen dataclass, whose fields are options of every command that takes one, under their own names."""
    return Parameter(name="*")(dataclass(frozen=True)(cls))


def comma_separated(type_: object, tokens: Sequence[Token]) -> tuple[str, ...]:
    """Words apart or with commas between them, each once."""
    return tuple(dict.fromkeys(text for token in tokens for text in token.value.split(",") if text))


def comma_separated_numbers(type_: object, tokens: Sequence[Token]) -> tuple[int, ...]:
    """Whole numbers with commas between them, as a tuple. Raises a `ValueError` where one is none."""
    found = comma_separated(type_, tokens)
    for text in found:
        if not text.isdecimal():
            raise ValueError(f"expected whole numbers with commas between them, found {text!r}")
    return tuple(dict.fromkeys(map(int, found)))


SEVERAL = Parameter(consume_multiple=True, negative=())
"""Of an option that takes several values in a row."""
WORDS = Parameter(consume_multiple=True, negative=(), converter=comma_separated)
"""Options of several words."""

Several = Annotated[tuple[T, ...], SEVERAL]
"""Several values in a row."""
Words = Annotated[tuple[str, ...], WORDS]
"""Several words, with blanks or commas between them."""
Numbers = Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative=(), converter=comma_separated_numbers)]
"""Several whole numbers, with blanks or commas between them."""
Repeated = Annotated[tuple[str, ...], Parameter(negative=())]
"""An option that may be given several times."""
Flag = Annotated[bool, Parameter(negative=())]
"""An option that is off unless it is given."""

Prompt = Annotated[str, Parameter(allow_leading_hyphen=True)]
"""A prompt on the command line; an unknown option among them is told of later."""
PromptFile = Annotated[
    Path | None,
    Parameter(help="a JSONL file of prompts, read as `bench speculative` reads its data; of several turns the first is taken."),
]
Chat = Annotated[Flag, Parameter(help="put the prompts to the model as a user's messages, in its own chat template.")]
KernelChoice = Annotated[
    Kernels,
    Parameter(help='"auto" takes this package\'s own kernels where they run, "xla" leaves everything to XLA.'),
]
Repetitions = Annotated[int, Parameter(help="how often each is timed.")]
CompileCache = Annotated[
    bool,
    Parameter(
        env_var="TILEWRIGHT_COMPILE_CACHE",
        help="keep compiled programs, and what rounds cost, in the user's cache folder, and use what is there.",
    ),
]
"""Switch for keeping compiled programs on disk for the next process; every command that compiles takes it."""


def flag(name: str, value: object = None) -> str:
    """An option as the command line has it; where `value` is False, what turns it off."""
    return f"--{'no-' if value is False else ''}{name.replace('_', '-')}"


def told(options: object, *names: str) -> list[str]:
    """Options that are not as by default, of all or of the named ones, by their names on the command line."""
    usual = vars(type(options)())
    return [flag(name) for name in names or usual if vars(options)[name] != usual[name]]


def check_least(options: object, **least: int) -> None:
    """Raises a `ValueError` for an option, or one of its values, that is less than it may be; and for several that are none."""
    for name, smallest in least.items():
        given = getattr(options, name)
        values = given if isinstance(given, tuple) else (smallest if given is None else given,)
        if not values or min(values) < smallest:
            raise ValueError(f"expected {name} of at least {smallest}, found {', '.join(map(str, values)) or 'none'}")


def check_some(options: object, *names: str) -> None:
    """Raises a `ValueError` for an option of several values that has none, or has one twice."""
    for name in names:
        values = getattr(options, name)
        if not values or len(set(values)) < len(values):
            found = ", ".join(map(str, values)) or "none"
            raise ValueError(f"expected {'different ' if values else ''}{name}, found {found}")


def check_known(options: object, **known: Collection[str]) -> None:
    """Raises a `ValueError` for an option of several values that has none, or has one that is not known."""
    for name, names in known.items():
        values = getattr(options, name)
        unknown = [value for value in values if value not in names]
        if unknown or not values:
            raise ValueError(f"expected {name} of {', '.join(names)}, found {', '.join(unknown) or 'none'}")


def check_share(option: str, share: float | None) -> None:
    """Raises a `ValueError` for a share that is not from 0 to 1."""
    if share is not None and not 0 <= share <= 1:
        raise ValueError(f"expected {option} from 0 to 1, found {share:g}")


@option_class
class TemplateOptions:
    """Options of the chat template.

    Attributes:
        chat_template: file of a Jinja template that takes the place of the model's own.
        parse_special_in_content: take special tokens that a message or a tool spells, such as <|im_end|>, for tokens. Without
            this option they are text, so that no message can forge a turn.
    """

    chat_template: Path | None = None
    parse_special_in_content: Flag = False

    def __post_init__(self) -> None:
        if self.chat_template is not None and not self.chat_template.is_file():
            raise ValueError(f"--chat-template: expected a file, found {self.chat_template}")
