"""A rank's share of a decoder: its heads and columns, and the work of attention."""

from dataclasses import dataclass
from math import ceil
from typing import Protocol, runtime_checkable

from tilewright.perfmodel.builder import BF16, MOVING, WeightTiles, product_cycles


@runtime_checkable
class Config(Protocol):
    """The sizes of a decoder that programs are built from; `models/decoder.py` has them, and so may anything else.

    `mixture` and `delta` are None where all layers have an MLP, and attention that is not linear: `Share` refuses others.
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


@dataclass(frozen=True)
class Share:
    """A tensor-parallel rank's part of a decoder. What does not divide is padded: heads to whole heads, columns to whole
    columns.

    Attributes:
        heads, kv_heads: query and key/value heads; fewer key/value heads than ranks are held several times.
        columns: of the MLP's inner dim.
        vocab: entries of the vocabulary.

    Raises:
        ValueError: layers that are not modelled, no rank, or more ranks than heads.
    """

    config: Config
    ranks: int

    def __post_init__(self) -> None:
        parts = {"mixtures of experts": self.config.mixture, "linear attention": self.config.delta}
        if others := [name for name, part in parts.items() if part is not None]:
            found = " and ".join(others)
            raise ValueError(f"expected layers of softmax attention and an MLP, as they are modelled, found {found}")
        if self.ranks < 1:
            raise ValueError(f"expected at least one tensor-parallel rank, found {self.ranks}")
        if self.ranks > self.config.num_heads:
            raise ValueError(f"expected at most a rank for each of {self.config.num_heads} heads, found {self.ranks} ranks")

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
        """Notes on sizes that are padded."""
        config = self.config
        sizes = {"heads": (self.heads, config.num_heads), "MLP columns": (self.columns, config.intermediate_size)}
        return tuple(
            f"{whole} {name} over {self.ranks} ranks are padded to {own * self.ranks}"
            for name, (own, whole) in sizes.items()
            if own * self.ranks != whole
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
        """Weights of a layer's attention."""
        return self.qkv().bytes + self.output().bytes

    @property
    def mlp_bytes(self) -> float:
        """Weights of a layer's MLP."""
        return self.gate_up().bytes + self.down().bytes

    @property
    def layer_bytes(self) -> float:
        return self.attention_bytes + self.mlp_bytes

    @property
    def table_bytes(self) -> float:
        """Weights of the head and of the embedding, which is divided like it; a tied model has one matrix for both."""
        return (1 if self.config.tie_word_embeddings else 2) * self.head().bytes

    @property
    def model_bytes(self) -> float:
        """All weights: layers, head and embedding."""
        return self.config.num_layers * self.layer_bytes + self.table_bytes

    def cache_bytes(self, rows: float, positions: float) -> float:
        """Keys and values of one layer."""
        return 2 * BF16 * rows * positions * self.kv_heads * self.config.head_dim

    def attention_cycles(self, sequences: float, queries: int, keys: int, seen: float) -> tuple[float, float, float]:
        """Tensor cycles of the scores and of their products with values, and how many scores there are.

        Args:
            queries: of each sequence; where they are few, the heads that share keys go together.
            seen: share of the scores that are computed: half of those of a prompt whose positions see what is before them.
        """
        dim = self.config.head_dim
        group = ceil(self.heads / self.kv_heads)
        rows, times = (queries * group, self.kv_heads) if queries < MOVING else (queries, self.heads)
        scores = sequences * times * product_cycles(rows, dim, keys) * seen
        values = sequences * times * product_cycles(rows, keys, dim) * seen
        return scores, values, sequences * self.heads * queries * keys * seen
