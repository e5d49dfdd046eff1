"""LoRA adapters that PEFT itself made and saved, on random models of a fresh seed: its own logits and tokens, live.

Needs the `oracle` extra. A failure prints the seed; `ORACLE_SEED=n` repeats it.
"""

import os
import secrets
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels.select import PLAIN
from tilewright.models import decoder
from tilewright.models.checkpoint import load_decoder
from tilewright.models.lora import LoraSettings, operations_for_adapters, target_modules
from tilewright.models.lora_files import read_adapters, write_adapter
from tilewright.train.lora import adapted, declare_adapter

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SEED = int(os.environ.get("ORACLE_SEED", secrets.randbelow(2**31)))
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"target_modules": ALL, "r": 4, "lora_alpha": 8}),
    "qwen2, biases, rslora": ("Qwen2", {"target_modules": ["q_proj", "v_proj"], "r": 9, "lora_alpha": 5, "use_rslora": True}),
    "phi3, joined": ("Phi3", {"target_modules": ["qkv_proj", "gate_up_proj"], "r": 3, "lora_alpha": 7}),
    "gemma2, gates apart": ("Gemma2", {"target_modules": "all-linear", "r": 2, "lora_alpha": 2}),
    "some layers": ("Llama", {"target_modules": ALL, "r": 4, "lora_alpha": 8, "layers_to_transform": [1]}),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_pefts(tmp_path: Path, name: str) -> None:
    """A batch of the base model and two adapters gives, row by row, what PEFT gives with each."""
    family, settings = CASES[name]
    torch.manual_seed(SEED)
    config = getattr(transformers, f"{family}Config")(**SIZES, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.save_pretrained(tmp_path / "model")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings), adapter_name="one")
    wrapped.add_adapter("two", peft.LoraConfig(task_type="CAUSAL_LM", **{**settings, "r": 2 * settings["r"]}))
    with torch.no_grad():
        for key, value in wrapped.named_parameters():
            if ".lora_" in key:
                value.copy_(torch.randn_like(value) / value.shape[1] ** 0.5)
    wrapped.save_pretrained(tmp_path / "saved")
    adapters = read_adapters({each: tmp_path / "saved" / each for each in ("one", "two")})
    assert adapters is not None
    ours, params = load_decoder(tmp_path / "model", jnp.float32, ops=operations_for_adapters(PLAIN, adapters))
    params = adapters.apply(PLAIN, decoder.declare(ours), params, jnp.float32)
    tokens = np.random.default_rng(SEED).integers(0, SIZES["vocab_size"], (3, 17))
    positions = jnp.broadcast_to(jnp.arange(17), (3, 17))
    numbers = jnp.arange(3, dtype=jnp.int32)
    given = jnp.asarray(tokens, jnp.int32), positions, decoder.causal_attend
    ran = decoder.forward(ours, PLAIN, params, *given, adapter=numbers)
    got = np.asarray(decoder.logits(ours, PLAIN, params, ran.hidden))
    with torch.no_grad():
        text = torch.asarray(tokens)
        with wrapped.disable_adapter():
            wanted = [wrapped(text[:1]).logits[0].numpy()]
        for row, each in enumerate(("one", "two"), 1):
            wrapped.set_adapter(each)
            wanted.append(wrapped(text[row : row + 1]).logits[0].numpy())
    np.testing.assert_allclose(got, wanted, atol=1e-4, rtol=1e-4, err_msg=f"seed {SEED}")


LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj")
"""Without shared experts: PEFT 0.21 on transformers 5 takes their modules for those of all experts."""
WRITTEN: dict[str, tuple[str, LoraSettings, dict[str, Any]]] = {
    "qwen3": ("Qwen3", LoraSettings(4, 8), {}),
    "phi3, joined, rslora": ("Phi3", LoraSettings(3, 7.5, True), {}),
    "gemma3": ("Gemma3Text", LoraSettings(2, 2, targets=("q_proj", "down_proj")), {"head_dim": 16}),
    "qwen3-moe": ("Qwen3Moe", LoraSettings(4, 8), {"head_dim": 16, **EXPERTS}),
    "qwen3-next": ("Qwen3Next", LoraSettings(4, 8, targets=ATTENTION), {"head_dim": 16, **LINEAR, **EXPERTS}),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_peft_reads_what_training_writes(tmp_path: Path, name: str) -> None:
    """PEFT's logits with an adapter that we wrote are those with which we train it; it finds every tensor."""
    family, settings, more = WRITTEN[name]
    torch.manual_seed(SEED)
    config = getattr(transformers, f"{family}Config")(**SIZES, **more, attn_implementation="eager")
    causal = family.removesuffix("Text")
    model = getattr(transformers, f"{causal}ForCausalLM")(config).eval()
    model.save_pretrained(tmp_path / "model")
    ours, base = load_decoder(tmp_path / "model", jnp.float32)
    rng = np.random.default_rng(SEED)

    def draw(spec: Any) -> Any:
        return jnp.asarray(rng.normal(size=spec.shape) / spec.shape[1] ** 0.5, jnp.float32)

    specs = declare_adapter(target_modules(decoder.declare(ours), settings.targets), settings.rank)
    pairs = {module: type(pair)(*map(draw, pair)) for module, pair in specs.items()}
    write_adapter(tmp_path / "adapter", "model", tmp_path / "model", settings, pairs)
    tokens = rng.integers(0, SIZES["vocab_size"], (2, 17))
    params = adapted(ours, PLAIN, base, pairs, settings)
    hidden = decoder.forward_full(ours, PLAIN, params, jnp.asarray(tokens, jnp.int32)).hidden
    got = np.asarray(decoder.logits(ours, PLAIN, params, hidden))
    wrapped = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    names = {key.replace(".default", "") for key, _ in wrapped.named_parameters() if ".lora_" in key}
    assert len(names) == 2 * len(pairs)
    with torch.no_grad():
        wanted = wrapped(torch.asarray(tokens)).logits.numpy()
        with wrapped.disable_adapter():
            before = wrapped(torch.asarray(tokens)).logits.numpy()
    assert np.abs(wanted - before).max() > 0.1, "the adapter changes the model"
    np.testing.assert_allclose(got, wanted, atol=2e-4, rtol=2e-4, err_msg=f"seed {SEED}")
