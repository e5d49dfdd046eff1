"""Sizes of a tensor-parallel rank's part of a decoder, and the cycles of its attention."""

from dataclasses import dataclass
from math import ceil
from typing import Protocol, runtime_checkable

from tilewright.perfmodel.builder import BF16, MOVING, WeightTiles, product_cycles


@runtime_checkable
class Config(Protocol):
    """Protocol of a decoder's sizes, such as `models.decoder.DecoderConfig`.

    `mixture` and `delta` are None for layers of softmax attention and an MLP, `global_heads` for heads that are the same in
    all layers; `Share` refuses other layers.
    """

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def mixture(self) -> object: ...
    @property
    def delta(self) -> object: ...
    @property
    def global_heads(self) -> object: ...


@dataclass(frozen=True)
class Share:
    """A tensor-parallel rank's part of a decoder; sizes that the ranks do not divide are padded.

    Attributes:
        config: sizes of the decoder.
        ranks: number of tensor-parallel ranks.
        heads, kv_heads: query and key/value heads of a rank; fewer key/value heads than ranks are replicated.
        columns: columns of the MLP's inner dim.
        vocab: entries of the vocabulary.

    Raises:
        ValueError: the model has layers that are not modelled, `ranks` is below 1, or above the number of heads.
    """

    config: Config
    ranks: int

    def __post_init__(self) -> None:
        parts = {"mixtures of experts": self.config.mixture, "linear attention": self.config.delta}
        parts["heads that differ between layers"] = self.config.global_heads
        if unmodelled := [name for name, part in parts.items() if part is not None]:
            found = " and ".join(unmodelled)
            raise ValueError(f"expected layers of softmax attention and an MLP (no others are modelled), found {found}")
        if self.ranks < 1:
            raise ValueError(f"expected at least one tensor-parallel rank, found {self.ranks}")
        if self.ranks > self.config.num_heads:
            raise ValueError(f"expected at most one rank per head ({self.config.num_heads} heads), found {self.ranks} ranks")

    @property
    def heads(self) -> int:
        return ceil(self.config.num_heads / self.ranks)

    @property
    def kv_heads(self) -> int:
        return ceil(self.config.num_kv_heads / self.ranks)

    @property
    def columns(self) -> int:
        return ceil(self.config.intermediate_size / self.ranks)

    @property
    def vocab(self) -> int:
        return ceil(self.config.vocab_size / self.ranks)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on padded sizes."""
        config = self.config
        sizes = {"heads": (self.heads, config.num_heads), "MLP columns": (self.columns, config.intermediate_size)}
        return tuple(
            f"{whole} {name} over {self.ranks} ranks are padded to {part * self.ranks}"
            for name, (part, whole) in sizes.items()
            if part * self.ranks != whole
        )

    def qkv(self) -> WeightTiles:
        return WeightTiles("qkv", self.config.hidden_size, (self.heads + 2 * self.kv_heads) * self.config.head_dim)

    def output(self) -> WeightTiles:
        return WeightTiles("output", self.heads * self.config.head_dim, self.config.hidden_size)

    def gate_up(self) -> WeightTiles:
        return WeightTiles("gate and up", self.config.hidden_size, 2 * self.columns)

    def down(self) -> WeightTiles:
        return WeightTiles("down", self.columns, self.config.hidden_size)

    def head(self) -> WeightTiles:
        return WeightTiles("head", self.config.hidden_size, self.vocab)

    @property
    def attention_bytes(self) -> float:
        """Bytes of a layer's attention weights."""
        return self.qkv().bytes + self.output().bytes

    @property
    def mlp_bytes(self) -> float:
        """Bytes of a layer's MLP weights."""
        return self.gate_up().bytes + self.down().bytes

    @property
    def layer_bytes(self) -> float:
        return self.attention_bytes + self.mlp_bytes

    @property
    def table_bytes(self) -> float:
        """Bytes of the head and of the embedding, sharded alike; a tied model has one matrix for both."""
        return (1 if self.config.tie_word_embeddings else 2) * self.head().bytes

    @property
    def model_bytes(self) -> float:
        """Bytes of all weights: layers, head and embedding."""
        return self.config.num_layers * self.layer_bytes + self.table_bytes

    def cache_bytes(self, rows: float, positions: float) -> float:
        """Bytes of the keys and values of one layer."""
        return 2 * BF16 * rows * positions * self.kv_heads * self.config.head_dim

    def attention_cycles(self, sequences: float, queries: int, keys: int, mask_share: float) -> tuple[float, float, float]:
        """Returns the tensor engine cycles of scores and of weighted values, and the number of scores.

        Args:
            sequences: number of sequences.
            queries: queries of each sequence; with few queries, the heads of a group are computed together.
            keys: keys of each sequence.
            mask_share: share of the scores that are computed, half for a causal prompt.
        """
        dim = self.config.head_dim
        group = ceil(self.heads / self.kv_heads)
        rows, times = (queries * group, self.kv_heads) if queries < MOVING else (queries, self.heads)
        scores = sequences * times * product_cycles(rows, dim, keys) * mask_share
        values = sequences * times * product_cycles(rows, keys, dim) * mask_share
        return scores, values, sequences * self.heads * queries * keys * mask_share
