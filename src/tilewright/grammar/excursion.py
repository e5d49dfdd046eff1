"""Texts that have left their automaton over tokens, followed byte by byte until they are back in it."""

from collections.abc import Callable

import numpy as np

from tilewright.grammar.token_automaton import TokenAutomaton
from tilewright.runtime.automata import AutomatonState


class Excursion:
    """A text outside of its automaton, in the automaton over bytes.

    That does not describe what stands in brackets which are deeper than it goes: there the text is followed up to the bracket
    that closes, outside of JSON's strings.
    """

    def __init__(self, made: TokenAutomaton, bytes_of: Callable[[int], bytes], stood: int):
        """Args:
        bytes_of: those of a token.
        stood: the state that the text left by its next token.
        """
        self.made = made
        self.bytes_of = bytes_of
        self.state = int(made.states[stood])
        self.open = 0
        self.quoted = False
        self.escaped = False

    def advance(self, token: int) -> None:
        """Goes on behind a token. The state is -1 from where the automaton cannot say how the text goes on."""
        automaton = self.made.over_bytes
        for byte in self.bytes_of(token):
            if self.state < 0:
                return
            if not automaton.beyond[self.state]:
                self.state = int(automaton.after[self.state, byte])
            elif self.closes(byte):
                self.state = int(automaton.resume[self.state])

    def closes(self, byte: int) -> bool:
        """Takes in a byte that is not described. Returns True for the bracket at which the description goes on."""
        if self.quoted:
            self.quoted = byte != ord('"') or self.escaped
            self.escaped = byte == ord("\\") and not self.escaped
        elif byte in b"[{":
            self.open += 1
        elif byte in b"]}":
            self.open -= 1
        else:
            self.quoted = byte == ord('"')
        if self.open >= 0:
            return False
        self.open = 0
        return True

    def back(self, forced: int) -> AutomatonState | None:
        """Where the text stands in the automaton over tokens; None while it is outside.

        Args:
            forced: the token that comes next; -1 if none has to.
        """
        automaton = self.made.automaton
        states = self.made.states
        (found,) = np.nonzero((states == self.state) & (automaton.forced == forced))
        return AutomatonState(automaton, int(found[0])) if len(found) else None
