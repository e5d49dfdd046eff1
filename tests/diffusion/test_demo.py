"""The diffusion model that comes with the package: it solves problems that training held out, in every mode."""

from itertools import islice

import numpy as np
import pytest

from tilewright.diffusion.options import Denoising, Mode, Saliency
from tilewright.diffusion.programs import DiffusionTable
from tilewright.llm.diffusion_model import DiffusionModel, load
from tilewright.models.hub import PACKAGED
from tilewright.train.arithmetic import is_right, problems

MOST_BYTES = 10_000_000
TABLE = DiffusionTable(batches=(4,), positions=(192,), responses=(160,), blocks=(32,))


@pytest.fixture(scope="module")
def demo() -> DiffusionModel:
    return load("demo-diffusion", table=TABLE, dtype="float32")


def test_it_is_small_and_has_a_card():
    folder = PACKAGED["demo-diffusion"]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES
    assert "task: arithmetic" in (folder / "MODEL_CARD.md").read_text().splitlines()


@pytest.mark.parametrize(
    "mode", ["dense", "sparse", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("prefix", "dual"))]
)
def test_it_solves_most_problems(demo: DiffusionModel, mode: Mode):
    asked = list(islice(problems(np.random.default_rng(1), held_out=True), 12))
    request = Denoising(160, block_length=32, mode=mode, threshold=0.9, saliency=Saliency(tau=0.999))
    found = demo.generate([problem.prompt for problem in asked], request)
    assert sum(is_right(problem, one.text) for problem, one in zip(asked, found, strict=True)) >= 8
