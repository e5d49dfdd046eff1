"""`tilewright chat`: a conversation in the terminal, with an engine in this process."""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any, cast

from cyclopts import Parameter
from rich.console import Console

from tilewright.bench.speculative import encoded
from tilewright.cli.common import (
    AdaptedModelOptions,
    MemoryOptions,
    decoding_text,
    given,
    json_object,
    named_model,
    stopped_by_interrupt,
)
from tilewright.cli.diffusion_options import DenoisingOption, DenoisingSettings, diffusion_model_options, is_diffusion
from tilewright.cli.generate import SamplingOptions
from tilewright.cli.options import COMMON, MODEL, SAMPLING, Flag, TemplateOptions, option_class
from tilewright.cli.outputs import progress_console
from tilewright.diffusion.engine_options import DENOISING, DiffusionEngineOptions
from tilewright.diffusion.options import Denoising
from tilewright.diffusion.request import request_of
from tilewright.llm.chosen import chosen_figures
from tilewright.llm.diffusion_model import DiffusionModel
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
/drop           remove the oldest turns to make room, then answer the message that did not fit
/reset          remove all turns
/system TEXT    set the system prompt; without a text, remove it
/help           list the commands
/quit           end the conversation, as Ctrl-D does
Ctrl-C stops an answer and keeps its text so far."""


ANSWER_DEFAULTS: dict[str, Any] = {"max_new_tokens": 512, "temperature": 0.0, "top_p": 1.0, "top_k": 0}
"""Sampling values that neither the command line nor the model sets."""


@option_class(group=SAMPLING)
class AnswerOptions(SamplingOptions):
    """Options of sampling answers.

    Attributes:
        max_new_tokens: maximum number of tokens of each answer. By default the model's value, else 512.
        temperature: 0 chooses the most likely token. By default the model's value (generation_config.json, or the packaged
            value of smollm2-135m), else 0.
        top_p: sample from the smallest set of most likely tokens with this total probability. By default the model's value.
        top_k: sample from this many most likely tokens; 0 for all. By default the model's value.
    """

    max_new_tokens: Annotated[int | None, Parameter(alias="-n", group=COMMON)] = None
    temperature: Annotated[float | None, Parameter(group=COMMON)] = None
    top_p: float | None = None
    top_k: int | None = None

    def sampling_for(self, folder: Path) -> Sampling:
        """Makes the sampling parameters for the model in a folder or file. Raises a `ValueError` for values out of range."""
        defaults = {**ANSWER_DEFAULTS, **model_defaults(folder)}
        return self.parameters({**defaults, "top_k": max(defaults["top_k"], 0)})  # `generation_config.json` has -1 for all


@dataclass
class Conversation:
    """Turns of a conversation, and the prompt that the model reads.

    Attributes:
        template: None for a model without a chat template: the prompt is the text of all turns.
        turns: pairs of a message and its answer.
        values: further variables of the template.
    """

    template: ChatTemplate | None
    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)
    values: Mapping[str, Any] = field(default_factory=dict)

    def text(self, message: str) -> str:
        """Returns the prompt with `message` as the next turn. Raises a `ValueError` if the template rejects the turns."""
        if self.template is None:
            before = [self.system] if self.system else []
            return "\n\n".join([*before, *(question + answer for question, answer in self.turns), message])
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for question, answer in self.turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return self.template.render([*messages, {"role": "user", "content": message}], values=self.values)


class ChatSession:
    """A conversation with a started engine.

    Args:
        lm: the engine's model, with the adapter of all answers, if any.
        denoising: denoising of answers by a diffusion model.
        console: receives the answers. Other lines go to standard error if the answers go to a file or a pipe.
    """

    def __init__(
        self,
        engine: Engine,
        lm: LanguageModel | DiffusionModel,
        conversation: Conversation,
        sampling: Sampling,
        console: Console,
        denoising: Denoising = DENOISING,
    ):
        self.engine = engine
        self.denoising = denoising
        self.lm = lm
        self.conversation = conversation
        self.sampling = sampling
        self.console = console
        self.refused = ""  # the message that did not fit; `/drop` makes room and answers it
        self.notes = console if console.is_terminal else Console(stderr=True, highlight=False, emoji=False)

    def note(self, text: str, style: str = "dim") -> None:
        self.notes.print(text, style=style, markup=False, soft_wrap=True)

    def run(self) -> None:
        """Answers each line until the input ends or `/quit`."""
        for line in self.lines():
            if line == "/quit":
                return
            if re.match(r"/\w", line):
                self.command(*line.split(maxsplit=1))
            elif line.strip():
                self.answer(line)

    def lines(self) -> Iterator[str]:
        """Yields the lines that the user enters. Raises a `ValueError` if standard input is not UTF-8."""
        if not (sys.stdin.isatty() and self.console.is_terminal):
            cast(TextIOWrapper, sys.stdin).reconfigure(encoding="utf-8", errors="strict")  # in every locale
            try:
                yield from (line.rstrip("\n") for line in sys.stdin)
            except UnicodeDecodeError as error:
                raise ValueError(f"standard input is not UTF-8: byte {error.object[error.start]:#04x}") from None
            return
        with suppress(ImportError):
            import_module("readline")  # adds a history and editing keys to `input`
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
            except ValueError as error:  # the template rejects the remaining turns
                self.note(str(error), "red")
        elif name == "/reset":
            self.conversation.turns.clear()
            self.refused = ""
            self.note("removed all turns")
        elif name == "/system":
            self.conversation.system = text
            self.note("system prompt set" if text else "system prompt removed")
        elif name == "/help":
            self.note(HELP)
        else:
            self.note(
                f"unknown command {name}; /help lists the commands. To send it as a message, put a space before it", "red"
            )

    def drop(self) -> None:
        """Removes the fewest oldest turns that leave room for an answer, then answers the message that did not fit."""
        turns = self.conversation.turns
        message = self.refused
        room = min(self.sampling.max_new_tokens, self.engine.context // 4)
        if not turns:
            self.note("there are no turns to remove")
            return
        for count in range(0 if message else 1, len(turns) + 1):
            shorter = replace(self.conversation, turns=turns[count:])
            text = shorter.text(message)
            if not text or len(encoded(self.lm, text, shorter.template)) <= self.engine.context - room:
                break
        else:
            self.note("removed nothing: an answer does not fit even without any turns; send a shorter message", "red")
            return
        shown = ", ".join(f'"{shortened(question)}"' for question, _ in turns[:count][:3]) + (", ..." if count > 3 else "")
        self.note(f"removed {counted(count)}, oldest first ({shown}); {counted(len(turns) - count)} left")
        del turns[:count]
        if message:
            self.answer(message)

    def answer(self, message: str) -> None:
        """Answers a message. A message that cannot be answered does not become a turn."""
        self.refused = ""
        try:
            handle, outputs = self.submit(message)
        except ValueError as error:
            self.note(str(error), "red")
            return
        with stopped_by_interrupt(lambda: self.engine.cancel(handle)):
            last = self.show(handle, outputs)
        result = finished_result(handle)
        if last.end != "error" and (result.text or last.end != "cancelled"):
            self.conversation.turns.append((message, result.text))
        self.report(handle, last)

    def submit(self, message: str) -> tuple[RequestHandle, SimpleQueue[RequestOutput]]:
        """Submits a message to the engine.

        Raises:
            ValueError: the conversation does not fit the context, or the template rejects it.
        """
        tokens = encoded(self.lm, self.conversation.text(message), self.conversation.template)
        context = self.engine.context
        if len(tokens) >= context:
            problem = f"not sent: with this message the conversation has {len(tokens)} tokens, the context {context}"
            if not self.conversation.turns:
                raise ValueError(f"{problem}; send a shorter message")
            self.refused = message
            raise ValueError(f"{problem}; /drop removes the oldest turns and answers it, /reset removes all turns")
        sampling = replace(self.sampling, max_new_tokens=min(self.sampling.max_new_tokens, context - len(tokens)))
        outputs = SimpleQueue[RequestOutput]()
        if isinstance(self.lm, DiffusionModel):
            return self.engine.submit(request_of(tokens, sampling, self.denoising), outputs.put), outputs
        return self.engine.submit(GenerateRequest(tokens, sampling, lora=self.lm.default_adapter), outputs.put), outputs

    def show(self, handle: RequestHandle, outputs: SimpleQueue[RequestOutput]) -> RequestOutput:
        """Streams the answer. Returns the last output of the request."""
        shown = 0
        last = RequestOutput()
        while last.end is None:
            last = outputs.get()
            for token in last.tokens:
                self.write(token.text, token.drafted)
                shown += len(token.text)
            if last.end is not None:
                self.write(finished_result(handle).text[shown:], False)  # text held back for stop strings
            self.console.file.flush()
        self.console.print()
        return last

    def write(self, text: str, drafted: bool) -> None:
        """Prints the text of a token, in a terminal coloured by its source."""
        if self.console.is_terminal:
            self.console.print(terminal.piece_text(text, drafted), end="", soft_wrap=True)
        else:
            self.console.file.write(text)

    def report(self, handle: RequestHandle, last: RequestOutput) -> None:
        """Prints the speed of the answer, and why it ended unless the model ended it."""
        result = finished_result(handle)
        times = handle.times
        if result.tokens:
            rounds = 0
            chosen = {"choices": []}
            if isinstance(self.lm, LanguageModel) and self.lm.drafter is not None:
                rounds = len(result.acceptance_lengths)
                chosen = chosen_figures(self.lm, [result]) or chosen
            figures = terminal.answer_line(len(result.tokens), times.ended - times.submitted_at, rounds, chosen)
            new_seed = result.seed is not None and self.sampling.seed is None
            self.note(f"{figures} · seed {result.seed}" if new_seed else figures)
        if last.end == "cancelled":
            self.note("stopped" if result.text else "stopped; not added to the conversation")
        elif last.end == "length" and result.prompt_tokens + len(result.tokens) >= self.engine.context:
            full = f"the context of {self.engine.context} tokens is full"
            self.note(f"{full}: /drop removes the oldest turns, /reset all turns", "red")
        elif last.end == "length":
            self.note(f"cut at --max-new-tokens {self.sampling.max_new_tokens}")
        elif last.end == "error":
            self.note(f"{last.error}; not added to the conversation", "red")


def counted(turns: int) -> str:
    return f"{turns} turn{'' if turns == 1 else 's'}"


def shortened(text: str, most: int = 40) -> str:
    """Returns the beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}..."


def sampling_text(sampling: Sampling) -> str:
    """Describes the temperature and the filters that are on."""
    defaults = Sampling()
    names = ("top_p", "top_k", "min_p", "repetition_penalty")
    others = [name for name in names if getattr(sampling, name) != getattr(defaults, name)]
    return ", ".join(f"{name} {getattr(sampling, name):g}" for name in ("temperature", *others))


def finished_result(handle: RequestHandle) -> Result:
    """Returns the result of a finished request."""
    assert handle.result is not None, "the engine sets the result before the last output"
    return handle.result


def chat(
    model: str | None = None,
    /,
    *,
    system: Annotated[str, Parameter(group=COMMON)] = "",
    memory: MemoryOptions = MemoryOptions(),
    chat_template_kwargs: Annotated[str, Parameter(group=MODEL)] = "{}",
    parse_special_in_content: Annotated[Flag, Parameter(group=MODEL)] = False,
    models: AdaptedModelOptions = AdaptedModelOptions(),
    options: AnswerOptions = AnswerOptions(),
    denoising: DenoisingOption = DenoisingSettings(),
    templates: TemplateOptions = TemplateOptions(),
) -> None:
    """Chats with a model in the terminal.

    Args:
        model: a folder, a GGUF file, a Hugging Face id, "smollm2-135m" (the default) or "demo", as --model.
        system: the system prompt.
        chat_template_kwargs: a JSON object of variables of the chat template, such as '{"enable_thinking": false}'.
        parse_special_in_content: parse special tokens in messages, such as <|im_end|>. By default they are text, so that no
            message can forge a turn.
    """
    models = named_model(model, models)
    options.parameters(ANSWER_DEFAULTS)  # checks the values before a model is fetched
    values = json_object("--chat-template-kwargs", chat_template_kwargs)
    check_values(values)
    engine_options = EngineOptions(slots=1, **memory.engine_options())
    console = Console(highlight=False, emoji=False)
    talk = Conversation(models.chat_template(console, templates, parse_special_in_content), system, values=values)
    sampling = options.sampling_for(models.folder(console))
    if is_diffusion(models, console):
        denoising.check_mode()
        defaults = denoising.applied(DENOISING)
        lm = diffusion_model_options(models).load_model(console)
        engine = lm.engine(DiffusionEngineOptions(modes=(defaults.mode,), defaults=defaults))
        shown = ChatSession(engine, lm, talk, sampling, console, defaults)
    else:
        blocks = denoising.for_decoder(models.folder(console))
        lm = models.load(console, decoding=None if blocks is None else "blocks")
        lm.denoising = given(blocks, lm.denoising)
        engine = lm.engine(engine_options)
        shown = ChatSession(engine, lm, talk, sampling, console)
        shown.note(engine.decoding.sizes_line)
    engine.warm(progress_console(shown.notes))
    engine.start()
    try:
        greet(shown, models)
        shown.run()
    finally:
        engine.stop()


def greet(shown: ChatSession, models: AdaptedModelOptions) -> None:
    adapter = "" if models.lora is None else f" with the adapter {models.lora}"
    decoding = decoding_text(models, shown.engine.decoding)
    shown.note(f"{models.model}{adapter}, {decoding}, context {shown.engine.context}; /help lists the commands")
    shown.note(f"{sampling_text(shown.sampling)}; answers of at most {shown.sampling.max_new_tokens} tokens")
    if shown.conversation.template is None:
        shown.note(f"{models.model} has no chat template: it continues the text of all turns")
    if isinstance(shown.lm, LanguageModel) and shown.lm.drafter is not None and shown.console.is_terminal:
        shown.console.print(terminal.legend())
