"""Terminal output of `tilewright verify-exact`."""

from collections.abc import Iterator, Mapping, Sequence

from tilewright.metrics.exactness import EXACTNESS
from tilewright.metrics.metric import Metric, select_metrics
from tilewright.metrics.tables import FigureTable, Row, grouped

SHOWN_DIGITS = 8
"""Number of displayed digits of a hash."""


def exact_table(title: str, plain: Mapping[str, str], findings: Sequence[Row]) -> FigureTable:
    """Returns a table with the reference hashes and a line for each path, with a hash for each kind of sampling.

    Args:
        plain: hash of the reference, by kind of sampling.
        findings: findings as in the JSON.
    """
    hashes = {kind: sha[:SHOWN_DIGITS] for kind, sha in plain.items()}
    rows: list[Row] = [{"name": "none", "path": "plain decoding", **hashes, "same": "", "exercised": ""}]
    for (drafter, path), group in group_by_path(findings).items():
        # Marks hashes that differ from the reference.
        shown = {one["sampling"]: ("" if one["same"] else "≠ ") + one["sha256"][:SHOWN_DIGITS] for one in group}
        cells = dict.fromkeys(plain) | shown
        same = all(one["same"] for one in group)
        rows.append({"name": drafter, "path": path, **cells, "same": same, "exercised": exercised_text(group)})
    path, same, exercised = select_metrics(EXACTNESS, "path same exercised")
    columns = [path, *(Metric(kind, head=kind) for kind in plain), same, exercised]
    return FigureTable(title, "drafter", {"": rows}, columns, section_by="name")


def group_by_path(findings: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Groups the findings by drafter and path."""
    return grouped(findings, lambda one: (one["drafter"], one["path"]))


def exercised_text(group: Sequence[Row]) -> str:
    """Describes the events of a path over all kinds of sampling, and the expected events that did not happen."""
    counts: dict[str, int] = {}
    missing: dict[str, list[str]] = {}
    for one in group:
        for name, count in one["exercised"].items():
            counts[name] = counts.get(name, 0) + count
        for name in one["not_exercised"]:
            missing.setdefault(name, []).append(one["sampling"])
    lacking = (f"not exercised: {name} ({', '.join(kinds)})" for name, kinds in missing.items())
    return ", ".join([*(f"{count:,} {name}" for name, count in counts.items()), *lacking])


def difference_lines(findings: Sequence[Row], most: int) -> Iterator[str]:
    """Yields a line for each problem and for each of the first `most` differences."""
    differences = 0
    for one in findings:
        place = f"{one['drafter']}: {one['path']}, {one['sampling']}"
        if one["problem"]:
            yield f"{place}: {one['problem']}"
        for each in one["differences"]:
            differences += 1
            if differences <= most:
                yield f"{place}: {difference_text(each)}"
    if differences > most:
        yield f"and {differences - most} more differences in --json"


def difference_text(difference: Row) -> str:
    about = f" ({difference['about']})" if difference["about"] else ""
    found, plain = (token_text(difference[f"{name}token"], difference[f"{name}text"]) for name in ("", "plain_"))
    lead = difference["lead"]
    ahead = "" if lead is None else f"; the plain token is {lead:.3g} ahead in the compared scores"
    return (
        f"request {difference['number']}{about} differs from token {difference['position']} on: {found} in the place of "
        f"{plain}; the target's best two logits there are {difference['margin']:.3g} apart{ahead}"
    )


def token_text(token: int | None, text: str | None) -> str:
    return "the end" if token is None else f"{token} {text!r}"
