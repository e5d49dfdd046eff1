"""Writes a checkpoint with the shapes of a published model and random weights, to measure memory and time of serving.

    python benchmarks/random_checkpoint.py qwen3-0.6b FOLDER --tokenizer FOLDER_WITH_A_TOKENIZER

The texts of such a model are meaningless. `write_gguf` writes a GGUF file in Q8_0, which llama.cpp can convert to other
formats.
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
"""Count of random numbers; larger arrays repeat them."""


def write_weights(path: Path, specs: list[ArraySpec], seed: int) -> None:
    """Writes a safetensors file in bfloat16 array by array, because large models exceed the memory."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    sizes = [int(np.prod(spec.shape)) for spec in specs]
    end = 0
    for spec, size in zip(specs, sizes, strict=True):
        header[spec.name] = {"dtype": "BF16", "shape": spec.stored_shape, "data_offsets": [end, end + 2 * size]}
        end += 2 * size
    header_bytes = json.dumps(header).encode()
    random_values = np.random.default_rng(seed).standard_normal(DRAWN, np.float32)
    with path.open("wb") as file:
        file.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
        for spec, size in zip(specs, sizes, strict=True):
            values = np.ones(DRAWN, np.float32) if spec.init == "ones" else random_values * np.float32(spec.scale)
            for begin in range(0, size, DRAWN):
                file.write(values[: size - begin].astype(ml_dtypes.bfloat16).tobytes())


def write_gguf(path: Path, config: DecoderConfig, tokenizer: GGUFCheckpoint) -> None:
    """Writes a GGUF file in Q8_0 with the tokenizer of another file. Unused tokens fill the vocabulary."""
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
    tensor_names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_layers)
    for spec in spec_leaves(declare(config)):
        part = spec.name.removesuffix(".weight").replace("experts.*.", "experts.")
        name = f"{tensor_names.get_name(part)}.weight"
        if len(spec.stored_shape) == 1:
            writer.add_tensor(name, np.ones(spec.stored_shape, np.float32))
            continue
        if spec.kind == "router":  # llama.cpp reads routers only in float32
            writer.add_tensor(name, np.random.default_rng(0).normal(0, spec.scale, spec.stored_shape).astype(np.float32))
            continue
        *rows, width = spec.stored_shape
        blocks[:, :2] = np.float16(spec.scale / 74).reshape(1).view(np.uint8)  # integers of any bits are about 74 in size
        random_values = np.resize(blocks, (math.prod(rows) * width // 32, 34)).reshape(*rows, -1)
        writer.add_tensor(name, random_values, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
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
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json and tokenizer_config.json")
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
