"""Bundle of operations: the functions that models compute with, and the preparation of their weights.

`select.operations` makes a bundle; models, drafters and layers take it as an argument. Models state what is computed; the
bundle chooses the implementation and the memory layout of weights.

Legend: B rows of a batch, T positions, H hidden size, N query heads, K key/value heads, D head size, S entries of a cache.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from tilewright.kernels.masks import AttentionMask

Tree = TypeVar("Tree")
Weights = Literal["auto", "dequantised", "int8", "int4", "fp8"]
"""Weight formats that users can choose; see `select.operations`."""
MatmulPrecision = Literal["auto", "float32", "bfloat16"]
"""Precisions of training's matmuls that users can choose; see `select.training_operations`."""


@partial(jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=["gated"])
@dataclass(frozen=True)
class Joined:
    """Matrices `[I, O]` that multiply the same rows in one call: q, k and v, or gate and up.

    Attributes:
        parts: the matrices, or their declarations or prepared forms.
        gated: the first matrix is a gate: `silu(x @ gate) * (x @ up)`.
    """

    parts: Any
    gated: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transposed:
    """A matrix `[O, I]` used as its transpose: a tied model's embedding as its output head."""

    w: Any


class Norm(NamedTuple):
    """An RMSNorm that precedes an operation: weight `[I]` and epsilon."""

    weight: Array
    eps: float


class Scores(NamedTuple):
    """Rules for attention scores.

    Attributes:
        scale: factor of scores; None for `D ** -0.5`.
        softcap: replaces scores s by `softcap * tanh(s / softcap)`; None for no cap.
        sinks: `[N]`: per query head, the score of a key without a value, which takes its share of the softmax; None for no
            sink.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: Array | None = None

    @property
    def plain(self) -> bool:
        """True without a softcap and without sinks."""
        return self.softcap is None and self.sinks is None

    @property
    def default(self) -> bool:
        """True for plain scores with the default scale."""
        return self.plain and self.scale is None

    def scale_of(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale


PLAIN_SCORES = Scores()


class Heads(NamedTuple):
    """Shape of the heads in a projection, and rules of their attention.

    Attributes:
        head_dim: D.
        q_norm, k_norm: RMSNorm of each head; None if the family has none.
        rope: cosines and sines `[B, T, h]`, float32, that rotate the first 2 h entries of a head; h = 0 for no rotation.
        scores: rules for attention scores.
        window: number of positions that a query sees, including its own; None for all.
        v_norm: RMSNorm of each head's values; None if the family has none.
        keys_are_values: the projection has queries and keys, and the keys before norm and rotation are the values too.
    """

    head_dim: int
    q_norm: Norm | None
    k_norm: Norm | None
    rope: tuple[Array, Array]
    scores: Scores = PLAIN_SCORES
    window: int | None = None
    v_norm: Norm | None = None
    keys_are_values: bool = False


class Quantised(NamedTuple):
    """Keys or values quantised to 8 bits: the vector of each entry is `scale * values`; see `paged/quantise.py`.

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
    """A pool of P pages `[P, K, E, D]` with E entries each, mapped to the rows of a batch by a page table.

    Attributes:
        k, v: arrays, or `Quantised`.
    """

    k: Any
    v: Any

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        return self.k.shape[2]


class KeyValueRows(NamedTuple):
    """A contiguous cache `[rows, K, S, D]` of keys and values: position p is slot p of its row."""

    k: Any
    v: Any


class PagedCache(NamedTuple):
    """A cache in pages of E entries: position p of row b is entry `p % E` of page `table[b, p // E]`.

    Positions without a page must be neither written nor visible: the CPU kernels raise an error, other kernels ignore them.
    Rows that share a page must not write to it.

    Attributes:
        pool: the result of `Operations.pages`.
        table: page table, int32 `[rows, M]`; `UNMAPPED` where a row has no page.
    """

    pool: Any
    table: Any


Cache = KeyValueRows | PagedCache

HEAD_MULTIPLE = 16
"""CPU attention kernels need head sizes that are multiples of this; XLA computes attention for others."""
UNMAPPED = -1
"""Page table entry without a page."""

Pool = Any
"""A pool of pages: `KeyValuePages`, or a type of an implementation. The first dim of its arrays is the pages.

Such a type has `page_size`, `kv_heads`, `read(table)`, which returns keys and values of rows `[B, K, S, D]`, and
`write(table, k, v, start, counts)`.
"""

Projection = Any
"""A projection, the result of `project`, in an implementation's own type, for `heads` and `attend_projected` of that bundle."""


class RoutedWeights(NamedTuple):
    """Weights of a mixture of experts.

    Attributes:
        replicated: weights replicated on every device, such as the router.
        sharded: trees of arrays whose first dim is the local experts.
        shared: matrices `[H, I]` and `[I, H]` of an expert that every token uses, sharded along I; None without one.
    """

    replicated: Any
    sharded: Any
    shared: tuple[Any, Any] | None = None


def softcapped(x: Array, cap: float | None) -> Array:
    """Returns `cap * tanh(x / cap)`, between -cap and cap (Gemma 2, arXiv 2408.00118, section 2); x unchanged without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


@dataclass(frozen=True)
class RoutedProduct:
    """Matmuls of rows with the experts that each row chooses, in steps between which a strategy may send rows to other devices.

    Attributes:
        scores: `(ops, x [R, H], w) -> [R, E]`, float32.
        choose: `(scores, w) -> (experts [R, K], weights [R, K])`.
        apply: `(ops, x, w, experts, weights, count=None) -> [R, H]`, float32: weighted sum of the outputs of a row's experts
            that are on this device; experts below 0 are skipped.
        experts, chosen: E, and K experts per row.
        shared: `apply` adds the local shard of a shared expert, so that all rows must reach all devices.
    """

    scores: Callable[..., Array]
    choose: Callable[[Array, RoutedWeights], tuple[Array, Array]]
    apply: Callable[..., Array]
    experts: int
    chosen: int
    shared: bool = False

    def __call__(self, ops: "Operations", x: Array, w: RoutedWeights, count: Any = None) -> Array:
        """Runs all steps for rows that stay on their device."""
        return self.apply(ops, x, w, *self.choose(self.scores(ops, x, w), w), count)


def routed_in_place(
    ops: "Operations",
    product: RoutedProduct,
    x: Array,
    w: RoutedWeights,
    norm: Norm | None = None,
    add: Array | None = None,
    count: Any = None,
) -> Array:
    """Implements `Operations.routed` for rows `[B, T, H]` that stay on their device."""
    h = x if norm is None else ops.rms_norm(x, *norm)
    y = product(ops, h.reshape(-1, h.shape[-1]), w, count).reshape(x.shape).astype(x.dtype)
    return y if add is None else add + y


def begin_in_place(
    ops: "Operations", product: Callable[..., Any], x: Array, w: Any, norm: Norm | None = None, count: Any = None
) -> Any:
    """Implements `Operations.begin` for rows `[B, T, H]` that stay on their device."""
    return product(ops, x, w, norm, count)


def attend_in_steps(
    ops: "Operations", projection: Projection, heads: Heads, cache: Any, mask: AttentionMask
) -> tuple[Array, Any]:
    """Implements `Operations.attend_projected` by `heads`, `write` and `attend`, for any mask."""
    q, k, v = ops.heads(projection, heads)
    if cache is None:
        out = ops.attend(q, None, mask, (k, v), heads.scores)
    else:
        counts = jnp.full(q.shape[0], q.shape[1], jnp.int32) if mask.counts is None else mask.counts
        cache = ops.write(cache, k, v, mask.context_lengths[:, 0], counts)
        out = ops.attend(q, cache, mask, scores=heads.scores)
    return out.reshape(*q.shape[:2], -1), cache


def heads_together(function: Callable[..., Any], heads: int, arguments: tuple[Any, ...], dims: Any, made_dims: Any) -> Any:
    """Implements `Operations.each_head` for all heads at once."""
    return function(*arguments)


@dataclass(frozen=True)
class Operations:
    """A bundle with one implementation of each operation. Hashable, so that it can be a static argument of jitted functions.

    Attributes:
        name: name of the implementation, shown to users.
        gather_rows: `(table [V, H], index) -> rows [..., H]`: rows of a table, such as token embeddings, prepared by
            `prepare_table`; also of a `PackedTable` if `keeps_blocks`.
        scatter_rows: `(table, index [R], rows [R, H]) -> table` with these rows at distinct indices; rows with an index out of
            range are dropped. The table has rows `[V, H]` in any shape.
        swap_rows: `(table, index, rows) -> (table, old rows)`: also returns the previous rows; zeros for dropped rows.
        nonzero: `(mask [R]) -> (index [R], count)`: indices of true elements in order, and their number.
        linear: `(x, w, out_dtype=None, norm=None, add=None, count=None) -> x @ w + add`, with `norm` applied to `x` first; in
            `out_dtype`, by default that of `x`. Only the first `count` rows need be computed; see `counts`.
        gated_linear: `(x, joined, norm=None, count=None) -> silu(x @ gate) * (x @ up)`.
        grouped_linear: `(x [R, I], w, sizes [G], out_dtype=None) -> [R, O]`: matmul of each row with its group's matrix. The
            first `sizes[0]` rows are the first group, and so on; rows behind the last group give zeros.
        grouped_gated: `(x [R, I], joined, sizes [G]) -> silu(x @ gate) * (x @ up)`, with each group's matrices.
        routed: `(ops, product, x [B, T, H], w, norm=None, add=None, count=None) -> y`: a sublayer whose tokens choose experts:
            a `RoutedProduct` with `RoutedWeights`. It computes with the operations `ops`.
        begin: `(ops, product, x [B, T, H], w, norm=None, count=None) -> tree`: first step of a sublayer that begins neither
            with `project` nor with `gated_linear`: `product(ops, x, w, norm=None, count=None)`, a tree of arrays whose first
            dims are those of the rows, each row computed from the same row of `x`.
        each_head: `(function, heads, arguments, dims, made_dims) -> function(*arguments)`, where `heads` independent heads are
            contiguous along a dim of each array. The dims are trees like arguments and results, or prefixes of them; None for
            arrays that all heads share.
        project: `(x, joined, norm=None, first=0, last=None, bias=None, count=None) -> Projection`: matmuls with the matrices
            `first` to `last - 1`, each plus its entry of `bias`: a vector `[O]` per matrix, or `[..., O]` with one per row.
        heads: `(projection, Heads) -> (q [B, T, N, D], k [B, K, T, D], v [B, K, T, D])`, normed and rotated; q is None for a
            projection of k and v, and k and v are None for a projection of q.
        rms_norm: `(x, weight, eps)`.
        write: `(cache, k [B, K, T, D], v, start [B], counts [B]) -> cache`: writes the first `counts` of each row's new entries
            at its positions from `start` on. `start + counts` must not exceed the size of a contiguous cache.
        attend: `(q [B, T, N, D], cache, mask, block_kv=None, scores=PLAIN_SCORES) -> [B, T, N, D]`: attention under an
            `AttentionMask` over a cache (`KeyValueRows` or `PagedCache`), and over `block_kv`, the keys and values `[B, K, U,
            D]` of the block. Without a cache (None) over `block_kv` alone, as in training, with a gradient if the bundle
            trains.
        attend_projected: `(ops, projection, Heads, cache, mask) -> (out [B, T, N * D], cache)`: `heads`, `write` behind each
            row's context, and `attend`, computed with the operations `ops`. The context lengths are `[B, 1]`. Without a cache
            nothing is written.
        pages: `(count, K, entries, D, dtype, devices=1) -> Pool`: empty pages for a `PagedCache`, with heads sharded over
            devices; for int8, keys and values are `Quantised` when they are written.
        sparse_attention: `(q [B, W, N, D], k [B, S, K, D], v, changes, lengths [B], kinds [B, W], before [B, W, N * D]) ->
            (after, statistics [B, W, 3])`: see `sparse_attention/reference.py`.
        delta_rule: `(q [B, T, K, D], k, v [B, T, K, R, E], log_decay [B, T, K, R], beta, state [B, K, R, D, E],
            by_position=False) -> (out [B, T, K, R, E], state)`: see `delta_rule/reference.py`. With `by_position`, sums have
            the order of single-position steps for any number of positions, except on TPUs, which always use chunks.
        cross_entropy: `(x, head, labels, weights, cap=None) -> the sum of weights * loss` in nats, with float32 sums; has a
            gradient if the bundle trains. Logits y become `cap * tanh(y / cap)`. Never stores the logits of all rows.
        head_argmax: `(x, head, norm=None, masks=None) -> (index, value)` of the largest of `x @ head` by float32 sums, the
            first of equals. Masks are uint32 `[*rows, ceil(V / 32)]`, with a bit per allowed token.
        head_top_k: `(x, head, k) -> (index, value)` `[..., k]` of the `k` largest of `x @ head`, in descending order, the first
            of equals first.
        prepare_matrix: `(weight, name, head=False, largest=None, exact=False) -> weight` in the layout of these operations; a
            `ValueError` names a weight that cannot be prepared. `head`: the weight is the output head. `largest`: the largest
            absolute weight of each output, if the matrix has only some of the inputs. `exact`: keep the dtype.
        prepare_joined: `(joined, name) -> weight`: prepares `Joined` matrices.
        prepare_groups: `(weights, groups, name) -> weights`: prepares matrices `[G, I, O]` for `grouped_linear`: one such
            array, or several that are `Joined`.
        prepare_table: `(table, name) -> table`: prepares an embedding `[V, H]`, whose rows are looked up.
        bytes_of: `(kind, shape, stored) -> bytes` of a prepared matrix, output head or embedding; None if its dtype determines
            them. `stored` is the quantised format of a file whose bits are kept, else "".
        restore: `(matrix, outputs=None) -> [I, O]`: returns the matrix that `prepare_matrix` was given, or the columns of some
            outputs `[W]`, rounded to the format, perhaps with zeros behind its inputs.
        prepares: prepared weights differ from the original matrices.
        weights: the format of prepared matrices.
        packs: prepared matrices have a layout that only this bundle's matmuls know, so they cannot be sliced.
        keeps_blocks: preparation accepts a file's `QuantisedMatrix` of 4 or 8 bits (see `linear/blocks.py`) and keeps its bits.
        keeps_fp8: preparation accepts a file's `ScaledMatrix` in FP8 and keeps its bits.
        scales_tables: `prepare_table` quantises tables.
        separate_head: a tied model gets a separate head, which its matmuls read faster than the transposed embedding.
        first_expert: `(count) -> number`: index of the first local expert, for `count` experts per device.
        sparse_multiple: the kernel of `sparse_attention` needs a multiple of this number of queries.
        skips_uncounted: matmuls skip rows behind `count`, so that `count` need not be rounded up to a compiled batch size.
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
    write: Callable[[Any, Array, Array, Array, Array], Any]
    attend: Callable[..., Array]
    attend_projected: Callable[..., tuple[Array, Any]]
    sparse_attention: Callable[..., tuple[Array, Array]]
    pages: Callable[..., Pool]
    delta_rule: Callable[..., tuple[Array, Array]]
    cross_entropy: Callable[..., Array]
    head_argmax: Callable[..., tuple[Array, Array]]
    head_top_k: Callable[[Array, Any, int], tuple[Array, Array]]
    prepare_matrix: Callable[..., Any]
    prepare_joined: Callable[[Joined, str], Any]
    prepare_groups: Callable[[Any, int, str], Any]
    prepare_table: Callable[[Any, str], Any]
    bytes_of: Callable[[str, tuple[int, ...], str], int | None]
    restore: Callable[..., Array]
    prepares: bool = False
    weights: Weights = "auto"
    packs: bool = False
    keeps_blocks: bool = False
    keeps_fp8: bool = False
    scales_tables: bool = False
    separate_head: bool = False
    skips_uncounted: bool = False
    first_expert: Callable[[int], Array | int] = lambda count: 0
    sparse_multiple: int = 1
    routed: Callable[..., Array] = routed_in_place
    begin: Callable[..., Any] = begin_in_place
    each_head: Callable[..., Any] = heads_together

    def prepare(self, specs: Tree, params: Tree, threads: int = 1) -> Tree:
        """Prepares parameters for these operations.

        Args:
            specs: declarations of the parameters, which mark matrices and heads; see `models.params.ArraySpec`.
            threads: number of threads; 1 for parameters that are traced.

        Raises:
            ValueError: a weight, named in the message, cannot be prepared.
        """
        declared, structure = jax.tree.flatten(specs, is_leaf=lambda spec: isinstance(spec, Joined))
        values = structure.flatten_up_to(params)
        if threads == 1:
            return structure.unflatten(map(self.prepare_one, declared, values))
        with ThreadPoolExecutor(threads) as pool:
            return structure.unflatten(pool.map(self.prepare_one, declared, values))

    def prepare_one(self, spec: Any, value: Any) -> Any:
        """Prepares one declared array, or several that are `Joined`."""
        parts = spec.parts if isinstance(spec, Joined) else (spec,)
        name = " and ".join(part.name for part in parts)
        kind = parts[0].kind
        if kind == "experts":
            return self.prepare_groups(value, parts[0].shape[0], name)
        if isinstance(spec, Joined):
            return self.prepare_joined(value, name)
        if kind == "embedding" and "hidden" in parts[0].axes:  # the tables of drafters have few columns
            return self.prepare_table(value, name)
        if kind in ("head", "router"):
            return self.prepare_matrix(value, name, **({"head": True} if kind == "head" else {"exact": True}))
        return self.prepare_matrix(value, name) if kind == "matrix" else value


@cache
def with_gates_apart(ops: Operations) -> Operations:
    """Returns a bundle that keeps gate and up as separate matrices, so that terms can be added to either's output."""

    def prepare_joined(joined: Joined, name: str) -> Any:
        if not joined.gated:
            return ops.prepare_joined(joined, name)
        return replace(joined, parts=tuple(ops.prepare_matrix(w, name) for w in joined.parts))

    return replace(ops, prepare_joined=prepare_joined)


def is_batch_invariant(
    ops: Operations, dtype: str, kv_dtype: str = "auto", by_xla: bool = False, quantised: bool = False
) -> bool:
    """Returns True if a row's tokens do not depend on the number of rows computed with it (batch invariance).

    The CPU kernels are bitwise batch-invariant in every dtype. XLA may sum in another order for another number of rows. In
    float32 this only decides between logits that are equal except for their last bits; in bfloat16, between tokens that occur
    in real texts. With 8-bit keys and values, or the 8-bit activations of the CPU kernels' quantised matrices, a difference in
    the last bit may change a value by a whole quantisation step, which is as much as bfloat16 rounds.

    Args:
        by_xla: XLA computes some layers even on a CPU (`DecoderConfig.needs_xla`).
        quantised: some matrices are quantised.
    """
    rounds = kv_dtype != "auto" or (quantised and ops.packs)
    return (ops.name.startswith("cpu ") and not by_xla) or (dtype == "float32" and not rounds)
