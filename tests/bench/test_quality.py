"""The scripts that measure quality and speed beside llama.cpp: which programs pass, what is kept, and what comes of it."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from models.test_gguf import CONFIGS, make
from tilewright.models.checkpoint import decoder_config, load_decoder
from tilewright.models.gguf import open_gguf

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
quality: Any = importlib.import_module("quality")
tasks: Any = importlib.import_module("quality_tasks")
peer: Any = importlib.import_module("llama_cpp_peer")
speed: Any = importlib.import_module("llama_cpp_speed")
drafting: Any = importlib.import_module("llama_cpp_drafting")
few_bits: Any = importlib.import_module("few_bits")
file_formats: Any = importlib.import_module("file_formats")
int8_quality: Any = importlib.import_module("int8_quality")
checkpoint: Any = importlib.import_module("random_checkpoint")

CHECKS = "assert add(1, 2) == 3"
RIGHT = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize(
    "answer, code",
    [
        ("Here:\n```python\nx = 1\n```\nand\n```python\ny = 2\n```", "x = 1"),
        ("```\nplain = 0\n```\n```py\nx = 1\n```", "x = 1"),
        ("```\nx = 1\n```\n", "x = 1"),
        ("It is\n```Python\nx = 1\n    y", "x = 1\n    y"),
        ("- a list\n  ```python\n  x = 1\n  ```\n", "  x = 1"),
        ("x = 1", "x = 1"),
    ],
)
def test_the_program_in_an_answer(answer: str, code: str):
    assert tasks.program(answer) == code


def test_a_right_program_passes_and_no_other():
    assert tasks.passes(f"Sure.\n```python\n{RIGHT}\n```\nDone.", CHECKS)
    assert not tasks.passes(RIGHT.replace("+", "-"), CHECKS)
    assert not tasks.passes("no program at all", CHECKS)
    assert not tasks.passes(f"{RIGHT}\nexit(0)", "assert False"), "it ended before its checks"


@pytest.mark.parametrize(
    "line",
    [
        "import socket; socket.socket()",
        "import os; os.system('true')",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.fork()",
        "open('{outside}', 'w')",
        "import os; os.remove('{outside}')",
        "x = bytearray(1 << 31)",
        "input()",
    ],
)
def test_a_program_reaches_nothing_outside(line: str, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.write_text("kept")
    assert not tasks.passes(f"{line.format(outside=outside)}\n{RIGHT}", CHECKS)
    assert outside.read_text() == "kept"


def test_a_program_has_an_empty_folder_of_its_own():
    assert tasks.passes(f"import os\nassert os.listdir() == []\nopen('here', 'w').write('x')\n{RIGHT}", CHECKS)


def test_a_program_that_does_not_end_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tasks, "WALL_S", 0.5)
    assert not tasks.passes(f"while True: pass\n{RIGHT}", CHECKS)


def test_problems_are_asked_with_their_tests(tmp_path: Path):
    record = {"text": " Add. ", "code": RIGHT, "test_list": [CHECKS, "assert add(0, 0) == 0"], "test_setup_code": "z = 0"}
    lines = [json.dumps(record | {"task_id": number}) for number in (10, 11)]
    (tmp_path / "mbpp.jsonl").write_text("\n".join(lines))
    template = tasks.ChatTemplate.compiled("{{ messages[0].content }}", "a test's")
    (found,) = tasks.problems(tmp_path, template)
    assert (found.number, found.solution, found.checks) == (11, RIGHT, f"z = 0\n{CHECKS}\nassert add(0, 0) == 0")
    assert found.prompt.endswith(
        f"here is your task: Add. Your code should pass these tests:\n\n{CHECKS}\nassert add(0, 0) == 0"
    )


def test_records_go_on_where_they_were_and_refuse_other_settings(tmp_path: Path):
    path = tmp_path / "records.jsonl"
    quality.Records(path, {"model": "a"}).add("mbpp", "int8", 11, tokens=[1])
    again = quality.Records(path, {"model": "a"})
    again.add("mbpp", "int8", 12, tokens=[2])
    assert {number: record["tokens"] for number, record in again.for_way("mbpp", "int8").items()} == {11: [1], 12: [2]}
    assert quality.Records(path, {"model": "a"}).found == again.found
    with pytest.raises(ValueError, match=r"expected records of .*, found"):
        quality.Records(path, {"model": "b"})


@pytest.mark.parametrize("drafted, changed", [([5, 6, 2], []), ([5, 7, 2], ["int8"])])
def test_answers_beside_one_another(drafted: list[int], changed: list[str], tmp_path: Path):
    records = quality.Records(tmp_path / "records.jsonl", {})
    counts = {"rounds": 3, "drafted": 0, "accepted": 0}
    for way, tokens in (("int8", [5, 6, 2]), ("int8+ngram", drafted), ("llama.cpp", [5, 9, 2])):
        records.add("mbpp", way, 11, tokens=tokens, text=f"x = {tokens[1]}", end="eos", **counts)
    problems = [tasks.Problem(11, "", "assert x == 6", "x = 6")]
    records.add("mbpp", "int8", 12, tokens=[1], text="y = 2", end="eos", **counts)  # of a run over more problems
    every = [*problems, tasks.Problem(12, "", "assert y == 1", "y = 1")]
    assert quality.judge_all(problems, every, records, quality.Console(quiet=True)) == 1
    found = quality.mbpp_figures(records)
    passed = {row["way"]: row["passed"] for row in found["ways"]}
    assert passed == {"int8": 1, "int8+ngram": int(not changed), "llama.cpp": 0}
    (beside, drafts) = found["pairs"]
    assert beside["ways"] == ("int8", "llama.cpp")
    assert (beside["equal_texts"], beside["same_tokens_median"]) == (0, 1)
    assert drafts["equal_tokens"] == int(not changed)
    assert quality.changed_by_drafts(found["pairs"]) == changed


def test_likelihoods_are_of_the_answers_that_every_way_has(tmp_path: Path):
    records = quality.Records(tmp_path / "records.jsonl", {})
    for way, number, nats in (
        ("float32", 1, -4.0),
        ("float32", 2, -6.0),
        ("float32", 3, -9.0),
        ("int8", 1, -5.0),
        ("int8", 2, -9.0),
    ):
        records.add("likelihood math500", way, number, nats=nats, tokens=4, bytes=10)
    whole, eight = quality.likelihood_figures(records)
    assert (whole["answers"], whole["nats_per_token"], whole["nats_per_byte"]) == (2, -1.25, -0.5)
    assert (eight["nats_per_token"], eight["lost_nats_per_token"]) == (-1.75, 0.5)


def test_a_peer_that_ends_is_no_answer(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    with peer.Peer(python) as one, pytest.raises(RuntimeError, match="ended with 3"):
        one.ask("about")


def test_speeds_are_compared_within_a_repetition():
    timed = speed.Timed
    times = {
        ("bfloat16", 1): [timed(0.1, 0.01), timed(0.1, 0.02), timed(0.1, 0.04)],
        ("int8", 1): [timed(0.1, 0.005)] * 3,
        ("llama.cpp, Q4_0", 1): [timed(0.3, 0.02), timed(0.2, 0.03), timed(0.1, 0.04)],
    }
    figures, _, other = speed.figures(times, {("llama.cpp, Q4_0", 1): True})
    assert (figures["step_ms"], figures["step_ms_range"], figures["tokens_per_s"]) == (20.0, [10.0, 40.0], 50.0)
    assert "bfloat16_speedup" not in figures
    assert (other["bfloat16_speedup"], other["bfloat16_speedup_range"], other["prompts_s"]) == (1.5, [1.0, 2.0], 0.2)
    assert other["flash_attention"] is True
    assert speed.faster({True: lambda: timed(1, 2.0), False: lambda: timed(2, 1.0)}) is False


def test_models_in_few_bits_are_compared_within_a_repetition():
    def steps(*seconds: float) -> list[Any]:
        return [speed.Timed(1.0, each) for each in seconds]

    times = {("memory", "read"): [40.0, 50.0, 60.0], ("16 rows", "int4"): steps(0.04, 0.06, 0.08)}
    times |= {("one row", "int4"): steps(0.01, 0.02, 0.04), ("one row", "int8"): steps(0.02, 0.03, 0.08)}
    times |= {("one row", "Q4_0"): steps(0.05, 0.05, 0.05), ("one row", "Q8_0"): steps(0.02, 0.06, 0.04)}
    times |= {("prompt of 512", name): [speed.Timed(5.12, 9.0)] * 3 for name in ("int4", "Q4_0")}
    nbytes = {"int4": 5 * 10**8, "int8": 10**9, "Q4_0": 4 * 10**8, "Q8_0": 10**9}
    records = {(each["case"], each["side"]): each for each in few_bits.figures("some", times, nbytes)}
    record = records["one row", "int4"]
    other = records["one row", "Q4_0"]
    assert (record["ms"], record["tokens_per_s"], record["read_share"]) == (20.0, 50.0, 0.5)
    assert (other["int4_speedup"], other["int4_speedup_range"]) == (2.5, [1.25, 5.0])
    prompt = records["prompt of 512", "Q4_0"]
    assert (prompt["ms"], prompt["tokens_per_s"], prompt["read_share"]) == (pytest.approx(10), pytest.approx(100), None)
    assert records["16 rows", "int4"]["tokens_per_s"] == pytest.approx(16 / 0.06)
    found = few_bits.verdict(times)
    assert found == {"one_row_over_llama_cpps_best": 2.0, "int4_over_int8": 2.0, "steps_of_16_rows": 3.0}
    assert few_bits.table(list(records.values()), "some").row_count == len(records)


def test_formats_of_files_are_compared_by_the_token():
    """Two texts, of which 3 and 1 tokens are scored; ours loses 0.4 and 0.8 nats there, llama.cpp nothing."""
    texts = [([1, 2, 3, 4], 1), ([5, 6, 7], 2)]
    losses = {side: {"text": np.asarray([6.0, 2.0])} for side in ("float32", "llama.cpp")}
    found = file_formats.figures({**losses, "ours": {"text": np.asarray([6.4, 2.8])}}, "text", texts)
    assert found["float32"] == [2.0, pytest.approx(np.std([6, 2], ddof=1) * np.sqrt(2) / 4)]
    assert found["ours_more"] == [pytest.approx(0.3), pytest.approx(0.1)]
    assert found["llama.cpp_more"] == [0.0, 0.0]
    record = {"types": {"Q4_0": 3}, "kept": True, "scored": {"text": found}}
    assert file_formats.table("some", {"Q4_0": record}, ["text"]).row_count == 1


def test_predictions_are_measured_against_those_of_float32():
    """Loss, KL divergence and agreement of four positions."""
    reference = np.asarray([[1.0, 2, 3, 4], [0, 0, 0, 0], [1, 1, 1, 1]])
    found = int8_quality.measured(reference + np.asarray([[0.5], [0.25], [0]]), reference)
    assert found["loss_more_than_float32_nats"] == [0.5, 0.0]
    assert (found["perplexity_ratio"], found["kl_nats"][0]) == (pytest.approx(np.exp(0.5)), 0.25)
    assert found["same_most_likely_token"] == [1.0, 0.0]


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama3.2-1b"])
def test_a_random_gguf_file_is_a_model_with_the_shapes_asked_for(name: str, tmp_path: Path):
    config = replace(
        checkpoint.MODELS[name],
        hidden_size=64,
        intermediate_size=96,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        vocab_size=320,
    )
    given, _ = make(tmp_path, CONFIGS["qwen3"], Kind.F32)
    file = tmp_path / "random.gguf"
    checkpoint.write_gguf(file, config, open_gguf(given))
    loose = {"eos_token_ids": (), "rms_norm_eps": 1e-5}  # the file has its numbers in float32
    assert replace(decoder_config(file), **loose) == replace(config, **loose)
    _, params = load_decoder(file, jnp.float32)
    assert float(jnp.std(params.layers[0].down)) == pytest.approx(checkpoint.declare(config).layers[0].down.scale, rel=0.1)


def test_drafting_is_compared_by_the_token_within_a_repetition():
    timed = drafting.Timed
    setting = drafting.Setting(Path("of/Q4_0.gguf"), True, 2, 3)
    text = [[1, 2, 3, 4, 1, 2, 3, 4, 5]]
    times = {
        "none": [timed(0.8, text, 9, 8), timed(1.6, text, 9, 8), timed(0.8, text, 9, 8)],
        "ngram": [timed(0.4, text, 6, 8), timed(0.4, text, 6, 8), timed(0.2, text, 6, 8)],
        "llama.cpp": [timed(1.0, [[7] * 11], 4, 10)] * 3,
    }
    plain, ngram, other = drafting.figures("some", times, {"llama.cpp": setting})
    assert (plain["tokens"], plain["tokens_per_s"], plain["tokens_per_round"], plain["identical"]) == (8, 10.0, 1.0, 1)
    assert (ngram["speedup_over none"], ngram["speedup_over none range"], ngram["tokens_per_round"]) == (4.0, [2.0, 4.0], 1.5)
    assert (ngram["speedup_over llama.cpp"], ngram["distinct_4gram_ratio"]) == (2.0, 5 / 6)
    assert (other["format"], other["drafts"], other["ngram"], "identical" in other) == ("Q4_0", 2, 3, False)
    assert drafting.table([plain, ngram, other], ["llama.cpp"]).row_count == 3


class Counting(peer.Llama):
    """A language model that goes on as 1, 2, ... 9, 0, 1, ...; it holds the tokens that it was given."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.size = 512
        self.context = None
        self.calls = 0
        self.api = SimpleNamespace(llama_get_memory=lambda _: None, llama_memory_seq_rm=self.remove)

    def remove(self, memory: None, row: int, begin: int, end: int) -> None:
        del self.held[begin:]

    def forget(self) -> None:
        self.held = []

    def decode(self, items: list[tuple[int, int, int, bool]]) -> None:
        assert [position for _, position, _, _ in items] == list(range(len(self.held), len(self.held) + len(items)))
        self.held += [token for token, _, _, _ in items]
        self.last = [token for token, _, _, _ in items]
        self.calls = self.calls + 1

    def logits(self, at: int) -> np.ndarray:
        return np.eye(10)[(self.last[at] + 1) % 10]


@pytest.mark.parametrize("right", [0, 1, 3])
def test_llama_cpps_drafts_are_taken_as_far_as_they_are_right(monkeypatch: pytest.MonkeyPatch, right: int):
    """The tokens are those of decoding without drafts, in fewer rounds."""

    class Lookup:
        def __init__(self, max_ngram_size: int, num_pred_tokens: int):
            self.size = num_pred_tokens

        def __call__(self, tokens: np.ndarray) -> np.ndarray:
            return np.asarray([(tokens[-1] + (1 if i < right else 6) + i) % 10 for i in range(self.size)], np.intc)

    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", SimpleNamespace(LlamaPromptLookupDecoding=Lookup))
    llama = Counting()
    drafted = llama.draft([1, 2], 16, [], drafts=3, ngram=2)
    assert drafted["tokens"] == Counting().generate([[1, 2]], 16, [])["tokens"]
    assert drafted["rounds"] == -(-15 // (right + 1))
    assert llama.draft([1, 2], 16, [7], drafts=3, ngram=2)["tokens"] == [[3, 4, 5, 6, 7]]
