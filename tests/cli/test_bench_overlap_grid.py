"""`tilewright bench overlap`: what it predicts, what it runs here, and what it refuses."""

import json
from dataclasses import replace
from html import unescape
from math import prod
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run
from report.reading import Page, check_self_contained
from tilewright.bench import overlap, overlap_grid
from tilewright.hardware.links import Fabric, torus_of
from tilewright.hardware.tpu import CHIPS
from tilewright.models.experts import Mixture
from tilewright.models.published_configs import MODELS
from tilewright.perfmodel.schedule import Node, ScheduledTransfer, ScheduleGraph
from tilewright.perfmodel.timeline import simulate

COMMAND = ("bench", "overlap")
SPEC = CHIPS["v5e"]
LAYER_S = {"prefill": 1e-3, "decode": 1e-4}
"""What a layer of the programs below computes."""


def made(setup: overlap.OverlapSetup, phase: overlap.Phase, name: str, layers: int) -> overlap.OverlapRun:
    """A program whose layers wait for a sum, or, under "ring", do not."""
    nodes = []
    for layer in range(layers):
        if name == overlap.SYNC:
            nodes.append(
                Node(f"sum{layer}", "all-reduce", "", "sync", transfer=ScheduledTransfer("all-reduce", 1_000_000), layer=layer)
            )
        cycles = LAYER_S[phase.kind] * 1e9 * SPEC.clock_ghz
        nodes.append(Node(f"product{layer}", "fusion", "", "run", cycles=cycles, estimated=name != "ring", layer=layer))
    timeline = simulate(ScheduleGraph(tuple(nodes), ()), fabric_of(setup.chip))
    return overlap.OverlapRun(setup, phase, name, layers, timeline, 1.0)


def fabric_of(topology: str) -> Fabric:
    """The links of a slice, without latency."""
    sizes = [int(size) for size in topology.partition(":")[2].split("x")]
    return Fabric(SPEC, torus_of(SPEC, sizes), tuple((x, y) for x in range(sizes[0]) for y in range(sizes[1])), hop_us=0.0)


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that are made up, on slices whose devices need no compiler."""
    count = property(lambda setup: prod(int(size) for size in setup.chip.partition(":")[2].split("x")))
    monkeypatch.setattr(overlap.OverlapSetup, "devices", count)
    monkeypatch.setattr(overlap.OverlapSetup, "fabric", property(lambda setup: fabric_of(setup.chip)))
    monkeypatch.setattr(overlap, "compiled", made)
    monkeypatch.setattr("tilewright.cli.calibrate.version", lambda _: "0")


@pytest.mark.usefixtures("without_compiler")
def test_predictions_are_the_layers_and_the_head(run: Run, tmp_path: Path):
    figures = tmp_path / "figures.json"
    page = tmp_path / "page.html"
    arguments = ("--no-here", "--input", "1024,4096", "--output", 512, "--batch", "4,8", "--tensor-parallel", "4,8,16")
    ran = run(*COMMAND, *arguments, "--json", figures, "--html", page, columns=200)
    assert ran.status == 0, ran.err
    found = json.loads(figures.read_text())
    assert (found["measured"], found["measured_on"], found["model"]) == ([], None, "llama3-8b")
    assert len(found["predicted"]) == 2 * 2 * 3 * 3
    assert [one["schedule"] for one in found["predicted"][:3]] == ["sync", "sequence", "ring"], "what is compared by default"
    assert found["compiler_options"] is False
    ranges = found["ranges"]["v5e:4x2, batch 4, 1,024 tokens in, TPOT ms"]
    assert set(ranges["constants"]) == {"hbm_gb_per_s", "ici_gb_per_s", "roofline_time"}
    for name, prediction in ranges["predictions"].items():
        held = [one["tpot_ms"] for one in found["predicted"] if one["schedule"] == name and one["devices"] == 8]
        assert prediction["value"] == pytest.approx(held[0])
    # `ring` is nothing but operations without an estimate, which may take twice their roofline; `sync` waits for its links.
    assert {name: prediction["decides"][0] for name, prediction in ranges["predictions"].items() if prediction["decides"]} == {
        "sync": "ici_gb_per_s",
        "ring": "roofline_time",
    }
    assert ranges["roofline_share"] == 1
    one = next(one for one in found["predicted"] if (one["devices"], one["schedule"], one["batch_rows"]) == (8, "ring", 4))
    assert (one["chip"], one["input_tokens"], one["output_tokens"], one["decode_positions"]) == ("v5e:4x2", 1024, 512, 1280)
    head_s = 2 * 4096 * 128256 / 8 / 819e9  # its weights are read once
    assert one["head_ms"] == pytest.approx(1e3 * head_s)
    assert one["ttft_ms"] == pytest.approx(1e3 * (32 * LAYER_S["prefill"] + head_s))
    assert one["tpot_ms"] == pytest.approx(1e3 * (32 * LAYER_S["decode"] + head_s))
    assert one["output_tokens_per_s"] == pytest.approx(4e3 / one["tpot_ms"])
    assert one["prefill_exposed_ms"] == one["decode_exposed_ms"] == 0
    sync = next(
        each for each in found["predicted"] if each["schedule"] == "sync" and each["devices"] == 8 and each["batch_rows"] == 4
    )
    assert sync["decode_exposed_ms"] == pytest.approx(sync["tpot_ms"] - one["tpot_ms"])
    assert one["tpot_over_sync"] == pytest.approx(one["tpot_ms"] / sync["tpot_ms"])
    assert (sync["ttft_over_sync"], sync["tpot_over_sync"]) == (1, 1)
    # Llama 3 8B has 8.03e9 parameters of two bytes; a position of a row takes 128 KiB.
    assert one["device_gb"] == pytest.approx((2 * 8.03e9 + 4 * 1536 * 2**17) / 8 / 1e9, rel=1e-3)
    assert one["fits"]
    # Over sixteen, two devices hold the same key/value head: a projection of 4096 inputs, and its caches.
    wide = next(
        each for each in found["predicted"] if (each["devices"], each["batch_rows"], each["input_tokens"]) == (16, 4, 1024)
    )
    of_head = 2 * 32 * (2 * 4096 * 128) + 4 * 1536 * 2**14
    assert wide["device_gb"] == pytest.approx(one["device_gb"] / 2 + of_head / 2 / 1e9, rel=1e-3)
    assert (one["prefill_layers_compiled"], one["decode_layers_compiled"]) == (5, 9)
    assert (one["prefill_steady"], one["decode_steady"]) == (True, True)
    assert "not steady" not in ran.out
    assert "predicted for v5e" in ran.out
    check_self_contained(Page(page))
    text = page.read_text()
    # What the model leaves out, and how much the compiler has no estimate for, stand beside the figures.
    assert one["prefill_compute_ms"] == pytest.approx(32e3 * LAYER_S["prefill"])
    assert (one["prefill_compute_over_sync"], one["prefill_without_estimate"], one["prefill_roofline_share"]) == (1, 5, 1)
    for shown in (ran.out, unescape(text)):
        assert "starting a transfer costs nothing" in " ".join(shown.split())
        assert "sync prefill 0 (0% of a layer's compute)" in " ".join(shown.split())
        assert "ring decode 9 (100% of a layer's compute)" in " ".join(shown.split())
    assert text.count("<polyline") == 6 * 6, "six charts, a line for each batch and schedule"
    assert "Throughput (tokens/s), 4,096 tokens in and 512 out" in text


@pytest.mark.usefixtures("without_compiler")
def test_a_device_holds_its_share_of_all_experts():
    """Qwen3-30B-A3B: 30.5e9 parameters over eight devices. Two have the same of four key/value heads, all have the routers."""
    mixture = Mixture(experts=128, chosen=8, size=768)
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_layers": 48, "num_heads": 32, "num_kv_heads": 4}
    config = replace(MODELS["qwen3-8b"], family="qwen3_moe", mixture=mixture, **sizes)
    setup = overlap.OverlapSetup("v5e:4x2", "made up", config)
    found = overlap_grid.device_gb(setup, overlap_grid.GridCase(1024, 512, 4))
    parameters = (30.53e9 + 48 * 2048 * (2 * 4 * 128 + 7 * 128)) / 8
    assert found == pytest.approx((2 * parameters + 4 * 1536 * 48 * 2 * 128 * 2) / 1e9, rel=2e-4)


@pytest.mark.slow
def test_what_runs_here_gives_the_same_tokens(run: Run, tmp_path: Path):
    """And as many collectives, of as many bytes, as the schedules have: two sums a layer, and the embedding's."""
    page = tmp_path / "page.html"
    arguments = ("--chip", "none", "--here", "--input", 64, "--output", 64, "--batch", 2, "--tensor-parallel", 2)
    ran = run(*COMMAND, *arguments, "--json", "-", "--html", page)
    assert ran.status == 0, ran.err
    assert ran.json["predicted"] == []
    alone, sync, _, ring = ran.json["measured"]
    assert (alone["devices"], alone["schedule"], alone["same_tokens"]) == (1, None, None)
    assert (alone["prefill_collectives"], alone["step_sent_bytes"]) == ({}, 0)
    assert [one["same_tokens"] for one in (sync, ring)] == [True, True]
    assert [one["input_tokens"] for one in (sync, ring)] == [4, 4]
    # a position of both rows, in float32
    layers = 4
    stream = 2 * 256 * 4
    assert sync["step_collectives"] == {"all-reduce": 2 * layers + 1, "all-gather": 2}
    assert sync["step_sent_bytes"] == (2 * layers + 1) * stream + 2 * 2 * 4
    # A prefill needs nothing of the last layer but its keys and values; the two prompts are computed one after the other.
    assert sync["prefill_collectives"] == {"all-reduce": 2 * (2 * (layers - 1) + 1)}
    assert sync["prefill_sent_bytes"] == (2 * (layers - 1) + 1) * 16 * stream
    assert set(ring["prefill_collectives"]) == {"collective-permute"}
    assert all(one[name] > 0 for one in (alone, sync, ring) for name in ("ttft_ms", "tpot_ms", "output_tokens_per_s"))
    assert "are meaningful, not the times." in " ".join(ran.err.split())
    assert Page(page).data()["measured"][1]["schedule"] == "sync"


def test_other_tokens_than_one_device_gives_are_a_failure(run: Run, monkeypatch: pytest.MonkeyPatch):
    def measured(lm: Any, case: overlap_grid.GridCase, wanted: Any) -> tuple[dict[str, Any], Any]:
        counts = {
            f"{name}_{what}": {} if what == "collectives" else 0
            for name in ("prefill", "step")
            for what in ("collectives", "sent_bytes")
        }
        same = None if wanted is None else wanted == [[2]]
        return {"devices": 1, "schedule": None, **case.figures(1.0, 1.0), "same_tokens": same, **counts}, [[1]]

    monkeypatch.setattr("tilewright.bench.overlap_here.measured", measured)
    monkeypatch.setattr("tilewright.bench.overlap_here.model", lambda *_: None)
    ran = run(*COMMAND, "--chip", "none", "--here", "--input", 64, "--batch", 2, "--tensor-parallel", 2, "--schedule", "sync")
    assert ran.status == 1
    assert " no " in ran.out


@pytest.mark.usefixtures("without_compiler")
def test_a_layer_that_is_unlike_its_neighbours_is_said_to_be(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overlap, "STEADY", -1.0)
    page = tmp_path / "page.html"
    arguments = ("--no-here", "--input", 1024, "--batch", 4, "--tensor-parallel", 4, "--schedule", "sync", "--json", "-")
    ran = run(*COMMAND, *arguments, "--html", page)
    assert ran.status == 0, ran.err
    (one,) = ran.json["predicted"]
    assert (one["prefill_layers_compiled"], one["prefill_steady"], one["decode_steady"]) == (11, False, False)
    assert ran.err.count("not steady") >= 2
    assert "\nnot steady</td>" in page.read_text()


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize(
    "options, message",
    [
        (
            ("--schedule", "domino9"),
            "expected schedule among sync, sequence, ring, domino, column, exact, auto, found domino9",
        ),
        (("--chip", "v5e:4x2"), "expected a TPU kind of v5e, v5p, v6e, found 'v5e:4x2'"),
        (("--tensor-parallel", "3"), "expected 2, 4, 8, 16 devices of v5e, found 3"),
        (("--input", "1"), "expected input of at least 2, found 1"),
        (("--batch", "0"), "expected batch of at least 1, found 0"),
        (("--schedule", ","), "expected schedule among sync, sequence, ring, domino, column, exact, auto, found none"),
        (("--layers", "2"), "expected from 3 to 32 layers"),
        (("--draws", "0"), "expected --draws from 2, found 0"),
        (("--chip", "none", "--no-here"), "expected a chip or several devices, found neither"),
        (("--chip", "none", "--here", "--tensor-parallel", "16"), "a number up to the 8 devices of this machine, found (16,)"),
        (("--chip", "none", "--here", "--input", "16"), "expected at least 32 input and output tokens"),
        (("--html", "nowhere/page.html"), "its folder does not exist"),
    ],
)
def test_what_cannot_be_is_refused(run: Run, options: tuple[str, ...], message: str):
    ran = run(*COMMAND, *options)
    assert ran.status == 2
    assert message in " ".join(ran.err.split())
