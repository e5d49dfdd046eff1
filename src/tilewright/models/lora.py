"""Low-rank adapters (LoRA, arXiv 2106.09685) beside a model's matrices: several at once, one for each row of a batch.

The A matrices of all adapters are concatenated in one matrix `[I, R]`, their B matrices in one `[R, O]`. Between the two
matmuls, a row's inner values of other adapters are set to zero. A row's adapter is therefore data, and a row without an adapter
adds zeros. The matmuls are those of the operations, so a row's result depends on no other row if they are batch-invariant. The
adapters' matrices have the dtype of activations, even if the base is quantised.

Legend: B rows of a batch, T positions, I inputs, O outputs, R ranks of all adapters together.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from tilewright.kernels.operations import Joined, Norm, Operations, with_gates_apart
from tilewright.models.params import ArraySpec
from tilewright.models.stored import first_names

FIELDS = ("qkv", "o", "gate_up", "down")
"""Fields of a decoder's layer whose matrices adapters may change."""


@partial(jax.tree_util.register_dataclass, data_fields=["base", "a", "b"], meta_fields=["outputs"])
@dataclass(frozen=True)
class AdaptedMatrix:
    """Matrix prepared by operations, or several that are `Joined`, with adapters.

    Attributes:
        a: `[I, R * n]`, prepared, for the n matrices that adapters change.
        b: for each matrix `[R, O]`, prepared; None for a matrix that no adapter changes.
        outputs: of each matrix.
    """

    base: Any
    a: Any
    b: tuple[Any, ...]
    outputs: tuple[int, ...]


def row_ranks(columns: Bool[Array, "N R"], adapter: Int[Array, " B"]) -> Bool[Array, "B 1 R"]:
    """Returns a mask of each row's ranks; row 0 of `columns` is for no adapter."""
    return columns[adapter][:, None]


@dataclass(frozen=True)
class AdaptedProducts:
    """Matmuls of rows with matrices, adapted or not.

    Attributes:
        ops: computes the matmuls.
        ranks: bool `[B, 1, R]`, the ranks of each row.
    """

    ops: Operations
    ranks: Any

    def corrections(
        self, x: Float[Array, "B T I"], w: AdaptedMatrix, out_dtype: DTypeLike, norm: Norm | None, count: Array | None
    ) -> list[Array | None]:
        """Returns the adapters' addition to the matmul with each matrix; None where no adapter changes it."""
        changed = sum(b is not None for b in w.b)
        inner = self.ops.linear(x, w.a, jnp.float32, norm, count=count)
        masked = jnp.where(jnp.tile(self.ranks, changed), inner, 0).astype(x.dtype)
        parts = iter(jnp.split(masked, changed, axis=-1))
        return [None if b is None else self.ops.linear(next(parts), b, out_dtype, count=count) for b in w.b]

    def linear(
        self,
        x: Array,
        w: Any,
        out_dtype: DTypeLike | None = None,
        norm: Norm | None = None,
        add: Array | None = None,
        count: Array | None = None,
    ) -> Array:
        if not isinstance(w, AdaptedMatrix):
            return self.ops.linear(x, w, out_dtype, norm, add=add, count=count)
        (more,) = self.corrections(x, w, out_dtype or x.dtype, norm, count)
        assert more is not None, "expected an adapter that changes the matrix"
        return self.ops.linear(x, w.base, out_dtype, norm, add=more if add is None else add + more, count=count)

    def project(
        self,
        x: Array,
        joined: Any,
        norm: Norm | None = None,
        first: int = 0,
        last: int | None = None,
        bias: Any = None,
        count: Array | None = None,
    ) -> Any:
        if isinstance(joined, AdaptedMatrix):
            added = self.corrections(x, joined, x.dtype, norm, count)
            biases = (None,) * len(added) if bias is None else bias
            outputs = zip(added, biases, joined.outputs, strict=True)
            bias = tuple(summed(jnp.zeros((*x.shape[:-1], size), x.dtype), *both) for *both, size in outputs)
            joined = joined.base
        return self.ops.project(x, joined, norm, first, last, bias=bias, count=count)

    def gated_linear(self, x: Array, joined: Any, norm: Norm | None = None, count: Array | None = None) -> Array:
        if not isinstance(joined, AdaptedMatrix):
            return self.ops.gated_linear(x, joined, norm, count=count)
        added = self.corrections(x, joined, jnp.float32, norm, count)
        both = zip(joined.base.parts, added, strict=True)
        gate, up = (self.ops.linear(x, w, jnp.float32, norm, add=each, count=count) for w, each in both)
        return (jax.nn.silu(gate) * up).astype(x.dtype)


def summed(first: Array, *addends: Array | None) -> Array:
    """Returns the sum of arrays, without those that are None."""
    for each in addends:
        first = first if each is None else first + each
    return first


def adapted_operations(ops: Operations, ranks: Bool[Array, "B 1 R"]) -> Operations:
    """Returns operations for rows with these ranks, which hold a traced array and are made anew in each trace."""
    products = AdaptedProducts(ops, ranks)
    return replace(ops, linear=products.linear, project=products.project, gated_linear=products.gated_linear)


class LowRankPair(NamedTuple):
    """Addition of an adapter to the matmul with one stored matrix `[O, I]`: `x @ a.T @ b.T`.

    Attributes:
        a: float32 `[r, I]`.
        b: float32 `[O, r]`, including the adapter's scale.
    """

    a: np.ndarray
    b: np.ndarray


@dataclass(frozen=True)
class Adapter:
    """Low-rank adapter.

    Attributes:
        name: by which requests select it.
        rank: r.
        pairs: by the names of modules in the model's tensors ("model.layers.0.mlp.up_proj").
    """

    name: str
    rank: int
    pairs: Mapping[str, LowRankPair]

    def check_fit(self, modules: Mapping[str, ArraySpec]) -> None:
        """Raises a `ValueError` for modules that the model lacks, or has in another shape.

        Args:
            modules: declared matrices that adapters may change.
        """
        if unknown := [module for module in self.pairs if module not in modules]:
            raise ValueError(f"adapter {self.name}: expected projections of the model, found {first_names(unknown)}")
        for module, pair in self.pairs.items():
            outputs, inputs = modules[module].stored_shape
            if pair.a.shape[1] != inputs or pair.b.shape[0] != outputs:
                found = f"A {list(pair.a.shape)} and B {list(pair.b.shape)}"
                expected = f"A [{self.rank}, {inputs}] and B [{outputs}, {self.rank}]"
                raise ValueError(f"adapter {self.name}: {module}: expected {expected}, found {found}")


@dataclass(frozen=True)
class Adapters:
    """Adapters of one model.

    Attributes:
        adapters: in the order of their numbers, from 1 on; 0 stands for none.
    """

    adapters: tuple[Adapter, ...]

    def __post_init__(self) -> None:
        names = [adapter.name for adapter in self.adapters]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"expected adapters of different names, found {', '.join(names) or 'none'}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(adapter.name for adapter in self.adapters)

    @property
    def rank(self) -> int:
        """R: sum of the ranks of all adapters."""
        return sum(adapter.rank for adapter in self.adapters)

    @property
    def columns(self) -> np.ndarray:
        """Mask of the ranks of each adapter, bool `[1 + N, R]`."""
        numbers = np.repeat(np.arange(len(self.adapters)), [adapter.rank for adapter in self.adapters])
        return np.arange(-1, len(self.adapters))[:, None] == numbers[None]

    @property
    def change_gates(self) -> bool:
        """True if an adapter changes a gate or up matrix, so that the two cannot be prepared for one matmul."""
        return any(
            module.endswith((".gate_proj", ".up_proj", ".gate_up_proj"))
            for adapter in self.adapters
            for module in adapter.pairs
        )

    def changed(self, spec: ArraySpec) -> bool:
        """True if some adapter changes a matrix."""
        return any(module_of(spec) in adapter.pairs for adapter in self.adapters)

    def matrices(self, spec: ArraySpec) -> tuple[np.ndarray, np.ndarray]:
        """Returns all adapters' A `[I, R]` and B `[R, O]` of a matrix, in float32; zeros for adapters that do not change it."""
        inputs, outputs = spec.shape
        a = np.zeros((inputs, self.rank), np.float32)
        b = np.zeros((self.rank, outputs), np.float32)
        begin = 0
        for adapter in self.adapters:
            end = begin + adapter.rank
            if (pair := adapter.pairs.get(module_of(spec))) is not None:
                ((first, last), _) = spec.stored_bounds(((0, inputs), (0, outputs)))
                a[:, begin:end] = pair.a.T
                b[begin:end] = pair.b[first:last].T
            begin = end
        return a, b

    def apply(self, ops: Operations, specs: Any, params: Any, dtype: DTypeLike) -> Any:
        """Adds the adapters to a decoder's prepared parameters.

        Args:
            specs: the declaration of these parameters.
            dtype: of activations.

        Raises:
            ValueError: an adapter does not match the model.
        """
        modules = {module_of(spec): spec for layer in specs.layers for spec in changeable(layer)}
        for adapter in self.adapters:
            adapter.check_fit(modules)
        layers = tuple(
            replace(layer, **{name: self.field(ops, getattr(spec, name), getattr(layer, name), dtype) for name in FIELDS})
            for spec, layer in zip(specs.layers, params.layers, strict=True)
        )
        return replace(params, layers=layers, adapters=jnp.asarray(self.columns))

    def field(self, ops: Operations, spec: Any, base: Any, dtype: DTypeLike) -> Any:
        """Adds the adapters to one field of a layer."""
        if isinstance(spec, tuple):
            return tuple(self.field(ops, *one, dtype) for one in zip(spec, base, strict=True))
        parts = parts_of(spec)
        if not any(map(self.changed, parts)):
            return base
        pairs = [self.matrices(part) if self.changed(part) else None for part in parts]
        a = np.concatenate([each[0] for each in pairs if each is not None], axis=1)

        def prepared(w: np.ndarray, name: str) -> Any:
            return ops.prepare_matrix(jnp.asarray(w, dtype), name, exact=True)

        b = tuple(
            None if each is None else prepared(each[1], f"lora_B of {part.name}")
            for part, each in zip(parts, pairs, strict=True)
        )
        return AdaptedMatrix(base, prepared(a, f"lora_A of {parts[0].name}"), b, tuple(part.shape[1] for part in parts))


def operations_for_adapters(ops: Operations, adapters: Adapters | None) -> Operations:
    """Returns operations that prepare weights so that adapters can be added."""
    return with_gates_apart(ops) if adapters is not None and adapters.change_gates else ops


def parts_of(spec: Any) -> Sequence[ArraySpec]:
    """Returns the matrices of a field."""
    return () if spec is None else spec.parts if isinstance(spec, Joined) else (spec,)


def changeable(layer: Any) -> Iterator[ArraySpec]:
    """Yields declared matrices of a layer that adapters may change.

    Experts are excluded, and matrices whose stored tensor interleaves the outputs of a gate.
    """
    for name in FIELDS:
        declared = getattr(layer, name)
        for spec in declared if isinstance(declared, tuple) else (declared,):
            yield from (part for part in parts_of(spec) if part.kind == "matrix" and not part.pieces)


def module_of(spec: ArraySpec) -> str:
    """Returns the name of the module to which a weight belongs."""
    return spec.name.removesuffix(".weight")
