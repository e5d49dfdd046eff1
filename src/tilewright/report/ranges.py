"""The part of a page that says how far predictions for chips that are not here may be off."""

from collections.abc import Mapping
from typing import Any

from tilewright.report.page import Block, HtmlTable, Section, sentences


def ranges_section(sweeps: Mapping[str, Mapping[str, Any]]) -> Section:
    """Predictions that are set against each other, with their ranges; records of `perfmodel/uncertainty.py` by name."""
    tables: list[Block] = []
    for name, sweep in sweeps.items():
        rows = []
        for label, one in sweep["predictions"].items():
            decides = None if one["decides"] is None else f"{one['decides'][0]} ({one['decides'][1]:+.2f})"
            ends = " to ".join(f"{end:,.3f}" for end in one["range"])
            rows.append([label, f"{one['value']:,.3f}", ends, f"{one['first']} of {sweep['draws']}", decides])
        heads = ["", sweep["unit"], "range", "first in", "decides (rank correlation)"]
        tables.append(HtmlTable(f"{name}, with the {sweep['range']}", heads, rows))
    text = sentences(line for sweep in sweeps.values() for line in sweep["text"][1:])
    return Section("Ranges", tables, text)
