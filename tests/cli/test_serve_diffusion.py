"""`tilewright serve` of a diffusion model: its options, those of the other kind of model, and a process that answers."""

import signal
from pathlib import Path
from typing import Any, NoReturn

import pytest

from cli.conftest import Run
from cli.test_serve import process
from reference.diffusion_folder import write_folder
from tilewright.cli.common import DeviceOptions
from tilewright.cli.serve_diffusion import ServedDenoising
from tilewright.diffusion.engine_options import DENOISING, DiffusionEngineOptions
from tilewright.diffusion.options import FAR, MODES, Denoising, Saliency
from tilewright.diffusion.programs import DiffusionTable
from tilewright.llm.diffusion_model import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("diffusion"))


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing reads weights."""

    def loaded(*_: object, **__: object) -> NoReturn:
        raise AssertionError("weights were to be read")

    monkeypatch.setattr("tilewright.cli.diffusion_options.load", loaded)
    monkeypatch.setattr("tilewright.cli.common.load", loaded)


SHARED = {"queue_requests": 5, "queue_tokens": 99, "guard": "warn"}


def test_without_options_everything_is_the_engines_own():
    found = ServedDenoising().engine_options(None, {}, 4096)
    defaults = DiffusionEngineOptions()
    assert (found.defaults, found.modes, found.table) == (DENOISING, MODES, defaults.shapes(4096))


def test_options_become_the_engines():
    options = ServedDenoising(
        mode="sparse",
        modes=("dense", "sparse"),
        threshold=0.9,
        tau=0.95,
        suffix_window=32,
        remasking="entropy",
        max_tokens=16,
        block_length=8,
        positions=(64, 128),
        responses=(32,),
        blocks=(8, 16),
    )
    found = options.engine_options(3, SHARED, 4096)
    wanted = Denoising(16, None, 8, "entropy", threshold=0.9, mode="sparse", saliency=Saliency(0.95), suffix_window=32)
    assert (found.defaults, found.modes) == (wanted, ("dense", "sparse"))
    assert found.table == DiffusionTable((1, 3), (64, 128), (32,), (8, 16))
    assert (found.queue_requests, found.queue_tokens, found.guard) == (5, 99, "warn")


def test_what_is_not_said_follows_from_what_is():
    assert ServedDenoising(modes=("dual", "sparse")).defaults.mode == "dual"
    table = ServedDenoising(positions=(300,)).engine_options(1, {}, 4096).table
    assert table == DiffusionTable((1,), (300,), (128, 299), (32, FAR))
    table = ServedDenoising().engine_options(8, {}, 200).table
    assert table == DiffusionTable((1, 4, 8), (200,), (128, 199), (32, FAR))


def caught(run: Run, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> dict[str, Any]:
    """What the command makes of its arguments, up to where it would read weights."""
    seen: dict[str, Any] = {}

    def engine(models: object, devices: object, denoising: object, slots: object, shared: object, _: object) -> NoReturn:
        seen.update(models=models, devices=devices, denoising=denoising, slots=slots, shared=shared)
        raise ValueError("enough is known")

    monkeypatch.setattr("tilewright.cli.serve.diffusion_engine", engine)
    ran = run("serve", "--port", 0, *arguments)
    assert (ran.status, "enough is known" in ran.err) == (2, True), ran.err
    return seen


def test_the_command_line_is_read(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch):
    found = caught(
        run,
        monkeypatch,
        folder,
        "--denoising",
        "modes=dense,sparse,mode=sparse,threshold=0.9,tau=0.95,suffix_window=24,remasking=entropy,max_tokens=16,block_length=8,"
        "positions=64,128,responses=32,blocks=8,16",
        "--slots",
        3,
        "--compile",
        "guard=warn",
        "--limits",
        "queue_requests=7",
        "--memory",
        "pages=40,page_size=32",
        "--dtype",
        "bfloat16",
        "--tensor-parallel",
        2,
        "--schedule",
        "ring",
    )
    assert found["denoising"] == ServedDenoising(
        mode="sparse",
        modes=("dense", "sparse"),
        threshold=0.9,
        tau=0.95,
        suffix_window=24,
        remasking="entropy",
        max_tokens=16,
        block_length=8,
        positions=(64, 128),
        responses=(32,),
        blocks=(8, 16),
    )
    assert (found["slots"], found["shared"]) == (
        3,
        {"queue_requests": 7, "queue_tokens": 262_144, "guard": "warn", "pages": 40, "page_size": 32},
    )
    assert (found["models"].model, found["models"].dtype) == (str(folder), "bfloat16")
    assert found["devices"] == DeviceOptions(2, "ring")
    assert caught(run, monkeypatch, "--model", folder)["denoising"] == ServedDenoising()


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--drafter", "ngram"], "--drafter is for models that decode token by token"),
        (["--drafter", "none"], "--drafter is for models that decode token by token"),
        (["--block-size", "8"], "--block-size is for models that decode token by token"),
        (["--kv-dtype", "int8"], "--kv-dtype is for models that decode token by token"),
        (["--drafting", "dtype=bfloat16"], "--drafting is for models that decode token by token"),
        (
            ["--memory", "prefix_cache=false"],
            "--memory prefix_cache is for models that decode token by token; this one denoises",
        ),
        (["--compile", "shapes=shapes.json"], "--compile shapes is for models that decode token by token; this one denoises"),
        (["--schedule", "ring"], "--schedule needs --tensor-parallel: one device has no partial results to sum"),
        (["--slots", "0"], "expected --slots of at least 1, found 0"),
        (["--denoising", "guidance=1.5"], "--denoising: expected no guidance, which the server does not offer, found 1.5"),
        (["--denoising", "mode=dense,modes=dual,sparse"], "expected a default mode among dual, sparse, found dense"),
        (["--denoising", "mode=thin"], "--denoising: expected mode=dense|prefix|dual|sparse, found mode=thin"),
        (["--denoising", "threshold=1.5"], "expected a threshold above 0, up to 1, found 1.5"),
        (["--denoising", "threshold=0.5,remasking=random"], "no threshold with random, which ranks by chance, found 0.5"),
        (["--denoising", "tau=2.5"], "expected a saliency threshold above 0, up to 2, found 2.5"),
        (["--denoising", "suffix_window=-1"], "expected a suffix_window of at least 0 positions, found -1"),
        (["--denoising", "block_length=12"], "expected new_tokens that are a multiple of the block_length 12, found 128"),
        (["--denoising", "positions=128,64"], "expected positions to be sizes of at least 1 in ascending order"),
        (["--denoising", "positions=64,responses=64"], "expected responses shorter than the most positions 64, found 64"),
        (
            ["--denoising", "positions=64"],
            "--denoising max_tokens, block_length: expected responses of at most 63, the largest declared, found 128",
        ),
        (
            ["--denoising", "blocks=16"],
            "--denoising max_tokens, block_length: expected blocks of at most 16, the largest declared, found 32",
        ),
    ],
)
def test_what_a_diffusion_model_cannot_take_is_said_before_its_weights_are_read(
    run: Run, folder: Path, arguments: list[str], said: str
):
    ran = run("serve", folder, "--port", 0, *arguments)
    assert (ran.status, ran.out) == (2, "")
    assert said in ran.err


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("setting", ["mode=sparse", "modes=dense,dual", "threshold=0.9", "max_tokens=64", "positions=64"])
def test_a_model_that_decodes_token_by_token_refuses_denoising(run: Run, folders: tuple[Path, Path], setting: str):
    ran = run("serve", folders[0], "--port", 0, "--denoising", setting)
    assert (ran.status, ran.out) == (2, "")
    assert "--denoising is for diffusion models; this one decodes token by token" in ran.err


@pytest.mark.slow
def test_a_server_answers_as_the_model_does(folder: Path):
    (want,) = load(folder).generate("t1 t2 t3", Denoising(16, block_length=8, mode="sparse", threshold=0.5))
    denoising = "positions=64,responses=16,blocks=8,modes=sparse,max_tokens=16,block_length=8,threshold=0.5"
    with process(folder, "--slots", 2, "--denoising", denoising) as server:
        line = server.wait_until_ready()
        assert line == f"{folder.name} with sparse steps at {server.url} (context 64)\n"
        found = server.post({"prompt": "t1 t2 t3"})
        assert found["choices"][0]["text"] == want.text
        assert found["metrics"]["denoising"]["steps"] == want.steps
        server.process.send_signal(signal.SIGTERM)
        status, said = server.ended()
    assert status == 0, said
    assert not any(level in said for level in ("WARNING", "ERROR", "Traceback")), said
