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
from tilewright.models.lora import operations_for_adapters
from tilewright.models.lora_files import read_adapters

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
