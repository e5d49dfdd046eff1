"""Declarations of command-line options: their groups, classes and types, and checks of their ranges."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from inspect import cleandoc
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints, overload

from cyclopts import Group, Parameter, Token

from tilewright.kernels.select import Kernels

C = TypeVar("C")
T = TypeVar("T")


COMMON = Group("Common options", sort_key=1)
"""Options that users set every day, first in the help of a command."""
MODEL = Group("Model", sort_key=2)
SPECULATION = Group("Speculative decoding", sort_key=3)
SAMPLING = Group("Sampling", sort_key=4)
DIFFUSION = Group("Diffusion models", sort_key=5)
DEVICES = Group("Several devices", sort_key=6)
MEMORY = Group("Memory and compilation", sort_key=7)
HTTP = Group("HTTP", sort_key=8)
OUTPUT = Group("Output", sort_key=10)


@overload
def option_class(cls: type[C], /) -> type[C]: ...
@overload
def option_class(*, group: Group) -> Callable[[type[C]], type[C]]: ...
@dataclass_transform(frozen_default=True)
def option_class(cls: type[C] | None = None, /, *, group: Group | None = None) -> Any:
    """Makes a class a frozen dataclass whose fields are command-line options, named as the fields.

    Args:
        group: panel of the help that shows the options; a field with a `Parameter(group=...)` of its own overrides it.
    """
    if cls is None:
        return lambda decorated: make_option_class(decorated, group)
    return make_option_class(cls, group)


def make_option_class(cls: type[C], group: Group | None) -> type[C]:
    parameter = Parameter(name="*") if group is None else Parameter(name="*", group=group)
    return parameter(dataclass(frozen=True)(cls))


def comma_separated(type_: object, tokens: Sequence[Token]) -> tuple[str, ...]:
    """Splits words at commas and drops repeated words."""
    return tuple(dict.fromkeys(text for token in tokens for text in token.value.split(",") if text))


def comma_separated_numbers(type_: object, tokens: Sequence[Token]) -> tuple[int, ...]:
    """Splits whole numbers at commas. Raises a `ValueError` for a word that is no whole number."""
    found = comma_separated(type_, tokens)
    for text in found:
        if not text.isdecimal():
            raise ValueError(f"expected whole numbers separated by commas, found {text!r}")
    return tuple(dict.fromkeys(map(int, found)))


def joined(values: Sequence[object] | None) -> str:
    """Formats several default values as a user writes them."""
    return ",".join(map(str, values)) if values else "none"


SEVERAL = Parameter(consume_multiple=True, negative=(), show_default=joined)
"""Declaration of an option that takes several values after its name."""
WORDS = Parameter(consume_multiple=True, negative=(), converter=comma_separated, show_default=joined)
"""Declaration of an option that takes several words, separated by blanks or commas."""

Several = Annotated[tuple[T, ...], SEVERAL]
"""Several values after the option's name."""
Words = Annotated[tuple[str, ...], WORDS]
"""Several words, separated by blanks or commas."""
Numbers = Annotated[
    tuple[int, ...], Parameter(consume_multiple=True, negative=(), converter=comma_separated_numbers, show_default=joined)
]
"""Several whole numbers, separated by blanks or commas."""
Repeated = Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)]
"""An option that may be repeated."""
Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
"""A switch that is off by default."""

Prompt = Annotated[str, Parameter(allow_leading_hyphen=True)]
"""A prompt on the command line; `gather_prompts` reports unknown options among the prompts."""
PromptFile = Annotated[
    Path | None,
    Parameter(
        alias="-f",
        group=COMMON,
        help="a JSONL file of prompts, in the formats of `bench speculative`; of a conversation the first turn is used.",
    ),
]
Chat = Annotated[Flag, Parameter(group=COMMON, help="format the prompts as user messages, with the model's chat template.")]
KernelChoice = Annotated[
    Kernels,
    Parameter(help='"auto" runs Tilewright\'s kernels where the chip supports them, "xla" runs XLA alone.'),
]
Repetitions = Annotated[int, Parameter(help="number of timed runs.")]
KINDS: dict[object, str] = {int: "INTEGER", float: "NUMBER", bool: "true|false", str: "TEXT", Path: "PATH"}
BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def setting_types(cls: type) -> dict[str, Any]:
    """Returns the type of each field of a settings class; of `X | None` the type is X."""
    hints = get_type_hints(cls)
    members = {name: [member for member in get_args(hint) if member is not NoneType] for name, hint in hints.items()}
    return {name: members[name][0] if NoneType in get_args(hint) else hint for name, hint in hints.items()}


def value_kind(type_: Any) -> str:
    """Placeholder of a setting's value in help texts and errors, such as NUMBER, dense|sparse or INTEGER,..."""
    if get_origin(type_) is tuple:
        return f"{value_kind(get_args(type_)[0])},..."
    return "|".join(map(str, get_args(type_))) if get_origin(type_) is Literal else KINDS[type_]


def parse_value(type_: Any, text: str) -> Any:
    """Converts the text of a setting. Raises a `ValueError` or a `KeyError` for a text that the type does not allow."""
    if get_origin(type_) is tuple:
        return tuple(parse_value(get_args(type_)[0], part) for part in text.split(","))
    if get_origin(type_) is Literal:
        return {str(choice): choice for choice in get_args(type_)}[text]
    if type_ is bool:
        return BOOLEANS[text.lower()]
    if not text:
        raise ValueError("expected a value, found none")
    return type_(text)


def parse_settings(cls: type[T], type_: object, tokens: Sequence[Token]) -> T:
    """Fills a dataclass from `KEY=VALUE,...`, where a tuple takes several values: `modes=dense,sparse,tau=0.9`.

    Args:
        type_: annotation of the option, which cyclopts passes to every converter.

    Raises:
        ValueError: a key is unknown or repeated, or a value does not have the type of its field.
    """
    types = setting_types(cls)
    texts: dict[str, str] = {}
    key = ""
    for part in tokens[0].value.split(","):
        if "=" not in part and key and get_origin(types[key]) is tuple:
            texts[key] += f",{part}"
            continue
        key, equals, text = part.partition("=")
        if key not in types:
            near = get_close_matches(key, types, 1)
            suggestion = f". Did you mean {near[0]}?" if near else ""
            raise ValueError(f"expected KEY=VALUE with a key among {', '.join(types)}, found {part!r}{suggestion}")
        if key in texts or not equals:
            raise ValueError(f"expected {key}={value_kind(types[key])} once, found {tokens[0].value!r}")
        texts[key] = text
    values = {}
    for key, text in texts.items():
        try:
            values[key] = parse_value(types[key], text)
        except (ValueError, KeyError):
            raise ValueError(f"expected {key}={value_kind(types[key])}, found {key}={text}") from None
    return cls(**values)


def settings(cls: type, about: str) -> Parameter:
    """Declares an option `--name KEY=VALUE,...` that fills a frozen dataclass, whose fields are the keys.

    Usage: `denoising: Annotated[Denoise, settings(Denoise, "denoising by a diffusion model")] = Denoise()`. Fields have the
    types int, float, bool, str, Path, Literal, tuples of those, or `X | None`, and a default. The help lists each field with
    its text under "Attributes:" in the docstring of the class or of its bases. An error of `__post_init__` is reported with
    the name of the option.

    Args:
        about: first sentence of the help, without a full stop.
    """
    sections = [(base.__doc__ or "").partition("Attributes:")[2] for base in reversed(cls.__mro__)]
    texts = dict(
        found for each in sections for found in re.findall(r"^(\w+): (.*(?:\n +.*)*)", cleandoc(f"\n{each}"), re.MULTILINE)
    )
    keys = [f"- {key}={value_kind(type_)}: {' '.join(texts.get(key, '').split())}" for key, type_ in setting_types(cls).items()]
    return Parameter(
        converter=partial(parse_settings, cls),
        accepts_keys=False,
        n_tokens=1,
        negative=(),
        show_default=False,
        metavar="KEY=VALUE,...",
        help="\n".join((f"{about}:\n", *keys)),
    )


def flag(name: str, value: object = None) -> str:
    """Returns the name of an option on the command line; for the value False, of the switch that turns it off."""
    return f"--{'no-' if value is False else ''}{name.replace('_', '-')}"


def changed_options(options: object, *names: str) -> list[str]:
    """Returns the command-line names of options that differ from their defaults, of all options or of the named ones."""
    defaults = vars(type(options)())
    return [flag(name) for name in names or defaults if vars(options)[name] != defaults[name]]


def check_least(options: object, **least: int) -> None:
    """Raises a `ValueError` for an option below its minimum, and for an option of several values that has none."""
    for name, smallest in least.items():
        value = getattr(options, name)
        values = value if isinstance(value, tuple) else (smallest if value is None else value,)
        if not values or min(values) < smallest:
            raise ValueError(f"expected {name} of at least {smallest}, found {', '.join(map(str, values)) or 'none'}")


def check_some(options: object, *names: str) -> None:
    """Raises a `ValueError` for an option of several values that has none or repeats one."""
    for name in names:
        values = getattr(options, name)
        if not values or len(set(values)) < len(values):
            found = ", ".join(map(str, values)) or "none"
            raise ValueError(f"expected {'different ' if values else ''}{name}, found {found}")


def check_choices(options: object, **choices: Collection[str]) -> None:
    """Raises a `ValueError` for an option of several values that has none or an unknown one."""
    for name, allowed in choices.items():
        values = getattr(options, name)
        unknown = [value for value in values if value not in allowed]
        if unknown or not values:
            raise ValueError(f"expected {name} among {', '.join(allowed)}, found {', '.join(unknown) or 'none'}")


def check_share(option: str, share: float | None) -> None:
    """Raises a `ValueError` for a share outside 0 to 1."""
    if share is not None and not 0 <= share <= 1:
        raise ValueError(f"expected {option} from 0 to 1, found {share:g}")


@option_class(group=MODEL)
class TemplateOptions:
    """Options of the chat template.

    Attributes:
        chat_template: a Jinja file to use in place of the model's chat template.
    """

    chat_template: Path | None = None

    def __post_init__(self) -> None:
        if self.chat_template is not None and not self.chat_template.is_file():
            raise ValueError(f"--chat-template: expected a file, found {self.chat_template}")
