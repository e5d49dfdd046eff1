"""Every figure in README stands in a committed result that the same paragraph links."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"

UNITS = r"%|×|times\b|(?:milli|micro)?seconds\b|ms\b|µs\b|[kKMG]i?B\b|tokens\b|steps\b|nats\b|GFLOP/s|TFLOP/s"
"""What makes a whole number of prose a figure; one with a decimal point or a comma between its thousands is one anyway."""

NUMBER = r"\d[\d,]*(?:\.\d+)?"


def blocks(text: str) -> Iterator[str]:
    """Paragraphs, code left out; a table together with the paragraph before it, which says what it shows."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\n\n(?=\|)", "\n", text)
    return (block for block in re.split(r"\n{2,}", text) if block.strip())


def links(block: str) -> list[str]:
    """The results that a block links."""
    return re.findall(r"\]\((benchmarks/results/[^)#]+)\)", block)


def figures(block: str) -> list[str]:
    """The numbers of a block that somebody measured, counted or estimated: not those of names, versions, dates and code."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", block)
    text = re.sub(r"\b(?:Python|arXiv|Apache) [\d.]+|\b\d{4}-\d\d-\d\d\b", " ", text)
    text = re.sub(r"\b[A-Za-z][\w.-]*\d[\w.-]*", " ", text)  # Qwen3-0.6B, v5e
    found = []
    for part in re.split(r"[|\n]", text):
        if re.fullmatch(r"[\d.,/*×%± –-]+", part):  # a cell of nothing but figures
            found += re.findall(NUMBER, part)
        else:
            # In "13 to 30 times" both are figures.
            ranges = re.sub(rf"({NUMBER}) to (?={NUMBER} ?(?:{UNITS}))", r"\1 times ", part)
            found += [m[1] for m in re.finditer(rf"({NUMBER})( ?(?:{UNITS}))?", ranges) if m[2] or re.search(r"[.,]\d", m[1])]
    return [number.rstrip(",") for number in found]


def stands_in(figure: str, text: str) -> bool:
    """Whether a number of a result rounds to a figure."""
    wanted, digits = float(figure.replace(",", "")), len(figure.partition(".")[2])
    numbers = (float(number.replace(",", "")) for number in re.findall(NUMBER + r"(?:e-?\d+)?", text))
    return any(abs(number - wanted) <= 0.5000001 * 10**-digits for number in numbers)


def problems(text: str, read: dict[str, str]) -> list[str]:
    """Figures of a document without a result, and those that the results which their block links do not hold."""
    wrong = []
    for block in blocks(text):
        found, results = figures(block), links(block)
        if found and not results:
            wrong.append(f"{', '.join(found)}: no result is linked in {block[:60]!r}")
        wrong += [
            f"{figure} is not in {', '.join(results)}"
            for figure in found
            if results and not any(stands_in(figure, read[result]) for result in results)
        ]
    return wrong


def test_every_figure_of_the_readme_stands_in_its_result():
    text = README.read_text(encoding="utf-8")
    linked = {result: (ROOT / result).read_text(encoding="utf-8") for result in links(text)}
    assert linked
    found = problems(text, linked)
    assert not found, "\n".join(found)


def test_every_file_that_the_readme_links_is_there():
    linked = re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text(encoding="utf-8"))
    missing = [name for name in linked if not (ROOT / name).exists()]
    assert linked
    assert not missing


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Qwen3-0.6B on `v5p 67 times`, Python 3.11, 2026-11-21, block 16", []),
        ("13 to 30 times as fast, 2.5 times, 98% of 5,218 tokens/s", ["13", "30", "2.5", "98", "5,218"]),
        ("| block 4 | 1.03 / 2.68 | 16 | Llama 3, 8 ms |", ["1.03", "2.68", "16", "8"]),
        ("82.0% ([all](benchmarks/results/2026-x.md)), two cores", ["82.0"]),
    ],
)
def test_figures_are_told_from_names(text: str, found: list[str]):
    assert figures(text) == found


def test_a_figure_without_its_result_is_seen():
    read = {"benchmarks/results/a.md": "| 1.2649 | 5,218.3 |", "benchmarks/results/b.md": "x: 0.5"}
    linked = "[a](benchmarks/results/a.md)"
    assert problems(f"1.26 times, 5,218 tokens/s ({linked})", read) == []
    assert problems(f"{linked}:\n\n| | x |\n|---|---|\n| code | 1.26 |", read) == []
    (wrong,) = problems(f"1.27 times ({linked})", read)
    assert wrong == "1.27 is not in benchmarks/results/a.md"
    (wrong,) = problems(f"1.26 times\n\nand {linked}", read)
    assert wrong.startswith("1.26: no result is linked")
    (wrong,) = problems(f"0.5 ms ({linked})\n\n[b](benchmarks/results/b.md)", read)
    assert wrong == "0.5 is not in benchmarks/results/a.md"
