"""`tilewright bench round` on the demo's shapes, for an absent chip, and what it refuses."""

import json
from pathlib import Path

import pytest

from cli.conftest import Run
from tilewright.bench import bandwidth, round_compiled
from tilewright.bench import round as rounds
from tilewright.cli import bench_round
from tilewright.metrics.metric import significant

TARGET = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
DRAFTER = {
    **TARGET,
    "num_hidden_layers": 1,
    "block_size": 4,
    "num_target_layers": 3,
    "dflash_config": {"mask_token_id": 255, "target_layer_ids": [0, 2]},
}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "BUFFER_BYTES", 2**16)
    monkeypatch.setattr(rounds, "RUN_S", 0.001)


@pytest.fixture
def shapes(tmp_path: Path) -> list[object]:
    """The options that name both configurations."""
    for name, fields in (("target", TARGET), ("drafter", DRAFTER)):
        (tmp_path / f"{name}.json").write_text(json.dumps(fields))
    return ["--model-config", tmp_path / "target.json", "--draft-config", tmp_path / "drafter.json"]


def test_measured_table_and_json(run: Run, shapes: list[object], tmp_path: Path):
    path = tmp_path / "figures.json"
    ran = run("bench", "round", *shapes, "--block-size", "4,8", "--context", 64, "--repetitions", 1, "--json", path)
    assert ran.status == 0, ran.err
    written = json.loads(path.read_text())
    assert (written["measured"], written["dtype"], written["repetitions"]) == (True, "bfloat16", 1)
    assert [(one["context"], one["block_size"]) for one in written["data"]] == [(64, 4), (64, 8)]
    assert "a plain step reads its weights at this share" in ran.out
    for one in written["data"]:
        assert f"{significant(one['verify_ms'])} ({one['verify_ms_ratio']:.2f})" in ran.out


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_round_of_seconds_is_shown_whole(run: Run, shapes: list[object], monkeypatch: pytest.MonkeyPatch, width: int):
    """Nothing is measured: every part takes 1,284.3 ms."""
    figures = {f"{part}_ms": 1284.3 for part in (*bench_round.MEASURED, "step")}
    ratios = {f"{part}_ms_ratio": 1.0 for part in bench_round.MEASURED}
    sizes = {"context": 64, "block_size": 16, "base_block_size": 16}
    shares = {"step_share_of_bandwidth": 0.5, "bandwidth_gb_per_s": 13.0}
    monkeypatch.setattr(bench_round, "load", lambda *_: (None, "xla"))
    monkeypatch.setattr(bench_round, "measure", lambda *_: [figures | ratios | sizes | shares])
    ran = run("bench", "round", *shapes, "--context", 64, columns=width)
    assert ran.status == 0, ran.err
    assert ran.out.count("1,284 (1.00)") == len(bench_round.MEASURED)
    assert ran.out.count("1,284") == len(bench_round.MEASURED) + 1
    assert "…" not in ran.out


@pytest.mark.tpu
def test_estimates_for_an_absent_chip(run: Run, shapes: list[object], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(round_compiled, "LAYERS_COMPILED", (1, 2))
    ran = run("bench", "round", *shapes, "--block-size", 4, "--context", 100, "--chip", "v5e:1x1", "--json", "-")
    assert ran.status == 0, ran.err
    assert (ran.json["measured"], len(ran.json["data"])) == (False, 1)
    (one,) = ran.json["data"]
    assert (one["chip"], one["block_size"], one["extrapolated"], one["layers_compiled"]) == ("v5e:1x1", 4, True, [1, 2])
    layer_bytes = 2 * (2 * 128 * 256 + 2 * 128 * 128 + 3 * 128 * 128)
    assert one["verify_read_bytes"] > 3 * layer_bytes + 2 * 256 * 128
    assert one["verify_head_kernel_cycles"] > 0
    assert one["verify_head_xla_kernel_cycles"] == 0
    assert one["verify_cycles_ratio"] == 1
    assert "… by XLA" in ran.err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--block-size", 1], "expected block_size of at least 2, found 1"),
        (["--context", "0,4"], "expected context of at least 1, found 0, 4"),
        (["--block-size", "16,x"], "Invalid value for --block-size"),
        (["--repetitions", 0], "expected repetitions of at least 1, found 0"),
        (["--context", 40960], "within the model's 40960 positions, found 41088"),
        (["--chip", "v9:2x2"], "expected a TPU of v5e, v5p, v6e, found 'v9:2x2'"),
        (["--model-config", "demo"], "expected --model-config and --draft-config together"),
        (["--model-config", "nowhere", "--draft-config", "demo-drafter"], "expected a config.json or 'demo', found 'nowhere'"),
        (["--model-config", "demo", "--draft-config", "demo"], "expected a config.json or 'demo-drafter', found 'demo'"),
        (["--json", "/nowhere/x.json"], "its folder does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(run: Run, arguments: list[object], problem: str):
    ran = run("bench", "round", *arguments)
    assert ran.status == 2
    assert problem in ran.err
    assert len(ran.err.strip().splitlines()) == 1


def test_a_config_that_is_no_json_object(run: Run, tmp_path: Path):
    for text, problem in (("{", "is not JSON"), ("[]", "expected a JSON object, found list")):
        (tmp_path / "config.json").write_text(text)
        ran = run("bench", "round", "--model-config", tmp_path / "config.json", "--draft-config", "demo-drafter")
        assert ran.status == 2
        assert problem in ran.err
