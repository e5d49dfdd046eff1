"""A family of targets other than the pairs' own decodes as its forward pass says, by every path."""

from pathlib import Path
from shutil import copyfile

import jax
import jax.numpy as jnp
import pytest

from llm.support import TABLE, check_same_as_autoregressive, prompts, tokens_of
from reference.dflash_numpy import as_folders, random_pair
from tilewright.kernels.select import PLAIN, Kernels
from tilewright.llm.language_model import load
from tilewright.models import decoder
from tilewright.models.checkpoint import load_decoder
from tilewright.runtime.sampling import Sampling

QWEN2 = Path(__file__).parents[1] / "golden" / "decoders" / "qwen2-untied"
NEW = 12


@pytest.mark.parametrize("kernels", ["auto", "xla"])
def test_qwen2(kernels: Kernels, tmp_path: Path):
    """Greedy tokens are those of the plain forward pass, and n-gram drafts do not change them; 8-bit weights decode too."""
    tokenizer = as_folders(tmp_path, random_pair(0))[0] / "tokenizer.json"
    folder = tmp_path / "qwen2"
    folder.mkdir()
    for file in (tokenizer, QWEN2 / "config.json", QWEN2 / "model.safetensors"):
        copyfile(file, folder / file.name)
    config, params = load_decoder(folder, jnp.float32)
    asked, sampling = prompts(0, [3, 9, 17, 5]), Sampling(NEW, ignore_eos=True)
    lm = load(folder, "ngram", table=TABLE, kernels=kernels, block_size=4)
    told = tokens_of(lm, asked, sampling, speculative=False, batch=4)
    check_same_as_autoregressive(lm, asked, sampling, 4, told)

    @jax.jit
    def best(tokens: jax.Array) -> jax.Array:
        return decoder.most_likely(config, PLAIN, params, decoder.forward_full(config, PLAIN, params, tokens).hidden)

    for prompt, tokens in zip(asked, told, strict=True):
        padded = jnp.asarray([[*prompt, *tokens, *[0] * (32 - len(prompt) - len(tokens))]], jnp.int32)
        assert best(padded)[0, len(prompt) - 1 : len(prompt) + NEW - 1].tolist() == tokens
    if kernels == "auto" and lm.ops.prepares:
        small = load(folder, "ngram", table=TABLE, weights="int8", block_size=4)
        check_same_as_autoregressive(small, asked, sampling, 4, tokens_of(small, asked, sampling, False, 4))
