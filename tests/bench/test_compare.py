"""Both ways of decoding side by side: what is alternated, what is timed, and what counts as identical."""

from collections.abc import Sequence
from typing import Any

import jax
import pytest

from tilewright.bench.compare import compare, environment
from tilewright.llm.language_model import LanguageModel
from tilewright.models.dflash import DFlashConfig
from tilewright.runtime.output import Generation, Result
from tilewright.runtime.sampling import Sampling
from tilewright.speculation.drafters.dflash import DFlash

DRAFTER = DFlash(
    DFlashConfig(
        vocab_size=8,
        hidden_size=4,
        intermediate_size=4,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=4,
        block_size=6,
        mask_token_id=7,
        target_layer_ids=(0,),
        num_target_layers=1,
    ),
    block_size=4,
)


def result(tokens: Sequence[int], lengths: Sequence[int], drafts: int = 0) -> Result:
    """Its last round accepted one draft more than it could add, if anything was drafted."""
    accepted = [n - 1 for n in lengths]
    accepted[-1] += drafts > 0
    return Result("", list(tokens), list(lengths), "length", 1, [drafts] * len(lengths), accepted)


def generation(*rows: Sequence[int], seconds: float = 1.0, rounds: int = 1) -> Generation:
    return Generation([result(row, [1] * len(row)) for row in rows], 0.5, seconds, rounds)


class FakeModel(LanguageModel):
    """Gives what it is told: `seconds[speculative]` for each run after the other. Results depend on the way."""

    def __init__(self, seconds: dict[bool, list[float]], drafter: DFlash | None = DRAFTER):
        self.seconds = {way: iter(each) for way, each in seconds.items()}
        self.drafter = drafter
        self.dtype = "float32"
        self.kernels = "xla"
        self.weights = "auto"
        self.kv_dtype = "auto"
        self.pacing = None
        self.placement = self.default_adapter = None
        self.calls: list[tuple[list[Any], bool | None]] = []

    def generate(
        self,
        prompts: str | Sequence[Any],
        sampling: Any = None,
        speculative: bool | None = None,
        grammar: Any = None,
        lora: Any = None,
        denoising: Any = None,
    ) -> Generation:
        assert speculative is not None
        self.calls.append((list(prompts), speculative))
        rows = [result(range(8), [4, 1, 3], 3) if speculative else result(range(8), [1] * 8) for _ in prompts]
        return Generation(rows, 0.1, next(self.seconds[speculative]), 3 if speculative else 8)


def test_runs_alternate_and_the_first_of_each_way_is_not_timed():
    lm = FakeModel({False: [99, 4, 2, 1], True: [99, 1, 0.5, 8]})
    done: list[int] = []
    row = compare(lm, [["a"]], Sampling(8), 3, lambda: done.append(1))
    assert [speculative for _, speculative in lm.calls] == [True, False, False, True] * 2, "every second turn is reversed"
    assert len(done) == 8
    assert row["baseline_tokens_per_s"] == 8 / 2, "the median of 2, 4 and 8 tokens a second"
    assert row["tokens_per_s"] == 8 / 1
    assert row["speedup"] == 2
    assert row["speedup_range"] == (1 / 8, 4)


def test_batches_are_summed():
    lm = FakeModel({False: [9, 9, 1, 3], True: [9, 9, 1, 1]})
    row = compare(lm, [["a", "b"], ["c"]], Sampling(8), 1)
    assert [prompts for prompts, _ in lm.calls[:2]] == [["a", "b"], ["c"]]
    assert row["baseline_tokens_per_s"] == 24 / 4
    assert row["tokens_per_s"] == 24 / 2
    assert row["responses"] == 3


def test_a_round_of_a_batch_is_one_round():
    """Two rows side by side: a round costs as much as it takes, however many of them it serves."""
    lm = FakeModel({False: [9, 8], True: [9, 6]})
    row = compare(lm, [["a", "b"]], Sampling(8), 1)
    assert row["rounds"] == 6, "of each row"
    assert row["mean_round_ms"] == 6000 / 3
    assert row["round_cost_steps"] == (6 / 3) / (8 / 8)


def test_joined_adds_up():
    parts = [generation([1], [2, 3], seconds=2.0, rounds=4), generation([4], seconds=3.0, rounds=5)]
    whole = Generation.joined(parts)
    assert [r.tokens for r in whole] == [[1], [2, 3], [4]]
    assert (whole.prefill_seconds, whole.decode_seconds, whole.rounds) == (1.0, 5.0, 9)


def test_figures_of_a_comparison():
    lm = FakeModel({False: [1, 1], True: [1, 0.25]})
    row = compare(lm, [["a"]], Sampling(8), 1)
    names = ("baseline_tokens_per_s", "tokens_per_s", "speedup", "identical", "first_differences", "rounds", "block_size")
    assert [row[name] for name in names] == [8, 32, 4, True, [None], 3, 4]
    assert row["round_cost_steps"] == pytest.approx((0.25 / 3) / (1 / 8))
    assert (row["tokens_per_round"], row["tau_by_response"]) == (8 / 3, 3)
    assert row["speculative_decoding"] == {
        "mean_acceptance_length": 3,
        "draft_acceptance_rate": 6 / 9,
        "acceptance_histogram": [1, 0, 0, 2],
        "acceptance_histogram_by_draft_length": {"3": [1, 0, 0, 2]},
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 9,
        "num_spec_tokens": 3,
    }


def test_environment_names_chip_and_versions():
    found = environment(FakeModel({}))
    assert (found["dtype"], found["kernels"], found["jax_version"]) == ("float32", "xla", jax.__version__)
    assert (found["weights"], found["drafter_dtype"]) == ("auto", "float32")
    assert found["chip"]
