"""The replay page: one file, safe whatever the text, nothing lost, and no figure that cannot be."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from report.reading import Page, check_self_contained
from tilewright.report.page import asset, embed_json
from tilewright.report.replay import Passage, Replay, ReplayRound, ReplayStep, ReplayToken, write_replay

HOSTILE = ["</script><script>alert(1)</script>", "<!--", "<!-- <script>", "]]>", "&lt;", "\u2028", "'\"`${x}", "\r\n\t\0", ""]


def tokens(texts: list[str], first: int = 0) -> list[ReplayToken]:
    return [ReplayToken(first + n, text, probability=0.5, margin=1.25) for n, text in enumerate(texts)]


def sample(texts: list[str] | None = None) -> Replay:
    """Two prompts; the first round accepts two of three drafts, the second none, the last is cut short by the end."""
    a, b, c, d, e, f, g = tokens((texts or ["def", " f", "(x", "):", "\n", "    return", " x"])[:7])
    wrong = tokens([" y", "("], first=90)
    rounds = [
        ReplayRound(0.002, [a, b, wrong[0]], 2, [a, b, c]),
        ReplayRound(0.0021, wrong, 0, [d]),
        ReplayRound(0.002, [e, f, g], 3, [e, f]),
    ]
    steps = [ReplayStep(token, 0.001) for token in (a, b, c, d, e, f)]
    about = {"chip": "a <chip> & more", "dtype": "float32", "seed": 3, "nothing": None}
    passages = [
        Passage("first", "# a prompt\n", steps, rounds),
        Passage("second", "x = ", steps[:1], [ReplayRound(0.1, [], 0, [a])]),
    ]
    return Replay("A <title> & more", "demo", "demo-drafter", 4, passages, about)


def written(path: Path, replay: Replay) -> Page:
    write_replay(path / "replay.html", replay)
    return Page(path / "replay.html")


def with_round(**changes: Any) -> list[Passage]:
    """The passages of the sample, the second round of the first changed."""
    first, second = sample().passages
    rounds = list(first.rounds)
    rounds[1] = replace(rounds[1], **changes)
    return [replace(first, rounds=rounds), second]


def test_the_page_is_one_file_that_fetches_nothing(tmp_path: Path):
    page = written(tmp_path, sample())
    check_self_contained(page)
    assert len(page.scripts) == 1
    assert page.embedded is not None
    assert "//" not in page.source.replace(page.scripts[0], "").replace(page.embedded, "")


def test_the_data_comes_out_as_it_went_in(tmp_path: Path):
    replay = sample()
    data = written(tmp_path, replay).data()
    assert data == json.loads(json.dumps(asdict(replay)))
    first = data["passages"][0]
    emitted = [token["text"] for round_ in first["rounds"] for token in round_["emitted"]]
    assert emitted == [step["token"]["text"] for step in first["baseline"]] == ["def", " f", "(x", "):", "\n", "    return"]
    assert [token["id"] for round_ in first["rounds"] for token in round_["drafted"]] == [0, 1, 90, 90, 91, 4, 5, 6]


def test_names_and_settings_are_shown(tmp_path: Path):
    text = written(tmp_path, sample()).text
    for shown in ("A <title> & more", "demo with demo-drafter, blocks of 4", "a <chip> & more", "float32", "seed 3"):
        assert shown in text
    assert "nothing" not in text


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_escapes_from_the_data(tmp_path: Path, text: str):
    replay = replace(sample([text] * 7), title=text)
    page = written(tmp_path, replay)
    assert page.embedded is not None
    assert not set("<>&") & set(page.embedded)
    assert page.data()["passages"][0]["rounds"][0]["emitted"][2]["text"] == text
    assert len(page.named("script")) == 2
    check_self_contained(page)


@given(st.recursive(st.text(st.characters()) | st.floats(allow_nan=False, allow_infinity=False), st.lists, max_leaves=8))
@settings(max_examples=200)
def test_any_text_survives_embedding(data: Any):
    text = embed_json(data)
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text) == data


@pytest.mark.parametrize("data", [float("nan"), [float("inf")], {"x": object()}])
def test_what_json_cannot_hold_is_an_error(data: Any):
    with pytest.raises(ValueError, match="JSON"):
        embed_json(data)


@given(st.lists(st.text(max_size=5), min_size=7, max_size=7))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_token_is_in_the_page(tmp_path: Path, texts: list[str]):
    data = written(tmp_path, sample(texts)).data()
    assert [step["token"]["text"] for step in data["passages"][0]["baseline"]] == texts[:6]


def test_the_script_finds_every_element_that_it_names(tmp_path: Path):
    """The script and the page's body are two files; this holds them together."""
    page = written(tmp_path, sample())
    present = {attributes.get("id") for _, attributes in page.elements}
    named = set(re.findall(r'\$\("([\w-]+)"\)', asset("replay.js")))
    named |= {f"{side}-{what}" for side in ("plain", "fast") for what in ("rate", "count", "bar")}
    assert len(named) > 15
    assert named <= present
    described = {attributes.get("aria-labelledby") for _, attributes in page.elements} - {None}
    assert described
    assert described <= present


GOOD = ReplayToken(7, "x", 0.5, 1.0)
BAD_ROUNDS = [
    ({"accepted": 3}, "found 3"),
    ({"accepted": -1}, "found -1"),
    ({"seconds": 0.0}, "above 0 seconds, found 0.0"),
    ({"seconds": -0.5}, "found -0.5"),
    ({"seconds": float("nan")}, "found nan"),
    ({"seconds": float("inf")}, "found inf"),
    ({"drafted": [GOOD] * 4}, "block size 4, found 4"),
    ({"emitted": []}, "found 0 emitted"),
    ({"emitted": [GOOD, GOOD]}, "0 accepted tokens and one from the target, found 2"),
    ({"accepted": 1, "emitted": [GOOD, GOOD]}, "found draft 90 and token 7"),
    ({"accepted": 2, "emitted": [GOOD]}, "2 accepted tokens and one from the target, found 1"),
    ({"emitted": [replace(GOOD, id=-1)]}, "found -1"),
    ({"emitted": [replace(GOOD, probability=1.5)]}, "token 7: expected a probability from 0 to 1, found 1.5"),
    ({"emitted": [replace(GOOD, probability=float("nan"))]}, "probability"),
    ({"drafted": [replace(GOOD, margin=-0.1)]}, "token 7: expected a margin of 0 or more, found -0.1"),
    ({"drafted": [replace(GOOD, margin=float("inf"))]}, "margin"),
]


@pytest.mark.parametrize(("changes", "problem"), BAD_ROUNDS)
def test_a_round_that_cannot_be_is_named(changes: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=r"prompt 1 \('first'\), round 2: ") as caught:
        replace(sample(), passages=with_round(**changes))
    assert problem in str(caught.value)


def test_a_step_that_cannot_be_is_named():
    first, second = sample().passages
    late = replace(second, baseline=[*second.baseline, ReplayStep(GOOD, 0.0)])
    with pytest.raises(ValueError, match=r"prompt 2 \('second'\), step 2 of the baseline: expected a time above 0"):
        replace(sample(), passages=[first, late])


@pytest.mark.parametrize(("changes", "problem"), [({"passages": []}, "at least one prompt"), ({"block_size": 0}, "block size")])
def test_a_replay_that_cannot_be_is_an_error(changes: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        replace(sample(), **changes)


@pytest.mark.parametrize("emptied", ["baseline", "rounds"])
def test_both_ways_are_needed(emptied: str):
    first, _ = sample().passages
    with pytest.raises(ValueError, match="expected steps and rounds, found"):
        replace(sample(), passages=[replace(first, **{emptied: []})])


def test_only_the_last_round_may_be_cut_short():
    first, second = sample().passages
    cut = first.rounds[2]
    whole = first.rounds[1]
    with pytest.raises(ValueError, match=r"round 1: expected 3 accepted tokens and one from the target, found 2"):
        replace(sample(), passages=[replace(first, rounds=[cut, whole]), second])
