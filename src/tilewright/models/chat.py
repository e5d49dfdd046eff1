"""A model's chat template: how a conversation becomes the one text that the model reads.

Templates are Jinja programs that come with a checkpoint, so they run in a sandbox (whose known holes jinja2 3.1.6 closed). They
see what transformers gives its templates, so that they say the same here as there.
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
"""Names that a caller's values for a template may not have: they are given otherwise, or not at all."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MARK = "end-of-the-last-message"
"""Text put behind a content to find where it ends in a rendered conversation."""
HALVES = re.compile("[\ud800-\udfff]")
"""Halves of surrogate pairs: JSON within a message, such as a call's arguments, may have them alone; no text has."""


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template, made by `load`.

    Attributes:
        template: the compiled program.
        special_tokens: texts of the special tokens that it may name, such as `bos_token`; what the model lacks is absent.
        where: the file it came from.
        source: of the program.
        takes_tools: whether it reads `tools`.
        begins: text that every conversation begins with, once: the beginning-of-sequence token of GGUF files that ask for it.
        guards: special tokens that stay text where a message or a tool spells them, so that no message forges a turn.
        searched: texts that the program looks for in others, such as `</think>`.
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
        """Special tokens that stay text in an assistant's message: not those by which the program finds a thought in it."""
        return tuple(token for token in self.guards if not any(token in each for each in self.searched))

    @property
    def can_think(self) -> bool:
        """True for a template that is told whether the model thinks first."""
        return "enable_thinking" in self.source

    @staticmethod
    def load(folder: Path, override: Path | None = None, parse_special_in_content: bool = False) -> "ChatTemplate | None":
        """Loads the template of a model's folder: `chat_template.jinja`, else `chat_template` in `tokenizer_config.json`.

        Of several named templates it is the one named "default". None where the model has none, as base models do.

        Args:
            override: file of a template that takes the place of the model's.
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
        own = folder / FILE
        if override is not None or own.is_file():
            where = str(override or own)
            source = read_text(override or own)
        else:
            source = default_template(config.get("chat_template"), where)
        if source is None:
            return None
        made = ChatTemplate.compiled(source, where, special_tokens(config))
        # Of folders transformers adds no token to what a template writes; of GGUF files llama.cpp does.
        begins = made.special_tokens.get("bos_token", "") if file is not None and config["add_bos_token"] else ""
        return replace(made, begins=begins, guards=() if parse_special_in_content else tuple(special_texts(folder)))

    @staticmethod
    def compiled(source: str, where: str, special_tokens: Mapping[str, str] | None = None) -> "ChatTemplate":
        """A template from its source.

        Raises:
            ValueError: it does not compile.
        """
        try:
            made = environment()
            template = made.from_string(source)
            parsed = made.parse(source)
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

        The text holds the special tokens that the model wants. Encode it with `models.tokenizer.encode` and
        `add_special_tokens=False`, or a tokenizer that adds a beginning-of-sequence token adds a second one. What looks like
        a special token in a message has a mark, which `encode` takes out. Half of a surrogate pair becomes U+FFFD.

        Args:
            messages: each with at least `role` and `content`.
            add_generation_prompt: end with what begins an answer.
            continue_final_message: end within the last message, so that the model goes on with it.
            values: whatever else the template is to know, such as `enable_thinking`. Templates ask what is defined, so that
                nothing is by default.
            tools: functions that the model may call, each as OpenAI describes it.

        Raises:
            ValueError: the template refuses the conversation, or fails on it; a value has a reserved name; there is nothing to
                continue.
        """
        check_values(values or {})
        answers = {"assistant": self.answer_guards}
        guarded_messages = [self.guarded(dict(each), answers.get(each.get("role", ""), self.guards)) for each in messages]
        known = {**self.special_tokens, **self.guarded(values or {}, self.guards), "messages": guarded_messages}
        known |= {
            "tools": [self.guarded(dict(tool), self.guards) for tool in tools] if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self.rendered(known)
        if continue_final_message:
            *before, last = known["messages"]
            marked = self.rendered({**known, "messages": [*before, {**last, "content": last["content"].rstrip() + MARK}]})
            text = up_to(text, last["content"], marked)
        if not text.startswith(self.begins):
            text = self.begins + text
        return HALVES.sub(REPLACEMENT, text)

    def guarded(self, value: Any, guards: tuple[str, ...]) -> Any:
        """Marks what looks like one of some special tokens in all texts of a message, a tool or a value."""
        if isinstance(value, str):
            return guarded(value, guards)
        if isinstance(value, Mapping):
            return {self.guarded(name, guards): self.guarded(inner, guards) for name, inner in value.items()}
        return [self.guarded(inner, guards) for inner in value] if isinstance(value, list | tuple) else value

    def rendered(self, known: Mapping[str, Any]) -> str:
        """The template's output for these values. Raises a `ValueError` where it fails."""
        try:
            return self.template.render(known)
        except Exception as error:  # a template is a program: what it raises is its own affair
            raise ValueError(f"{self.where}: the chat template fails on this conversation: {error}") from error


def check_values(values: Mapping[str, Any]) -> None:
    """Raises a `ValueError` for a value that templates are given otherwise."""
    if taken := [name for name in RESERVED if name in values]:
        raise ValueError(f"expected values of a template, of which {taken[0]} is none")


def up_to(text: str, last: str, marked: str) -> str:
    """A rendered conversation up to the end of its last message's content, whose outer spaces a template may have taken away.

    Args:
        last: the content.
        marked: the conversation rendered with a mark behind the content, which says where it ends: what it reads may stand
            in the template's own words behind it, too. A template that writes something else before the mark does not tell.

    Raises:
        ValueError: the content is empty, or does not stand in the text.
    """
    bare = last.strip()
    before, mark, _ = marked.rpartition(MARK)
    told = bool(mark) and text.startswith(before)
    if not bare or not (told or bare in text):
        raise ValueError("expected a last message that stands in the rendered conversation, to be continued")
    end = len(before) if told else text.rfind(bare) + len(bare)
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
"""Methods of a text that look for another text."""


def searched_texts(parsed: nodes.Template) -> tuple[str, ...]:
    """Finds the texts that a program looks for in others, as in `content.split('</think>')` and `'</think>' in content`."""
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
    """The template's source in a configuration: a text, or a list of `{"name", "template"}`."""
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
    """The special tokens of a tokenizer's configuration, each a text or an object with its `content`."""
    tokens = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


class GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what an assistant says, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an attribute of the instance)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> NoReturn:
    """Raises the error by which a template refuses a conversation."""
    raise jinja2.TemplateError(message)


def strftime_now(format: str) -> str:
    """The local time; some templates tell the model the date."""
    return datetime.now().strftime(format)


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False):
    """JSON as a model should read it. Jinja's own filter is made for web pages and escapes `<`, `>`, `&` and quotes."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace(json.dumps(GUARD)[1:-1], GUARD) if ensure_ascii else text


def environment() -> ImmutableSandboxedEnvironment:
    """The sandbox: no access to Python's internals, no change to what a template is given."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = to_json
    made.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return made
