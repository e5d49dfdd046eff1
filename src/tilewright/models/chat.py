"""Chat templates of models, which render a conversation as the text that the model reads.

Templates are Jinja programs in a checkpoint, so they run in a sandbox (jinja2 3.1.6 closed its known holes). Templates get the
variables and functions that transformers gives them, so that they render the same text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tilewright.models import gguf
from tilewright.models.checkpoint import read_json
from tilewright.models.tokenizer import GUARD, REPLACEMENT, guarded, special_texts

CONFIG = "tokenizer_config.json"
FILE = "chat_template.jinja"
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
"""Names that extra values for a template may not have: other arguments set them, or they are not supported."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MARK = "end-of-the-last-message"
"""Text placed after a content to find its end in a rendered conversation."""
HALVES = re.compile("[\ud800-\udfff]")
"""Halves of surrogate pairs. JSON in a message, such as a call's arguments, may hold single ones; no text does."""


@dataclass(frozen=True)
class ChatTemplate:
    """Compiled template, made by `load`.

    Attributes:
        template: the compiled program.
        special_tokens: texts of the special tokens that it may use, such as `bos_token`; tokens that the model lacks are
            absent.
        where: its file.
        source: its source.
        takes_tools: it reads `tools`.
        begins: text with which every conversation begins, once: the beginning-of-sequence token, for GGUF files that require
            it.
        guards: special tokens that stay text if a message or a tool spells them, so that no message forges a turn.
        searched: texts that the program searches for in others, such as `</think>`.
    """

    template: jinja2.Template
    special_tokens: Mapping[str, str]
    where: str
    source: str = ""
    takes_tools: bool = False
    begins: str = ""
    guards: tuple[str, ...] = ()
    searched: tuple[str, ...] = ()

    @cached_property
    def answer_guards(self) -> tuple[str, ...]:
        """Special tokens that stay text in an assistant's message: all but those by which the program finds a thought."""
        return tuple(token for token in self.guards if not any(token in each for each in self.searched))

    @property
    def can_think(self) -> bool:
        """True if the template has a switch for thinking."""
        return "enable_thinking" in self.source

    @staticmethod
    def load(folder: Path, override: Path | None = None, parse_special_in_content: bool = False) -> "ChatTemplate | None":
        """Loads the template of a model's folder: `chat_template.jinja`, else `chat_template` in `tokenizer_config.json`.

        Of several named templates, the one named "default" is used. None if the model has none, as base models do.

        Args:
            override: file of a template that replaces the model's.
            parse_special_in_content: take special tokens in messages and tools for tokens, not for text.

        Raises:
            ValueError: a file is malformed, or the template does not compile.
        """
        if (file := gguf.gguf_file(folder)) is not None:
            where = str(file)
            config = gguf.open_gguf(file).tokenizer_config
        else:
            where = str(folder / CONFIG)
            config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
        file_of_template = override or folder / FILE
        if override is not None or file_of_template.is_file():
            where = str(file_of_template)
            source = read_text(file_of_template)
        else:
            source = default_template(config.get("chat_template"), where)
        if source is None:
            return None
        template = ChatTemplate.compiled(source, where, special_tokens(config))
        # llama.cpp adds the token to the text of a template; transformers adds none.
        begins = template.special_tokens.get("bos_token", "") if file is not None and config["add_bos_token"] else ""
        return replace(template, begins=begins, guards=() if parse_special_in_content else tuple(special_texts(folder)))

    @staticmethod
    def compiled(source: str, where: str, special_tokens: Mapping[str, str] | None = None) -> "ChatTemplate":
        """Compiles a template.

        Raises:
            ValueError: the template does not compile.
        """
        try:
            sandbox = environment()
            template = sandbox.from_string(source)
            parsed = sandbox.parse(source)
            reads = meta.find_undeclared_variables(parsed)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{where}: the chat template does not compile: line {error.lineno}: {error.message}") from error
        return ChatTemplate(template, special_tokens or {}, where, source, "tools" in reads, searched=searched_texts(parsed))

    @staticmethod
    def refusing(why: str) -> "ChatTemplate":
        """Makes a template that refuses every conversation, for a server whose model's template cannot be used."""
        return ChatTemplate.compiled(f"{{{{ raise_exception({json.dumps(why)}) }}}}", "the server")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        values: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Renders a conversation as text.

        The text includes the model's special tokens. Encode it with `models.tokenizer.encode` and `add_special_tokens=False`;
        otherwise a tokenizer that adds a beginning-of-sequence token adds a second one. Text in a message that looks like a
        special token has a mark, which `encode` removes. Half of a surrogate pair becomes U+FFFD.

        Args:
            messages: each with at least `role` and `content`.
            add_generation_prompt: append the beginning of an answer.
            continue_final_message: end within the last message, so that the model continues it.
            values: other variables of the template, such as `enable_thinking`. There are none by default, because templates
                test whether a variable is defined.
            tools: functions that the model may call, each in OpenAI's format.

        Raises:
            ValueError: the template refuses the conversation, or fails on it; a value has a reserved name; there is nothing to
                continue.
        """
        check_values(values or {})
        answers = {"assistant": self.answer_guards}
        guarded_messages = [self.guarded(dict(each), answers.get(each.get("role", ""), self.guards)) for each in messages]
        variables = {**self.special_tokens, **self.guarded(values or {}, self.guards), "messages": guarded_messages}
        variables |= {
            "tools": [self.guarded(dict(tool), self.guards) for tool in tools] if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self.rendered(variables)
        if continue_final_message:
            *before, last = variables["messages"]
            marked = self.rendered({**variables, "messages": [*before, {**last, "content": last["content"].rstrip() + MARK}]})
            text = up_to(text, last["content"], marked)
        if not text.startswith(self.begins):
            text = self.begins + text
        return HALVES.sub(REPLACEMENT, text)

    def guarded(self, value: Any, guards: tuple[str, ...]) -> Any:
        """Marks text that looks like one of some special tokens, in all texts of a message, a tool or a value."""
        if isinstance(value, str):
            return guarded(value, guards)
        if isinstance(value, Mapping):
            return {self.guarded(name, guards): self.guarded(inner, guards) for name, inner in value.items()}
        return [self.guarded(inner, guards) for inner in value] if isinstance(value, list | tuple) else value

    def rendered(self, variables: Mapping[str, Any]) -> str:
        """Returns the template's output for these variables. Raises a `ValueError` if the template fails."""
        try:
            return self.template.render(variables)
        except Exception as error:  # a template is a program, and may raise anything
            raise ValueError(f"{self.where}: the chat template fails on this conversation: {error}") from error


def check_values(values: Mapping[str, Any]) -> None:
    """Raises a `ValueError` for an extra value with a reserved name."""
    if reserved := [name for name in RESERVED if name in values]:
        raise ValueError(f"expected other names for values of a template, found the reserved {reserved[0]}")


def up_to(text: str, last: str, marked: str) -> str:
    """Cuts a rendered conversation at the end of its last message's content, whose outer spaces a template may strip.

    Args:
        last: the content.
        marked: the conversation rendered with a mark after the content, which shows the end even if the content also occurs in
            the text after it. If the template writes something else before the mark, the last occurrence counts.

    Raises:
        ValueError: the content is empty, or is not in the text.
    """
    bare = last.strip()
    before, mark, _ = marked.rpartition(MARK)
    has_end = bool(mark) and text.startswith(before)
    if not bare or not (has_end or bare in text):
        raise ValueError("expected the last message in the rendered conversation, to continue it")
    end = len(before) if has_end else text.rfind(bare) + len(bare)
    spaces = last[len(last.rstrip()) :]
    return text[: end + len(spaces)] if text.startswith(spaces, end) else text[:end]


SEARCHES = (
    "split",
    "rsplit",
    "partition",
    "rpartition",
    "startswith",
    "endswith",
    "find",
    "rfind",
    "index",
    "replace",
    "count",
)
"""Methods of a text that search for another text."""


def searched_texts(parsed: nodes.Template) -> tuple[str, ...]:
    """Finds the texts that a program searches for in others, as in `content.split('</think>')` and `'</think>' in content`."""
    places = [[each.expr] for each in parsed.find_all(nodes.Compare) if each.ops[0].op in ("in", "notin")]
    calls = (
        each for each in parsed.find_all(nodes.Call) if isinstance(each.node, nodes.Getattr) and each.node.attr in SEARCHES
    )
    places += [each.args for each in calls]
    return tuple(
        {
            part.value: None
            for parts in places
            for part in parts
            if isinstance(part, nodes.Const) and isinstance(part.value, str)
        }
    )


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text") from None


def default_template(value: object, where: str) -> str | None:
    """Returns the template in a configuration: a text, or a list of `{"name", "template"}`."""
    if value is None or isinstance(value, str):
        return value
    named: dict[object, object] = {}
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        named = {one.get("name"): one.get("template") for one in value}
    chosen = named.get("default")
    if not isinstance(chosen, str):
        found = f"those named {', '.join(map(str, named))}" if named else repr(value)
        raise ValueError(f'{where}: expected chat_template to be a text, or a list with one named "default", found {found}')
    return chosen


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens of a tokenizer's configuration, each a text or an object with its `content`."""
    tokens = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


class GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the text of an assistant for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an attribute of the instance)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> NoReturn:
    """Raises the error by which a template refuses a conversation."""
    raise jinja2.TemplateError(message)


def strftime_now(format: str) -> str:
    """Returns the local time; some templates include the date."""
    return datetime.now().strftime(format)


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False):
    """Returns JSON as models read it. Jinja's own filter is for web pages and escapes `<`, `>`, `&` and quotes."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace(json.dumps(GUARD)[1:-1], GUARD) if ensure_ascii else text


def environment() -> ImmutableSandboxedEnvironment:
    """Returns the sandbox, without access to Python's internals and without changes to the variables."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = to_json
    sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return sandbox
