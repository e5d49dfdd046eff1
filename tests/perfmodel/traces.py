"""Traces as a TPU's profiler writes them, made up: planes, lines and events, in microseconds."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jax.profiler import ProfileData

Event = tuple[str, float, float]
"""A name, when it begins, and how long it takes."""


def line(name: str, events: Sequence[Event], numbers: Mapping[str, int]) -> str:
    """A line of a plane."""
    shown = [
        f"events {{ metadata_id: {numbers[event]} offset_ps: {round(1e6 * begin)} duration_ps: {round(1e6 * duration)} }}"
        for event, begin, duration in events
    ]
    return f'lines {{ name: "{name}" {" ".join(shown)} }}'


def plane(name: str, lines: Mapping[str, Sequence[Event]], kind: str = "TPU v5 lite") -> str:
    """A plane, with the kind of the device."""
    names = dict.fromkeys(event for events in lines.values() for event, _, _ in events)
    numbers = {event: number for number, event in enumerate(names, 1)}
    metadata = [
        f'event_metadata {{ key: {number} value {{ id: {number} name: "{_quoted(event)}" }} }}'
        for event, number in numbers.items()
    ]
    device_stat = 'stat_metadata { key: 1 value { id: 1 name: "device_type_string" } }'
    stat = f'stats {{ metadata_id: 1 str_value: "{kind}" }}'
    shown = [line(each, events, numbers) for each, events in lines.items()]
    return f'planes {{ name: "{name}" {" ".join([*metadata, device_stat, stat, *shown])} }}'


def gpu_plane(number: int, streams: Mapping[str, Sequence[tuple[str, float, float, str]]]) -> str:
    """A GPU's plane: events of lines with the kernel, its begin and time in microseconds, and its instruction ("" for none).

    All events belong to the program `m`, number 7.
    """
    stats = "".join(
        f'stat_metadata {{ key: {key} value {{ id: {key} name: "{name}" }} }} '
        for key, name in enumerate(("hlo_op", "hlo_module", "program_id"), 1)
    )
    kernels = dict.fromkeys(kernel for events in streams.values() for kernel, *_ in events)
    numbers = {kernel: number for number, kernel in enumerate(kernels, 1)}
    metadata = "".join(
        f'event_metadata {{ key: {key} value {{ id: {key} name: "{kernel}" }} }} ' for kernel, key in numbers.items()
    )
    lines = ""
    for name, events in streams.items():
        shown = ""
        for kernel, begin, duration, op in events:
            about = f'stats {{ metadata_id: 1 str_value: "{op}" }} ' if op else ""
            about += 'stats { metadata_id: 2 str_value: "m" } stats { metadata_id: 3 uint64_value: 7 }'
            times = f"offset_ps: {round(1e6 * begin)} duration_ps: {round(1e6 * duration)}"
            shown += f"events {{ metadata_id: {numbers[kernel]} {times} {about} }} "
        lines += f'lines {{ name: "{name}" {shown}}} '
    return f'planes {{ name: "/device:GPU:{number}" {metadata}{stats}{lines}}}'


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def write_trace(folder: Path, *planes: str, host: str = "host0", session: str = "2026_11_27") -> Path:
    """A trace of one host, in a folder as `jax.profiler.trace` has it."""
    file = folder / "plugins" / "profile" / session / f"{host}.xplane.pb"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace(" ".join(planes)))
    return folder
