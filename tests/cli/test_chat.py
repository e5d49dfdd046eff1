"""`tilewright chat`: turns, commands, interruptions, and a conversation that no longer fits."""

import builtins
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import tilewright as tw
from cli.conftest import Ran, Run
from tilewright.cli.chat import AnswerOptions
from tilewright.llm.language_model import LanguageModel
from tilewright.runtime.engine import Engine
from tilewright.runtime.request import GenerateRequest, Listener, RequestHandle, RequestOutput
from tilewright.runtime.runner import ModelRunner

NEW = ["--max-new-tokens", 12, "--sampling", "ignore_eos=true"]
TEMPLATE = "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}t3{% endif %}"


@pytest.fixture(scope="module")
def lm(folders: tuple[Path, Path]) -> LanguageModel:
    return tw.load(folders[0])


Answer = Callable[..., str]


@pytest.fixture(scope="module")
def answer(lm: LanguageModel) -> Answer:
    """What the target alone says after a text."""

    def generate(text: str, tokens: int = 12) -> str:
        prompt = lm.tokenizer.encode(text, add_special_tokens=False).ids
        return lm.generate([prompt], tw.Sampling(tokens, ignore_eos=True))[0].text

    return generate


@pytest.fixture
def talk(run: Run, pair: list[Any]) -> Callable[..., Ran]:
    """A chat with the pair, in blocks of 4, over pipes: a line for each turn."""

    def chat(*lines: str, options: Sequence[Any] = (), tokens: int = 12) -> Ran:
        arguments = [*pair, "--block-size", 4, "--max-new-tokens", tokens, "--sampling", "ignore_eos=true", *options]
        return run("chat", *arguments, stdin="".join(f"{line}\n" for line in lines))

    return chat


@pytest.fixture
def typed(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """A chat in a terminal; an exception among the lines is what the user's keys raise."""

    def chat(*options: Any, lines: list[str | type[BaseException]]) -> Ran:
        waiting = iter([*lines, EOFError])

        def line(prompt: str = "") -> str:
            assert prompt == "> "
            entered = next(waiting)
            if isinstance(entered, str):
                return entered
            raise entered

        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setattr(builtins, "input", line)
        return run("chat", *options, *NEW)

    return chat


@pytest.fixture
def template(folders: tuple[Path, Path]) -> Iterator[Path]:
    path = folders[0] / "chat_template.jinja"
    path.write_text(TEMPLATE)
    yield path
    path.unlink()


def test_over_pipes_there_is_plain_text_and_nothing_else(talk: Callable[..., Ran], answer: Answer):
    first = answer("t1 t2 t3")
    second = answer("t1 t2 t3" + first + "\n\nt7")
    ran = talk("t1 t2 t3", "", "t7")
    assert (ran.status, ran.out) == (0, first + "\n" + second + "\n")
    assert "has no chat template: it continues the text of all turns" in ran.err
    assert len(re.findall(r"^12 tokens in [\d.]+ s · [\d,]+ tokens/s · τ [\d.]+$", ran.err, re.MULTILINE)) == 2
    assert ran.err.count("cut at --max-new-tokens 12\n") == 2
    assert "\x1b" not in ran.out + ran.err


def test_answers_are_an_adapters(talk: Callable[..., Ran], folders: tuple[Path, Path], adapter: Path):
    lm = tw.load(folders[0], lora={"own": adapter})
    (want,) = lm.generate(["t1 t2 t3"], tw.Sampling(12, ignore_eos=True), lora="own")
    ran = talk("t1 t2 t3", options=["--lora", adapter])
    assert (ran.status, ran.out) == (0, want.text + "\n")
    assert f"with the adapter {adapter}, drafter" in ran.err


@pytest.mark.usefixtures("template")
def test_turns_go_through_the_models_template(talk: Callable[..., Ran], answer: Answer):
    first = answer("s t9 u t1 t3")
    second = answer(f"s t9 u t1 a {first} u t2 t3")
    third = answer("u t2 t3")
    ran = talk("t1", "t2", "/reset", "/system", "t2", options=["--system", "t9"])
    assert ran.out == f"{first}\n{second}\n{third}\n"
    assert "removed all turns\n" in ran.err
    assert "no chat template" not in ran.err


def test_the_template_is_told_what_it_is_asked_to_be(talk: Callable[..., Ran], answer: Answer, template: Path):
    template.write_text("{{ effort }} {{ 't2' if enable_thinking is defined else 't3' }} {{ messages[0].content }}")
    ran = talk("t1", options=["--chat-template-kwargs", '{"effort": "t9", "enable_thinking": false}'])
    assert ran.out == answer("t9 t2 t1") + "\n"
    assert talk("t1").out == answer(" t3 t1") + "\n"


def test_a_seed_that_was_drawn_is_told_and_gives_the_answer_again(talk: Callable[..., Ran]):
    drawn = talk("t1 t2", options=["--temperature", 1])
    found = re.search(r" tokens/s · τ [\d.]+ · seed (\d+)\n", drawn.err)
    assert found is not None
    again = talk("t1 t2", options=["--temperature", 1, "--seed", found[1]])
    assert again.out == drawn.out
    assert "seed" not in again.err


def test_commands(talk: Callable[..., Ran], answer: Answer):
    ran = talk("/help", "/system t4 t5", "/nope t1", " /t1", "/quit", "t9")
    assert ran.out == answer("t4 t5\n\n /t1") + "\n", "nothing comes after /quit"
    for shown in ("/system TEXT", "system prompt set", "unknown command /nope; /help lists"):
        assert shown in ran.err


@pytest.mark.slow
def test_a_terminal_shows_which_tokens_were_drafted_and_what_was_chosen(
    typed: Callable[..., Ran], pair: list[Any], answer: Answer
):
    ran = typed("--model", pair[1], "--drafter", "ngram", lines=["t1 t2 t3", KeyboardInterrupt, "/help"])
    assert (ran.status, ran.err) == (0, "")
    assert "\x1b[32maccepted draft tokens\x1b[0m, the target's own tokens\n" in ran.out
    plain = re.sub(r"\x1b\[[\d;]*m", "", ran.out)
    assert answer("t1 t2 t3") + "\n12 tokens in " in plain
    assert "\x1b[1;33m" not in ran.out
    assert re.search(r"· τ [\d.]+ · (plain|ngram \d+) \d+%", plain)
    assert "/quit ends\n" in plain
    assert "/reset          remove all turns\n" in plain


def hold_at_first_token(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[Engine], None]) -> None:
    """After the first tokens of the first request, one round each, the engine waits for what `meanwhile` waits for."""
    submit = Engine.submit
    held = []

    def submitted(self: Engine, ask: GenerateRequest, listener: Listener) -> RequestHandle:
        def hear(update: RequestOutput) -> None:
            listener(update)
            if not held:
                held.append(update)
                meanwhile(self)

        return submit(self, ask, hear)

    monkeypatch.setattr(Engine, "submit", submitted)
    monkeypatch.setattr("tilewright.speculation.pacer.Pacer.most", lambda *_: 1)


def interrupt(engine: Engine) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    until = time.monotonic() + 30
    while not all(sequence.handle.cancelled for sequence in engine.live_sequences) and time.monotonic() < until:
        time.sleep(0.001)


def test_ctrl_c_stops_an_answer_and_keeps_what_came(talk: Callable[..., Ran], answer: Answer, monkeypatch: pytest.MonkeyPatch):
    hold_at_first_token(monkeypatch, interrupt)
    before = signal.getsignal(signal.SIGINT)
    ran = talk("t1 t2 t3", "t7", tokens=60)
    first, second = ran.out.splitlines()
    assert ran.status == 0
    assert first
    assert len(first) < len(answer("t1 t2 t3", 60))
    assert answer("t1 t2 t3", 60).startswith(first)
    assert second == answer(f"t1 t2 t3{first}\n\nt7", 60)
    assert ran.err.count("stopped\n") == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_a_conversation_that_no_longer_fits_says_so_and_loses_nothing(talk: Callable[..., Ran], answer: Answer):
    """What does not fit is left out, and what came before it is still there, until the user has the oldest turns dropped."""
    long = " ".join(["t5"] * 96)
    more = "t1 " * 30
    ran = talk(long, more, "t7", more, "/drop", "/drop", "/drop", "t7", "/reset", "t9")
    first = answer(long)
    second = answer(f"{long}{first}\n\nt7")
    third = answer(f"t7{second}\n\n{more}")
    assert ran.out.splitlines() == [first, second, third, answer("t7"), answer("t9")]
    assert re.search(r"not sent: with this message the conversation has 1[34]\d tokens, the context 128", ran.err)
    assert ran.err.count("/drop removes the oldest turns and answers it, /reset removes all turns\n") == 2
    shown = "t5 " * 13 + "t..."
    assert f'removed 1 turn, oldest first ("{shown}"); 1 turn left\n' in ran.err
    assert 'removed 1 turn, oldest first ("t7"); 1 turn left\n' in ran.err
    assert ran.err.count("; 0 turns left\n") == 1
    assert ran.status == 0


def test_a_message_that_never_fits_costs_no_turn(talk: Callable[..., Ran], answer: Answer):
    ran = talk("t1", "t5 " * 120, "/drop", "t5 " * 130, "/reset", "/drop", "t5 " * 130)
    assert ran.out == answer("t1") + "\n"
    assert ran.err.count("removed nothing: an answer does not fit even without") == 1
    assert ran.err.count("; send a shorter message\n") == 2
    assert ran.err.count("there are no turns to remove\n") == 1


def test_an_answer_that_fills_the_context_says_so(talk: Callable[..., Ran], answer: Answer):
    ran = talk(" ".join(["t5"] * 121))
    assert ran.out == answer(" ".join(["t5"] * 121), 7) + "\n"
    assert "the context of 128 tokens is full: /drop removes the oldest turns, /reset all turns\n" in ran.err


def test_what_the_command_line_leaves_out_is_the_models(tmp_path: Path):
    assert AnswerOptions().sampling_for(tmp_path) == tw.Sampling(512), "the most likely tokens"
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_p": 0.95, "top_k": -1, "max_new_tokens": 99}')
    assert AnswerOptions().sampling_for(tmp_path) == tw.Sampling(99, 0.6, 0.95)
    explicit = AnswerOptions(max_new_tokens=5, temperature=0.0, top_p=1.0, top_k=3)
    assert explicit.sampling_for(tmp_path) == tw.Sampling(5, 0.0, 1.0, 3), "a value that is given wins"
    file.write_text('{"temperature": -1}')
    with pytest.raises(ValueError, match="expected temperature from 0 to 1e"):
        AnswerOptions().sampling_for(tmp_path)


def test_an_answer_that_fails_leaves_its_turn_out(
    talk: Callable[..., Ran], answer: Answer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    rounds = ModelRunner.rounds
    calls = []

    def failing(self: ModelRunner, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) <= 2:
            raise RuntimeError("the device has gone")
        return rounds(self, *arguments)

    monkeypatch.setattr(ModelRunner, "rounds", failing)
    ran = talk("t1 t2 t3", "t7")
    assert ran.out == "\n" + answer("t7") + "\n"
    assert "the request could not be computed; not added to the conversation\n" in ran.err
    assert "a dispatch failed" in caplog.text


def test_a_template_that_refuses_leaves_the_turn_out(talk: Callable[..., Ran], answer: Answer, template: Path):
    template.write_text("{% if messages[0].role == 'system' %}{{ raise_exception('no orders') }}{% endif %}" + TEMPLATE)
    ran = talk("t1", "/system t9", "t2", "/system", "t2")
    first = answer("u t1 t3")
    assert ran.out == f"{first}\n{answer(f'u t1 a {first} u t2 t3')}\n"
    assert ran.err.count("the chat template fails on this conversation: no orders\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", 0], "expected context of at least 1, found 0"),
        (["--chat-template-kwargs", "[1]"], "--chat-template-kwargs: expected a JSON object, found [1]"),
        (["--chat-template-kwargs", '{"messages": 1}'], "expected other names for values of a template, found the reserved"),
        (["--context", 129], "expected a context of at most 128, the model's, found 129"),
        (["other"], "expected one model, found other and --model "),
        (["--max-new-tokens", 0], "expected max_new_tokens of at least 1, found 0"),
    ],
)
def test_mistakes(run: Run, pair: list[Any], options: list[Any], message: str):
    ran = run("chat", *options, *pair, stdin="")
    assert ran.status == 2
    assert ran.err.splitlines()[-1].startswith(f"tilewright: {message}")


def test_input_that_is_no_text(run: Run, pair: list[Any]):
    ran = run("chat", pair[1], "--drafter", pair[3], "--block-size", 4, *NEW, stdin=b"t1 \xff\n")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.endswith("tilewright: standard input is not UTF-8: byte 0xff\n")
