"""The page and tables of the diffusion benchmark, and the replay page of denoising."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from report.reading import Page, check_self_contained
from tilewright.report.denoising import DenoisingPassage, DenoisingReplay, DenoisingStep, Placed, write_denoising
from tilewright.report.diffusion import figures_table, programs_table, write_diffusion
from tilewright.report.page import Report, asset
from tilewright.report.replay import ReplayToken
from tilewright.report.unmasking import MASK, figures_line, frame


def row(name: str, mode: str = "dense", **more: Any) -> dict[str, Any]:
    fields = {
        "name": name,
        "mode": mode,
        "threshold": None,
        "tau": None,
        "correct": 3,
        "accuracy": 0.75,
        "responses": 4,
        "token_agreement": None if name == "dense" else 0.875,
        "argmax_agreement": None,
        "argmax_agreement_by_step": [],
        "logit_kl_nats": None,
        "logit_kl_nats_by_step": [],
        "salient_share": 1.0,
        "salient_share_by_step": [1.0, 1.0],
        "salient_share_by_layer": [1.0, 1.0],
        "tokens_per_forward": 1.0,
        "tokens_per_forward_by_step": [1.0, 1.0],
        "tokens_per_s": 1234.5,
        "seconds_per_step": 0.0123,
        "step_speedup": 1.0,
        "speedup": 1.0,
        "compilations": 2,
        "compile_seconds": 3.25,
        "compilations_while_timed": 0,
        "host_synchronisations_per_step": 1 / 64,
        "peak_bytes": 20_100_000,
        "spans": {"whole": 768},
    }
    return {**fields, **more}


CACHED = {"logit_kl_nats": 0.0025, "logit_kl_nats_by_step": [0.0, 0.005], "argmax_agreement": 0.98}
CACHED |= {"argmax_agreement_by_step": [1.0, 0.96], "salient_share": 0.07, "salient_share_by_step": [1.0, 0.05]}


def sample() -> Report:
    sparse = row(
        "sparse τ0.99", "sparse", speedup=2.7, accuracy=0.5, correct=2, spans={"whole": 204, "response": 564}, **CACHED
    )
    by_threshold = row("sparse <p≥0.9>", "sparse", threshold=0.9, speedup=5.02, **CACHED)
    return Report("Denoising & more", "small, 4 problems.", [row("dense"), sparse, by_threshold], {"chip": "a <chip>"})


def test_the_page_is_one_file_with_all_its_data(tmp_path: Path):
    write_diffusion(tmp_path / "page.html", sample())
    page = Page(tmp_path / "page.html")
    check_self_contained(page)
    assert page.data() == json.loads(json.dumps(asdict(sample())))
    for shown in (
        "small, 4 problems.",
        "5.02",
        "75.0%",
        "sparse <p≥0.9>",
        "a <chip>",
        "whole 204, response 564",
        "0.016",
        "commits from p 0.9",
    ):
        assert shown in page.text, shown
    assert "Logits compared with dense steps" in page.text


def test_prompts_without_answers_and_dense_alone_make_a_page(tmp_path: Path):
    rows = [row("dense", correct=None, accuracy=None)]
    write_diffusion(tmp_path / "page.html", replace(sample(), records=rows))
    page = Page(tmp_path / "page.html")
    assert "Logits compared with dense steps" not in page.text
    assert "Salient positions" not in page.text
    with pytest.raises(ValueError, match="at least one row"):
        replace(sample(), records=[])


def test_the_tables_have_every_figure():
    console = Console(width=140, record=True)
    console.print(figures_table(sample().records).terminal())
    console.print(programs_table(sample().records).terminal())
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["dense", "75.0%", "–", "–", "–", "100%", "1.00", "1,234", "12.30", "1.00", "1.00"] in lines
    assert ["sparse", "τ0.99", "50.0%", "87.5%", "98.0%", "0.0025", "7%", "1.00", "1,234", "12.30", "1.00", "2.70"] in lines
    assert ["sparse", "τ0.99", "2", "3.2", "0", "0.016", "20.1", "whole", "204,", "response", "564"] in lines


def step(*places: int, **changes: Any) -> DenoisingStep:
    committed = [Placed(place, ReplayToken(place, f" t{place}")) for place in places]
    return replace(DenoisingStep(0.01, "whole", committed, [1.0, 0.25]), **changes)


def denoising() -> DenoisingReplay:
    dense = [replace(step(n), salient=[]) for n in range(4)]
    passage = DenoisingPassage("first", "a <prompt>\n", dense, [step(2, 0), step(1, 3, span="response")])
    return DenoisingReplay("Steps & <more>", "small", "sparse", 4, [passage], {"tau": 0.99})


def test_the_replay_is_one_file_with_all_its_data(tmp_path: Path):
    write_denoising(tmp_path / "page.html", denoising())
    page = Page(tmp_path / "page.html")
    check_self_contained(page)
    assert page.data() == json.loads(json.dumps(asdict(denoising())))
    for shown in ("Steps & <more>", "small, sparse steps, blocks of 4", "Dense steps", "a step back and on", "still a mask"):
        assert shown in page.text
    assert "Speculative" not in page.text
    present = {attributes.get("id") for _, attributes in page.elements}
    assert set(re.findall(r'\$\("([\w-]+)"\)', asset("replay.js"))) <= present


@pytest.mark.parametrize(
    ("rounds", "problem"),
    [
        ([], "expected steps, found none"),
        ([step(0), step(0)], "step 2: expected a place that was masked, found 0"),
        ([step(0, committed=[Placed(-1, ReplayToken(1, "x"))])], "step 1: expected a place that was masked, found -1"),
        ([step(0, seconds=0.0)], "step 1: expected a time above 0 seconds, found 0.0"),
        ([step(0, span="all")], "step 1: expected a span among block, response, whole, found 'all'"),
        ([step(0, salient=[1.5])], "step 1: expected a salient share from 0 to 1, found 1.5"),
        ([step(*range(5))], "step 1: expected at most 4 committed tokens, found 5"),
    ],
)
def test_steps_that_cannot_be_are_named(rounds: list[DenoisingStep], problem: str):
    (passage,) = denoising().passages
    with pytest.raises(ValueError, match=re.escape(f"prompt 1 ('first'), {problem}")):
        replace(denoising(), passages=[replace(passage, rounds=rounds)])


@pytest.mark.parametrize(("changes", "problem"), [({"passages": []}, "at least one prompt"), ({"block_size": 0}, "block size")])
def test_a_replay_that_cannot_be_is_an_error(changes: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        replace(denoising(), **changes)


def test_a_frame_keeps_what_is_new_in_sight():
    console = Console(width=20, height=8, record=True, force_terminal=True)
    pieces = [(f"line {n}\n", n == 30) for n in range(40)] + [(None, False)]
    console.print(frame(console, "prompt\n", pieces, "step 3 of a status that is far too long for its line"))
    lines = console.export_text().splitlines()
    assert len(lines) == 6
    assert "line 30" in lines
    assert "prompt" not in lines
    console.print(frame(console, "prompt", [(None, False)] * 3, "step 0"))
    assert console.export_text().splitlines() == [f"prompt{MASK * 3}", "step 0"]


def test_figures_in_a_line():
    figures = {
        "tokens": 1200,
        "seconds": 2.0,
        "tokens_per_s": 600.0,
        "steps": 1,
        "tokens_per_forward": 1.25,
        "salient_share": 0.1,
    }
    assert figures_line(figures) == "1,200 tokens in 2.00 s · 600 tokens/s · 1 steps · 1.25 tokens per forward · salient 10%"
    nothing = dict.fromkeys(figures) | {"steps": 0, "tokens": 0}
    assert figures_line(nothing) == "0 steps"
