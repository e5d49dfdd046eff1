"""Options of training on text: what a run may be told anew."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tilewright.train.drafter import DFlashOptions, train_drafter
from tilewright.train.text import rate
from train.support import DRAFTER, TARGET, counting_stream, options, silent, target_params


def test_a_run_on_its_plateau_is_told_when_to_end(tmp_path: Path):
    """The rate falls from where the run is told, over what was trained before as if it had been told so at first."""
    text = counting_stream()
    drafter_options = DFlashOptions(anchors=4)

    def trained(steps: int, cooldown: float, out: str) -> np.ndarray:
        chosen = options(schedule="wsd", warmup=1 / steps, steps=steps, cooldown=cooldown, evaluate_every=4)
        result = train_drafter(TARGET, target_params(), DRAFTER, text, text, chosen, drafter_options, tmp_path / out, silent())
        return result.curve["held_out_loss"]

    trained(8, 0.0, "stopped")
    later = trained(12, 4 / 12, "stopped")
    whole = trained(12, 4 / 12, "whole")
    assert len(later) == 3
    np.testing.assert_array_equal(later, whole)


def test_other_runs_must_agree_in_their_steps():
    assert options(schedule="cosine", steps=8).run_fingerprint() != options(schedule="cosine", steps=9).run_fingerprint()
    plateau = options(schedule="wsd", steps=8)
    assert plateau.run_fingerprint() == replace(plateau, steps=9, cooldown=0.0).run_fingerprint()
    assert plateau.run_fingerprint() != replace(plateau, learning_rate=1.0).run_fingerprint()


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_the_first_step_has_the_peak_rate_without_a_warm_up(schedule: str):
    chosen = options(schedule=schedule, steps=20, warmup=0.0, cooldown=0.5)
    assert rate(chosen, 0.25)(0) == 0.25
    warmed = rate(replace(chosen, warmup=0.2), 0.25)
    np.testing.assert_array_equal(np.array([warmed(step) for step in range(5)]), [0.0, 0.0625, 0.125, 0.1875, 0.25])
