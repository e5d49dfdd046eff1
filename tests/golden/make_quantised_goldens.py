"""Writes the golden quantised weights: what other libraries store of a linear layer, and the matrix that they read back.

Needs the `oracle` extra, `compressed-tensors`, and two files of libraries that do not install on a CPU: AutoGPTQ's
`auto_gptq/nn_modules/qlinear/qlinear_cuda.py` and AutoAWQ's `awq/utils/packing_utils.py`. Run from the repository root:

    python tests/golden/make_quantised_goldens.py qlinear_cuda.py packing_utils.py

Each file under `tests/golden/quantised/` holds the stored tensors, their names behind the layer's, and `wanted [O, I]`; the
file's metadata has the `quantization_config` as JSON.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

FOLDER = Path(__file__).parent / "quantised"
OUTPUTS = 32
INPUTS = 128


def module(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def write(name: str, config: dict[str, Any], tensors: dict[str, torch.Tensor], wanted: torch.Tensor) -> None:
    FOLDER.mkdir(exist_ok=True)
    kept = {key: value.contiguous() for key, value in {**tensors, "wanted": wanted}.items()}
    save_file(kept, FOLDER / f"{name}.safetensors", {"quantization_config": json.dumps(config)})


def four_bits(w: torch.Tensor, size: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points of groups of inputs, `[O, G]`, float16."""
    parts = w.reshape(len(w), -1, size)
    if symmetric:
        return (parts.abs().amax(-1) / 7.5).half().float(), torch.full(parts.shape[:2], 8.0)
    least = parts.amin(-1).clamp(max=-1e-3)
    most = parts.amax(-1).clamp(min=1e-3)
    scales = ((most - least) / 15).half().float()
    return scales, (-least / scales).round().clamp(1, 15)


def gptq(path: str, name: str, size: int, symmetric: bool, order: torch.Tensor | None = None) -> None:
    """The packing and the reading of AutoGPTQ."""
    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.float16)
    packed = module(path).QuantLinear(4, size, INPUTS, OUTPUTS, bias=False)
    scales, zeros = four_bits(linear.weight.detach().float(), size, symmetric)
    packed.pack(linear, scales, zeros, order)
    tensors = {key: getattr(packed, key) for key in ("qweight", "qzeros", "scales", "g_idx")}
    packed.scales = packed.scales.float()  # so that the product of integer and scale is not rounded
    wanted = packed(torch.eye(INPUTS)).T
    config = {"quant_method": "gptq", "bits": 4, "group_size": size, "sym": symmetric, "desc_act": order is not None}
    write(name, config, tensors, wanted)


def awq(path: str, name: str, size: int) -> None:
    """The order of the packing, and the reading, of AutoAWQ."""
    packing = module(path)
    w = torch.randn(OUTPUTS, INPUTS)
    scales, zeros = (each.T for each in four_bits(w, size, symmetric=False))
    wide = [each.repeat_interleave(size, dim=0) for each in (scales, zeros)]
    units = (w.T / wide[0] + wide[1]).round().clamp(0, 15)

    def words(values: torch.Tensor) -> torch.Tensor:
        eights = values.to(torch.int32).reshape(len(values), -1, 8)[..., packing.AWQ_ORDER]
        return (eights << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1, dtype=torch.int32)

    tensors = {"qweight": words(units), "qzeros": words(zeros), "scales": scales.half()}
    wanted = packing.dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"].float(), 4, size).T
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}
    write(name, config, tensors, wanted)


def compressed(name: str, kind: str, stored_scale: torch.dtype = torch.float32, **weights: Any) -> None:
    """The packing and the reading of compressed-tensors."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    args = scheme.weights
    w = torch.randn(OUTPUTS, INPUTS)
    strategy = str(args.strategy)
    if strategy == "tensor":
        parts = w.reshape(1, 1, -1)
    elif strategy == "channel":
        parts = w.reshape(OUTPUTS, 1, -1)
    elif strategy == "block":
        rows, columns = args.block_structure
        parts = w.reshape(OUTPUTS // rows, rows, -1, columns).swapaxes(1, 2).flatten(2)
    else:
        parts = w.reshape(OUTPUTS, -1, args.group_size)
    scales, zeros = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
    if strategy == "tensor":
        scales = scales.reshape(1)
        zeros = zeros.reshape(1)
    state = {"weight": w, "weight_scale": scales.to(stored_scale), "weight_zero_point": zeros}
    compressor = BaseCompressor.get_value_from_registry(kind)
    stored = compressor.compress(state, scheme)
    # In float32, so that the product of integer and scale is not rounded.
    exact = {**stored, "weight_scale": stored["weight_scale"].float()} if stored["weight_scale"].is_floating_point() else stored
    wanted = compressor.decompress(exact, scheme)["weight"].float()
    group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json()), "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    write(name, config, stored, wanted)


def main() -> None:
    torch.manual_seed(0)
    qlinear, packing = sys.argv[1:]
    gptq(qlinear, "gptq-symmetric", 128, symmetric=True)
    gptq(qlinear, "gptq-zeros", 32, symmetric=False)
    gptq(qlinear, "gptq-order", 64, symmetric=False, order=torch.randperm(INPUTS) // 64)
    awq(packing, "awq", 64)
    integers: dict[str, Any] = {"num_bits": 4, "type": "int"}
    compressed("pack-group", "pack-quantized", torch.float16, **integers, strategy="group", group_size=32, symmetric=True)
    compressed("pack-zeros", "pack-quantized", torch.bfloat16, **integers, strategy="group", group_size=64, symmetric=False)
    compressed("pack-channel", "pack-quantized", torch.bfloat16, **integers, strategy="channel", symmetric=True)
    floats: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    compressed("float-tensor", "float-quantized", **floats, strategy="tensor")
    compressed("float-channel", "float-quantized", torch.bfloat16, **floats, strategy="channel")
    compressed("float-block", "float-quantized", **floats, strategy="block", block_structure=[16, 64])
    compressed("int-channel", "int-quantized", torch.float16, num_bits=8, type="int", symmetric=True, strategy="channel")
    compressed(
        "mxfp4",
        "mxfp4-pack-quantized",
        torch.float32,
        num_bits=4,
        type="float",
        symmetric=True,
        strategy="group",
        group_size=32,
        scale_dtype="torch.uint8",
        zp_dtype="torch.uint8",
    )


if __name__ == "__main__":
    main()
