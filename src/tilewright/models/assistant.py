"""Assistants of Gemma 4: small decoders that draft for a target and attend over the target's own keys and values.

The maths is that of transformers 5.24: `modeling_gemma4_assistant.py`, and `SinglePositionMultiTokenCandidateGenerator`, the
loop that drafts with it.

An assistant has Gemma 4's layers with queries only. Each layer reads the cache of the target's last layer of its kind, with or
without a window. `pre_projection` joins the target's embedding of a token and the target's hidden state, after its final norm,
at the position before; `post_projection` turns the output into such a state, with which a chain continues. All steps of a chain
have the position p of the last committed token and see positions before p: all of them, or the last W + 1 with a window W. So a
window reaches two positions further back than the target's own query at p does.

After a partly accepted round, transformers' loop also shows a chain some keys and values of rejected drafts; here a chain sees
committed tokens only, as transformers' does after a prefill.

The assistants of E2B and E4B choose in two steps: the clusters of tokens with the best centroids, then the best token in them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int
from rich.console import Console

from tilewright.kernels.operations import Joined, Operations
from tilewright.models import decoder
from tilewright.models.checkpoint import CONFIG, load_params, load_stored, read_config
from tilewright.models.config import ConfigReader
from tilewright.models.decoder import Attend, DecoderConfig, Layer, declare_layer, stack_of
from tilewright.models.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from tilewright.models.mtp import BLOCK_SIZE
from tilewright.models.params import ArraySpec, matrix, norm_weight
from tilewright.models.quantised import quantised_layout
from tilewright.models.registry import FAMILIES
from tilewright.models.stack import SINGLE_DEVICE, Rows

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
"""Their `model_type`; 12B has the second."""
TARGETS = (GEMMA4.name, GEMMA4_UNIFIED.name)
"""Families of their targets."""
BEYOND_WINDOW = 2
"""Positions before the window of the target's query that an assistant reads."""
ORDERING = "masked_embedding.token_ordering"
"""Tensor with the tokens of each cluster, one cluster after the other."""
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
UNUSED = ("k_proj.weight", "v_proj.weight", "k_norm.weight")
"""Tensors of attention that files may have although no layer computes keys."""


@dataclass(frozen=True, kw_only=True)
class AssistantConfig:
    """Sizes of an assistant.

    Attributes:
        layers: its layers, as a decoder.
        hidden_size: size of a chain's states: the target's hidden size.
        target_layer_ids: the tapped layer: the target's last.
        cached_layers: the target's layer whose keys and values each layer reads.
        clusters: number of clusters of the vocabulary; 0 for an output head over all tokens.
        chosen_clusters: number of clusters whose tokens are compared.
        tied: the output head is stored as the embedding, which nothing else reads.
        block_size: tokens of a block, the last token included.
    """

    layers: DecoderConfig
    hidden_size: int
    target_layer_ids: tuple[int, ...]
    cached_layers: tuple[int, ...]
    clusters: int = 0
    chosen_clusters: int = 0
    tied: bool = True
    block_size: int = BLOCK_SIZE


def is_assistant(fields: Mapping[str, Any]) -> bool:
    """True if a `config.json` declares an assistant."""
    return fields.get("model_type") in MODEL_TYPES


def config_from_hf(fields: Mapping[str, Any], target: DecoderConfig, where: str = CONFIG) -> AssistantConfig:
    """Reads the `config.json` of an assistant for a target.

    Raises:
        ValueError: one message that lists everything missing or unsupported, or every mismatch with the target.
    """
    text = fields.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"{where}: text_config must be an object, found {text!r}")
    read = ConfigReader(fields, where)
    shared = text.get("num_kv_shared_layers")
    count = text.get("num_hidden_layers")
    read.require(shared in (None, 0, count), f"num_kv_shared_layers must be num_hidden_layers ({count}), found {shared!r}")
    layers = decoder.config_from_hf({**text, "num_kv_shared_layers": 0}, where)
    of_family = layers.family in TARGETS
    read.require(of_family, f"model_type of text_config must be one of {', '.join(TARGETS)}, found {layers.family}")
    read.require(layers.mixture is None, "enable_moe_block=True is not supported")
    clusters = chosen = 0
    if read.flag("use_ordered_embeddings", default=False):
        clusters = read.integer("num_centroids", default=2048)
        chosen = read.integer("centroid_intermediate_top_k", default=32)
        divides = layers.vocab_size % clusters == 0
        read.require(divides, f"num_centroids must divide vocab_size ({layers.vocab_size}), found {clusters}")
        read.require(chosen <= clusters, f"centroid_intermediate_top_k must be at most {clusters}, found {chosen}")
    hidden = read.integer("backbone_hidden_size")
    tied = read.flag("tie_word_embeddings", default=True)
    read.finish()
    if layers.global_heads is not None:  # no layer projects keys or values
        layers = replace(layers, global_heads=replace(layers.global_heads, keys_are_values=False))
    return AssistantConfig(
        layers=layers,
        hidden_size=hidden,
        target_layer_ids=(target.num_layers - 1,),
        cached_layers=matching_layers(layers, hidden, target),
        clusters=clusters,
        chosen_clusters=chosen,
        tied=tied,
    )


def matching_layers(layers: DecoderConfig, hidden: int, target: DecoderConfig) -> tuple[int, ...]:
    """Returns the target's layer whose keys and values each layer reads: the last one of the same kind.

    Raises:
        ValueError: lists every mismatch between an assistant and its target.
    """
    last = {window: n for n, window in enumerate(target.windows)}
    found = tuple(last.get(window, -1) for window in layers.windows)
    problems = [] if target.family in TARGETS else [f"it drafts for {' or '.join(TARGETS)}, not for {target.family}"]
    sizes = [("vocab_size", layers.vocab_size, target.vocab_size), ("backbone_hidden_size", hidden, target.hidden_size)]
    for window, own, other in sorted({(window or 0, n, found[n]) for n, window in enumerate(layers.windows)}):
        kind = f"a window of {window}" if window else "no window"
        if other < 0:
            problems.append(f"layer {own} has {kind}, but the target has no such layer")
            continue
        mine, theirs = layers.heads(layers.kind(own)), target.heads(target.kind(other))
        sizes += [
            (f"the number of key heads in layers with {kind}", mine.kv_heads, theirs.kv_heads),
            (f"the head size in layers with {kind}", mine.head_dim, theirs.head_dim),
        ]
    problems += [f"{name} is {have} but the target's is {want}" for name, have, want in dict.fromkeys(sizes) if have != want]
    if problems:
        raise ValueError("the drafter does not fit the target: " + "; ".join(problems))
    return found


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Clusters:
    """Clusters of the vocabulary.

    Attributes:
        centroids: matrix `[hidden, C]`, one column for each cluster.
        tokens: tokens of each cluster, int32 `[C, V / C]`; None in the declaration of what is read from matrices.
    """

    centroids: Any
    tokens: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AssistantParams:
    """All arrays of an assistant.

    Attributes:
        pre: `pre_projection`, `[2 * target hidden, hidden]`, of the embedding and the state.
        post: `post_projection`, `[hidden, target hidden]`.
        layers: decoder layers without keys and values.
        norm: final norm.
        head: the output head `[hidden, V]`; with clusters its rows `[V, hidden]`.
        clusters: None without clusters.
    """

    pre: Any
    post: Any
    layers: tuple[Layer, ...]
    norm: Any
    head: Any
    clusters: Clusters | None = None


def declare(config: AssistantConfig) -> AssistantParams:
    """Declares the arrays under their checkpoint names."""
    layers = config.layers
    h, v = layers.hidden_size, layers.vocab_size
    stored = EMBEDDING if config.tied else HEAD
    clusters = None
    head = matrix(stored, h, v, ("hidden", "vocab"), kind="head")
    if config.clusters:
        head = ArraySpec(stored, (v, h), ("vocab", "hidden"), "embedding")
        centroids = matrix("masked_embedding.centroids.weight", h, config.clusters, ("hidden", "clusters"))
        clusters = Clusters(centroids, ArraySpec(ORDERING, (config.clusters, v // config.clusters), ("clusters", "vocab")))

    def layer(n: int) -> Layer:
        # Values have no norm here, as they come normed from the target's cache.
        kind = replace(layers.kind(n), value_norm=False)
        whole = declare_layer(layers, f"model.layers.{n}", FAMILIES[layers.family], kind=kind)
        return replace(whole, qkv=Joined(whole.qkv.parts[:1]), k_norm=None)

    return AssistantParams(
        pre=matrix("pre_projection.weight", 2 * config.hidden_size, h, ("taps", "hidden")),
        post=matrix("post_projection.weight", h, config.hidden_size, ("hidden", "taps")),
        layers=tuple(layer(n) for n in range(layers.num_layers)),
        norm=norm_weight("model.norm.weight", h),
        head=head,
        clusters=clusters,
    )


def load(
    folder: Path, target: DecoderConfig, dtype: DTypeLike, console: Console | None = None
) -> tuple[AssistantConfig, AssistantParams]:
    """Reads an assistant for a target: its configuration, and its parameters as `dtype`.

    Quantised matrices are dequantised, like those of other drafters.

    Raises:
        ValueError: see `config_from_hf`; or one message with all tensors that do not match; or the tokens of the clusters are
            not all tokens.
    """
    fields = read_config(folder)
    config = config_from_hf(fields, target, str(folder / CONFIG))

    def ignore(name: str) -> bool:
        other = HEAD if config.tied else EMBEDDING
        return name in (other, ORDERING) or (".self_attn." in name and name.endswith(UNUSED))

    declared = declare(config)
    clusters = declared.clusters
    separate = declared if clusters is None else replace(declared, clusters=replace(clusters, tokens=None))
    layout = quantised_layout(fields.get("quantization_config"))
    params = load_params(folder, separate, dtype, ignore=ignore, console=console, layout=layout)
    if clusters is None:
        return config, params
    tokens = load_stored(folder, (ORDERING,)).get(ORDERING)
    every = np.arange(config.layers.vocab_size)
    if tokens is None or not np.issubdtype(tokens.dtype, np.integer) or not np.array_equal(np.sort(tokens, axis=None), every):
        found = "no such tensor" if tokens is None else f"{tokens.dtype} {list(tokens.shape)}"
        raise ValueError(f"{folder}: expected {ORDERING} to hold each of {len(every)} tokens once, found {found}")
    assert params.clusters is not None
    tokens = jnp.asarray(tokens.reshape(clusters.tokens.shape), jnp.int32)
    return config, replace(params, clusters=Clusters(params.clusters.centroids, tokens))


def step(
    config: AssistantConfig,
    ops: Operations,
    params: AssistantParams,
    h: Float[Array, "B 1 H"],
    embeds: Float[Array, "B 1 H"],
    positions: Int[Array, "B 1"],
    attend: Attend,
    caches: tuple[Any, ...],
) -> Float[Array, "B 1 _"]:
    """Runs the layers over one token of each row.

    Args:
        h: the target's normalised hidden state at the position before the token, or `post_projection` of the step before.
        embeds: the target's scaled embedding of the token.
        positions: position of the last committed token, in every step.
        attend: gets a projection without keys and values.
        caches: the target's cache for each layer; see `AssistantConfig.cached_layers`.

    Returns:
        the output after the final norm, for `choose` and `post_projection`.
    """
    x = ops.linear(jnp.concatenate([embeds, h], axis=-1), params.pre)
    rows = Rows(config.layers.rope_tables(positions), None)
    stack = stack_of(config.layers, ops, params.layers, attend)
    x, _, _ = SINGLE_DEVICE.run(stack, x, rows, caches, ())
    return ops.rms_norm(x, params.norm, config.layers.rms_norm_eps)


def candidates(
    config: AssistantConfig, ops: Operations, params: AssistantParams, x: Float[Array, "B T H"]
) -> tuple[Int[Array, "B T S"], Float[Array, "B T S"]]:
    """Returns the tokens of the clusters with the best centroids, and their float32 logits; for an assistant with clusters."""
    assert params.clusters is not None
    _, best = jax.lax.top_k(ops.linear(x, params.clusters.centroids, jnp.float32), config.chosen_clusters)
    tokens = params.clusters.tokens[best].reshape(*x.shape[:2], -1)
    rows = ops.gather_rows(params.head, tokens)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return tokens, jnp.einsum("bth,btsh->bts", x, rows, precision=precision, preferred_element_type=jnp.float32)


def choose(config: AssistantConfig, ops: Operations, params: AssistantParams, x: Float[Array, "B T H"]) -> Int[Array, "B T"]:
    """Returns the most likely token after each output of `step`."""
    if params.clusters is None:
        return ops.head_argmax(x, params.head)[0]
    tokens, logits = candidates(config, ops, params, x)
    return jnp.take_along_axis(tokens, jnp.argmax(logits, axis=-1, keepdims=True), axis=-1)[..., 0]
