"""Self-speculation: rounds are those of the published loop, tokens are those of plain decoding."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm.support import TABLE, prompts, tokens_of
from reference.lora_numpy import config_of, merged, random_adapter, write_adapter
from reference.self_speculation_numpy import CHARACTERS, Model, as_folder, random_model, self_speculation, with_characters
from tilewright.grammar.grammar import Grammar
from tilewright.llm.language_model import load
from tilewright.models.checkpoint import load_decoder, save_params
from tilewright.models.decoder import config_to_hf, declare
from tilewright.models.hub import DRAFT_ADAPTER
from tilewright.parallel.mesh import make_mesh
from tilewright.runtime.options import EngineOptions
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
    inputs = prompts(block, LENGTHS, VOCAB - 1)
    expected = [self_speculation(model, drafting, prompt, NEW, block) for prompt in inputs]
    lm = load(folder, "self", table=TABLE, block_size=block)
    found = [lm.generate(inputs, Sampling(NEW)), *(lm.generate([prompt], Sampling(NEW)) for prompt in inputs[:2])]
    for results, wanted in zip(found, (expected, *([one] for one in expected)), strict=False):
        assert [(result.tokens, result.acceptance_lengths) for result in results] == wanted
    assert any(length > 1 for _, rounds in expected for length in rounds), "no draft was accepted, so drafts were not tested"


@pytest.mark.slow(seconds=20)
@pytest.mark.parametrize("dlm_type", ["llada", "dream"])
@pytest.mark.parametrize("adapted", [False, True], ids=["bare", "adapter"])
def test_many_rounds_are_those_of_the_published_loop(dlm_type: str, adapted: bool, tmp_path: Path):
    """Compares eight prompts for each width from 2 to 16, decoded together: 480 cases with all parameters."""
    model = random_model(12, dlm_type)
    folder = as_folder(tmp_path, model)
    drafting = with_draft_adapter(folder, model, 3) if adapted else model
    lm = load(folder, "self", table=TABLE, block_size=2)
    lengths = (1, 3, 8, 15, 16, 33, 64, 100)
    drafted = 0
    for block in range(2, 17):
        inputs = prompts(block, lengths, VOCAB - 1)
        wide = lm.with_drafter(*lm.load_drafter("self", DrafterOptions(block)))
        for prompt, result in zip(inputs, wide.generate(inputs, Sampling(NEW)), strict=True):
            expected = self_speculation(model, drafting, prompt, NEW, block)
            assert (result.tokens, result.acceptance_lengths) == expected, f"block {block}, {len(prompt)} tokens"
            drafted += sum(result.accepted)
    assert drafted > 100


@pytest.mark.parametrize("settings", [{}, {"kv_dtype": "int8"}, {"weights": "int4"}], ids=["float32", "int8-cache", "int4"])
@pytest.mark.parametrize("source", ["self", ["ngram", "self"]], ids=["self", "ngram+self"])
def test_tokens_are_those_of_plain_decoding(source: str | list[str], settings: dict[str, Any], tmp_path: Path):
    """With widths chosen round by round, rows that draw beside rows that do not, and penalties."""
    lm = load(as_folder(tmp_path, random_model(3)), source, table=TABLE, **settings)
    each = [
        Sampling(NEW),
        Sampling(NEW, temperature=1.0, seed=5),
        Sampling(NEW, temperature=0.7, top_p=0.9, seed=6),
        Sampling(NEW, temperature=1.0, top_k=5, presence_penalty=0.5, seed=7),
    ]
    inputs = prompts(11, (3, 9, 20, 33), VOCAB - 1)
    assert tokens_of(lm, inputs, each, speculative=True) == tokens_of(lm, inputs, each, speculative=False)


def test_an_adapter_of_the_draft_pass_changes_no_token(tmp_path: Path):
    model = random_model(4)
    bare = load(as_folder(tmp_path / "bare", model), "self", table=TABLE, block_size=8)
    folder = as_folder(tmp_path / "adapted", model)
    with_draft_adapter(folder, model, 1)
    lm = load(folder, "self", table=TABLE, block_size=8)
    assert isinstance(lm.drafter, SelfDiffusion)
    assert lm.adapters == (DRAFT_ADAPTER,)
    assert lm.drafter.adapter == 1
    assert lm.engine(EngineOptions(table=TABLE)).decoding.adapters == ()
    with pytest.raises(ValueError, match="expected an adapter among none at all, found 'linear_spec_lora'"):
        lm.generate(["t1"], Sampling(8), lora=DRAFT_ADAPTER)
    inputs = prompts(4, (5, 30), VOCAB - 1)
    sampling = Sampling(3 * NEW)
    found, plain = lm.generate(inputs, sampling), bare.generate(inputs, sampling)
    assert [each.tokens for each in found] == [each.tokens for each in plain]
    assert [each.acceptance_lengths for each in found] != [each.acceptance_lengths for each in plain]
    assert load(folder, table=TABLE).adapters == ()


def test_a_model_loaded_without_the_adapter_drafts_with_it(tmp_path: Path):
    """The commands that compare drafters load the target once. Its plain decoding runs without the adapter."""
    model = random_model(4)
    folder = as_folder(tmp_path, model)
    with_draft_adapter(folder, model, 1)
    base = load(folder, table=TABLE)
    inputs = prompts(4, (5, 30), VOCAB - 1)
    expected = load(folder, "self", table=TABLE, block_size=8).generate(inputs, Sampling(NEW))
    for sources in ("self", ["ngram", "self"]):
        lm = base.with_drafter(*base.load_drafter(sources, DrafterOptions(8)))
        assert (lm.adapters, base.adapters) == ((DRAFT_ADAPTER,), ())
        assert [each.tokens for each in lm.generate(inputs, Sampling(NEW))] == [each.tokens for each in expected]
    lm = base.with_drafter(*base.load_drafter("self", DrafterOptions(8)))
    found = lm.generate(inputs, Sampling(NEW))
    assert [each.acceptance_lengths for each in found] == [each.acceptance_lengths for each in expected]


def test_an_adapter_of_gates_is_loaded_with_the_weights(tmp_path: Path):
    """Gate and up matrices may be prepared for one product, to which nothing can be added later."""
    model = random_model(4)
    folder = as_folder(tmp_path, model)
    adapter = random_adapter(np.random.default_rng(0), model.tensors, ("gate_proj",), rank=2)
    write_adapter(folder / DRAFT_ADAPTER, config_of(("gate_proj",), rank=2, alpha=2.0), adapter)
    base = load(folder, table=TABLE)
    with pytest.raises(ValueError, match="expected a model loaded with the drafter self, which adds linear_spec_lora"):
        base.with_drafter(*base.load_drafter("self", DrafterOptions(4)))
    assert load(folder, "self", table=TABLE).adapters == (DRAFT_ADAPTER,)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex("[0-9]{3,12}(,[a-f]+){2,4}"),
        Grammar.json_schema({"type": "array", "items": {"enum": [10, 12, 345]}, "minItems": 4, "maxItems": 6}),
    ],
    ids=["regex", "schema"],
)
def test_texts_of_a_grammar_are_those_of_plain_decoding(grammar: Grammar, tmp_path: Path):
    """Drafts that the grammar forbids are cut; the others are verified under its masks."""
    model = random_model(5, vocab_size=len(CHARACTERS))
    model = Model({**model.config, "eos_token_id": CHARACTERS.index("</s>")}, model.tensors)
    lm = load(with_characters(tmp_path, model), "self", table=TABLE, block_size=4)
    inputs = prompts(5, (4, 11, 20), VOCAB - 1)
    each = [Sampling(NEW), Sampling(NEW, temperature=1.0, seed=3), Sampling(NEW, temperature=0.8, top_k=6, seed=4)]
    found, plain = (lm.generate(inputs, each, speculative=drafts, grammar=grammar) for drafts in (True, False))
    assert [result.tokens for result in found] == [result.tokens for result in plain]
    assert [result.text for result in found] == [result.text for result in plain]
    assert sum(sum(result.accepted) for result in found) > 0


def test_two_devices_decode_what_plain_decoding_does(tmp_path: Path):
    """The draft pass and the verification run over the mesh; its adapter does not, and an error says so."""
    model = random_model(3)
    folder = as_folder(tmp_path, model)
    mesh = make_mesh({"tp": 2})
    lm = load(folder, "self", table=TABLE, block_size=4, mesh=mesh)
    inputs = prompts(2, (3, 20), VOCAB - 1)
    each = [Sampling(NEW), Sampling(NEW, temperature=1.0, seed=5)]
    assert tokens_of(lm, inputs, each, speculative=True) == tokens_of(lm, inputs, each, speculative=False)
    accepted = sum(sum(result.accepted) for result in lm.generate(inputs, each))
    assert accepted > 0
    with_draft_adapter(folder, model, 1)
    message = re.escape("expected one device for low-rank adapters (linear_spec_lora), found 2")
    with pytest.raises(ValueError, match=message):
        load(folder, "self", table=TABLE, mesh=mesh)
    with pytest.raises(ValueError, match=message):
        lm.with_drafter(*lm.load_drafter("self", DrafterOptions(4)))
    assert load(folder, table=TABLE, mesh=mesh).adapters == ()


def test_drafts_that_are_drawn_agree_more_often_than_the_most_likely_ones(tmp_path: Path):
    """Draft and target draw with the same noise: at a high temperature the noise decides nearly all tokens."""
    lm = load(as_folder(tmp_path, random_model(6)), "self", table=TABLE, block_size=4)
    inputs = prompts(6, (8,) * 8, VOCAB - 1)
    each = [Sampling(40, temperature=8.0, seed=seed) for seed in range(8)]
    accepted = sum(sum(result.accepted) for result in lm.generate(inputs, each))
    drafted = sum(sum(result.drafted) for result in lm.generate(inputs, each))
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
