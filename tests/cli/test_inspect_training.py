"""`tilewright inspect training`: what it refuses, what it writes, and what it finds with the TPU compiler."""

import json
from dataclasses import replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from cli.conftest import Run
from tilewright.bench import overlap_training as training
from tilewright.compiled.aot import Compiled
from tilewright.hardware.links import Fabric, torus_of
from tilewright.hardware.tpu import CHIPS
from tilewright.models.decoder import config_from_hf
from tilewright.models.experts import Mixture
from tilewright.parallel.exchanges import FullyShardedPlan
from tilewright.perfmodel.schedule import Node, ScheduledTransfer, ScheduleGraph
from tilewright.perfmodel.timeline import simulate

CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 512,
}
COMMAND = ("inspect", "training")
SMALL = {"--mesh": "fsdp=4,tp=2", "--batch-size": 8, "--length": 64, "--chip": "v5e:4x2"}


def small(*options: object) -> list[object]:
    """`SMALL` with these options in the place of its own."""
    pairs = SMALL | dict(zip(options[::2], options[1::2], strict=True))
    return [word for pair in pairs.items() for word in pair]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def made(case: training.TrainingCase, name: str, plan: FullyShardedPlan) -> training.TrainingProgram:
    """A program whose halves take a tenth of a millisecond each. Weights are gathered a layer before their turn, beside its
    products or, where nothing is threaded, before them; gradients are scattered with nothing beside them."""
    chip = CHIPS["v5e"]
    nodes = []
    gathered = ScheduledTransfer("all-gather", 500_000)
    scattered = ScheduledTransfer("reduce-scatter", 4_000_000)

    def half(scope: str, beside: str | None) -> None:
        threaded = plan.threaded and name != training.ANNOTATED
        began = len(nodes)
        if beside is not None:
            nodes.append(Node("gather", "all-gather", beside, "start" if threaded else "sync", transfer=gathered))
        nodes.append(Node("product", "fusion", f"{scope}/dot_general", "run", cycles=1e5 * chip.clock_ghz))
        if beside is not None and threaded:
            nodes.append(Node("done", "done", beside, "done", start=began))

    for layer in range(case.layers):
        ahead = f"gather_{layer + 1}" if layer + 1 < case.layers else None
        for sublayer in ("attention", "mlp"):
            half(f"layer_{layer}/{sublayer}", ahead and f"{ahead}_{sublayer}")
    for layer in reversed(range(case.layers)):
        ahead = f"gather_{layer - 1}" if layer else None
        for sublayer in ("mlp", "attention"):
            half(f"transpose(jvp(back_{layer}/{sublayer}))", ahead and f"{ahead}_{sublayer}_again")
        if layer + 1 < case.layers:
            nodes.append(Node("scatter", "reduce-scatter", f"scatter_{layer + 1}_mlp", "sync", transfer=scattered))
    compiled = Compiled(case.chip, "", 2**29, 2**29, 2**29, 2**29, 0, (), (), {})
    return training.TrainingProgram(
        case, name, plan, compiled, simulate(training.placed(ScheduleGraph(tuple(nodes), ())), case.fabric), 1.0
    )


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that are made up, on a slice whose devices need no compiler."""
    chip = CHIPS["v5e"]
    places = [(x, y) for x in range(4) for y in range(2)]
    monkeypatch.setattr(training, "tpu_topology", lambda _: SimpleNamespace(devices=jax.devices()))
    monkeypatch.setattr(training.TrainingCase, "fabric", Fabric(chip, torus_of(chip, (4, 2)), tuple(places), 0.0))
    monkeypatch.setattr(training, "compile_program", made)
    monkeypatch.setattr("tilewright.cli.calibrate.version", lambda _: "0")


@pytest.mark.usefixtures("without_compiler")
def test_tables_and_files(run: Run, model: Path, tmp_path: Path):
    files = {name: tmp_path / f"figures.{name}" for name in ("json", "html", "trace")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    ran = run(
        *COMMAND, "--model-config", model, *small("--prefetch-distance", "1,2", "--rings", "gradients"), "--transfers", *options
    )
    assert ran.status == 0, ran.err
    written = json.loads(files["json"].read_text())
    assert (written["measured"], written["mesh"]) == (False, "fsdp=4,tp=2")
    by = {one["program"]: one for one in written["data"]}
    assert list(by) == ["prefetch 1, delay 1", "prefetch 2, delay 1", "no tokens", "no tokens or rings", "auto-sharded (GSPMD)"]
    ours = by["prefetch 1, delay 1"]
    plain = by["no tokens or rings"]
    assert (ours["plan"]["weights"], ours["plan"]["gradients"]) == ("whole", "ring")
    # Two products of 0.1 ms in each pass; a layer's gradient, which nothing hides, and, where not threaded, the gathers.
    assert ours["layers_compiled"] == 6
    assert ours["reported_layer"] == 2
    assert ours["forward"]["compute_ms"] == pytest.approx(0.2)
    assert ours["forward"]["exposed_ms"] == pytest.approx(0)
    assert ours["forward"]["hidden_ms"] > 0.01
    assert plain["forward"]["exposed_ms"] == pytest.approx(ours["forward"]["hidden_ms"])
    assert plain["exposed_share_of_plain"] == 1
    assert ours["exposed_share_of_plain"] == pytest.approx(ours["exposed_ms"] / plain["exposed_ms"])
    assert ours["unsteady_share"] == pytest.approx(0)
    # A step of six layers is the whole model: nothing is reckoned.
    assert ours["model_peak_bytes"] == ours["peak_bytes"] == 2**30
    beside = {each["name"]: each for each in ours["transfers_of_layer"]}
    assert set(beside) == {
        "gather_2_attention",
        "gather_2_mlp",
        "gather_2_mlp_again",
        "gather_2_attention_again",
        "scatter_2_mlp",
    }
    assert beside["gather_2_mlp"]["beside_ms"] == {"forward 1 mlp": pytest.approx(beside["gather_2_mlp"]["alone_ms"])}
    assert beside["gather_2_mlp"]["begin_ms"] == pytest.approx(-0.1)  # a layer before its turn, which attention begins
    assert beside["scatter_2_mlp"]["exposed_ms"] == pytest.approx(beside["scatter_2_mlp"]["alone_ms"])
    assert "transfers of layer 2" in ran.out
    page = files["html"].read_text()
    for shown in (ran.out, unescape(page)):
        assert "starting a transfer costs nothing" in " ".join(shown.split())
        assert "at the full roofline: prefetch 1, delay 1 0 (0% of a layer's compute)" in " ".join(shown.split())
    assert "Core and links in the step of 6 layers" in page
    events = json.loads(files["trace"].read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} >= {"v5e:4x2 auto-sharded (GSPMD)"}


@pytest.mark.usefixtures("without_compiler")
def test_what_more_layers_need_is_their_state_and_their_streams(run: Run, model: Path, tmp_path: Path):
    path = tmp_path / "figures.json"
    ran = run(*COMMAND, "--model-config", model, *small("--json", path))
    assert ran.status == 0, ran.err
    ours = json.loads(path.read_text())["data"][0]
    assert ours["layers_compiled"] == 4
    weights = 1024 * (4 * 1024 + 3 * 2048)  # over 8 devices; norms are whole over fsdp, and not divided by tp
    streams = 2 * 8 * 64 * 1024 * 2
    assert ours["model_peak_bytes"] - ours["peak_bytes"] == 2 * (16 * (weights // 8 + 2 * 1024) + streams // 8)


def test_products_are_those_of_the_experts_that_a_row_meets():
    """Two of eight experts with 512 columns, and a shared one of 1024, are as much as an MLP of 2048."""
    case = training.TrainingCase("v5e:4x2", "made up", config_from_hf(CONFIG), {"fsdp": 4, "tp": 2}, 4, 8, 64)
    mixture = Mixture(experts=8, chosen=2, size=512, shared=1024)
    routed = replace(case, config=replace(case.config, intermediate_size=9999, mixture=mixture))
    assert routed.least_compute_s == case.least_compute_s


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("share, status", [(0.1, 1), (1, 0)])
def test_a_share_above_what_is_allowed_fails(run: Run, model: Path, share: float, status: int):
    ran = run(*COMMAND, "--model-config", model, *small("--fail-above", share), "--no-peers")
    assert ran.status == status
    assert ("exposed, more than" in ran.out) == bool(status)


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize(
    "options, message",
    [
        (("--prefetch-distance", "x"), "expected --prefetch-distance in whole layers, found 'x'"),
        (("--scatter-delay", ","), "expected scatter_delay, found none"),
        (("--rings", "tokens"), "expected --rings among weights, gradients, activations or all, found tokens"),
        (("--layers", "3"), "expected from 4 to 6 layers"),
        (
            ("--prefetch-distance", "5", "--layers", "4"),
            "expected the prefetch distance of attention from 0 to the 4 layers, found 5",
        ),
        (("--mesh", "fsdp=4"), "expected"),
        (("--mesh", "data=8"), "expected the axes dp, fsdp and tp, found data"),
        (("--batch-size", "6"), "expected a batch that fsdp=4"),
        (("--length", "0"), "expected --length from 1, found 0"),
        (("--hop-us", "-1"), "expected the latency of a hop from 0 us, found -1"),
        (("--draws", "1"), "expected --draws from 2, found 1"),
        (("--fail-above", "2"), "expected --fail-above from 0 to 1, found 2"),
        (("--chip", "v9:4x2"), "expected a TPU of v5e, v5p, v6e, found 'v9:4x2'"),
        (("--html", "nowhere/page.html"), "its folder does not exist"),
    ],
)
def test_what_cannot_be_is_refused(run: Run, model: Path, options: tuple[str, ...], message: str):
    ran = run(*COMMAND, "--model-config", model, *small(*options))
    assert ran.status == 2
    assert message in " ".join(ran.err.split())


@pytest.mark.tpu
@pytest.mark.slow
def test_weights_pass_beside_the_layer_before(run: Run, model: Path, tmp_path: Path):
    """A small model on v5e, whose gathers can be asynchronous. Programs beside it would take minutes each."""
    path = tmp_path / "figures.json"
    wide = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}
    (model / "config.json").write_text(json.dumps(CONFIG | wide))
    sizes = small("--batch-size", 16, "--length", 1024, "--json", path)
    ran = run(*COMMAND, "--model-config", model, *sizes, "--no-peers")
    assert ran.status == 0, ran.err
    (ours,) = json.loads(path.read_text())["data"]
    travels = {each["name"]: each for each in ours["transfers_of_layer"]}
    for name, beside in (("gather_1_mlp", "forward 0 mlp"), ("gather_1_mlp_again", "backward 2 mlp")):
        assert travels[name]["asynchronous"] > 0
        assert travels[name]["beside_ms"].get(beside, 0) > 0
    assert ours["hidden_ms"] + ours["exposed_ms"] == pytest.approx(ours["communication_ms"])
    assert ours["peak_bytes"] < ours["model_peak_bytes"]
