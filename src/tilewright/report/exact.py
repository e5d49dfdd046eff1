"""Terminal output of `tilewright verify-exact`, from its figures."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

SHOWN_DIGITS = 8
"""Of a hash."""
ABSENT = "-"
"""Where a path does not run a kind of sampling."""

Row = Mapping[str, Any]


def exact_table(title: str, plain: Mapping[str, str], findings: Sequence[Row]) -> Table:
    """A row for each path with a hash for each kind of sampling, beneath that of plain decoding.

    Args:
        plain: the hash of the plain answers, by kind.
        findings: as `--json` writes them.
    """
    table = Table(title=escape(title))
    table.add_column("drafter")
    table.add_column("path")
    for kind in plain:
        table.add_column(kind, justify="right")
    table.add_column("same", justify="right")
    table.add_column("exercised")
    table.add_row("none", "plain decoding", *(sha[:SHOWN_DIGITS] for sha in plain.values()), "", "")
    before = "none"
    for (drafter, path), group in by_path(findings).items():
        if drafter != before:
            table.add_section()
            before = drafter
        cells = {one["sampling"]: hash_cell(one) for one in group}
        good = all(one["same"] for one in group)
        same = "[green]yes[/green]" if good else "[red]no[/red]"
        row = [cells.get(kind, ABSENT) for kind in plain]
        table.add_row(escape(drafter), escape(path), *row, same, escape(exercised_text(group)))
    return table


def by_path(findings: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """The findings of each drafter and path."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for one in findings:
        groups.setdefault((one["drafter"], one["path"]), []).append(one)
    return groups


def hash_cell(finding: Row) -> str:
    sha = finding["sha256"][:SHOWN_DIGITS]
    return sha if finding["same"] else f"[red]{sha}[/red]"


def exercised_text(group: Sequence[Row]) -> str:
    """Text on what a path did over all kinds of sampling, and on what it was to do and did not."""
    counts: dict[str, int] = {}
    for one in group:
        for name, count in one["exercised"].items():
            counts[name] = counts.get(name, 0) + count
    missing: dict[str, list[str]] = {}
    for one in group:
        for name in one["not_exercised"]:
            missing.setdefault(name, []).append(one["sampling"])
    lacking = (f"not exercised: {name} ({', '.join(kinds)})" for name, kinds in missing.items())
    return ", ".join([*(f"{count:,} {name}" for name, count in counts.items()), *lacking])


def difference_lines(findings: Sequence[Row], most: int) -> Iterator[str]:
    """A line for each problem and for each of the first `most` differences."""
    told = 0
    for one in findings:
        where = f"{one['drafter']}: {one['path']}, {one['sampling']}"
        if one["problem"]:
            yield f"{where}: {one['problem']}"
        for each in one["differences"]:
            told += 1
            if told <= most:
                yield f"{where}: {difference_text(each)}"
    if told > most:
        yield f"and {told - most} more differences, which --json lists"


def difference_text(difference: Row) -> str:
    about = f" ({difference['about']})" if difference["about"] else ""
    found, plain = (token_text(difference[f"{name}token"], difference[f"{name}text"]) for name in ("", "plain_"))
    lead = difference["lead"]
    ahead = "" if lead is None else f"; the plain token is {lead:.3g} ahead in what is compared"
    return (
        f"request {difference['number']}{about} differs from token {difference['position']} on: {found} in the place of "
        f"{plain}; the target's best two logits there are {difference['margin']:.3g} apart{ahead}"
    )


def token_text(token: int | None, text: str | None) -> str:
    return "the end" if token is None else f"{token} {text!r}"
