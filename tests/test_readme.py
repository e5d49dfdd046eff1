"""Every figure of README and of the page of results comes from a field of a committed result, as `docs/figures.toml` says."""

import re
from dataclasses import replace

import pytest

import figures as made
from figures import ROOT, Source, figures, problems, read_sources, value

README = "README.md"
WHOLE = (README, "docs/results.md")
"""Documents in which every figure has a field."""

SOURCES = read_sources((ROOT / "docs" / "figures.toml").read_text(encoding="utf-8"))
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in {*WHOLE, *(one.document for one in SOURCES)}}


def test_every_figure_of_whole_documents_and_of_mapped_blocks_is_its_field_s():
    found = problems(TEXTS, SOURCES, whole=WHOLE)
    assert not found, "\n".join(found)


def shifted(figure: str, by: int) -> str:
    """A figure with another last digit."""
    return figure[:-1] + str((int(figure[-1]) + by) % 10)


@pytest.mark.parametrize("by", [1, 9])
def test_a_figure_that_is_wrong_in_its_last_digit_is_refused(by: int):
    """Also where it is wrong in both places, in the document and beside its field."""
    accepted = []
    tried = 0
    for source in SOURCES:
        named = [figure for figure, _ in source.fields]
        for at, (figure, field) in enumerate(source.fields):
            wrong = [*named[:at], shifted(figure, by), *named[at + 1 :]]
            mapped = tuple((shown, name) for shown, (_, name) in zip(wrong, source.fields, strict=True))
            tried += 1
            document_alone = made.block_problems(wrong, source)
            both = made.block_problems(wrong, replace(source, fields=mapped))
            if not document_alone or not both:
                accepted.append(f"{source.document}: {shifted(figure, by)} for {figure}, {field}")
    assert tried > 70
    assert len(accepted) <= tried // 100, "\n".join(accepted)


def test_the_readme_can_be_read_in_two_minutes():
    words = len(TEXTS[README].split())
    tables = len(re.findall(r"^\|[-|: ]+\|$", TEXTS[README], flags=re.MULTILINE))
    assert words <= 600
    assert tables == 1


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Qwen3-0.6B on `v5p 67 times`, Python 3.11, 2026-11-21, block 16", []),
        ("13 to 30 times as fast, 2.5 times, 98% of 5,218 tokens/s", ["13", "30", "2.5", "98", "5,218"]),
        ("60, 7 and 17 times, 1,000, 20 or 30 ms, blocks of 4 and 8", ["60", "7", "17", "1,000", "20", "30"]),
        ("| block 4 | 1.03 / 2.68 | 16 | Llama 3, 8 ms |", ["1.03", "2.68", "16", "8"]),
        ("82.0% ([all](benchmarks/results/2026-x.md)), two cores, 36 requests", ["82.0", "36"]),
    ],
)
def test_figures_are_told_from_names(text: str, found: list[str]):
    assert figures(text) == found


FILES = {"a": "a.json"}
RESULT = {"data": [{"n": 1, "name": "x y", "tau": 2.5}, {"n": 2, "name": "z", "tau": 4}], "top": {"p": 0.5}, "ok": True}


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "result", {"a.json": RESULT}.__getitem__)


@pytest.mark.usefixtures("result")
@pytest.mark.parametrize(
    ("expression", "number"),
    [
        ("a:top.p", 0.5),
        ("a:data[1].tau", 4),
        ("a:data[name=x y].tau", 2.5),
        ("a:data[n=2,name=z].tau", 4),
        ("max(a:data.tau)", None),
        ("max(a:data[].tau)", None),
        ("a:data[n=3].tau", None),
        ("a:data[n=1,n=1].name", None),
        ("a:ok", None),
        ("b:top.p", None),
        ("a:top.p * 100", 50),
        ("a:data[n=2].tau / a:data[n=1].tau * 10", 16),
    ],
)
def test_fields_are_read(expression: str, number: float | None):
    if number is not None:
        assert value(expression, FILES) == pytest.approx(number)
        return
    with pytest.raises(ValueError, match="expected"):
        value(expression, FILES)


@pytest.mark.usefixtures("result")
def test_of_several_fields_the_least_the_most_and_the_mean_are_read(monkeypatch: pytest.MonkeyPatch):
    rows = [{"kind": "k", "tau": tau} for tau in (1, 2, 6)]
    monkeypatch.setattr(made, "result", {"a.json": {"data": [*rows, {"kind": "other", "tau": 9}]}}.__getitem__)
    assert [value(f"{name}(a:data[kind=k].tau)", FILES) for name in ("min", "max", "mean")] == [1, 6, 3]
    with pytest.raises(ValueError, match="expected one number at a:data"):
        value("a:data[kind=k].tau", FILES)


@pytest.mark.usefixtures("result")
def test_what_is_wrong_is_said():
    source = Source("d.md", "Of", FILES, (("0.5", "a:top.p"),))
    assert problems({"d.md": "Of 0.5 nats."}, [source], ("d.md",)) == []
    (wrong,) = problems({"d.md": "Of 0.6 nats."}, [source])
    assert wrong == "d.md, 'Of': figures ['0.6'], fields for ['0.5']"
    (wrong,) = problems({"d.md": "Of 0.6 nats."}, [replace(source, fields=(("0.6", "a:top.p"),))])
    assert wrong == "d.md, 'Of': 0.6, but a:top.p is 0.5"
    (wrong,) = problems({"d.md": "Of 0.5 nats.\n\nAnd 7 ms."}, [source], ("d.md",))
    assert wrong == "d.md: 7: no entry for 'And 7 ms.'"
    assert problems({"d.md": "Of 0.5 nats.\n\nAnd 7 ms."}, [source]) == []
    (wrong,) = problems({"d.md": "By 0.5 nats."}, [source])
    assert wrong == "d.md: no block begins with 'Of'"
    (wrong,) = problems({"d.md": "Of 0.5 nats."}, [source, replace(source, begins="Of 0")])
    assert wrong == "d.md: 2 entries for 'Of 0.5 nats.'"
    # A table belongs to the paragraph before it.
    assert problems({"d.md": "Of these:\n\n| | x |\n|---|---|\n| code | 0.5 |"}, [source]) == []
