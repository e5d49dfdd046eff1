"""`tilewright bench overlap --micro`: what it refuses, what it shows, and what the TPU compiler makes of collectives."""

import json
from pathlib import Path

import pytest

from cli.conftest import Run

COMMAND = ("bench", "overlap", "--micro")


@pytest.mark.parametrize(
    "options, message",
    [
        (("bench", "overlap", "--repetitions", "2"), "expected --repetitions with --micro, found it without"),
        ((*COMMAND, "--input", "512"), "expected --input without --micro, found it with"),
        ((*COMMAND, "--chip", "v9:4x2"), "expected a TPU of v5e, v5p, v6e, found 'v9:4x2'"),
        ((*COMMAND, "--chip", "none"), "expected a chip, a collective and a size, or --here; found none"),
        ((*COMMAND, "--chip", "none", "--here", "--size-kib", "3"), "expected multiples of 64 KiB"),
        ((*COMMAND, "--repetitions", "0"), "expected repetitions of at least 1, found 0"),
        ((*COMMAND, "--hop-us", "nan"), "expected the latency of a hop from 0 us, found nan"),
    ],
)
def test_what_cannot_be_is_refused(run: Run, options: tuple[str, ...], message: str):
    ran = run(*options)
    assert ran.status == 2
    assert message in " ".join(ran.err.split())


def test_what_ran_here_is_shown(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    figures = {"product_us": 10.0, "collective_us": 4.0, "both_us": 12.0, "hidden_share": 0.5}
    about = {"collective": "all-reduce", "program": "beside", "size_bytes": 65536}
    monkeypatch.setattr("tilewright.cli.bench_overlap.measured", lambda *_: about | figures)
    page = tmp_path / "page.html"
    ran = run(
        *COMMAND, "--chip", "none", "--here", "--collective", "all-reduce", "--size-kib", 64, "--html", page, "--json", "-"
    )
    assert ran.status == 0, ran.err
    assert ran.json["measured"] == [about | figures] * 4
    assert ran.json["compiled"] == []
    assert "50%" in ran.err
    assert "Measured here" in page.read_text()


@pytest.mark.tpu
def test_only_permutes_are_asynchronous_on_every_chip(run: Run, tmp_path: Path):
    """What the rings rest on. A compiler that makes more of it is welcome, and this test should then say so."""
    path = tmp_path / "figures.json"
    sizes = ("--collective", "collective-permute,all-reduce", "--size-kib", "1024")
    ran = run(*COMMAND, *sizes, "--chip", "v5e:4x2,v6e:4x2", "--json", path)
    assert ran.status == 0, ran.err
    found = {(one["chip"], one["collective"], one["program"]): one for one in json.loads(path.read_text())["compiled"]}
    for chip in ("v5e:4x2", "v6e:4x2"):
        beside, two = (found[chip, "collective-permute", name] for name in ("beside", "two"))
        assert (beside["made_of_it"], two["made_of_it"]) == ("asynchronous", "asynchronous")
        assert beside["hidden_us"] == pytest.approx(beside["communication_us"])
        sums = found[chip, "all-reduce", "beside"], found[chip, "all-reduce", "two"]
        assert [one["made_of_it"] for one in sums] == ["synchronous", "synchronous, merged"]
        assert all(one["hidden_us"] == 0 for one in sums)
        assert sums[0]["ring_us"] <= sums[0]["communication_us"] * (1 + 1e-9)
