"""Gemma 4's assistants against transformers' model and drafting loop, live, on random weights of a fresh seed.

Every position of a text is a round: transformers runs the target over the text before its last token and drafts behind it; ours
drafts from the engine's own pages. Needs the `oracle` extra. A failure prints the seed; `ORACLE_SEED=n` repeats it.
"""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llm.support import state_of
from llm.test_families import tokenizer  # noqa: F401 (a fixture)
from tilewright.kernels.select import Kernels
from tilewright.llm.language_model import LanguageModel, load
from tilewright.models import assistant
from tilewright.models.assistant import AssistantConfig
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.runtime.state import DecodeState, Models
from tilewright.speculation.drafters.assistant import Assistant

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SEED = int(os.environ.get("ORACLE_SEED", secrets.randbelow(2**31)))
WINDOW = 11
LENGTH = 33
DRAFTS = 3
VOCAB = 96
ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": WINDOW,
    "max_position_embeddings": 128,
    "rope_parameters": ROPE,
    "eos_token_id": None,
}
TARGET = {"hidden_size": 48, "intermediate_size": 72, "layer_types": ["sliding_attention", "full_attention"] * 2}
DRAFTER = {"hidden_size": 32, "intermediate_size": 40, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("Gemma4", {}),
    "gemma4, centroids": ("Gemma4", CLUSTERS),
    "gemma4, untied": ("Gemma4", {"tie_word_embeddings": False}),
    "gemma4-unified": ("Gemma4Unified", {}),
}


def randomise(model: Any, generator: Any) -> Any:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.4 if weight.ndim == 1 else 1.0 if "embed" in name else 1.5 * weight.shape[-1] ** -0.5
            weight.copy_(float(weight.ndim == 1) + scale * torch.randn(weight.shape, generator=generator))
        for name, number in model.named_buffers():
            if name.endswith("layer_scalar"):
                number.copy_(0.5 + torch.rand(1, generator=generator))
            if name.endswith("token_ordering"):
                number.copy_(torch.randperm(len(number), generator=generator))
    return model.eval()


def models_of(case: str) -> tuple[Any, Any]:
    """transformers' target and assistant."""
    prefix, more = CASES[case]
    unified = prefix == "Gemma4Unified"
    sizes = {**TEXT, "num_hidden_layers": 4, **({} if unified else {"hidden_size_per_layer_input": 0})}
    text = getattr(transformers, f"{prefix}TextConfig")
    target = getattr(transformers, f"{prefix}ForCausalLM")(text(**sizes, **TARGET))
    layers = text(**sizes, **DRAFTER, **({} if unified else {"vocab_size_per_layer_input": 0}))
    config = getattr(transformers, f"{prefix}AssistantConfig")(text_config=layers, backbone_hidden_size=48, **more)
    drafter = getattr(transformers, f"{prefix}AssistantForCausalLM")(config)
    generator = torch.Generator().manual_seed(SEED)
    return randomise(target, generator), randomise(drafter, generator)


def published_round(target: Any, drafter: Any, tokens: Any) -> tuple[list[int], np.ndarray]:
    """Drafts behind `tokens` `[1, n]`, and their logits `[drafts, V]`, by transformers' loop."""
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

    settings = transformers.GenerationConfig(max_length=LENGTH + 2 * DRAFTS)
    drafter.generation_config.num_assistant_tokens = DRAFTS
    loop = SinglePositionMultiTokenCandidateGenerator(drafter, target.get_input_embeddings(), settings)
    with torch.no_grad():
        ran = target(tokens[:, :-1], use_cache=True, **loop.model_kwargs_overrides)
        mask = {"attention_mask": torch.ones_like(tokens)}
        ids, logits = loop.get_candidates(tokens, mask, ran, is_first_iteration=False, n_last_matches=0)
    return ids[0, tokens.shape[1] :].tolist(), logits[0].numpy()


def all_logits(config: AssistantConfig, ops: Any, params: Any, x: jax.Array) -> jax.Array:
    """Logits of all tokens `[B, V]` as transformers fills them up: tokens of other clusters are below all others."""
    if params.clusters is None:
        return ops.linear(x, params.head, jnp.float32)[:, 0]
    tokens, logits = assistant.candidates(config, ops, params, x)
    least = jnp.min(logits, axis=-1) - 1
    filled = jnp.broadcast_to(least, (x.shape[0], config.layers.vocab_size))
    return filled.at[jnp.arange(len(x))[:, None], tokens[:, 0]].set(logits[:, 0])


def watched_proposals(lm: LanguageModel) -> Callable[[Models, DecodeState], tuple[jax.Array, jax.Array]]:
    """Returns a function of the blocks of a state, and the logits of their drafts `[B, drafts, V]`."""
    drafter = lm.drafter
    assert isinstance(drafter, Assistant)
    choose = assistant.choose

    def propose(models: Models, state: DecodeState) -> tuple[jax.Array, jax.Array]:
        seen = []

        def watched(*arguments: Any) -> jax.Array:
            seen.append(all_logits(*arguments))
            return choose(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(assistant, "choose", watched)
            block = drafter.propose(lm.model.target, models, state).block
        return block, jnp.stack(seen, axis=1)

    return jax.jit(propose)


@pytest.mark.parametrize(("case", "kernels"), [*((case, "auto") for case in CASES), ("gemma4, centroids", "xla")])
@pytest.mark.usefixtures("quick_compiles")
def test_every_round_equals_the_published_one(case: str, kernels: Kernels, tokenizer: Path, tmp_path: Path):  # noqa: F811
    print(f"ORACLE_SEED={SEED}")
    target, drafter = models_of(case)
    target.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter")
    (tmp_path / "target" / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    table = ShapeTable(batches=(8,), capacities=(64,), chunks=(16,))
    lm = load(tmp_path / "target", tmp_path / "drafter", table=table, block_size=DRAFTS + 1, kernels=kernels, dtype="float32")
    tokens = np.random.default_rng(SEED).integers(0, VOCAB, LENGTH).tolist()
    propose = watched_proposals(lm)
    texts = [tokens[:n] for n in range(2, LENGTH + 1)]
    for first in range(0, len(texts), 8):
        session = lm.start(texts[first : first + 8], Sampling(DRAFTS))
        session.prefill()
        state, numbers = state_of(session)
        block, logits = (np.asarray(part) for part in propose(lm.model.models, state))
        for number, drafts, found in zip(numbers, block[:, 1:].tolist(), logits, strict=True):
            text = texts[first + number]
            want, expected = published_round(target, drafter, torch.tensor([text]))
            assert drafts == want, f"behind {len(text)} tokens"
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4, err_msg=f"behind {len(text)} tokens")
