"""Tracking of texts that have left their token automaton, until they re-enter it."""

from collections.abc import Callable

import numpy as np

from tilewright.grammar.token_automaton import TokenAutomaton
from tilewright.runtime.automata import AutomatonState


class Excursion:
    """Follows a text that has left its token automaton, in the byte automaton.

    The byte automaton does not describe brackets nested deeper than its limit. Inside them, brackets are counted outside JSON
    strings, up to the bracket that closes the undescribed part.

    Attributes:
        state: state of the byte automaton; -1 once it is unknown.
    """

    def __init__(self, token_automaton: TokenAutomaton, decode: Callable[[int], bytes], last_state: int):
        """Args:
        decode: returns the bytes of a token.
        last_state: state of the token automaton before the token that left it.
        """
        self.token_automaton = token_automaton
        self.decode = decode
        self.state = int(token_automaton.byte_states[last_state])
        self.depth = 0
        self.quoted = False
        self.escaped = False

    def advance(self, token: int) -> None:
        """Follows the bytes of a token."""
        automaton = self.token_automaton.over_bytes
        for byte in self.decode(token):
            if self.state < 0:
                return
            if not automaton.undescribed[self.state]:
                self.state = int(automaton.transitions[self.state, byte])
            elif self.closes(byte):
                self.state = int(automaton.resume[self.state])

    def closes(self, byte: int) -> bool:
        """Follows a byte of an undescribed part. Returns True for the bracket that closes the part."""
        if self.quoted:
            self.quoted = byte != ord('"') or self.escaped
            self.escaped = byte == ord("\\") and not self.escaped
        elif byte in b"[{":
            self.depth += 1
        elif byte in b"]}":
            self.depth -= 1
        else:
            self.quoted = byte == ord('"')
        if self.depth >= 0:
            return False
        self.depth = 0
        return True

    def reentry(self, forced: int) -> AutomatonState | None:
        """Finds the state at which the text re-enters the token automaton; None while the text is outside.

        Args:
            forced: the token that the grammar forces next; -1 for none.
        """
        automaton = self.token_automaton.automaton
        states = self.token_automaton.byte_states
        (found,) = np.nonzero((states == self.state) & (automaton.forced == forced))
        return AutomatonState(automaton, int(found[0])) if len(found) else None
