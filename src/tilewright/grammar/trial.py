"""Grammars tried in a process of their own, with a bound on time and memory."""

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
"""Seconds that the process may take to begin: it reads a tokenizer, on a machine that may be busy."""

PATIENCE = 5
"""Seconds by the clock after which an answer is given up, for each of a processor that it may take; its process does so by
itself before, unless it hangs, begins, or the machine is busy."""


class Refusal(NamedTuple):
    """Outcome of a trial.

    Attributes:
        why: the grammar cannot be used; empty if it can.
        lasts: the same would be said again: it depends on the grammar, and on no other work of the machine.
    """

    why: str
    lasts: bool = True


class Trial:
    """Tries grammars one after the other; safe to use from several threads."""

    def __init__(self, setting: CompilerSettings):
        self.setting = setting
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None
        self.end: weakref.finalize[[subprocess.Popen[str]], Trial] | None = None

    def refusal(self, grammar: Grammar, seconds: float) -> Refusal:
        """Tells whether a grammar can be used.

        Args:
            seconds: of a processor that compiling it may take.
        """
        with self.lock:
            process = self.process if self.process is not None and self.process.poll() is None else self.started()
            line = json.dumps(["refusal", grammar.kind, grammar.text, seconds])
            answer = self.answer(process, line, PATIENCE * seconds)
        if answer is not None:
            return Refusal(json.loads(answer))
        # What a matcher says follows from the grammar and from limits that count, and so do, about, seconds of a processor.
        # Those by the clock do not, and whether there is memory depends on the grammars before, too.
        why = f"compiling it takes longer than {seconds:g} s of a processor, or too much memory"
        return Refusal(why, lasts=process.returncode == -signal.SIGPROF)

    def automaton(self, grammar: Grammar) -> TokenAutomaton | None:
        """The automaton of a grammar that is not refused; None if it has none, or if making it takes too much."""
        with self.lock:
            process = self.process if self.process is not None and self.process.poll() is None else self.started()
            answer = self.answer(process, json.dumps(["automaton", grammar.kind, grammar.text, 0]), PATIENCE * AUTOMATON_S)
        return None if answer is None else read_automaton(json.loads(answer))

    def started(self) -> "subprocess.Popen[str]":
        """A process that has compiled something."""
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "tilewright.grammar.worker"]
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        self.process = process
        self.end = weakref.finalize(self, ended, process)
        first = f"{json.dumps(self.setting)}\n{json.dumps(['refusal', 'regex', 'a', 0])}"
        if self.answer(process, first, STARTS_WITHIN_S) is None:
            raise RuntimeError("the process that tries grammars does not start")
        return process

    def answer(self, process: "subprocess.Popen[str]", line: str, seconds: float) -> str | None:
        """The process's answer to a line; None, and it is ended, if none comes in time."""
        assert process.stdin is not None
        assert process.stdout is not None
        said = ""
        try:
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                said = process.stdout.readline() if selector.select(seconds) else ""
        except BrokenPipeError:
            said = ""
        if not said:
            self.close()
        return said or None

    def close(self) -> None:
        """Ends the process."""
        if self.end is not None:
            self.end()
        self.process = None


def ended(process: "subprocess.Popen[str]") -> None:
    """Ends a process whose pipes nobody else uses."""
    process.kill()
    try:
        process.communicate()
    except BrokenPipeError:  # of what was still to be written
        process.wait()
