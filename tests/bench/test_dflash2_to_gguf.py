"""`benchmarks/dflash2_to_gguf.py`: tensors and metadata under llama.cpp's names, and refused drafters."""

import importlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from models.gguf_files import write_gguf
from reference.dflash2_numpy import as_dflash2, with_draft_vocab
from reference.dflash_numpy import Pair, as_folders, random_pair
from reference.layouts_numpy import with_own
from tilewright.models.decoder import config_from_hf

script: Any = importlib.import_module("dflash2_to_gguf")

PAIR = random_pair(0, taps=(0, 2))
IDS = [1, 2, 5, 7, 11, 30]
SUCCESSOR = "candidate_selector.successor_codebook"
SMALL = with_draft_vocab(as_dflash2(PAIR, output_multiplier=0.5, final_logit_softcapping=20.0), IDS, [SUCCESSOR])
TOKENS = [f"t{token}" for token in range(40)]
FIELDS = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.token_type": [1] * 40}
Kind = gguf.GGMLQuantizationType


def convert(folder: Path, pair: Pair, head: Kind = Kind.Q8_0, **options: str) -> tuple[gguf.GGUFReader, gguf.GGUFReader]:
    """Converts the drafter of a pair. Returns the files of the target, with matrices in a format, and of the drafter."""
    target, drafter = as_folders(folder, pair)
    config = config_from_hf(pair.target_config)
    write_gguf(folder / "target.gguf", config, load_file(target / "model.safetensors"), head, FIELDS)
    script.convert(str(drafter), folder / "target.gguf", folder / "drafter.gguf", **options)
    return gguf.GGUFReader(folder / "target.gguf"), gguf.GGUFReader(folder / "drafter.gguf")


def values(reader: gguf.GGUFReader) -> dict[str, np.ndarray]:
    return {each.name: gguf.dequantize(each.data, each.tensor_type) for each in reader.tensors if each.name != "d2t"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[gguf.GGUFReader, gguf.GGUFReader]:
    # Rows of 48 numbers have no whole blocks of 8-bit numbers, so that the target stays in float32 here.
    return convert(tmp_path_factory.mktemp("small"), SMALL, Kind.F32, kind="F32")


def test_every_tensor_has_a_place(small: tuple[gguf.GGUFReader, gguf.GGUFReader]):
    stored = SMALL.drafter_tensors
    found = values(small[1])
    named = {script.gguf_name(name): stored[name] for name in stored if name not in ("d2t", "t2d", SUCCESSOR)}
    assert set(found) == {*named, "selector_successor.weight", "output.weight"}
    for name, value in named.items():
        np.testing.assert_array_equal(found[name], value)
    assert found["blk.1.ffn_conv_base"].shape == (2, 2, 32)


def test_the_draft_vocabulary_has_its_part_of_the_head(small: tuple[gguf.GGUFReader, gguf.GGUFReader]):
    """Successors are found by target ids; rows of other tokens are zero."""
    target, drafter = small
    found = values(drafter)
    np.testing.assert_array_equal(found["output.weight"], values(target)["output.weight"][IDS])
    successor = found["selector_successor.weight"]
    np.testing.assert_array_equal(successor[IDS], SMALL.drafter_tensors[SUCCESSOR])
    assert not np.delete(successor, IDS, axis=0).any()
    (ids,) = (each for each in drafter.tensors if each.name == "d2t")
    assert (ids.tensor_type, ids.data.tolist()) == (Kind.I64, IDS)


def test_metadata_is_what_llama_cpp_reads(small: tuple[gguf.GGUFReader, gguf.GGUFReader]):
    fields = {name: field.contents() for name, field in small[1].fields.items()}
    assert fields["general.architecture"] == "dflash"
    wanted = {
        "block_size": 6,
        "block_count": 2,
        "context_length": 512,
        "target_layers": [1, 3],  # llama.cpp counts inputs of layers
        "selector_top_k": 5,
        "conv_group_size": 8,
        "attention.causal": False,
        "logit_scale": 0.5,
        "final_logit_softcapping": 20.0,
    }
    assert {name: fields[f"dflash.{name}"] for name in wanted} == wanted
    assert {name: fields[name] for name in FIELDS} == FIELDS
    assert fields["tokenizer.ggml.mask_token_id"] == 39


def test_matrices_are_quantised_and_the_head_keeps_its_format(tmp_path: Path):
    pair = with_draft_vocab(as_dflash2(random_pair(1, taps=(0, 2), intermediate_size=64), rank=32), IDS, [SUCCESSOR])
    target, drafter = convert(tmp_path, pair, Kind.Q8_0, kind="Q4_0")
    kinds = {each.name: each.tensor_type for each in drafter.tensors}
    assert (kinds["fc.weight"], kinds["selector_predecessor.weight"]) == (Kind.Q4_0, Kind.Q4_0)
    assert (kinds["output.weight"], kinds["output_norm.weight"]) == (Kind.Q8_0, Kind.F32)
    np.testing.assert_array_equal(values(drafter)["output.weight"], values(target)["output.weight"][IDS])


def test_a_whole_vocabulary_uses_the_targets_head(tmp_path: Path):
    _, drafter = convert(tmp_path, as_dflash2(PAIR), Kind.F32)
    found = values(drafter)
    assert "output.weight" not in found
    assert found["selector_successor.weight"].shape == (40, 6)


@pytest.mark.parametrize(
    ("pair", "options", "message"),
    [
        (PAIR, {}, "expected a DFlash 2 drafter"),
        (with_own(as_dflash2(PAIR), "embedding"), {}, "found one with an embedding of its own"),
        (as_dflash2(PAIR, top_k=6), {}, "a hidden size below 42"),
        (as_dflash2(random_pair(0, taps=(0, 4))), {}, "a tap of the target's last layer"),
        (as_dflash2(PAIR, window=6, sliding=[1]), {}, "windows"),
        (as_dflash2(PAIR), {"kind": "Q8_0"}, "rows of a multiple of 32 for Q8_0"),
        (as_dflash2(PAIR), {"kind": "Q3_K"}, "expected the kind to be one of"),
    ],
)
def test_what_is_refused(pair: Pair, options: dict[str, str], message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        convert(tmp_path, pair, Kind.F32, **options)
    assert not (tmp_path / "drafter.gguf").exists()


def test_the_target_is_a_gguf_file(tmp_path: Path):
    target, drafter = as_folders(tmp_path, SMALL)
    with pytest.raises(ValueError, match="expected a GGUF file as the target"):
        script.convert(str(drafter), target, tmp_path / "drafter.gguf")
