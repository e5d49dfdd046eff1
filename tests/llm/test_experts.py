"""Targets with experts: speculation gives the tokens of plain decoding, in every batch, under preemption and with prefixes."""

from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from typing import Any

import jax
import numpy as np
import pytest

from llm.support import check_same_as_autoregressive, prompts, tokens_of
from llm.test_families import copied, golden_tokens, random_drafter, tokenizer  # noqa: F401 (a fixture)
from llm.test_windows import PAGE, engine_of
from models.test_decoder import GOLDENS
from reference.eagle3_numpy import as_folder, random_eagle3
from reference.mtp_numpy import add_random_head
from runtime.support import check_empty, drive
from tilewright.kernels.select import operations
from tilewright.llm.language_model import LanguageModel, load
from tilewright.models.checkpoint import decoder_config, read_config, save_params
from tilewright.models.decoder import DecoderConfig, config_to_hf, declare
from tilewright.models.experts import Mixture
from tilewright.models.params import initialise
from tilewright.parallel.mesh import make_mesh
from tilewright.runtime.memory import held_bytes, step_bytes
from tilewright.runtime.placement import placement_over
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable

TABLE = ShapeTable(batches=(1, 8), capacities=(128,), chunks=(16,), widths=(4,))
FAMILIES = ["qwen3-moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt-oss", "mixtral-untied"))]
KINDS = ["ngram", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dflash", "eagle3", "mtp"))]


def drafter_of(kind: str, folder: Path, target: Path) -> Any:
    if kind == "mtp":
        add_random_head(target)
    if kind in ("ngram", "mtp"):
        return kind
    if kind == "dflash":
        return random_drafter(folder, decoder_config(target))
    fields = read_config(target)
    return as_folder(folder, *random_eagle3(0, fields, taps=[0, 1], draft_vocab_size=72))


def loaded(tmp_path: Path, tokenizer: Path, name: str, kind: str, **settings: Any) -> LanguageModel:  # noqa: F811
    target = copied(tmp_path / "target", name, tokenizer)
    return load(target, drafter_of(kind, tmp_path / "drafter", target), table=TABLE, block_size=4, **settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_speculation_gives_the_tokens_of_plain_decoding(name: str, kind: str, tokenizer: Path, tmp_path: Path):  # noqa: F811
    lm = loaded(tmp_path, tokenizer, name, kind)
    inputs = prompts(0, (3, 17, 5, 9, 30, 2, 12, 21), vocab=96)
    sampling = Sampling(24, ignore_eos=True)
    want = tokens_of(lm, inputs, sampling, speculative=False, batch=1)
    for batch in (1, 8):
        check_same_as_autoregressive(lm, inputs, sampling, batch, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "mixtral-untied"])
def test_preemption_and_prefixes(name: str, tokenizer: Path, tmp_path: Path):  # noqa: F811
    """With few pages, requests that are asked for again: the tokens stay those of transformers."""
    engine = engine_of(loaded(tmp_path, tokenizer, name, "ngram"), pages=8)
    inputs, want = golden_tokens(name)
    requests = [GenerateRequest(prompt, Sampling(64, ignore_eos=True)) for prompt in inputs]
    again = [0, 1, 1, 0, 1]
    listeners, _ = drive(engine, [requests[n] for n in again], np.random.default_rng(0))
    assert [each.tokens for each in listeners] == [want[n] for n in again]
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    check_empty(engine)
    assert len(inputs[1]) > PAGE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "mixtral-untied"])
@pytest.mark.parametrize(("dtype", "weights"), [("bfloat16", "auto"), ("bfloat16", "int8"), ("bfloat16", "int4")])
def test_so_it_does_in_other_formats(name: str, dtype: Any, weights: Any, tokenizer: Path, tmp_path: Path):  # noqa: F811
    """With the CPU kernels, by which a row's bits do not depend on the other rows; gpt-oss' capped attention is XLA's."""
    if not operations().prepares or name == "gpt-oss":
        pytest.skip("needs the CPU kernels in attention, too")
    lm = loaded(tmp_path, tokenizer, name, "ngram", dtype=dtype, weights=weights)
    inputs = prompts(1, (3, 17, 5, 9), vocab=96)
    sampling = Sampling(24, ignore_eos=True)
    check_same_as_autoregressive(lm, inputs, sampling, 4, tokens_of(lm, inputs, sampling, speculative=False, batch=1))


def test_the_bytes_of_a_step_grow_with_its_rows(tokenizer: Path, tmp_path: Path):  # noqa: F811
    """By the experts that rows are expected to choose: 3 of 8 for one, nearly all for many. Other models read all of theirs."""
    target = load(copied(tmp_path / "target", "qwen3-moe", tokenizer), table=TABLE).model.models.target
    mixtures = [layer for layer in target.layers if layer.router is not None]
    experts = held_bytes([(layer.gate_up, layer.down) for layer in mixtures])
    assert len(mixtures) == 2
    rest = held_bytes(target if target.head is None else [target.layers, target.norm, target.head]) - experts
    assert step_bytes(target) == pytest.approx(rest + experts * 3 / 8, abs=2)
    assert step_bytes(target, 4) == pytest.approx(rest + experts * (1 - (5 / 8) ** 4), abs=2)
    assert step_bytes(target, 1000) == rest + experts
    dense = load(copied(tmp_path / "dense", "qwen3-tied", tokenizer), table=TABLE).model.models.target
    assert step_bytes(dense, 1) == step_bytes(dense, 16)
    assert jax.tree.leaves(dense)


OVER = [
    (8, "auto", None),
    (8, "xla", None),
    (4, "xla", "sequence"),
    (4, "auto", "ring"),
    (4, "xla", "domino"),
    (8, "xla", "exact"),
]
"""Devices, kernels and schedules."""


@pytest.mark.parametrize(
    ("devices", "kernels", "schedule"), [(2, "auto", "auto"), *(pytest.param(*each, marks=pytest.mark.slow) for each in OVER)]
)
def test_experts_over_several_devices(
    devices: int,
    kernels: Any,
    schedule: str | None,
    tokenizer: Path,  # noqa: F811
    tmp_path: Path,
):
    """Each has some of the experts, and the tokens are those of one, with drafts and without."""
    mixture = Mixture(16, 3, 32)
    config = DecoderConfig(
        family="qwen3_moe",
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        num_layers=3,
        num_heads=8,
        num_kv_heads=2,
        head_dim=16,
        mixture=mixture,
        dense_layers=(1,),
        max_position_embeddings=256,
    )
    specs = declare(config)
    large = jax.tree.map(lambda spec: replace(spec, scale=0.2), specs)
    save_params(tmp_path, config_to_hf(config), specs, initialise(large, jax.random.key(0)), "float32")
    copyfile(tokenizer, tmp_path / "tokenizer.json")
    table = ShapeTable(batches=(4,), capacities=(64,), chunks=(16,))
    settings: dict[str, Any] = {"table": table, "block_size": 4, "kernels": kernels}
    inputs = prompts(3, (5, 20, 9, 2), vocab=96)
    sampling = Sampling(16, ignore_eos=True)
    want = tokens_of(load(tmp_path, "ngram", **settings), inputs, sampling, speculative=False, batch=4)
    lm = load(tmp_path, "ngram", mesh=make_mesh({"tp": devices}), schedule=schedule, **settings)
    held = lm.model.models.target.layers[0].down
    arrays = jax.tree.leaves(held)
    assert all(len(each.sharding.device_set) == devices for each in arrays)
    if kernels == "auto" and operations().prepares:
        assert held.groups == 16 // devices
    for speculative in (False, True):
        assert tokens_of(lm, inputs, sampling, speculative, batch=4) == want


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["domino", "auto"])
def test_gpt_oss_over_two_devices(schedule: str, tokenizer: Path, tmp_path: Path):  # noqa: F811
    """With its sinks, windows and biases, of which one device adds those of sums: the tokens of transformers."""
    inputs, want = golden_tokens("gpt-oss")
    lm = loaded(tmp_path, tokenizer, "gpt-oss", "ngram", mesh=make_mesh({"tp": 2}), schedule=schedule)
    for speculative in (False, True):
        assert tokens_of(lm, inputs, Sampling(64, ignore_eos=True), speculative, batch=8) == want


@pytest.mark.parametrize(
    ("name", "devices", "schedule", "said"),
    [
        ("gpt-oss", 2, "exact", "the schedule exact sums 8 parts: expected sizes that are multiples of 8, found 6 experts"),
        (
            "qwen3-moe-sparse",
            3,
            None,
            "expected devices that divide 4 heads, 96 tokens of the vocabulary, 56 MLP columns, 8 experts",
        ),
    ],
)
def test_what_is_not_divided_is_refused(name: str, devices: int, schedule: str | None, said: str):
    with pytest.raises(ValueError, match=said):
        placement_over(decoder_config(GOLDENS / name), make_mesh({"tp": devices}), schedule)
