"""Chrome's trace events, which Perfetto opens: processes with tracks, and what runs on them when."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Track(NamedTuple):
    """Place where something is drawn: a process and one of its threads."""

    process: int
    thread: int


def named(process: int, name: str, threads: Mapping[str, int]) -> list[dict[str, Any]]:
    """The events that name a process and its threads."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}]
    for label, thread in threads.items():
        events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": label}})
    return events


def complete(track: Track, name: str, category: str, begin_s: float, end_s: float, about: Mapping[str, Any]) -> dict[str, Any]:
    """The event of something that begins and ends, in seconds."""
    place = {"pid": track.process, "tid": track.thread, "ts": 1e6 * begin_s, "dur": 1e6 * (end_s - begin_s)}
    return {"ph": "X", "name": name, "cat": category, "args": dict(about), **place}
