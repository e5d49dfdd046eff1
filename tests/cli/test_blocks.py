"""Models whose blocks are denoised, on the command line."""

from pathlib import Path

import pytest

from cli.conftest import Run
from reference.causal_blocks_numpy import Options, generate
from reference.self_speculation_numpy import as_folder, random_model
from reference.small_blocks_numpy import Options as SmallOptions
from reference.small_blocks_numpy import generate as generate_in_small_blocks
from reference.small_blocks_numpy import random_model as model_of_small_blocks

SIZE = ["--drafter", "none", "--max-new-tokens", 12, "--json", "-"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_folder(tmp_path_factory.mktemp("model"), random_model(3, vocab_size=40))


def test_settings_of_denoising_select_blocks_for_a_model_that_can_do_both(run: Run, folder: Path):
    prompt = "t1 t2 t3 t4"
    ran = run("generate", prompt, "--model", folder, *SIZE, "--denoising", "threshold=0.3")
    assert ran.status == 0, ran.err
    assert ran.json["tokens"] == [generate(random_model(3, vocab_size=40), [1, 2, 3, 4], 12, 8, Options(0.3))[0]]
    plain = run("generate", prompt, "--model", folder, *SIZE)
    assert plain.json["tokens"] != ran.json["tokens"]


def test_a_model_of_small_blocks_is_one_as_any_other(run: Run, tmp_path: Path):
    model = model_of_small_blocks(3)
    folder = as_folder(tmp_path, model)  # type: ignore[arg-type]
    for settings, options in (([], SmallOptions()), (["threshold=0.3,small_block_size=4"], SmallOptions(0.3, 4))):
        named = ["--denoising", *settings] if settings else []
        ran = run("generate", "t1 t2 t3 t4", "--model", folder, "--max-new-tokens", 20, "--json", "-", *named)
        assert ran.status == 0, ran.err
        assert ran.json["tokens"] == [generate_in_small_blocks(model, [1, 2, 3, 4], 20, 16, options)[0]]
    ran = run("generate", "t1", "--model", folder, "--denoising", "small_block_size=3")
    assert (ran.status, ran.out) == (2, "")
    assert "expected a small_block_size that divides the block length 16, found 3" in ran.err


def test_wrong_settings_are_named(run: Run, folder: Path):
    for options, said in (
        (
            ["--denoising", "mode=sparse"],
            "small_block_size, edit_threshold, max_post_steps for a model with blocks, found mode",
        ),
        (["--denoising", "block_length=8"], "found block_length; --block-size sets the block length"),
        (
            ["--denoising", "strategy=sequential,threshold=0.9"],
            "expected strategy=low_confidence_dynamic or joint_threshold with threshold, found strategy=sequential",
        ),
        (
            ["--denoising", "edit_threshold=0.5"],
            "expected strategy=joint_threshold with edit_threshold, found strategy=low_confidence_dynamic",
        ),
        (["--denoising", "threshold=0.3", "--drafter", "self"], "expected no drafter where blocks are denoised"),
    ):
        ran = run("generate", "t1", "--model", folder, *options)
        assert (ran.status, ran.out) == (2, "")
        assert said in ran.err
