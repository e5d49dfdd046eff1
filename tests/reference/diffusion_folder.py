"""Small diffusion language models of random weights on disk, with a tokenizer of words."""

import json
from pathlib import Path
from typing import Any, Literal

from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from reference.diffusion_model_numpy import Model, checkpoint, random_model

VOCAB = 40
MASK = 39
EOS = 38


def write_model(folder: Path, model: Model, mask: int, eos: int, **fields: Any) -> Path:
    """A checkpoint with a tokenizer: the word "t7" is token 7.

    Args:
        fields: of its `config.json` that are to be otherwise.
    """
    config, tensors = checkpoint(model, mask, eos)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | fields))
    save_file(tensors, folder / "model.safetensors")
    tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(len(model.embed))}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_folder(folder: Path, family: Literal["llada", "dream"] = "llada", seed: int = 3, **fields: Any) -> Path:
    """A model of two layers of its own; see `write_model`."""
    return write_model(folder, random_model(seed, family, vocab=VOCAB, layers=2), MASK, EOS, **fields)
