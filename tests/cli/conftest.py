"""The command line in this process: small models on disk, and a way to run a command and see what it printed."""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from safetensors.numpy import load_file

from reference.dflash_numpy import as_folders, random_pair
from reference.lora_numpy import config_of, random_adapter, write_adapter
from tilewright.cli.main import main
from tilewright.train import loop


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_compiles: None) -> None:
    """What is tested here are rules."""


@dataclass(frozen=True)
class Ran:
    """What a command left: its exit status, and both outputs."""

    status: object
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("generate", ..., stdin="piped text")`, or bytes; without `stdin`, standard input is a terminal."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def command(*arguments: object, stdin: str | bytes | None = None, columns: int = 160) -> Ran:
        piped = stdin.encode() if isinstance(stdin, str) else stdin
        text = Terminal() if piped is None else io.TextIOWrapper(io.BytesIO(piped), "utf-8", "surrogateescape")
        monkeypatch.setattr(sys, "stdin", text)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TILEWRIGHT_COMPILE_CACHE", os.environ.get("TILEWRIGHT_COMPILE_CACHE", "0"))  # not into the user's
        capsys.readouterr()
        status: object = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as ended:
            status = ended.code
        printed = capsys.readouterr()
        return Ran(status, printed.out, printed.err)

    return command


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that commands keep their compiled programs below."""
    names = [name for name in jax.config.values if name.startswith(("jax_compilation_cache_dir", "jax_persistent_cache_min"))]
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    monkeypatch.setattr("tilewright.cli.common.cache_folder", lambda: tmp_path)
    monkeypatch.setenv("TILEWRIGHT_COMPILE_CACHE", "1")
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a drafter of random weights; the word "t7" is token 7, and the context has 128 positions."""
    pair = random_pair(
        3, target_layers=2, drafter_layers=1, taps=(0, 1), block_size=4, max_position_embeddings=128, tie_word_embeddings=True
    )
    return as_folders(tmp_path_factory.mktemp("pair"), pair)


@pytest.fixture(scope="session")
def adapter(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A low-rank adapter of the target."""
    config = config_of(["q_proj", "v_proj"], 2, 8)
    tensors = load_file(folders[0] / "model.safetensors")
    made = random_adapter(np.random.default_rng(0), tensors, config["target_modules"], config["r"])
    return write_adapter(tmp_path_factory.mktemp("adapter"), config, made)


@pytest.fixture(scope="session")
def pair(folders: tuple[Path, Path]) -> list[object]:
    """The options that name both models."""
    return ["--model", folders[0], "--drafter", folders[1]]


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has training stop there, as if by Ctrl-C."""
    advance = loop.TrainingRun.advance

    def interrupted(self: loop.TrainingRun, batch: Any) -> None:
        if self.step == step:
            raise KeyboardInterrupt
        advance(self, batch)

    monkeypatch.setattr(loop.TrainingRun, "advance", interrupted)
