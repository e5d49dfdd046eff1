"""A model that refines canvases, on the command line."""

import json
from pathlib import Path

import pytest

from cli.conftest import Run
from reference.canvas_numpy import Options, generate, random_model
from reference.self_speculation_numpy import as_folder

SIZE = ["--max-new-tokens", 12, "--seed", 3, "--json", "-"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = as_folder(tmp_path_factory.mktemp("model"), random_model(1))  # type: ignore[arg-type]
    (found / "generation_config.json").write_text(json.dumps({"max_denoising_steps": 5}))
    return found


@pytest.mark.parametrize(
    ("settings", "options"),
    [([], Options(5)), (["--denoising", "steps=7,entropy_bound=1,t_max=0.3,t_min=0.1"], Options(7, 1.0, 0.3, 0.1))],
    ids=["published", "named"],
)
def test_texts_are_those_of_the_published_loop(run: Run, folder: Path, settings: list[str], options: Options):
    ran = run("generate", "t1 t2 t3 t4", "--model", folder, *SIZE, *settings)
    assert ran.status == 0, ran.err
    tokens, passes = generate(random_model(1), [1, 2, 3, 4], 12, options, 3)
    assert (ran.json["tokens"], ran.json["passes"]) == ([tokens], [sum(passes)])


def test_wrong_settings_are_named(run: Run, folder: Path):
    for options, said in (
        (["--denoising", "threshold=0.3"], "confidence_threshold for a model that refines canvases, found threshold"),
        (["--denoising", "block_length=8"], "found block_length; --block-size sets the canvas length"),
        (["--denoising", "t_min=0.9"], "expected t_min from 0 to below t_max"),
        (["--temperature", "0.7"], "expected no temperature for a model that refines canvases"),
        (["--drafter", "ngram"], "expected no drafter where blocks are denoised"),
    ):
        ran = run("generate", "t1", "--model", folder, *options)
        assert (ran.status, ran.out) == (2, "")
        assert said in ran.err
