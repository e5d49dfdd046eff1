"""GGUF files: the same model, tokenizer and template as a Hugging Face folder, and one line for what cannot be read."""

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file
from tokenizers import pre_tokenizers

import tilewright as tw
from models.gguf_files import add_fields, write_gguf
from tilewright.models.chat import ChatTemplate
from tilewright.models.checkpoint import load_decoder, save_params
from tilewright.models.decoder import DecoderConfig, config_to_hf, declare
from tilewright.models.delta import DeltaSizes
from tilewright.models.experts import ClampedGate, Mixture
from tilewright.models.gguf import GGUFSlice, open_gguf
from tilewright.models.gguf_head import read_head
from tilewright.models.layers import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling
from tilewright.models.params import initialise
from tilewright.models.tokenizer import encode, load_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_ids": (257, 258),
}
TURNED = int(0.75 * SIZES["head_dim"]) // 2
HYBRID: dict[str, Any] = {
    **SIZES,
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "delta": DeltaSizes(2, 4, 16, 16, 4),
    "delta_layers": (0,),
}
CONFIGS = {
    "llama": DecoderConfig(family="llama", rope_theta=5e5, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192), **SIZES),
    "qwen2": DecoderConfig(family="qwen2", rope_theta=1e6, tie_word_embeddings=True, **SIZES),
    "qwen3": DecoderConfig(family="qwen3", rope_theta=1e6, tie_word_embeddings=True, **{**SIZES, "head_dim": 32}),
    "phi3": DecoderConfig(family="phi3", rope_theta=1e4, partial_rotary_factor=0.75, **SIZES),
    "smollm3": DecoderConfig(family="smollm3", unrotated_layers=(3,), **{**SIZES, "num_layers": 4}),
    "qwen3_moe": DecoderConfig(family="qwen3_moe", rope_theta=1e6, mixture=Mixture(4, 2, 32), **SIZES),
    "mixtral": DecoderConfig(family="mixtral", rope_theta=1e6, mixture=Mixture(4, 2, 96), **SIZES),
    "gpt_oss": DecoderConfig(
        family="gpt_oss",
        mixture=Mixture(4, 2, 96, clamped=ClampedGate(1.702, 7.0)),
        balance=0.9,
        sliding_window=8,
        sliding_layers=(0,),
        rope_theta=1.5e5,
        **SIZES,
        rope_scaling=YarnScaling(32.0, 64, YarnScaling.default_attention_factor(32.0), truncate=False),
    ),
    "yarn": DecoderConfig(
        family="qwen3", rope_scaling=YarnScaling(4.0, 64, YarnScaling.default_attention_factor(4.0)), **SIZES
    ),
    "gemma2": DecoderConfig(
        family="gemma2",
        rope_theta=1e4,
        sliding_window=32,
        sliding_layers=(0,),
        attention_scale=16**-0.5,
        score_softcap=40.0,
        logit_softcap=20.0,
        embedding_scale=8.0,
        tie_word_embeddings=True,
        **SIZES,
    ),
    "gemma3": DecoderConfig(
        family="gemma3_text",
        rope_theta=1e6,
        rope_scaling=LinearScaling(8.0),
        sliding_window=32,
        sliding_layers=(0, 1, 2, 3, 4, 6),
        local_rope_theta=1e4,
        attention_scale=16**-0.5,
        embedding_scale=8.0,
        tie_word_embeddings=True,
        **{**SIZES, "num_layers": 7},
    ),
    "qwen3_next": DecoderConfig(family="qwen3_next", mixture=Mixture(4, 2, 32, shared=64), **HYBRID),
    "qwen3_5": DecoderConfig(family="qwen3_5_text", **HYBRID),
    "qwen3_5_moe": DecoderConfig(family="qwen3_5_moe_text", mixture=Mixture(4, 2, 32, shared=32), **HYBRID),
    "longrope": DecoderConfig(
        family="phi3",
        rope_theta=1e4,
        partial_rotary_factor=0.75,
        rope_scaling=LongRopeScaling((1.0,) * TURNED, tuple(1 + n / 4 for n in range(TURNED)), 64, 1.25, long=True),
        **SIZES,
    ),
}
KINDS = [Kind.F32, Kind.F16, Kind.Q4_1, Kind.Q8_0]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


def vocabulary() -> list[str]:
    """One token a byte, three that are no text, and names up to the vocabulary's size."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "<|im_end|>", "<|endoftext|>", "<|im_start|>", "<tool>"]
    return tokens + [f"unused{n}" for n in range(320 - len(tokens))]


def metadata() -> dict[str, Any]:
    tokens = vocabulary()
    types = [1] * len(tokens)
    types[257:260] = [3, 3, 3]
    types[260] = 4
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.bos_token_id": 259,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
    }


def make(folder: Path, config: DecoderConfig, kind: Kind = Kind.F32) -> tuple[Path, Path]:
    """A GGUF file and a folder of safetensors that hold the same model, quantised and not."""
    params = initialise(declare(config), jax.random.key(1))
    save_params(folder / "hf", config_to_hf(config), declare(config), params, "float32")
    kept = write_gguf(folder / "model.gguf", config, load_file(folder / "hf/model.safetensors"), kind, metadata())
    save_file(kept, folder / "hf/model.safetensors", {"format": "pt"})
    load_tokenizer(folder / "model.gguf").save(str(folder / "hf/tokenizer.json"))
    return folder / "model.gguf", folder / "hf"


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *product(["llama", "qwen2", "qwen3"], KINDS),
        ("qwen3_moe", Kind.F32),
        ("qwen3_moe", Kind.Q4_1),
        ("mixtral", Kind.F32),
        ("mixtral", Kind.Q8_0),
        ("gpt_oss", Kind.F32),
        ("gpt_oss", Kind.MXFP4),
        ("phi3", Kind.F32),
        ("phi3", Kind.Q8_0),
        ("smollm3", Kind.F32),
        ("yarn", Kind.F32),
        ("longrope", Kind.F32),
        ("gemma2", Kind.F32),
        ("gemma3", Kind.Q8_0),
        ("qwen3_next", Kind.Q8_0),
        ("qwen3_5", Kind.F32),
        ("qwen3_5", Kind.Q4_1),
        ("qwen3_5_moe", Kind.Q8_0),
    ],
    ids=lambda each: each if isinstance(each, str) else each.name,
)
def test_configuration_and_tensors_are_those_of_the_folder(tmp_path: Path, family: str, kind: Kind):
    file, folder = make(tmp_path, CONFIGS[family], kind)
    (got_config, got), (want_config, want) = load_decoder(file, jnp.float32), load_decoder(folder, jnp.float32)
    assert got_config == replace(want_config, rms_norm_eps=got_config.rms_norm_eps)
    assert got_config.rms_norm_eps == pytest.approx(want_config.rms_norm_eps)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_layers_that_predict_ahead_are_left_out_and_sizes_have_to_be_there(tmp_path: Path):
    file, _ = make(tmp_path, CONFIGS["qwen3_5"])
    plain = open_gguf(file)
    ahead = {name.replace("blk.1.", "blk.2."): tensor for name, tensor in plain.tensors.items() if "blk.1." in name}
    fields = {**plain.fields, "qwen35.block_count": 3, "qwen35.nextn_predict_layers": 1}
    ahead["blk.2.nextn.enorm.weight"] = plain.tensors["blk.1.attn_norm.weight"]
    more = replace(plain, fields=fields, tensors={**plain.tensors, **ahead})
    assert (more.config, more.names) == (plain.config, plain.names)
    with pytest.raises(ValueError, match=r"expected sizes of linear attention, found no qwen35\.ssm\.group_count"):
        _ = replace(plain, fields={**fields, "qwen35.ssm.group_count": None}).config


def test_marks_stay_with_their_letters_in_qwen35s_pieces(tmp_path: Path):
    text = "a\u0301b 12!\u0301"
    pieces = {pre: load_tokenizer(head(tmp_path, metadata() | {"tokenizer.ggml.pre": pre})) for pre in ("qwen2", "qwen35")}
    ends = {pre: [end for _, (_, end) in each.pre_tokenizer.pre_tokenize_str(text)] for pre, each in pieces.items()}
    assert ends == {"qwen2": [1, 3, 4, 5, 6, 8], "qwen35": [3, 4, 5, 6, 8]}


BY_THREES = ["don", "'t", " ", "123", "45", "!\n", "/\n", "xY"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        *((pre, BY_THREES) for pre in ("llama-bpe", "dbrx", "smaug-bpe")),
        ("gpt-4o", ["don't", " ", "123", "45", "!\n/\n", "x", "Y"]),
        ("gpt-4o", ["I'LL", " camel", "Case", " HTMLParser", "/y", "\n", "/\n\n", "z", " ", " _"]),
        ("gpt-4o", ["漢字カナabc漢", "B", "。é", "É", "'x"]),
        ("tekken", ["don", "'t", " ", "1", "2", " camel", "Case", "!\n/\n", "x"]),
    ],
)
def test_text_is_cut_by_the_pattern_that_the_file_names(tmp_path: Path, pre: str, pieces: list[str]):
    text = "".join(pieces)
    tokenizer = load_tokenizer(head(tmp_path, metadata() | {"tokenizer.ggml.pre": pre}))
    assert tokenizer.pre_tokenizer is not None
    assert [text[first:end] for _, (first, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_the_declared_context_says_how_longrope_rotates(tmp_path: Path):
    file, folder = make(tmp_path, CONFIGS["longrope"])
    for context, long in ((None, True), (65, True), (64, False)):
        for one in (file, folder):
            target = tw.load(one, dtype="float32", context=context).target
            assert isinstance(target.rope_scaling, LongRopeScaling)
            assert (target.rope_scaling.long, target.max_position_embeddings) == (long, context or 256)


def test_tokens_are_those_of_the_folder(tmp_path: Path):
    file, folder = make(tmp_path, CONFIGS["llama"], Kind.Q8_0)
    prompts = ["hello he", "<|im_start|>x"]
    got, want = (
        tw.load(one, dtype="float32").generate(prompts, tw.Sampling(max_new_tokens=6)) for one in (tmp_path / file, folder)
    )
    assert [r.tokens for r in got] == [r.tokens for r in want]


def test_a_folder_that_holds_one_file_stands_for_it(tmp_path: Path):
    file, _ = make(tmp_path, CONFIGS["qwen3"])
    assert load_decoder(tmp_path, jnp.float32)[0] == load_decoder(file, jnp.float32)[0]
    (tmp_path / "other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match=r"expected one \.gguf file, found 2: model\.gguf, other\.gguf; name one of them"):
        load_decoder(tmp_path, jnp.float32)


def test_tokenizer_template_ends_and_sampling_defaults(tmp_path: Path):
    file, _ = make(tmp_path, CONFIGS["qwen3"])
    tokenizer = load_tokenizer(file)
    ids = tokenizer.encode("he<|im_end|><tool>").ids
    assert ids == [256, 257, 260]
    assert tokenizer.decode(ids) == "he<tool>"
    template = ChatTemplate.load(file)
    assert template is not None
    assert template.render([{"role": "user", "content": "he"}]) == "<|im_start|>user\nhe<|im_end|>"
    assert open_gguf(file).generation_config == {"eos_token_id": [257, 258], "temperature": 0.5, "top_k": 20}


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (["<|end|>"], ["<|im_end|>", "<|endoftext|>", "<|end|>"]),
        (["<|call|>", "<|end|>", "<|return|>"], ["<|im_end|>", "<|endoftext|>", "<|return|>", "<|call|>"]),
    ],
)
def test_ends_of_an_answer_are_told_by_their_text(tmp_path: Path, texts: list[str], ends: list[str]):
    """Whatever the tokens' types: these are of plain text. Where answers are made of messages, an end of these is none."""
    tokens = vocabulary()[: -len(texts)] + texts
    found = open_gguf(head(tmp_path, metadata() | {"tokenizer.ggml.tokens": tokens})).end_ids
    assert [tokens[number] for number in found] == ends


QUANTISED = [kind for kind in Kind if kind.name.startswith(("Q", "IQ", "TQ", "MXFP4")) and kind in gguf.quants._type_traits]


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_parts_of_every_quantised_type_are_parts_of_the_whole(tmp_path: Path, kind: Kind):
    entries, size = gguf.GGML_QUANT_SIZES[kind]
    columns = 2 * max(entries, 256)
    raw = np.random.default_rng(0).integers(0, 64, (6, columns // entries * size), np.uint8)  # scales are finite numbers
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = read_head(tmp_path / "m.gguf")[1]["x"]
    part = GGUFSlice(tensor, None)
    whole = gguf.quants.dequantize(raw, kind)
    assert part.get_shape() == [6, columns]
    np.testing.assert_array_equal(part[2:5, 3:40], whole[2:5, 3:40])
    turned = GGUFSlice(tensor, np.arange(6)[::-1])
    np.testing.assert_array_equal(turned[0:2, 0:columns], whole[[5, 4]])


def head(tmp_path: Path, fields: dict[str, Any], arch: str = "llama") -> Path:
    """A file with metadata and no tensors."""
    writer = gguf.GGUFWriter(tmp_path / "head.gguf", arch)
    add_fields(writer, fields)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "head.gguf"


def test_a_file_that_is_cut_off_is_refused_wherever_the_cut_is(tmp_path: Path):
    file, _ = make(tmp_path, CONFIGS["qwen3"], Kind.Q8_0)
    whole = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (0, 3, 10, 60, 2000, 9000, len(whole) // 2, len(whole) - 40):
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf is (not a GGUF file|damaged or cut off|cut off)") as said:
            load_decoder(cut, jnp.float32)
        assert "\n" not in str(said.value)


@pytest.mark.parametrize("name", ["model.gguf", "model-00002-of-00003.gguf"])
@pytest.mark.parametrize("whole", [False, True], ids=["file", "folder"])
def test_parts_of_a_model_are_told_to_be_merged(tmp_path: Path, name: str, whole: bool):
    file = head(tmp_path, {"split.no": 1, "split.count": 3, "split.tensors.count": 9}).rename(tmp_path / name)
    if whole and name != "model.gguf":
        (tmp_path / name.replace("00002", "00003")).write_bytes(file.read_bytes())
    merge = f"llama-gguf-split --merge {name.replace('00002', '00001')} model.gguf"
    with pytest.raises(ValueError, match=re.escape(f"{file.name} is one of 3 parts of a model: `{merge}`")):
        load_decoder(tmp_path if whole else file, jnp.float32)


@pytest.mark.parametrize(
    ("fields", "arch", "said"),
    [
        (
            {},
            "gptneox",
            r"to be one of gemma2, gemma3, gpt-oss, llama, phi3, qwen2, qwen3, qwen35, qwen35moe, qwen3moe, qwen3next, "
            r"smollm3, found 'gptneox'",
        ),
        ({"qwen2.expert_count": 8}, "qwen2", r"expected qwen2\.expert_count to be absent or 0, found 8"),
        ({"llama.rope.scaling.type": "longrope"}, "llama", r"rope\.scaling\.type to be absent or none or .*, found 'longrope'"),
        ({}, "llama", r"num_hidden_layers must be a positive integer, found None"),
    ],
)
def test_what_is_not_here_is_named(tmp_path: Path, fields: dict[str, Any], arch: str, said: str):
    with pytest.raises(ValueError, match=said):
        load_decoder(head(tmp_path, fields, arch), jnp.float32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer.ggml.model": "bert"}, r"tokenizer\.ggml\.model to be gpt2 or llama, found 'bert'"),
        ({"tokenizer.ggml.pre": "chatglm-bpe"}, r"tokenizer\.ggml\.pre to be one of .*, found 'chatglm-bpe'"),
        ({"tokenizer.ggml.token_type": [1]}, r"with a token_type for each, found 320 tokens and 1 types"),
        ({"tokenizer.ggml.merges": ["x yz"]}, r"the tokenizer's merges do not fit its tokens"),
    ],
)
def test_a_tokenizer_that_is_not_here_is_named(tmp_path: Path, change: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        load_tokenizer(head(tmp_path, metadata() | change))


NONE = 4294967295
"""Id that converters write for a token that there is none of."""


def changed(fields: dict[str, Any], **change: Any) -> dict[str, Any]:
    """Metadata with other values of the tokenizer; None takes one out."""
    fields = fields | {f"tokenizer.ggml.{name}": value for name, value in change.items()}
    return {name: value for name, value in fields.items() if value is not None}


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id", "eot_token_id", "unknown_token_id", "padding_token_id"])
@pytest.mark.parametrize("number", [NONE, 320])
def test_an_id_that_is_no_tokens_is_left_out_with_a_warning(tmp_path: Path, name: str, number: int, caplog: Any):
    file = open_gguf(head(tmp_path, changed(metadata(), **{name: number})))
    assert file.tokenizer_config.get(f"{name.removesuffix('_id')}") is None
    assert file.end_ids == [257, 258]
    assert file.tokenizer().encode("he").ids == [256]
    assert f"ignoring tokenizer.ggml.{name} {number}, outside of the 320 tokens" in caplog.text


def test_a_text_that_should_begin_with_no_token_begins_without(tmp_path: Path, caplog: Any):
    file = open_gguf(head(tmp_path, changed(metadata(), add_bos_token=True, bos_token_id=NONE)))
    assert file.tokenizer().encode("he").ids == [256]
    assert "texts get no beginning-of-sequence token" in caplog.text


@pytest.mark.parametrize(("kind", "ends"), [(1, True), (3, True), (4, False)])
def test_an_end_that_users_defined_is_text(tmp_path: Path, kind: int, ends: bool):
    """Gemma has </s> as HTML; as a control token or a normal one it ends answers, whatever else does."""
    types = [2, 3, kind, *SENTENCE_PIECE["tokenizer.ggml.token_type"][3:]]
    file = open_gguf(head(tmp_path, changed(SENTENCE_PIECE, token_type=types, eos_token_id=266)))
    assert (2 in file.end_ids, 266 in file.end_ids) == (ends, True)
    assert file.tokenizer().decode([260, 2]) == ("a" if ends else "a</s>")


@pytest.mark.parametrize("kind", [1, 4, 6])
@pytest.mark.parametrize("text", ["<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<end_of_utterance>"])
def test_ends_of_turns_are_control_tokens_whatever_their_type(tmp_path: Path, kind: int, text: str):
    tokens = [*vocabulary()[:-2], "<|mark|>", text]
    types = [1] * 318 + [3, kind]
    file = open_gguf(head(tmp_path, changed(metadata(), tokens=tokens, token_type=types, eos_token_id=318)))
    assert file.end_ids[0] == 318
    assert 319 in file.end_ids
    tokenizer = file.tokenizer()
    assert tokenizer.encode(f"he{text}he").ids == [256, 319, 256]
    assert tokenizer.decode([256, 319, 256]) == "hehe"
    assert text in file.control_texts


def test_without_types_tokens_are_plain_but_for_ends_of_turns(tmp_path: Path):
    file = open_gguf(head(tmp_path, changed(metadata(), token_type=None)))
    assert sorted(file.control_texts) == ["<|endoftext|>", "<|im_end|>"]
    assert file.tokenizer().encode("<|im_start|>").ids != [259]


def test_without_types_the_beginning_of_a_text_is_a_token_in_chats_too(tmp_path: Path):
    """Where a template writes it, or the chat begins with it; and the end that the file names."""
    template = "{{ messages[0].content }}{{ eos_token }}"
    fields = changed(SENTENCE_PIECE, token_type=None) | {"tokenizer.chat_template": template}
    file = head(tmp_path, fields)
    made = ChatTemplate.load(file)
    assert made is not None
    ids = encode(load_tokenizer(file), made.render([{"role": "user", "content": "ab<s>"}]), add_special_tokens=False)
    assert [PIECES[number] for number in (*ids[:2], ids[-1])] == ["<s>", "▁ab", "</s>"]
    assert ids.count(1) == 1


def test_text_merges_into_no_control_token(tmp_path: Path):
    """Though its halves are tokens."""
    pieces = [*PIECES, "<", "s>", "s", ">"]
    more = {"tokens": pieces, "token_type": [*SENTENCE_PIECE["tokenizer.ggml.token_type"], *[1] * 4]}
    fields = changed(SENTENCE_PIECE, **more, scores=[*SENTENCE_PIECE["tokenizer.ggml.scores"], -5.0, -4.0, -6.0, -7.0])
    file = head(tmp_path, fields | {"tokenizer.chat_template": "{{ messages[0].content }}"})
    made = ChatTemplate.load(file)
    assert made is not None
    ids = encode(load_tokenizer(file), made.render([{"role": "user", "content": "<s>"}]), add_special_tokens=False)
    assert [pieces[number] for number in ids] == ["<s>", "▁", "<", "s>"]


@pytest.mark.parametrize("number", [None, NONE])
def test_a_sentencepiece_vocabulary_has_the_usual_special_tokens(tmp_path: Path, number: int | None):
    file = open_gguf(head(tmp_path, changed(SENTENCE_PIECE, bos_token_id=number, eos_token_id=number, unknown_token_id=number)))
    assert file.tokenizer_config["bos_token"] == "<s>"
    assert file.tokenizer_config["eos_token"] == "</s>"
    assert 2 in file.end_ids
    assert file.tokenizer().encode("ab").tokens == ["<s>", "▁ab"]


@pytest.mark.parametrize(
    ("change", "begins"),
    [
        ({}, "<s>"),
        ({"template": "{{ bos_token }}{{ messages[0].content }}"}, "<s>"),
        ({"add_bos_token": True}, "<s>"),
        ({"bos_token_id": NONE}, "<s>"),  # SentencePiece's own
        ({"add_bos_token": False}, ""),
    ],
)
def test_a_chat_begins_with_one_bos_where_texts_do(tmp_path: Path, change: dict[str, Any], begins: str):
    source = change.get("template", "{{ messages[0].content }}")
    fields = changed(SENTENCE_PIECE, **{name: value for name, value in change.items() if name != "template"})
    template = ChatTemplate.load(head(tmp_path, fields | {"tokenizer.chat_template": source}))
    assert template is not None
    assert template.render([{"role": "user", "content": "ab"}]) == f"{begins}ab"
    assert template.render([{"role": "user", "content": "ab"}], continue_final_message=True) == f"{begins}ab"


@pytest.mark.parametrize(("pre", "begins"), [("llama-bpe", "<|im_start|>"), ("qwen2", "")])
def test_a_chat_of_byte_level_bpe_begins_with_bos_by_its_kind(tmp_path: Path, pre: str, begins: str):
    fields = changed(metadata(), pre=pre, add_bos_token=None)
    template = ChatTemplate.load(head(tmp_path, fields | {"tokenizer.chat_template": "{{ messages[0].content }}"}))
    assert template is not None
    assert template.render([{"role": "user", "content": "he"}]) == f"{begins}he"


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "linear", "rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.type": "linear"}, None),
        ({"rope.scaling.factor": 0.0, "rope.scale_linear": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({}, None),
    ],
)
def test_the_rotation_is_scaled_as_in_llama_cpp(tmp_path: Path, fields: dict[str, Any], scaling: dict[str, Any] | None):
    file = open_gguf(head(tmp_path, metadata() | {f"llama.{name}": value for name, value in fields.items()}))
    assert file.rope_scaling(64, 10000.0) == scaling


PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁",
    "a",
    "b",
    "▁a",
    "ab",
    "▁ab",
    "<|end|>",
    "<|endoftext|>",
]
SENTENCE_PIECE: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 6, 4, 3],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, *[0.0] * 256, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, 0.0, 0.0],
}


@pytest.mark.parametrize(("arch", "behind"), [("llama", ["▁", "▁ab"]), ("phi3", ["▁ab"])])
def test_added_tokens_of_phi3_take_the_space_behind_them(tmp_path: Path, arch: str, behind: list[str]):
    ids = load_tokenizer(head(tmp_path, SENTENCE_PIECE, arch)).encode("<|end|> ab<|endoftext|> ab").ids
    assert [PIECES[number] for number in ids] == ["<s>", "<|end|>", *behind, "<|endoftext|>", "▁", "▁ab"]


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path):
    tokenizer = load_tokenizer(head(tmp_path, SENTENCE_PIECE))
    numbers = {piece: number for number, piece in enumerate(PIECES)}
    # "ab" scores best, so it is made before the space joins; é is two bytes.
    want = [1, *(numbers[piece] for piece in ("▁ab", "▁a", "<0xC3>", "<0xA9>"))]
    assert tokenizer.encode("ab aé").ids == want
    assert tokenizer.decode(want) == "ab aé"


def test_a_file_that_is_not_there_is_said():
    with pytest.raises(ValueError, match=r"^there is no file absent\.gguf$"):
        tw.load("absent.gguf")


def test_json_of_the_configuration_is_plain(tmp_path: Path):
    file, _ = make(tmp_path, CONFIGS["llama"])
    assert json.loads(json.dumps(open_gguf(file).config))["rope_scaling"]["factor"] == 8.0
