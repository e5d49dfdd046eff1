"""The bundle of operations: the functions that a model computes with, chosen once, and how its weights are prepared.

`select.operations` makes a bundle; models, drafters and layers take it as an argument. So they say what is computed, and the
bundle alone knows which implementation computes it and how that wants its weights to lie in memory.

Legend: B rows of a batch, T positions, H hidden size, N query heads, K key/value heads, D head size, S entries of a cache.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

Tree = TypeVar("Tree")
Weights = Literal["auto", "int8", "int4", "fp8"]
"""Formats of matrices that users ask for; see `select.operations`."""
Products = Literal["auto", "float32", "bfloat16"]
"""Precisions of training's products that users ask for; see `select.training_operations`."""


@partial(jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=["gated"])
@dataclass(frozen=True)
class Joined:
    """Matrices `[I, O]` that read the same rows, for one call: q, k and v, or gate and up.

    Attributes:
        parts: the matrices, or what a declaration or a preparation puts in their places.
        gated: the first is a gate: `silu(x @ gate) * (x @ up)`.
    """

    parts: Any
    gated: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transposed:
    """A matrix `[O, I]` that is read as its transpose: the embedding of a tied model as its output head."""

    w: Any


class Norm(NamedTuple):
    """An RMSNorm that precedes an operation: its weight `[I]` and epsilon."""

    weight: Array
    eps: float


class Scores(NamedTuple):
    """Rule by which queries weigh keys.

    Attributes:
        window: how many positions a query sees, its own included; None for all.
        scale: of scores; None for `D ** -0.5`.
        softcap: scores s become `softcap * tanh(s / softcap)`; None for as they are.
        sinks: `[N]`, for each query head the score of a key that has no value: it takes its share of the weights.
    """

    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Array | None = None

    @property
    def plain(self) -> bool:
        """True if a window and a scale are all that there may be."""
        return self.softcap is None and self.sinks is None

    @property
    def default(self) -> bool:
        """True if queries see all keys, by scores of the usual scale."""
        return self.plain and self.window is None and self.scale is None

    def scale_of(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale


PLAIN_SCORES = Scores()


class Heads(NamedTuple):
    """Form of the heads that a projection becomes, and how these see one another.

    Attributes:
        head_dim: D.
        q_norm, k_norm: RMSNorm over each head; None where the family has none.
        rope: cosines and sines `[B, T, h]`, float32, which turn the first 2 h of a head's entries; none where h is 0.
    """

    head_dim: int
    q_norm: Norm | None
    k_norm: Norm | None
    rope: tuple[Array, Array]
    scores: Scores = PLAIN_SCORES


class Quantised(NamedTuple):
    """Keys or values in 8 bits: each entry's vector is `scale * values`; see `paged/quantise.py`.

    Attributes:
        values: int8 `[P, K, E, D]`, from -127 to 127.
        scale: float32 `[P, K, E]`.
    """

    values: Array
    scale: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


class KeyValuePages(NamedTuple):
    """A pool of pages `[P, K, E, D]`, E entries each, which the rows of a batch share by a table.

    Attributes:
        k, v: arrays, or `Quantised`.
    """

    k: Any
    v: Any

    @property
    def page_size(self) -> int:
        return self.k.shape[2]


HEAD_MULTIPLE = 16
"""Sizes of heads that the CPU kernels take are multiples of this; attention over others is XLA's."""
UNMAPPED = -1
"""In a table of pages: the row has none there."""

Pool = Any
"""A pool of pages: `KeyValuePages`, or an implementation's own, with a `page_size`; its arrays' first dim is the pages."""

Projection = Any
"""A projection, as `project` makes it: an implementation's own, for `heads` and `append_attend` of the same bundle."""


class RoutedWeights(NamedTuple):
    """Arrays of a routed product.

    Attributes:
        whole: what every device has, such as the router.
        divided: trees of arrays whose first dim is the experts that a device has.
        shared: products `[H, I]` and `[I, H]` of an expert that every row has, of which devices divide I; None without one.
    """

    whole: Any
    divided: Any
    shared: tuple[Any, Any] | None = None


def softcapped(x: Array, cap: float | None) -> Array:
    """`cap * tanh(x / cap)`: between -cap and cap (Gemma 2, arXiv 2408.00118, section 2). Without a cap, x as it is."""
    return x if cap is None else cap * jnp.tanh(x / cap)


@dataclass(frozen=True)
class RoutedProduct:
    """Products of rows with the experts that each row chooses, in steps: a schedule may have rows travel between them.

    Attributes:
        scores: `(ops, x [R, H], w) -> [R, E]`, float32.
        choose: `(scores) -> (experts [R, K], weights [R, K])`.
        apply: `(ops, x, w, experts, weights, count=None) -> [R, H]`, float32: the sum by these weights of those of a row's
            experts that a device has; an expert below 0 is none.
        experts, chosen: E, and K of them for a row.
        shared: `apply` adds what every row has of an expert that devices divide: all rows have to come to all of them.
    """

    scores: Callable[..., Array]
    choose: Callable[[Array], tuple[Array, Array]]
    apply: Callable[..., Array]
    experts: int
    chosen: int
    shared: bool = False

    def __call__(self, ops: "Operations", x: Array, w: RoutedWeights, count: Any = None) -> Array:
        """All steps, of rows where they are."""
        return self.apply(ops, x, w, *self.choose(self.scores(ops, x, w)), count)


def routed_in_place(
    ops: "Operations",
    product: RoutedProduct,
    x: Array,
    w: RoutedWeights,
    norm: Norm | None = None,
    add: Array | None = None,
    count: Any = None,
) -> Array:
    """`Operations.routed` of rows `[B, T, H]` that stay where they are."""
    h = x if norm is None else ops.rms_norm(x, *norm)
    y = product(ops, h.reshape(-1, h.shape[-1]), w, count).reshape(x.shape).astype(x.dtype)
    return y if add is None else add + y


def begun_in_place(
    ops: "Operations", product: Callable[..., Any], x: Array, w: Any, norm: Norm | None = None, count: Any = None
) -> Any:
    """`Operations.begin` of rows `[B, T, H]` that stay where they are."""
    return product(ops, x, w, norm, count)


def heads_together(of: Callable[..., Any], heads: int, arguments: tuple[Any, ...], dims: Any, made_dims: Any) -> Any:
    """`Operations.each_head` of all heads at once."""
    return of(*arguments)


@dataclass(frozen=True)
class Operations:
    """A bundle of operations, one implementation of each. Hashable: a static argument of whatever is compiled.

    Attributes:
        name: of the implementation, as it is shown to users.
        gather_rows: `(table [V, H], index) -> rows [..., H]`: the rows of a table, such as the embeddings of tokens, as
            `prepare_table` made it; with `keeps_blocks` of a `PackedTable` too.
        scatter_rows: `(table, index [R], rows [R, H]) -> table` with these rows at these places, no two the same; a row whose
            index is out of range goes nowhere. The table is one of rows `[V, H]`, of whatever shape.
        swap_rows: `(table, index, rows) -> (table, old rows)`: the same, and what stood there; zeros for rows that go nowhere.
        nonzero: `(mask [R]) -> (index [R], count)`: the places where it holds, in order, and how many they are.
        linear: `(x, w, out_dtype=None, norm=None, add=None, count=None) -> x @ w + add`, after `norm` if one is given; in
            `out_dtype`, else that of `x`. Of `x` only the first `count` rows need be computed; see `counts`.
        gated_linear: `(x, joined, norm=None, count=None) -> silu(x @ gate) * (x @ up)`.
        grouped_linear: `(x [R, I], w, sizes [G], out_dtype=None) -> [R, O]`: the product of each row with the matrix of its
            group; the first `sizes[0]` rows are the first group's, and so on. Rows behind the last group's give zeros.
        grouped_gated: `(x [R, I], joined, sizes [G]) -> silu(x @ gate) * (x @ up)`, likewise.
        routed: `(ops, product, x [B, T, H], w, norm=None, add=None, count=None) -> y`: a half of a layer whose rows choose
            experts, a `RoutedProduct` of `RoutedWeights`, with the operations that it computes with.
        begin: `(ops, product, x [B, T, H], w, norm=None, count=None) -> tree`: what a half of a layer begins with where that is
            neither `project` nor `gated_linear`: `product(ops, x, w, norm=None, count=None)`, a tree of arrays whose first dims
            are the rows', each of them made of its own row.
        each_head: `(of, heads, arguments, dims, made_dims) -> of(*arguments)`, where so many heads lie one after another along
            a dim of each array, and none reads another's numbers. The dims are trees as the arguments and as what is made are,
            or prefixes of such; None for what all heads have in common.
        project: `(x, joined, norm=None, first=0, last=None, bias=None, count=None) -> Projection`: the products with all
            matrices from the `first` on, up to the one before the `last`, each plus its own of `bias`: a vector `[O]` for every
            matrix, or `[..., O]` with one for every row.
        heads: `(projection, Heads) -> (q [B, T, N, D], k [B, K, T, D], v [B, K, T, D])`, normed and rotated; None for q where
            the projection was of k and v alone, and for these where it was of q alone.
        rms_norm: `(x, weight, eps)`.
        prefix_attention: `(q, k, v, lengths, extra=None, rule=PLAIN_SCORES)`: see `attention/reference.py`; a rule where
            weights are taken as they are.
        window_attention: `(q [B, W, N, D], k [B, S, K, D], v, changes, lengths [B], kinds [B, W], before [B, W, N * D]) ->
            (after, statistics [B, W, 3])`: see `window_attention/reference.py`.
        append: `(cache [B, K, S, D], new [B, K, T, D], start [B], count [B]) -> cache`: writes the first `count` of each row's
            new entries from its slot `start` on, and nothing else. `start + count` must not pass S.
        append_attend: `(projection, Heads, k, v, start, count) -> (out [B, T, N * D], k, v)`: appends to the caches and lets
            the query at `start + t` see all entries up to its own.
        pages: `(count, K, entries, D, dtype, devices=1) -> Pool`: empty pages for the three that follow, their heads
            divided among devices; of int8 keys and values are `Quantised` as they are written. Row b's position p lies in entry
            `p % entries` of page `table[b, p // entries]`; `table` is int32 `[B, M]`, `UNMAPPED` where a row has no page.
            Positions without one must not be written or seen: an error with the CPU kernels, without effect elsewhere.
        paged_append: `(pool, table, k [B, K, T, D], v, start [B], count [B]) -> pool`: as `append`. Of rows that share a page
            none may write there.
        paged_attention: `(q, pool, table, lengths, extra=None, rule=PLAIN_SCORES)`: as `prefix_attention`.
        paged_append_attend: `(projection, Heads, pool, table, start, count) -> (out, pool)`: as `append_attend`, with zeros for
            queries from `count` on.
        delta_rule: `(q [B, T, K, D], k, v [B, T, K, R, E], log_decay [B, T, K, R], beta, state [B, K, R, D, E],
            by_position=False) -> (out [B, T, K, R, E], state)`: see `delta_rule/reference.py`. By position, sums come in the
            order of a step of one position, however many come together; but a TPU takes them in a chunk all the same.
        causal_attention: `(projection, Heads) -> out [B, T, N * D]`: each query sees all entries up to its own; with a gradient
            where the bundle trains.
        cross_entropy: `(x, head, labels, weights, cap=None) -> the sum of weights * loss` in nats, by float32 sums; with a
            gradient where the bundle trains. Logits y become `cap * tanh(y / cap)`. Never holds those of all rows.
        head_argmax: `(x, head, norm=None, masks=None) -> (index, value)` of the largest of `x @ head` by float32 sums, the
            first of equals. Masks are uint32 `[*rows, ceil(V / 32)]`, with a bit for each token that may be taken.
        head_top_k: `(x, head, k) -> (index, value)` `[..., k]` of the `k` largest of `x @ head`, in descending order; of equals
            the first goes first.
        prepare_matrix, prepare_joined: `(weight, name) -> weight` as the operations want it; a `ValueError` names a weight
            that cannot be prepared. The former takes `head=False` as well, whether it is the output head, and `largest=None`,
            the largest absolute weight of each output where the matrix has only some of their inputs; and `exact=False`,
            whether it keeps its dtype, whatever the format of the others.
        prepare_groups: `(weights, groups, name) -> weights`: the same for the matrices `[G, I, O]` of grouped products; one
            such array, or several that are `Joined`.
        prepare_table: `(table, name) -> table`: an embedding `[V, H]`, whose rows are looked up.
        bytes_of: `(kind, shape, stored) -> bytes` that a matrix, an output head or an embedding takes as it is prepared; None
            for as many as its dtype has. `stored` is the format of a file whose bits are kept, "" where it has none.
        restore: the matrix `[I, O]` that `prepare_matrix` was given, rounded to the format; zeros may follow its inputs.
        prepares: prepared weights are not the matrices that they were.
        weights: the format that `prepare` makes matrices of.
        packs: they lie in a layout that only the products of the bundle know: nothing cuts them.
        keeps_blocks: what prepares takes a file's `QuantisedMatrix` of 4 or 8 bits as well (see `linear/blocks.py`), and keeps
            its bits.
        keeps_fp8: and a file's `ScaledMatrix` in FP8.
        scales_tables: `prepare_table` keeps a table in few bits.
        own_head: a tied model gets a head of its own: the products read it faster than the embedding transposed.
        first_expert: `(count) -> number`: of the first expert that a device has, where each has so many of a mixture's.
        window_multiple: of the queries of a `window_attention` that its kernel takes.
        counts: products leave out rows behind a `count`, so that it need not be rounded up to a declared number of rows.
    """

    name: str
    gather_rows: Callable[[Any, Array], Array]
    scatter_rows: Callable[[Array, Array, Array], Array]
    swap_rows: Callable[[Array, Array, Array], tuple[Array, Array]]
    nonzero: Callable[[Array], tuple[Array, Array]]
    linear: Callable[..., Array]
    gated_linear: Callable[..., Array]
    grouped_linear: Callable[..., Array]
    grouped_gated: Callable[[Array, Any, Array], Array]
    project: Callable[..., Projection]
    heads: Callable[[Projection, Heads], tuple[Any, Array, Array]]
    rms_norm: Callable[[Array, Array, float], Array]
    prefix_attention: Callable[..., Array]
    window_attention: Callable[..., tuple[Array, Array]]
    append: Callable[[Array, Array, Array, Array], Array]
    append_attend: Callable[..., tuple[Array, Array, Array]]
    pages: Callable[..., Pool]
    paged_append: Callable[[Pool, Array, Array, Array, Array, Array], Pool]
    paged_attention: Callable[..., Array]
    paged_append_attend: Callable[[Projection, Heads, Pool, Array, Array, Array], tuple[Array, Pool]]
    delta_rule: Callable[..., tuple[Array, Array]]
    causal_attention: Callable[[Projection, Heads], Array]
    cross_entropy: Callable[..., Array]
    head_argmax: Callable[..., tuple[Array, Array]]
    head_top_k: Callable[[Array, Any, int], tuple[Array, Array]]
    prepare_matrix: Callable[..., Any]
    prepare_joined: Callable[[Joined, str], Any]
    prepare_groups: Callable[[Any, int, str], Any]
    prepare_table: Callable[[Any, str], Any]
    bytes_of: Callable[[str, tuple[int, ...], str], int | None]
    restore: Callable[[Any], Array]
    prepares: bool = False
    weights: Weights = "auto"
    packs: bool = False
    keeps_blocks: bool = False
    keeps_fp8: bool = False
    scales_tables: bool = False
    own_head: bool = False
    counts: bool = False
    first_expert: Callable[[int], Array | int] = lambda count: 0
    window_multiple: int = 1
    routed: Callable[..., Array] = routed_in_place
    begin: Callable[..., Any] = begun_in_place
    each_head: Callable[..., Any] = heads_together

    def prepare(self, specs: Tree, params: Tree) -> Tree:
        """Parameters as these operations want them.

        Args:
            specs: their declaration, which says what is a matrix or a head; see `models.params.ArraySpec`.

        Raises:
            ValueError: a weight, which it names, cannot be prepared.
        """
        return jax.tree.map(self.prepare_one, specs, params, is_leaf=lambda spec: isinstance(spec, Joined))

    def prepare_one(self, spec: Any, value: Any) -> Any:
        """One array of a declaration, or several that are `Joined`."""
        parts = spec.parts if isinstance(spec, Joined) else (spec,)
        name = " and ".join(part.name for part in parts)
        kind = parts[0].kind
        if kind == "experts":
            return self.prepare_groups(value, parts[0].shape[0], name)
        if isinstance(spec, Joined):
            return self.prepare_joined(value, name)
        if kind == "embedding" and "hidden" in parts[0].axes:  # drafters have other tables, of few columns
            return self.prepare_table(value, name)
        if kind in ("head", "router"):
            return self.prepare_matrix(value, name, **({"head": True} if kind == "head" else {"exact": True}))
        return self.prepare_matrix(value, name) if kind == "matrix" else value


@cache
def with_gates_apart(ops: Operations) -> Operations:
    """Bundle whose preparation leaves gates and what they gate two matrices: something is to be added to either's products."""

    def prepare_joined(joined: Joined, name: str) -> Any:
        if not joined.gated:
            return ops.prepare_joined(joined, name)
        return replace(joined, parts=tuple(ops.prepare_matrix(w, name) for w in joined.parts))

    return replace(ops, prepare_joined=prepare_joined)


def is_batch_invariant(ops: Operations, dtype: str, kv_dtype: str = "auto", by_xla: bool = False) -> bool:
    """True if the target gives a row the same tokens however many rows run with it (batch-invariant).

    The CPU kernels do, bit by bit in every dtype. XLA may sum in another order for another number of rows: in float32 that
    decides only between logits that are equal but for their last bits, in bfloat16 between candidates that texts do have. Where
    keys and values are rounded to 8 bits, the last bit of one may make a step of it, which is as much as bfloat16 rounds.

    Args:
        by_xla: XLA computes part of the layers on a CPU, too (`DecoderConfig.needs_xla`).
    """
    return (ops.name.startswith("cpu ") and not by_xla) or (dtype == "float32" and kv_dtype == "auto")
