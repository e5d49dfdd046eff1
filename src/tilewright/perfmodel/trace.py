"""Chrome trace events, for Perfetto: processes, tracks, and spans on the tracks."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Track(NamedTuple):
    """Track of a trace: a process and one of its threads."""

    process: int
    thread: int


def named(process: int, name: str, threads: Mapping[str, int]) -> list[dict[str, Any]]:
    """Returns the events that name a process and its threads."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}]
    for label, thread in threads.items():
        events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": label}})
    return events


def complete(track: Track, name: str, category: str, begin_s: float, end_s: float, about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the event of a span, given in seconds."""
    place = {"pid": track.process, "tid": track.thread, "ts": 1e6 * begin_s, "dur": 1e6 * (end_s - begin_s)}
    return {"ph": "X", "name": name, "cat": category, "args": dict(about), **place}
