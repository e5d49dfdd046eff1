"""Writes a checkpoint with the shapes of a published model and random weights, to see what memory and time serving it takes.

    python benchmarks/random_checkpoint.py qwen3-0.6b FOLDER --tokenizer FOLDER_WITH_A_TOKENIZER

What it says means nothing. `write_gguf` writes a GGUF file in 8 bits, of which llama.cpp makes others.
"""

import argparse
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from tilewright.models.decoder import DecoderConfig, config_to_hf, declare
from tilewright.models.gguf import GGUFCheckpoint
from tilewright.models.params import ArraySpec, spec_leaves
from tilewright.models.published_configs import MODELS
from tilewright.models.registry import FAMILIES

DRAWN = 2**22
"""Numbers that are drawn; larger arrays repeat them."""


def write_weights(path: Path, specs: list[ArraySpec], seed: int) -> None:
    """A safetensors file in bfloat16, written array by array: the largest models' are more than there is memory."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    sizes = [int(np.prod(spec.shape)) for spec in specs]
    end = 0
    for spec, size in zip(specs, sizes, strict=True):
        header[spec.name] = {"dtype": "BF16", "shape": spec.stored_shape, "data_offsets": [end, end + 2 * size]}
        end += 2 * size
    said = json.dumps(header).encode()
    drawn = np.random.default_rng(seed).standard_normal(DRAWN, np.float32)
    with path.open("wb") as file:
        file.write(len(said).to_bytes(8, "little") + said)
        for spec, size in zip(specs, sizes, strict=True):
            values = np.ones(DRAWN, np.float32) if spec.init == "ones" else drawn * np.float32(spec.scale)
            for begin in range(0, size, DRAWN):
                file.write(values[: size - begin].astype(ml_dtypes.bfloat16).tobytes())


def write_gguf(path: Path, config: DecoderConfig, tokenizer: GGUFCheckpoint) -> None:
    """A GGUF file in Q8_0, with another file's tokenizer, whose vocabulary is filled up with tokens that mean nothing."""
    architecture = FAMILIES[config.family].gguf
    assert architecture is not None
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_vocab_size(config.vocab_size)
    if config.mixture is not None:
        writer.add_expert_count(config.mixture.experts)
        writer.add_expert_used_count(config.mixture.chosen)
        writer.add_expert_feed_forward_length(config.mixture.size)
    add_tokenizer(writer, config.vocab_size, tokenizer.fields)
    blocks = np.random.default_rng(0).integers(0, 256, (2**16, 34), np.uint8)  # a scale in half precision and 32 integers
    known = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_layers)
    for spec in spec_leaves(declare(config)):
        part = spec.name.removesuffix(".weight").replace("experts.*.", "experts.")
        name = f"{known.get_name(part)}.weight"
        if len(spec.stored_shape) == 1:
            writer.add_tensor(name, np.ones(spec.stored_shape, np.float32))
            continue
        if spec.kind == "router":  # which llama.cpp reads in no other format
            writer.add_tensor(name, np.random.default_rng(0).normal(0, spec.scale, spec.stored_shape).astype(np.float32))
            continue
        *rows, width = spec.stored_shape
        blocks[:, :2] = np.float16(spec.scale / 74).reshape(1).view(np.uint8)  # integers of any bits are about 74 in size
        drawn = np.resize(blocks, (math.prod(rows) * width // 32, 34)).reshape(*rows, -1)
        writer.add_tensor(name, drawn, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, size: int, fields: Mapping[str, Any]) -> None:
    tokens = fields["tokenizer.ggml.tokens"]
    more = range(len(tokens), size)
    writer.add_tokenizer_model(fields["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"])
    writer.add_token_list([*tokens, *(f"<unused{n}>" for n in more)])
    writer.add_token_types([*fields["tokenizer.ggml.token_type"], *(gguf.TokenType.UNUSED for _ in more)])
    writer.add_token_merges(fields["tokenizer.ggml.merges"])
    writer.add_bos_token_id(fields["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(fields["tokenizer.ggml.eos_token_id"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with tokenizer.json and tokenizer_config.json")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = MODELS[args.model]
    args.folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(args.tokenizer / name, args.folder / name)
    fields = {**config_to_hf(config), "torch_dtype": "bfloat16"}
    (args.folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    write_weights(args.folder / "model.safetensors", spec_leaves(declare(config)), args.seed)


if __name__ == "__main__":
    main()
