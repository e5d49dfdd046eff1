"""Converts a DFlash 2 drafter to a GGUF file, with which llama.cpp's server drafts for the same target.

    python benchmarks/dflash2_to_gguf.py DRAFTER TARGET.gguf DRAFTER.gguf [--kind F32]
    llama-server -m TARGET.gguf -md DRAFTER.gguf --spec-type draft-dflash --spec-draft-n-max 7

llama.cpp's own converter reads published drafters, but not those with a draft vocabulary, and only beside a target in Hugging
Face's format. Here, the tokenizer and the draft vocabulary's part of the output head come from the target's GGUF file; the head
keeps its format. A drafter without a draft vocabulary uses the target's head.

The layout is llama.cpp's architecture `dflash` (build 11549, `src/models/dflash.cpp`).
"""

import re
from pathlib import Path
from typing import Any, Literal, get_args

import gguf
import numpy as np
from cyclopts import App

from tilewright.cli.outputs import whole_file
from tilewright.models import dflash, dflash2, hub
from tilewright.models.checkpoint import decoder_config
from tilewright.models.dflash2 import DFlash2Config
from tilewright.models.gguf import gguf_file, open_gguf
from tilewright.models.params import to_tensors
from tilewright.speculation.drafters.load import DRAFTERS, DrafterOptions, load_drafter

ARCHITECTURE = "dflash"
Kind = Literal["F32", "F16", "BF16", "Q8_0", "Q4_0"]
"""Formats of the matrices and codebooks."""
PARTS = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
"""llama.cpp's names of a layer's tensors, by the published names."""
WHOLE = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
"""llama.cpp's names of the other tensors."""
HEADS = ("output.weight", "token_embd.weight")
"""Names of the target's output head; the second is for tied embeddings."""


def gguf_name(name: str) -> str:
    """Returns llama.cpp's name of a tensor. Raises a `KeyError` for an unknown tensor."""
    layer = re.fullmatch(r"layers\.(\d+)\.(.*)", name)
    return WHOLE[name] if layer is None else f"blk.{layer[1]}.{PARTS[layer[2]]}"


def check_supported(config: DFlash2Config) -> None:
    """Raises a `ValueError` that lists features of a drafter that the file cannot hold."""
    found = list(config.variations)
    found += ["drafts of the first slot"] if config.sample_from_anchor else []
    found += ["taps of another size"] if config.tap_size != config.hidden_size else []
    found += ["scaled RoPE"] if config.rope_scaling is not None else []
    # llama.cpp taps the inputs of layers, and has no input after the last layer's output.
    found += ["a tap of the target's last layer"] if config.num_target_layers - 1 in config.target_layer_ids else []
    lattice = config.selector_top_k * (config.selector_top_k + 1)
    found += [f"a hidden size below {lattice}, the scores of a slot"] if config.hidden_size < lattice else []
    if found:
        raise ValueError(f"expected a drafter that llama.cpp's layout can describe, found one with {', '.join(found)}")


def metadata(config: DFlash2Config, context: int) -> dict[str, tuple[Any, gguf.GGUFValueType]]:
    """Returns the fields of the architecture, with their types; `context` is the target's length of contexts."""
    integer, number, flag = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.BOOL
    fields = {
        "vocab_size": (config.vocab_size, integer),
        "context_length": (context, integer),
        "block_count": (config.num_layers, integer),
        "embedding_length": (config.hidden_size, integer),
        "feed_forward_length": (config.intermediate_size, integer),
        "attention.head_count": (config.num_heads, integer),
        "attention.head_count_kv": (config.num_kv_heads, integer),
        "attention.key_length": (config.head_dim, integer),
        "attention.value_length": (config.head_dim, integer),
        "attention.layer_norm_rms_epsilon": (config.rms_norm_eps, number),
        "attention.causal": (False, flag),
        "rope.dimension_count": (int(config.head_dim * config.partial_rotary_factor), integer),
        "rope.freq_base": (config.rope_theta, number),
        "block_size": (config.block_size, integer),
        "conv_kernel_size": (config.conv_kernel_size, integer),
        "conv_group_size": (config.conv_group_size, integer),
        "selector_rank": (config.selector_rank, integer),
        "selector_top_k": (config.selector_top_k, integer),
    }
    if config.output_multiplier != 1:
        fields["logit_scale"] = config.output_multiplier, number
    if config.final_logit_softcapping is not None:
        fields["final_logit_softcapping"] = config.final_logit_softcapping, number
    if config.input_embedding_scale != 1:
        fields["embedding_scale"] = config.input_embedding_scale, number
    return {f"{ARCHITECTURE}.{name}": field for name, field in fields.items()}


def add_tokenizer(writer: gguf.GGUFWriter, target: Path, mask: int) -> None:
    """Copies the target's tokenizer, and marks the mask token."""
    for name, field in gguf.GGUFReader(target).fields.items():
        if name.startswith("tokenizer.ggml.") and name != gguf.Keys.Tokenizer.MASK_ID:
            element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], element)
    writer.add_mask_token_id(mask)


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: Kind) -> None:
    """Adds a tensor in a format; norms and base kernels, which llama.cpp reads as float32, stay in float32.

    Raises:
        ValueError: the rows have no whole number of the format's blocks.
    """
    chosen = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
    size = gguf.GGML_QUANT_SIZES[chosen][0]
    if values.shape[-1] % size:
        raise ValueError(f"expected rows of a multiple of {size} for {kind}, found {name} with {values.shape[-1]}")
    if chosen == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quantize(values, chosen), raw_dtype=chosen)


def convert(drafter: str, target: Path, out: Path, *, kind: Kind = "BF16") -> None:
    """Converts a DFlash 2 drafter to a GGUF file.

    Parameters
    ----------
    drafter
        Folder or hub id of the drafter, or "smollm2-dflash2".
    target
        GGUF file of the target, or "smollm2-135m".
    out
        The file to write.
    kind
        Format of the matrices and codebooks: F32, F16, BF16, Q8_0 or Q4_0.

    Raises
    ------
    ValueError
        The drafter is of another kind, does not fit the target, or has features that the file cannot hold; or the target is
        not a GGUF file.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"expected the kind to be one of {', '.join(get_args(Kind))}, found {kind!r}")
    file = gguf_file(hub.resolve(str(target)))
    if file is None:
        raise ValueError(f"expected a GGUF file as the target, found {target}")
    folder = hub.resolve(drafter, names=DRAFTERS)
    decoder = decoder_config(file)
    loaded, params = load_drafter(str(folder), decoder, "float32", DrafterOptions(), None)
    config = getattr(loaded, "config", None)
    if not isinstance(config, DFlash2Config):
        raise ValueError(f"expected a DFlash 2 drafter, found {drafter} of another kind")
    check_supported(config)
    vocab = dflash.backbone_of(params).vocab
    with whole_file(out) as partial:
        writer = gguf.GGUFWriter(partial, ARCHITECTURE)
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(folder.name)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for name, (value, value_type) in metadata(config, decoder.max_position_embeddings).items():
            writer.add_key_value(name, value, value_type)
        # llama.cpp counts the inputs of layers, so that the output of layer i is tap i + 1.
        writer.add_array(f"{ARCHITECTURE}.target_layers", [layer + 1 for layer in config.target_layer_ids])
        add_tokenizer(writer, file, config.mask_token_id)
        for name, values in to_tensors(dflash2.declare(config), dflash.with_vocab(params, None), np.float32):
            if vocab is not None and name == "candidate_selector.successor_codebook":
                # llama.cpp looks candidates up by their target ids; the other rows are never read.
                values, drafted = np.zeros((config.vocab_size, values.shape[1]), np.float32), values
                values[np.asarray(vocab.ids)] = drafted
            add_tensor(writer, gguf_name(name), values, kind)
        if vocab is not None:
            ids = np.asarray(vocab.ids)
            tensors = open_gguf(file).tensors
            head = tensors[next(name for name in HEADS if name in tensors)]
            writer.add_tensor(HEADS[0], head.data[ids], raw_dtype=head.tensor_type)
            writer.add_tensor("d2t", ids.astype(np.int64))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


if __name__ == "__main__":
    app = App(name="dflash2_to_gguf", help=__doc__)
    app.default(convert)
    app()
