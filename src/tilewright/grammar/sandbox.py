"""Compilation of untrusted grammars in a subprocess with limits on CPU time and memory."""

import json
import selectors
import signal
import subprocess
import sys
import threading
import weakref
from typing import NamedTuple

from tilewright.grammar.grammar import Grammar
from tilewright.grammar.token_automaton import AUTOMATON_S, TokenAutomaton, read_automaton
from tilewright.grammar.worker import CompilerSettings

STARTS_WITHIN_S = 60.0
"""Limit on the wall-clock seconds in which the process starts and reads a tokenizer."""

WALL_PER_CPU = 5
"""Limit on the wall-clock seconds of an answer, per CPU second of its limit. The process normally ends itself at the CPU limit;
this limit is for processes that hang or start slowly, and for busy machines."""


class Refusal(NamedTuple):
    """Outcome of compiling a grammar in the sandbox.

    Attributes:
        reason: reason why the grammar cannot be used; empty if it can.
        is_final: the outcome depends on the grammar only, and not on the machine's load.
    """

    reason: str
    is_final: bool = True


class Sandbox:
    """Compiles grammars in a subprocess, one at a time. Thread-safe. The subprocess starts on first use."""

    def __init__(self, setting: CompilerSettings):
        self.setting = setting
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None
        self.finalizer: weakref.finalize[[subprocess.Popen[str]], Sandbox] | None = None

    def refusal(self, grammar: Grammar, seconds: float) -> Refusal:
        """Compiles a grammar and returns why it cannot be used.

        Args:
            seconds: limit on the CPU seconds of the compilation.
        """
        with self.lock:
            process = self.running_process()
            line = json.dumps(["refusal", grammar.kind, grammar.text, seconds])
            answer = self.answer(process, line, WALL_PER_CPU * seconds)
        if answer is not None:
            return Refusal(json.loads(answer))
        # The matcher's answer and, roughly, the CPU seconds depend on the grammar only. The wall-clock time depends on the
        # machine's load, and the available memory on the grammars before.
        reason = f"compiling it takes longer than {seconds:g} s of CPU time, or too much memory"
        return Refusal(reason, is_final=process.returncode == -signal.SIGPROF)

    def automaton(self, grammar: Grammar) -> TokenAutomaton | None:
        """Builds the automaton of a grammar that can be used; None if the grammar has none, or building it exceeds a limit."""
        with self.lock:
            line = json.dumps(["automaton", grammar.kind, grammar.text, 0])
            answer = self.answer(self.running_process(), line, WALL_PER_CPU * AUTOMATON_S)
        return None if answer is None else read_automaton(json.loads(answer))

    def running_process(self) -> "subprocess.Popen[str]":
        """Returns the subprocess, and starts it if it is not running."""
        if self.process is not None and self.process.poll() is None:
            return self.process
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "tilewright.grammar.worker"]
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        self.process = process
        self.finalizer = weakref.finalize(self, kill, process)
        first = f"{json.dumps(self.setting)}\n{json.dumps(['refusal', 'regex', 'a', 0])}"
        if self.answer(process, first, STARTS_WITHIN_S) is None:
            raise RuntimeError(f"expected a sandbox process for grammars within {STARTS_WITHIN_S:g} s, found none")
        return process

    def answer(self, process: "subprocess.Popen[str]", line: str, seconds: float) -> str | None:
        """Sends a line and returns the answer. Kills the process and returns None if there is no answer in time."""
        assert process.stdin is not None
        assert process.stdout is not None
        answer = ""
        try:
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                answer = process.stdout.readline() if selector.select(seconds) else ""
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.close()
        return answer or None

    def close(self) -> None:
        """Kills the subprocess."""
        if self.finalizer is not None:
            self.finalizer()
        self.process = None


def kill(process: "subprocess.Popen[str]") -> None:
    process.kill()
    try:
        process.communicate()
    except BrokenPipeError:  # unwritten input
        process.wait()
