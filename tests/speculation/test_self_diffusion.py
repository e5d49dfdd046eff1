"""Self-speculation: rounds are those of the published loop, tokens are those of plain decoding."""

from pathlib import Path

import numpy as np
import pytest

from llm.support import TABLE, prompts, tokens_of
from reference.lora_numpy import config_of, merged, random_adapter, write_adapter
from reference.self_speculation_numpy import Model, as_folder, random_model, self_speculation
from tilewright.llm.language_model import load
from tilewright.models.checkpoint import load_decoder, save_params
from tilewright.models.decoder import config_to_hf, declare
from tilewright.models.hub import DRAFT_ADAPTER
from tilewright.runtime.sampling import Sampling
from tilewright.speculation.drafters.load import DrafterOptions
from tilewright.speculation.drafters.self_diffusion import SelfDiffusion

VOCAB = 24
LENGTHS = (1, 2, 7, 8, 19, 40)
NEW = 24


def with_draft_adapter(folder: Path, model: Model, seed: int) -> Model:
    """Writes an adapter of the output projections beside a model. Returns the model that has it in its weights."""
    adapter = random_adapter(np.random.default_rng(seed), model.tensors, ("o_proj",), rank=3)
    config = config_of(("o_proj",), rank=3, alpha=6.0)
    write_adapter(folder / DRAFT_ADAPTER, config, adapter)
    return Model(model.config, merged(model.tensors, config, adapter))


def as_llama(model: Model) -> Model:
    """Returns the model as one of the family llama, which only decodes."""
    prefixes = {"encoder": "model", "diffusion_head": "lm_head"}
    named = [(*name.partition("."), value) for name, value in model.tensors.items()]
    return Model(
        {**model.config, "model_type": "llama"}, {prefixes[first] + dot + rest: value for first, dot, rest, value in named}
    )


@pytest.mark.parametrize("dlm_type", ["llada", "dream"])
@pytest.mark.parametrize("adapted", [False, True], ids=["bare", "adapter"])
@pytest.mark.parametrize("block", [2, 5, 8])
def test_rounds_are_those_of_the_published_loop(dlm_type: str, adapted: bool, block: int, tmp_path: Path):
    """The same tokens, and in each round as many, alone and in a batch of mixed lengths."""
    model = random_model(block, dlm_type)
    folder = as_folder(tmp_path, model)
    drafting = with_draft_adapter(folder, model, 7) if adapted else model
    asked = prompts(block, LENGTHS, VOCAB - 1)
    expected = [self_speculation(model, drafting, prompt, NEW, block) for prompt in asked]
    lm = load(folder, "self", table=TABLE, block_size=block)
    found = [lm.generate(asked, Sampling(NEW)), *(lm.generate([prompt], Sampling(NEW)) for prompt in asked[:2])]
    for results, wanted in zip(found, (expected, *([one] for one in expected)), strict=False):
        assert [(result.tokens, result.acceptance_lengths) for result in results] == wanted
    assert any(length > 1 for _, rounds in expected for length in rounds), "no draft was accepted, so drafts were not tested"


@pytest.mark.parametrize("settings", [{}, {"kv_dtype": "int8"}, {"weights": "int4"}], ids=["float32", "int8-cache", "int4"])
@pytest.mark.parametrize("source", ["self", ["ngram", "self"]], ids=["self", "ngram+self"])
def test_tokens_are_those_of_plain_decoding(source: str | list[str], settings: dict[str, str], tmp_path: Path):
    """With widths chosen round by round, rows that draw beside rows that do not, and penalties."""
    lm = load(as_folder(tmp_path, random_model(3)), source, table=TABLE, **settings)
    each = [
        Sampling(NEW),
        Sampling(NEW, temperature=1.0, seed=5),
        Sampling(NEW, temperature=0.7, top_p=0.9, seed=6),
        Sampling(NEW, temperature=1.0, top_k=5, presence_penalty=0.5, seed=7),
    ]
    asked = prompts(11, (3, 9, 20, 33), VOCAB - 1)
    assert tokens_of(lm, asked, each, speculative=True) == tokens_of(lm, asked, each, speculative=False)


def test_an_adapter_of_the_draft_pass_changes_no_token(tmp_path: Path):
    model = random_model(4)
    bare = load(as_folder(tmp_path / "bare", model), "self", table=TABLE, block_size=8)
    folder = as_folder(tmp_path / "adapted", model)
    with_draft_adapter(folder, model, 1)
    lm = load(folder, "self", table=TABLE, block_size=8)
    assert isinstance(lm.drafter, SelfDiffusion)
    assert lm.adapters == (DRAFT_ADAPTER,)
    assert lm.drafter.adapter == 1
    asked = prompts(4, (5, 30), VOCAB - 1)
    sampling = Sampling(3 * NEW)
    found, plain = lm.generate(asked, sampling), bare.generate(asked, sampling)
    assert [each.tokens for each in found] == [each.tokens for each in plain]
    assert [each.acceptance_lengths for each in found] != [each.acceptance_lengths for each in plain]
    assert load(folder, table=TABLE).adapters == ()


def test_drafts_that_are_drawn_agree_more_often_than_the_most_likely_ones(tmp_path: Path):
    """Draft and target draw with the same noise: at a high temperature the noise decides nearly all tokens."""
    lm = load(as_folder(tmp_path, random_model(6)), "self", table=TABLE, block_size=4)
    asked = prompts(6, (8,) * 8, VOCAB - 1)
    each = [Sampling(40, temperature=8.0, seed=seed) for seed in range(8)]
    accepted = sum(sum(result.accepted) for result in lm.generate(asked, each))
    drafted = sum(sum(result.drafted) for result in lm.generate(asked, each))
    assert accepted > 0.4 * drafted  # 1 in 24 by chance


def test_saved_checkpoints_have_the_published_names(tmp_path: Path):
    model = random_model(8)
    config, params = load_decoder(as_folder(tmp_path / "from", model), "float32")
    specs = declare(config)
    save_params(tmp_path / "to", config_to_hf(config), specs, params, "float32")
    again, same = load_decoder(tmp_path / "to", "float32")
    assert again == config
    assert {spec.name for spec in [specs.embed, specs.head, specs.norm]} <= set(model.tensors)
    np.testing.assert_array_equal(same.head, model.tensors["diffusion_head.weight"].T)


def test_other_targets_and_options_are_errors(tmp_path: Path):
    model = random_model(9)
    llama = as_folder(tmp_path / "llama", as_llama(model))
    with pytest.raises(ValueError, match=r"trained to denoise blocks.*found a model of the family llama"):
        load(llama, "self", table=TABLE)
    with pytest.raises(ValueError, match="refining needs a DFlash drafter; self-speculation drafts with the target's weights"):
        DrafterOptions(refine=1).check("self")
    with pytest.raises(ValueError, match="a draft window needs a drafter with weights"):
        load(as_folder(tmp_path / "model", model), ["ngram", "self"], table=TABLE, draft_window=8)
