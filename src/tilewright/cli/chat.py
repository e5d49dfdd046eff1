"""`tilewright chat`: a conversation in the terminal, over the engine without HTTP."""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

from rich.console import Console

from tilewright.bench.speculative import encoded
from tilewright.cli.common import MEMORY_FRACTION, AdaptedModelOptions, json_object, named_model, stopped_by_interrupt
from tilewright.cli.generate import SamplingOptions
from tilewright.cli.options import TemplateOptions, option_class
from tilewright.cli.outputs import progress_console
from tilewright.llm.chosen import chosen_figures
from tilewright.llm.language_model import LanguageModel
from tilewright.models.chat import ChatTemplate, check_values
from tilewright.report import terminal
from tilewright.runtime.engine import Engine
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.output import Result
from tilewright.runtime.request import GenerateRequest, RequestHandle, RequestOutput
from tilewright.runtime.sampling import Sampling
from tilewright.server.defaults import model_defaults

HELP = """\
/drop           forget the oldest turns to make room; a message that did not fit is then answered
/reset          forget all turns
/system TEXT    what the model is told before the first turn; without a text, nothing
/help           this
/quit           end, as the end of the input does
Ctrl-C stops an answer and keeps what came of it."""


ANSWER_DEFAULTS: dict[str, Any] = {**vars(SamplingOptions()), "max_new_tokens": 512}
"""Sampling values where neither the command line nor the model gives one: the most likely tokens, as `generate`."""


@option_class
class AnswerOptions(SamplingOptions):
    """Options by which answers are drawn.

    Attributes:
        max_new_tokens: the length limit of each answer; by default the model's own, else 512.
        temperature: 0 takes the most likely token; by default the model's own (generation_config.json, or what comes with
            smollm2-135m), else 0. So are the next three, and --repetition-penalty.
        top_p: keep the smallest set of most likely tokens with this much probability.
        top_k: keep this many most likely tokens; 0 keeps all.
        min_p: keep tokens at least this share as likely as the most likely one; 0 keeps all.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def sampling_of(self, folder: Path) -> Sampling:
        """Sampling parameters of answers of the model in a folder or file. Raises a `ValueError` for values out of range."""
        defaults = {**ANSWER_DEFAULTS, **model_defaults(folder)}
        return self.sampling({**defaults, "top_k": max(defaults["top_k"], 0)})  # -1 keeps all in `generation_config.json`


@dataclass
class Conversation:
    """Turns, and the text that the model reads of them.

    Attributes:
        template: None for a model that has none: it continues the text of all turns.
        turns: pairs of what was said and what was answered.
        values: what the template is told besides.
    """

    template: ChatTemplate | None
    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)
    values: Mapping[str, Any] = field(default_factory=dict)

    def text(self, said: str) -> str:
        """Prompt of the model when `said` is next. Raises a `ValueError` where the template refuses the conversation."""
        if self.template is None:
            before = [self.system] if self.system else []
            return "\n\n".join([*before, *(asked + answer for asked, answer in self.turns), said])
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answer in self.turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        return self.template.render([*messages, {"role": "user", "content": said}], values=self.values)


class ChatSession:
    """A conversation with an engine that has begun.

    Args:
        lm: the engine's model, with the adapter of all answers, if any.
        console: where answers go; whatever else there is to say goes to standard error where answers go to a file or a pipe.
    """

    def __init__(self, engine: Engine, lm: LanguageModel, conversation: Conversation, sampling: Sampling, console: Console):
        self.engine = engine
        self.lm = lm
        self.conversation = conversation
        self.sampling = sampling
        self.console = console
        self.refused = ""  # the message that did not fit, which `/drop` makes room for
        self.notes = console if console.is_terminal else Console(stderr=True, highlight=False, emoji=False)

    def note(self, text: str, style: str = "dim") -> None:
        self.notes.print(text, style=style, markup=False, soft_wrap=True)

    def run(self) -> None:
        """Answers line after line, until the input ends or says so."""
        for line in self.lines():
            if line == "/quit":
                return
            if re.match(r"/\w", line):
                self.command(*line.split(maxsplit=1))
            elif line.strip():
                self.say(line)

    def lines(self) -> Iterator[str]:
        """Lines that the user enters. Raises a `ValueError` where standard input is not UTF-8."""
        if not (sys.stdin.isatty() and self.console.is_terminal):
            cast(TextIOWrapper, sys.stdin).reconfigure(encoding="utf-8", errors="strict")  # whatever the locale says
            try:
                yield from (line.rstrip("\n") for line in sys.stdin)
            except UnicodeDecodeError as error:
                raise ValueError(f"standard input is not UTF-8: byte {error.object[error.start]:#04x}") from None
            return
        with suppress(ImportError):
            import_module("readline")  # its import gives `input` a history and keys to edit with
        while True:
            try:
                line = input("> ")
            except EOFError:
                self.console.print()
                return
            except KeyboardInterrupt:
                self.console.print()
                self.note("/quit ends")
                continue
            yield line

    def command(self, name: str, text: str = "") -> None:
        if name == "/drop":
            try:
                self.drop()
            except ValueError as error:  # the template refuses what is left
                self.note(str(error), "red")
        elif name == "/reset":
            self.conversation.turns.clear()
            self.refused = ""
            self.note("all turns are forgotten")
        elif name == "/system":
            self.conversation.system = text
            self.note("the model is told this before the first turn" if text else "there is no system prompt")
        elif name == "/help":
            self.note(HELP)
        else:
            self.note(f"there is no {name}; /help lists what there is, and a space before it makes it a turn", "red")

    def drop(self) -> None:
        """Forgets as few of the oldest turns as leave room for an answer, and answers the message that did not fit."""
        turns = self.conversation.turns
        said = self.refused
        room = min(self.sampling.max_new_tokens, self.engine.context // 4)
        if not turns:
            self.note("there is no turn to forget")
            return
        for count in range(0 if said else 1, len(turns) + 1):
            kept = replace(self.conversation, turns=turns[count:])
            text = kept.text(said)
            if not text or len(encoded(self.lm, text, kept.template)) <= self.engine.context - room:
                break
        else:
            self.note(
                "nothing is forgotten: there is no room for an answer even without all turns; say something shorter", "red"
            )
            return
        shown = ", ".join(f'"{shortened(asked)}"' for asked, _ in turns[:count][:3]) + (", ..." if count > 3 else "")
        self.note(f"forgotten, the oldest first: {counted(count)} ({shown}); {counted(len(turns) - count)} kept")
        del turns[:count]
        if said:
            self.say(said)

    def say(self, said: str) -> None:
        """Answers a turn. One that cannot be answered leaves the conversation as it was."""
        self.refused = ""
        try:
            handle, told = self.submit(said)
        except ValueError as error:
            self.note(str(error), "red")
            return
        with stopped_by_interrupt(lambda: self.engine.cancel(handle)):
            last = self.show(handle, told)
        result = result_of(handle)
        if last.end != "error" and (result.text or last.end != "cancelled"):
            self.conversation.turns.append((said, result.text))
        self.tell(handle, last)

    def submit(self, said: str) -> tuple[RequestHandle, SimpleQueue[RequestOutput]]:
        """Asks the engine for an answer.

        Raises:
            ValueError: the conversation does not fit, or the template refuses it.
        """
        tokens = encoded(self.lm, self.conversation.text(said), self.conversation.template)
        context = self.engine.context
        if len(tokens) >= context:
            found = f"with this turn the conversation has {len(tokens)} tokens, and the context {context}: the turn is left out"
            if not self.conversation.turns:
                raise ValueError(f"{found}; say something shorter")
            self.refused = said
            raise ValueError(f"{found}; /drop forgets the oldest turns and answers it, /reset forgets all turns")
        sampling = replace(self.sampling, max_new_tokens=min(self.sampling.max_new_tokens, context - len(tokens)))
        told = SimpleQueue[RequestOutput]()
        return self.engine.submit(GenerateRequest(tokens, sampling, lora=self.lm.default_adapter), told.put), told

    def show(self, handle: RequestHandle, told: SimpleQueue[RequestOutput]) -> RequestOutput:
        """Shows tokens as they come. Returns the update that ends them."""
        shown = 0
        last = RequestOutput()
        while last.end is None:
            last = told.get()
            for token in last.tokens:
                self.put(token.text, token.drafted)
                shown += len(token.text)
            if last.end is not None:
                self.put(result_of(handle).text[shown:], False)  # what was held back, if the answer was stopped
            self.console.file.flush()
        self.console.print()
        return last

    def put(self, text: str, drafted: bool) -> None:
        """A token in the colour of its source; to a file or a pipe as it is."""
        if self.console.is_terminal:
            self.console.print(terminal.piece_text(text, drafted), end="", soft_wrap=True)
        else:
            self.console.file.write(text)

    def tell(self, handle: RequestHandle, last: RequestOutput) -> None:
        """Says what the answer cost, and why it ended where that is not plain to see."""
        result = result_of(handle)
        times = handle.times
        if result.tokens:
            rounds = len(result.acceptance_lengths) if self.lm.drafter is not None else 0
            chosen = chosen_figures(self.lm, [result]) or {"choices": []}
            figures = terminal.answer_line(len(result.tokens), times.ended - times.asked, rounds, chosen)
            drawn = result.seed is not None and self.sampling.seed is None
            self.note(f"{figures} · seed {result.seed}" if drawn else figures)
        if last.end == "cancelled":
            self.note("stopped" if result.text else "stopped; the turn is left out")
        elif last.end == "length" and result.prompt_tokens + len(result.tokens) >= self.engine.context:
            full = f"the context of {self.engine.context} tokens is full"
            self.note(f"{full}: /drop forgets the oldest turns, /reset all of them", "red")
        elif last.end == "length":
            self.note(f"ended at --max-new-tokens {self.sampling.max_new_tokens}")
        elif last.end == "error":
            self.note(f"{last.error}; the turn is left out", "red")


def counted(turns: int) -> str:
    return f"{turns} turn{'' if turns == 1 else 's'}"


def shortened(text: str, most: int = 40) -> str:
    """Text on one line, cut to its beginning."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}..."


def sampling_text(sampling: Sampling) -> str:
    """Temperature, and whatever else differs from taking all tokens as they come."""
    usual = Sampling()
    names = ("top_p", "top_k", "min_p", "repetition_penalty")
    others = [name for name in names if getattr(sampling, name) != getattr(usual, name)]
    return ", ".join(f"{name} {getattr(sampling, name):g}" for name in ("temperature", *others))


def result_of(handle: RequestHandle) -> Result:
    """All that came of a request that has ended."""
    assert handle.result is not None, "an update that ends a request comes after its result"
    return handle.result


def chat(
    model: str | None = None,
    /,
    *,
    system: str = "",
    context: int | None = None,
    memory_fraction: float = MEMORY_FRACTION,
    chat_template_kwargs: str = "{}",
    models: AdaptedModelOptions = AdaptedModelOptions(),
    options: AnswerOptions = AnswerOptions(),
    templates: TemplateOptions = TemplateOptions(),
) -> None:
    """Chats with a model in the terminal.

    Args:
        model: a folder, a GGUF file, a Hugging Face id, "smollm2-135m" (the default) or "demo", as --model.
        system: what the model is told before the first turn.
        context: the most tokens of a conversation; by default the model's own context, or what there is memory for.
        memory_fraction: the share of the memory that is free once the weights are loaded that the conversation may take.
        chat_template_kwargs: a JSON object of what the chat template is told, as '{"enable_thinking": false}' for models that
            think unless they are told not to.
    """
    models = named_model(model, models)
    options.sampling(ANSWER_DEFAULTS)  # refuses what is out of range before anything is fetched
    values = json_object("--chat-template-kwargs", chat_template_kwargs)
    check_values(values)
    engine_options = EngineOptions(slots=1, context=context, memory_fraction=memory_fraction)
    console = Console(highlight=False, emoji=False)
    talk = Conversation(models.chat_template(console, templates), system, values=values)
    sampling = options.sampling_of(models.folder(console))
    lm = models.load(console)
    engine = lm.engine(engine_options)
    shown = ChatSession(engine, lm, talk, sampling, console)
    shown.note(engine.sizes_line)
    engine.warm(progress_console(shown.notes))
    engine.start()
    try:
        greet(shown, models)
        shown.run()
    finally:
        engine.stop()


def greet(shown: ChatSession, models: AdaptedModelOptions) -> None:
    adapter = "" if models.lora is None else f" with the adapter {models.lora}"
    shown.note(f"{models.model}{adapter}, {models.drafter_text}, context {shown.engine.context}; /help lists the commands")
    shown.note(f"{sampling_text(shown.sampling)}; answers of at most {shown.sampling.max_new_tokens} tokens")
    if shown.conversation.template is None:
        shown.note(f"{models.model} has no chat template: it continues the text of all turns, one after another")
    if shown.lm.drafter is not None and shown.console.is_terminal:
        shown.console.print(terminal.legend())
