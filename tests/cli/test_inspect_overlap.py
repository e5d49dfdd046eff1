"""`tilewright inspect overlap`: what it refuses, what it writes, and what it finds with the TPU compiler."""

import json
from html import unescape
from pathlib import Path

import pytest

from cli.conftest import Run
from tilewright.bench import overlap
from tilewright.bench.ordering import read_name
from tilewright.cli import inspect_overlap
from tilewright.hardware.links import Fabric, ring_of, torus_of
from tilewright.hardware.tpu import CHIPS
from tilewright.parallel.compiling import hiding
from tilewright.perfmodel.schedule import Node, ScheduledTransfer, ScheduleGraph
from tilewright.perfmodel.timeline import simulate

CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 512,
}
COMMAND = ("inspect", "overlap")
COMPILED = overlap.compiled
PLACES = tuple(ring_of([(x, y) for x in range(4) for y in range(2)]))
FABRIC = Fabric(CHIPS["v5e"], torus_of(CHIPS["v5e"], (4, 2)), PLACES, hop_us=0.0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def made(setup: overlap.OverlapSetup, phase: overlap.Phase, name: str, layers: int) -> overlap.OverlapRun:
    """A program whose layers take a tenth of a millisecond, with a transfer that is as long as the phase's rows are many."""
    chip = CHIPS["v5e"]
    schedule = read_name(name)[0]
    sent = ScheduledTransfer("all-reduce", phase.batch * 1_000_000)
    nodes = []
    for layer in range(layers):
        if name != overlap.BOUND:
            role = "sync" if schedule == "sync" else "start"
            nodes.append(Node(f"sum{layer}", "all-reduce", "", role, transfer=sent, layer=layer))
        began = len(nodes) - 1
        for operation, estimated in (("product", True), ("kernel", layer != 1)):
            cycles = 5e4 * chip.clock_ghz
            nodes.append(Node(f"{operation}{layer}", "fusion", "", "run", cycles=cycles, estimated=estimated, layer=layer))
        if schedule == "ring":
            nodes.append(Node(f"done{layer}", "done", "", "done", start=began, layer=layer))
    return overlap.OverlapRun(setup, phase, name, layers, simulate(ScheduleGraph(tuple(nodes), ()), FABRIC), 1.0)


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that are made up, on a slice whose devices need no compiler."""
    monkeypatch.setattr(overlap.OverlapSetup, "devices", 8)
    monkeypatch.setattr(overlap.OverlapSetup, "mesh", None)
    monkeypatch.setattr(overlap.OverlapSetup, "fabric", FABRIC)
    monkeypatch.setattr(overlap, "compiled", made)
    monkeypatch.setattr("tilewright.cli.calibrate.version", lambda _: "0")


@pytest.mark.usefixtures("without_compiler")
def test_orders(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch):
    """The same schedule with its own ties and without; what the installed JAX lacks is left out, by one line."""
    monkeypatch.setattr(inspect_overlap, "program_order", lambda: None)
    words = (*COMMAND, "--model-config", model, "--layers", 3, "--schedule", "ring", "--phase", "decode:8x64", "--json", "-")
    ran = run(*words, "--order", "own,compiler,program_order")
    assert [one["schedule"] for one in ran.json["data"]] == ["ring", "ring@compiler"]
    assert ran.err.count("--order program_order needs JAX 0.12") == 1
    alone = run(*words, "--order", "program_order")
    unknown = run(*words, "--order", "none")
    assert (alone.status, "needs JAX 0.12" in alone.err) == (2, True)
    assert (unknown.status, "expected order among own, compiler, program_order, found none" in unknown.err) == (2, True)


@pytest.mark.usefixtures("without_compiler")
def test_tables_and_files(run: Run, model: Path, tmp_path: Path):
    files = {name: tmp_path / f"figures.{name}" for name in ("json", "html", "trace", "graph")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    phases = "decode:8x64,prefill:64x8"
    ran = run(*COMMAND, "--model-config", model, "--layers", 3, "--schedule", "sync,ring", "--phase", phases, *options)
    assert ran.status == 0, ran.err
    written = json.loads(files["json"].read_text())
    assert (written["measured"], written["hop_us"], written["dtype"]) == (False, FABRIC.hop_us, "bfloat16")
    assert [(one["schedule"], one["phase"], one["batch_rows"]) for one in written["data"]] == [
        ("sync", "decode", 8),
        ("ring", "decode", 8),
        ("sync", "prefill", 64),
        ("ring", "prefill", 64),
    ]
    # 8 MB all round a ring of eight take 140 us, of which a layer of 100 us hides its own share: the rest waits.
    sync, ring = written["data"][:2]
    assert sync["communication_ms"] == pytest.approx(0.14)
    assert (sync["exposed_share"], sync["exposed_share_of_sync"], sync["extra_compute_share"]) == (1, 1, 0)
    assert sync["total_over_bound"] == pytest.approx(2.4)
    assert ring["hidden_ms"] == pytest.approx(0.1)
    assert ring["exposed_share_of_sync"] == pytest.approx(0.04 / 0.14)
    assert ring["least_exposed_ms"] == pytest.approx(0.04)
    assert ring["model_exposed_ms"] == pytest.approx(4 * 0.04)
    assert [layer["layer"] for layer in ring["layers"]] == [0, 1, 2]
    assert "28.6%" in ran.out
    for shown in (ran.out, files["html"].read_text()):
        assert "starting a transfer costs nothing" in " ".join(shown.split())
        assert "at the full roofline: sync 1 (50% of a layer's compute), ring 1 (50%" in " ".join(unescape(shown).split())
    ranges = written["ranges"]["v5e:4x2 decode:8x64"]
    assert {name: prediction["value"] for name, prediction in ranges["predictions"].items()} == {
        name: pytest.approx(one["total_ms"]) for name, one in (("sync", sync), ("ring", ring))
    }
    assert ranges["predictions"]["ring"]["first"] == ranges["draws"] == 24
    assert ranges["roofline_share"] == pytest.approx(0.5)
    for name in ("ring first in 24 of 24", "up to 50% of the compute time is in operations without an estimate"):
        assert name in " ".join(ran.out.split())
    assert [(one["without_estimate"], one["roofline_share"]) for one in (sync, ring)] == [(1, pytest.approx(0.5))] * 2
    assert written["compiler_options"] is False
    assert "Core and links in a layer, v5e:4x2 prefill:64x8" in files["html"].read_text()
    events = json.loads(files["trace"].read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} >= {"v5e:4x2 decode:8x64 ring"}
    programs = json.loads(files["graph"].read_text())["programs"]
    assert len(programs) == 6
    assert programs[1]["nodes"][0]["transfer"]["kind"] == "all-reduce"


@pytest.mark.parametrize("enabled", [False, True])
def test_layers_are_compiled_with_options_only_if_asked(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, without_compiler: None, enabled: bool
):
    given = []

    def compile_for(*_: object, options: object, **__: object) -> None:
        given.append(options)
        raise ValueError("no compiler here")

    monkeypatch.setattr(overlap, "compiled", COMPILED)
    monkeypatch.setattr(overlap, "program", lambda *_: (None, ()))
    monkeypatch.setattr(overlap, "compile_for", compile_for)
    options = ["--compiler-options"] if enabled else []
    ran = run(*COMMAND, "--model-config", model, "--layers", 3, "--schedule", "sync", "--phase", "decode:8x64", *options)
    assert "no compiler here" in ran.err
    assert given == [hiding("v5e") if enabled else None]


@pytest.mark.usefixtures("without_compiler")
def test_a_layer_that_is_unlike_its_neighbours_is_said_to_be(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch):
    """A model of four layers has no more to add."""
    arguments = ("--model-config", model, "--schedule", "sync", "--phase", "decode:8x64")
    ran = run(*COMMAND, *arguments)
    assert ran.status == 0, ran.err
    assert "not steady" not in ran.out
    monkeypatch.setattr(overlap, "STEADY", -1.0)
    ran = run(*COMMAND, *arguments, columns=200)
    assert ran.status == 0, ran.err
    assert ran.out.count("not steady") >= 3, "the schedule's time, the bound's, and a note"


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize(
    "schedules, share, status", [("sync,ring", 0.3, 0), ("sync,ring", 0.2, 1), ("sync", 0.99, 1), ("sync", 1, 0)]
)
def test_a_share_above_what_is_allowed_fails(run: Run, model: Path, schedules: str, share: float, status: int):
    """In each order alike; of sync, only where nothing else is asked for."""
    arguments = ("--model-config", model, "--layers", 3, "--phase", "decode:8x64", "--schedule", schedules)
    ran = run(*COMMAND, *arguments, "--order", "own,compiler", "--fail-above", share)
    assert ran.status == status
    assert ("exposed, more than" in ran.out) == bool(status)


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize(
    "options, message",
    [
        (("--schedule", "domino9"), "expected schedule among sync, sequence, ring, domino, column, exact, auto"),
        (("--phase", "prefill:4"), "expected a phase as prefill:BATCHxPOSITIONS or decode:BATCHxPOSITIONS, found 'prefill:4'"),
        (("--chip", "v9:4x2"), "expected a TPU of v5e, v5p, v6e, found 'v9:4x2'"),
        (("--model-config", "llama9"), "expected a model of smollm2-135m, llama3-8b"),
        (
            ("--model-config", "llama3-8b", "--tensor-parallel", "3"),
            "expected devices that divide 32 heads, 14336 MLP columns, and that divide 8 key/value heads or are a multiple of "
            "them: 1, 2, 4, 8, 16, 32; found 3",
        ),
        (
            ("--model-config", "llama3-8b", "--tensor-parallel", "16"),
            "expected a topology of 16 devices",
        ),
        (("--model-config", "llama3-8b", "--tensor-parallel", "4"), "expected a topology of 4 devices"),
        (("--layers", "2"), "expected from 3 to 32 layers"),
        (("--layers", "33"), "expected from 3 to 32 layers"),
        (("--hop-us", "-1"), "expected the latency of a hop from 0 us, found -1"),
        (
            ("--hop-us", "1", "--calibrate", "micro.json"),
            "expected --hop-us or --calibrate, which fits it, found 1 and micro.json",
        ),
        (("--draws", "1"), "expected --draws from 2, found 1"),
        (("--fail-above", "2"), "expected --fail-above from 0 to 1, found 2"),
        (("--schedule", ","), "expected schedule among sync, sequence, ring, domino, column, exact, auto, found none"),
        (("--html", "nowhere/page.html"), "its folder does not exist"),
    ],
)
def test_what_cannot_be_is_refused(run: Run, options: tuple[str, ...], message: str):
    ran = run(*COMMAND, *options)
    assert ran.status == 2
    assert message in " ".join(ran.err.split())


def test_a_topology_that_is_none_is_refused(run: Run):
    ran = run(*COMMAND, "--chip", "v5e:4by2")
    assert ran.status == 2
    assert "sizes up to 16, such as v5e:1x1" in " ".join(ran.err.split())


def test_without_the_compiler_the_extra_is_named(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    ran = run(*COMMAND)
    assert ran.status == 2
    assert "pip install 'tilewright[tpu]'" in ran.err


@pytest.mark.tpu
@pytest.mark.parametrize("chip", ["v5e:4x2", pytest.param("v5p:2x2x2", marks=pytest.mark.slow)])
def test_rings_hide_what_plain_sums_expose(run: Run, model: Path, tmp_path: Path, chip: str):
    """On a small model: all of a plain sum is exposed; of a ring, some passes under products."""
    path = tmp_path / "figures.json"
    arguments = (
        "--model-config",
        model,
        "--layers",
        3,
        "--schedule",
        "sync,ring",
        "--phase",
        "prefill:4x512",
    )
    ran = run(*COMMAND, *arguments, "--chip", chip, "--json", path)
    assert ran.status == 0, ran.err
    sync, ring = json.loads(path.read_text())["data"]
    assert sync["transfers"] == 2
    assert sync["sent_bytes"] == 2 * 4 * 512 * 1024 * 2
    assert sync["exposed_share"] == 1
    assert ring["transfers"] == 4 * 7  # four rings of seven hops, both ways together
    assert ring["hidden_ms"] > 0.1 * ring["communication_ms"]
    assert ring["exposed_share"] < 0.9
    for one in (sync, ring):
        assert one["hidden_ms"] + one["exposed_ms"] == pytest.approx(one["communication_ms"])
        assert one["bound_compute_cycles"] > 0


@pytest.mark.tpu
def test_a_batch_that_cannot_be_divided_is_refused(run: Run, model: Path):
    ran = run(*COMMAND, "--model-config", model, "--layers", 3, "--schedule", "domino", "--phase", "decode:3x64")
    assert ran.status == 2
    assert "domino, decode:3x64: expected a batch that 2 micro-batches divide, found 3 rows" in " ".join(ran.err.split())
