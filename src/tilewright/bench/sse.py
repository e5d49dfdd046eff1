"""Server-sent events out of a stream of bytes, however it is cut."""

import re
from dataclasses import dataclass

LONGEST_LINE = 1 << 24
"""Bytes. A stream without line breaks is no stream of events, and would fill the memory."""


@dataclass(frozen=True)
class Event:
    """An event: its name, "message" where it has none, and its lines of data, with a line break between any two."""

    name: str
    data: str


class EventReader:
    """Takes bytes as they come and gives the events that they complete.

    Source: the HTML standard, "Server-sent events" (https://html.spec.whatwg.org/multipage/server-sent-events.html). Lines end
    with LF, CR or both; comments, `id` and `retry` are passed over; an event without data is none, and what follows the last
    empty line is none yet. Other than there, bytes that are not UTF-8 are an error.
    """

    def __init__(self) -> None:
        self.rest = b""
        self.first = True
        self.after_return = False
        self.name = ""
        self.data: list[str] = []

    def feed(self, data: bytes) -> list[Event]:
        """The events that end within `data`.

        Raises:
            ValueError: a line is not UTF-8, or longer than `LONGEST_LINE`.
        """
        if self.after_return and data:
            data = data.removeprefix(b"\n")  # the other half of a line break that was cut in two
            self.after_return = False
        self.after_return = self.after_return or data.endswith(b"\r")
        *lines, self.rest = re.split(rb"\r\n|\r|\n", self.rest + data)
        if len(self.rest) > LONGEST_LINE:
            raise ValueError(f"a line of an event stream is longer than {LONGEST_LINE} bytes")
        events = (self.line(line) for line in lines)
        return [event for event in events if event is not None]

    def line(self, raw: bytes) -> Event | None:
        """The event that a line ends, if it does."""
        if self.first:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
            self.first = False
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"a line of an event stream is not UTF-8: {raw[:40]!r}") from None
        if text:
            field, _, value = text.partition(":")
            value = value.removeprefix(" ")
            if field == "data":
                self.data.append(value)
            elif field == "event":
                self.name = value
            return None
        event = Event(self.name or "message", "\n".join(self.data)) if self.data else None
        self.name = ""
        self.data = []
        return event
