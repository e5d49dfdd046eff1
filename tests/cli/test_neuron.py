"""`tilewright neuron` and `chips`: what they print and write, and what they refuse."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.conftest import Run

CONFIG = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 512,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def embedded(page: Path) -> dict:
    """The data in a page."""
    text = page.read_text()
    return json.loads(text.partition('id="data">')[2].partition("</script>")[0])


def test_plan_inference(run: Run, model: Path, tmp_path: Path):
    page = tmp_path / "plan.html"
    names = ("sync", "sequence", "domino", "ring")
    options = [model, "--cores", "2,4", "--batch", "2", "--input", "128,256", "--output", 16, "--html", page]
    options += ["--draws", 4]
    ran = run("neuron", "plan", *options, "--json", "-")
    assert ran.status == 0, ran.err
    records = ran.json["data"]
    assert [(one["input_tokens"], one["cores"], one["schedule"]) for one in records] == [
        (tokens, cores, name) for tokens in (128, 256) for cores in (2, 4) for name in names
    ]
    for one in records:
        assert one["tokens_per_s"] == pytest.approx(1e3 * one["batch_rows"] / one["tpot_ms"])
        alike = [each for each in records if each["cores"] == one["cores"] and each["input_tokens"] == one["input_tokens"]]
        for base, gain in zip(alike, ("tpot_gain", "tpot_gain_over_sequence"), strict=False):
            assert one[gain] == pytest.approx(1 - one["tpot_ms"] / base["tpot_ms"])
        assert (one["decode"]["algorithm"] is None) == (one["schedule"] == "ring")
    assert ran.json["winner"]["tokens_per_s"] == max(one["tokens_per_s"] for one in records)
    for name, ranges in ran.json["ranges"].items():
        assert set(ranges["constants"]) == {"dma_gb_per_s", "link_gb_per_s", "hop_us"}
        assert sum(one["first"] for one in ranges["predictions"].values()) == ranges["draws"] == 4
        for schedule, one in ranges["predictions"].items():
            assert one["range"][0] <= one["value"] <= one["range"][1]
            assert any(each["schedule"] == schedule and each[name] == pytest.approx(one["value"]) for each in records)
    for shown in (" ".join(ran.err.split()), " ".join(page.read_text().split())):
        assert "first in" in shown
        assert "alibrated against nothing: constants are published or working figures" in shown
    assert "most tokens a second" in ran.err
    assert embedded(page)["data"] == records
    assert page.read_text().count("<figure>") == 6, "the source's six"


def test_an_adaptive_plan_is_nowhere_slower(run: Run, model: Path):
    options = [model, "--cores", "4", "--batch", "2", "--input", "128", "--output", 16, "--json", "-"]
    options += ["--schedule", "sync,ring", "--draws", 2]
    plain, adaptive = (run("neuron", "plan", *options, *more).json["data"] for more in ([], ["--adaptive"]))
    assert all(two["tpot_ms"] <= one["tpot_ms"] for one, two in zip(plain, adaptive, strict=True))
    assert any(two["decode"]["prefetch"] for two in adaptive)


def test_plan_training(run: Run, model: Path, tmp_path: Path):
    page = tmp_path / "plan.html"
    options = [
        model,
        "--training",
        "--mesh",
        "tp=4,fsdp=4",
        "--prefetch-distance",
        "0,0.5",
        "--scatter-delay",
        "1.5",
        "--streams",
        2,
        "--positions",
        256,
        "--draws",
        3,
    ]
    ran = run("neuron", "plan", *options, "--html", page, "--json", "-")
    assert ran.status == 0, ran.err
    records = ran.json["data"]
    assert len(records) == 1 + 2 * 2
    assert [one["step_ms"] for one in records] == sorted(one["step_ms"] for one in records)
    names = {one["name"] for one in ran.json["winner_environment"]}
    assert "NEURON_FSDP_NUM_LAYER_EARLY_AG_SHIFT" in names
    assert all(f"export {name}=" in ran.err for name in names)
    assert f"limited by {records[0]['limit']}" in ran.err
    predicted = ran.json["ranges"]["step_ms"]["predictions"]
    assert len(predicted) == 1 + 4
    assert predicted[records[0]["setting"]]["value"] == pytest.approx(records[0]["step_ms"])
    assert embedded(page)["winner"] == records[0]
    assert {(one["early_layers"], one["late_layers"]) for one in records if one["threaded"]} == {(0, 1.5), (0.5, 1.5)}
    # The runtime counts attention and MLP as a layer each.
    shifts = {one["name"]: one["value"] for one in ran.json["winner_environment"]}
    assert shifts["NEURON_FSDP_NUM_LAYER_LATE_RS_SHIFT"] == "3"


@pytest.mark.parametrize(
    "command",
    [
        ("train", "lm"),
        ("train", "diffusion"),
        ("inspect", "training"),
        ("neuron", "plan"),
        ("neuron", "simulate"),
    ],
)
def test_shifts_are_in_layers_in_every_command(run: Run, command: tuple[str, ...]):
    help_text = " ".join(run(*command, "--help", columns=400).out.split())
    assert len(re.findall("layers by which|layers between|by how many layers", help_text)) == 2


def test_simulate_writes_figures_a_page_and_a_trace(run: Run, model: Path, tmp_path: Path):
    page = tmp_path / "page.html"
    trace = tmp_path / "trace.json"
    options = ["--model-config", model, "--cores", 4, "--input", 64, "--html", page, "--trace", trace, "--json", "-"]
    ran = run("neuron", "simulate", "decode", *options)
    assert ran.status == 0, ran.err
    found = ran.json
    parts = [found[f"{name}_ms"] for name in ("compute", "loading", "exposed", "waiting")]
    assert sum(parts) == pytest.approx(found["total_ms"])
    for name, busy in found["busy_ms"].items():
        assert busy + found["idle_ms"][name] == pytest.approx(found["total_ms"])
    assert sum(found["dma_share"].values()) == pytest.approx(1)
    (drawn,) = found["ranges"]["total_ms"]["predictions"].values()
    assert drawn["range"][0] <= drawn["value"] == found["total_ms"] <= drawn["range"][1]
    assert "hop_us decides" in ran.err or "dma_gb_per_s decides" in ran.err
    events = json.loads(trace.read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == found["operations"]
    assert embedded(page)["data"] == found
    assert "What each engine does" in page.read_text()


@pytest.mark.parametrize("kind", ["prefill", "training", "dflash", "diffusion", "gather-reduce"])
def test_other_programs(run: Run, model: Path, kind: str):
    options = [
        "--draws",
        2,
        "--model-config",
        model,
        "--cores",
        4,
        "--fsdp",
        2 if kind == "training" else 1,
        "--input",
        64,
        "--graph",
        "nodes=256",
    ]
    ran = run("neuron", "simulate", kind, *options, "--json", "-")
    assert ran.status == 0, ran.err
    assert ran.json["total_ms"] > 0


def test_scheduled_hlo(run: Run, tmp_path: Path):
    hlo = tmp_path / "program.hlo"
    array = "f32[1000000]{0}"
    pairs = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
    hlo.write_text(
        "HloModule m, is_scheduled=true\n\n"
        f"%inner (p: f32[4]) -> f32[4] {{\n  ROOT %p = {array} parameter(0)\n}}\n\n"
        f"ENTRY %main (x: f32[4]) -> f32[4] {{\n  %x = {array} parameter(0)\n"
        f"  %s = ({array}, {array}, u32[], u32[]) collective-permute-start(%x), {pairs}\n"
        f'  %c = {array} fusion(%x), kind=kLoop, calls=%inner, backend_config={{"estimated_cycles":"150000"}}\n'
        f"  %d = {array} collective-permute-done(%s)\n  ROOT %end = ({array}, {array}) tuple(%c, %d)\n}}\n"
    )
    ran = run("neuron", "simulate", "hlo", "--hlo", hlo, "--cores", 4, "--json", "-")
    assert ran.status == 0, ran.err
    assert ran.json["busy_ms"]["tensor"] == pytest.approx(0.1 * 197 / 91.75, rel=0.01)
    assert ran.json["busy_ms"]["cc0"] > 4e6 / 51.6e6
    assert "compute times of a TPU v5e scaled by 2.15, the ratio of peaks" in ran.err
    hlo.write_text("no program")
    assert run("neuron", "simulate", "hlo", "--hlo", hlo).status == 2


def test_without_simpy_the_extra_is_named():
    """In a process of its own, where nothing has imported it."""
    code = "import sys; sys.modules['simpy'] = None; from tilewright.cli.main import main; main(['neuron', 'plan'])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ran.returncode == 2
    assert ran.stderr == "tilewright: simulating Neuron chips needs the neuron extra: pip install 'tilewright[neuron]'\n"


def test_commands_for_tpus_do_not_ask_for_simpy():
    """Nor do those that simulate nothing."""
    names = ("inspect_overlap", "inspect_diff", "inspect_trace", "neuron_tools")
    code = "import sys; sys.modules['simpy'] = None; " + "; ".join(f"import tilewright.cli.{name}" for name in names)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_env_and_calibrate(run: Run, tmp_path: Path):
    ran = run("neuron", "env", "--train", "fsdp,tp", "--json", "-")
    assert {one["name"] for one in ran.json["jax"]} >= {"NEURON_FSDP", "NEURON_RT_DBG_CC_DMA_PACKET_SIZE"}
    assert "# NeuronX Distributed" in ran.err
    assert "export NEURON_RT_DBG_CC_DMA_PACKET_SIZE=65536,4096" in ran.err
    ran = run("neuron", "calibrate", "--json", "-")
    assert ran.json["residual"] < 0.05
    assert "held-out times are" in ran.err
    curve = tmp_path / "curve.txt"
    rows = "\n".join(f"{2**n} {2**n} uint8 {50 + 2**n / 4e4} 0.1 0.1" for n in range(10, 28, 2))
    curve.write_text(f"nccom-test -r 2 allr\n{rows}\n")
    ran = run("neuron", "calibrate", curve, "--json", "-")
    assert ran.json["residual"] < 0.01
    assert "curve.txt, nccom-test, as of inf2.48xlarge" in ran.err
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = ["--model-config", tmp_path, "--cores", 4, "--input", 64, "--draws", 2, "--json", "-"]
    plain, fitted = (run("neuron", "simulate", "decode", *options, *more).json for more in ([], ["--calibrate", curve]))
    assert fitted["total_ms"] > plain["total_ms"]
    assert "curve.txt" in fitted["ranges"]["total_ms"]["calibrated_against"]
    curve.write_text("[[1, 0]]")
    assert "found something else" in run("neuron", "calibrate", curve).err


def test_chips(run: Run):
    ran = run("chips", "--json", "-")
    found = {one["name"]: one for one in ran.json["data"]}
    assert {"Inferentia2", "Trainium2", "TPU v4", "TPU 7x", "MI250X", "H200", "CPU"} <= set(found)
    assert found["TPU v5e"]["flops_per_link_byte"] == pytest.approx(492.5)
    assert found["Inferentia2"]["ranges"]["dma_gb_per_s"] == [3.8, 17, 27.2]
    work = run("chips", "--chip", "A100,CPU", "--gflop", 312e3, "--memory-mb", 1, "--link-mb", 1, "--json", "-").json["data"]
    assert [(one["name"], one["limit"]) for one in work] == [("A100", "compute"), ("CPU", "compute")]
    assert work[0]["least_ms"] == pytest.approx(1000)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["neuron", "plan", "--instance", "inf2.48large"], "found 'inf2.48large' (did you mean inf2.48xlarge"),
        (["neuron", "plan", "--cores", "25"], "expected 1 to 24 cores of inf2.48xlarge, found 25"),
        (["neuron", "plan", "--cores", "two"], "expected whole numbers separated by commas, found 'two'"),
        (["neuron", "plan", "--schedule", "dominoes"], "found 'dominoes' (did you mean domino?)"),
        (["neuron", "plan", "--batch", "1"], "expected batches of at least 2 rows for domino"),
        (["neuron", "plan", "--draws", "1"], "expected --draws from 2, found 1"),
        (["neuron", "plan", "--output", "0"], "expected output from 1, found 0"),
        (["neuron", "plan", "--training", "--mesh", "pp=4"], "expected --mesh as tp=N,fsdp=N, found 'pp=4'"),
        (
            ["neuron", "plan", "--training", "--mesh", "tp=4,fsdp=32"],
            "at most the 64 cores of trn2.48xlarge, found 128: fsdp=32, tp=4",
        ),
        (["neuron", "plan", "--training", "--streams", "5"], "at most 4 streams, one per collective core"),
        (
            ["neuron", "plan", "--training", "--packet-size", "big"],
            "expected packet sizes of default, recommended; found 'big'",
        ),
        (
            ["neuron", "plan", "--training", "--prefetch-distance", "9"],
            "expected --prefetch-distance from 0 to 4 layers, found 9",
        ),
        (
            ["neuron", "plan", "--training", "--scatter-delay", "0.25"],
            "expected --scatter-delay in layers, in steps of half a layer, found '0.25'",
        ),
        (
            ["neuron", "simulate", "training", "--prefetch-distance", "one"],
            "expected --prefetch-distance in layers, in steps of half a layer",
        ),
        (
            ["neuron", "simulate", "decode", "--runtime", "cc_packet_size=131072"],
            "of 1 to 65536 bytes for collectives, found 131072",
        ),
        (["neuron", "plan", "--mesh", "tp=4"], "--mesh is for training: add --training"),
        (["neuron", "plan", "--training", "--cores", "4"], "--cores is for inference: leave out --training"),
        (["neuron", "simulate", "hlo"], "expected --hlo with a file of scheduled HLO, found none"),
        (["neuron", "simulate", "decode", "--model-config", "llama9"], "expected a model of smollm2-135m, llama3-8b"),
        (["neuron", "env", "--train", "fsdp,pp"], "expected axes to train over of fsdp, tp; found 'pp'"),
        (["chips", "--chip", "H1000"], "found 'H1000' (did you mean H100"),
        (["chips", "--gflop", "-1"], "expected --gflop of 0 or more, found -1"),
        (["chips", "--json", "no/folder.json"], "its folder does not exist"),
    ],
)
def test_what_is_refused(run: Run, command: list[str], problem: str):
    ran = run(*command)
    assert (ran.status, ran.out) == (2, "")
    assert problem in ran.err
    assert ran.err.count("\n") == 1
