"""`tilewright plan training`: memory and time of all layers, what is tried where a step does not fit, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from cli.conftest import Run
from tilewright.bench import training_plan
from tilewright.bench.training_plan import TrainingSetting
from tilewright.compiled.aot import Compiled
from tilewright.models.decoder import DecoderConfig

pytestmark = pytest.mark.tpu
COMMAND = ("plan", "training")
CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
}
HLO = """HloModule step, is_scheduled=true

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %sum = f32[8]{{0}} add(%p, %p), backend_config={{"estimated_cycles":"{cycles}"}}
}}
"""
CYCLES = 1_500_000
"""Cycles of a layer, a millisecond of v5e's clock."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TrainingSetting, int]]:
    """Records what is compiled; a step takes 1 GB, and 4 GB a layer, less with fewer rows or moving averages in bfloat16."""
    asked: list[tuple[TrainingSetting, int]] = []

    def compile_setting(setting: TrainingSetting, config: DecoderConfig) -> Compiled:
        asked.append((setting, config.num_layers))
        if not setting.remat:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 40G of 15.75G hbm. More text")
        layer = 4e9 if setting.state_dtype == "float32" else 2e9
        layer = layer / setting.accumulate * 4 / setting.devices
        peak = int(1e9 + layer * config.num_layers)
        return Compiled(setting.chip, HLO.format(cycles=CYCLES * config.num_layers), peak, 0, 0, 0, 0, (), (), {})

    monkeypatch.setattr(training_plan, "compile_setting", compile_setting)
    return asked


def plan(run: Run, model: Path, *options: object) -> Any:
    ran = run(*COMMAND, model, "--chip", "v5e:2x2", "--mesh", "fsdp=2,tp=2", "-l", 128, *options, "--json", "-")
    assert ran.status == 0, ran.err
    return ran


def test_memory_and_time_of_all_layers_follow_from_two_depths(run: Run, model: Path, compiled: list[Any]):
    ran = plan(run, model, "-b", 4, "--accumulate", 2)
    (one,) = ran.json["data"]
    assert [layers for _, layers in compiled] == [2, 4]
    assert one["model_peak_bytes"] == pytest.approx(1e9 + 6 * 2e9)
    assert (one["fits"], one["is_extrapolated"], one["mesh"]) == (True, True, "fsdp=2,tp=2")
    assert ran.json["ranges"]["step"]["predictions"]["step"]["value"] == pytest.approx(6 * CYCLES / 1.503e6, rel=0.01)
    assert "attention: splash Pallas" in ran.err
    assert "calibrated against nothing" in ran.err
    assert ran.json["measured"] is False


def test_less_memory_is_tried_in_order_until_a_step_fits(run: Run, model: Path, compiled: list[Any]):
    """Recomputation (25 GB) and accumulation over 2 parts (13 GB): the first that fits 16 GB."""
    ran = plan(run, model, "-b", 4, "--remat", "everything_saveable")
    first, recomputed, accumulated = ran.json["data"]
    assert (first["fits"], first["model_peak_bytes"], first["refusal"]) == (
        False,
        None,
        "RESOURCE_EXHAUSTED: Used 40G of 15.75G hbm",
    )
    assert (recomputed["fits"], recomputed["remat"]) == (False, True)
    assert (accumulated["fits"], accumulated["accumulate"]) == (True, 2)
    assert "the first that fits: accumulate gradients over 2 parts of the batch" in ran.err
    assert len(compiled) == 1 + 2 + 2


def test_a_larger_slice_and_bfloat16_state_come_last(run: Run, model: Path, compiled: list[Any]):
    """A single sequence per rank leaves nothing to accumulate, and the batch has no two sequences more for a larger slice."""
    ran = plan(run, model, "-b", 2)
    assert [one["state_dtype"] for one in ran.json["data"]] == ["float32", "bfloat16"]
    wide = plan(run, model, "-b", 4, "--accumulate", 2, "--no-alternatives").json["data"]
    assert len(wide) == 1


def test_all_layers_are_compiled_on_request(run: Run, model: Path, compiled: list[Any]):
    ran = plan(run, model, "-b", 4, "--accumulate", 2, "--whole")
    assert [layers for _, layers in compiled] == [6]
    assert ran.json["data"][0]["is_extrapolated"] is False
    assert "6 layers" in ran.err


def test_alternatives_keep_what_was_tried_before():
    setting = TrainingSetting("v5e:4x4", {"fsdp": 8, "tp": 2}, 32, 1024, remat=False)
    names, settings = zip(*training_plan.alternatives(setting), strict=True)
    assert names == (
        "recompute activations and gather weights again",
        "accumulate gradients over 2 parts of the batch",
        "accumulate gradients over 4 parts of the batch",
        "shard over 32 chips, v5e:8x4",
        "store the optimizer's moving averages in bfloat16",
        "both: bfloat16 moving averages, and v5e:8x4",
    )
    assert all(each.remat for each in settings)
    assert [each.accumulate for each in settings] == [1, 2, 4, 2, 4, 2]
    assert settings[3].axes == {"fsdp": 16, "tp": 2}
    assert replace(settings[5], state_dtype="float32") == settings[3]


@pytest.mark.parametrize(
    "options, message",
    [
        (("--mesh", "fsdp=4,tp=2"), "expected --mesh over the 4 devices of v5e:2x2, found fsdp=4,tp=2"),
        (("--mesh", "data=4"), "expected --mesh as dp=N,fsdp=N,tp=N, found 'data=4'"),
        (("--chip", "v9:2x2"), "expected a TPU of v5e, v5p, v6e, found 'v9:2x2'"),
        (("--batch-size", "3"), "expected a batch that fsdp=2 divides, found 3"),
        (("--accumulate", "0"), "expected --accumulate from 1, found 0"),
        (("--layers", "2"), "expected two numbers of layers from 1 to 6, found 2"),
        (("--layers", "2,9"), "expected two numbers of layers from 1 to 6, found 2, 9"),
        (("--layers", "2,4", "--whole"), "expected --layers or --whole, found both"),
        (("--draws", "1"), "expected --draws from 2, found 1"),
    ],
)
def test_what_cannot_be_is_refused(run: Run, model: Path, options: tuple[str, ...], message: str):
    defaults = {"--chip": "v5e:2x2", "--mesh": "fsdp=2,tp=2"}
    others = [word for name, value in defaults.items() if name not in options for word in (name, value)]
    ran = run(*COMMAND, model, *others, *options)
    assert ran.status == 2
    assert message in " ".join(ran.err.split())


@pytest.mark.slow
def test_a_compiled_step_of_all_layers_needs_what_fewer_layers_predict(run: Run, model: Path):
    """The extrapolated peak is within a tenth of the compiled one."""
    options = ("-b", 4, "--draws", 2)
    few, whole = (plan(run, model, *options, *more).json["data"][0] for more in ((), ("--whole",)))
    assert few["model_peak_bytes"] == pytest.approx(whole["model_peak_bytes"], rel=0.1)
    assert few["fits"]
    assert whole["compiled"][0]["layers_compiled"] == 6
