"""Low-rank adapters (LoRA, arXiv 2106.09685) beside a model's matrices: several at once, one for each row of a batch.

The A matrices of all adapters are concatenated in one matrix `[I, R]`, their B matrices in one `[R, O]`. Between the two
matmuls, a row's inner values of other adapters are set to zero. A row's adapter is therefore data, and a row without an adapter
adds zeros. The matmuls are those of the operations, so a row's result depends on no other row if they are batch-invariant. The
adapters' matrices have the dtype of activations, even if the base is quantised.

Legend: B rows of a batch, T positions, I inputs, O outputs, R ranks of all adapters together.
"""

from collections.abc import Mapping, Sequence
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
from tilewright.models.params import ArraySpec, spec_leaves
from tilewright.models.stored import first_names


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
        self, x: Float[Array, "*rows I"], w: AdaptedMatrix, out_dtype: DTypeLike, norm: Norm | None, count: Array | None
    ) -> list[Array | None]:
        """Returns the adapters' addition to the matmul with each matrix; None where no adapter changes it."""
        changed = sum(b is not None for b in w.b)
        inner = self.ops.linear(x, w.a, jnp.float32, norm, count=count)
        ranks = self.ranks
        if inner.ndim == 2:  # rows [B * T, I] of a sublayer with experts
            ranks = jnp.repeat(ranks[:, 0], len(inner) // len(ranks), axis=0)
        masked = jnp.where(jnp.tile(ranks, changed), inner, 0).astype(x.dtype)
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
        a: `[r, I]`, float32 on the host; in training an array of the program, or its declaration.
        b: `[O, r]`, including the adapter's scale; of the same kind.
    """

    a: Any
    b: Any


@dataclass(frozen=True)
class LoraSettings:
    """Settings of an adapter, as in PEFT's `LoraConfig`.

    Attributes:
        rank: r.
        alpha: `lora_alpha`.
        rslora: scale by `alpha / sqrt(r)` (arXiv 2312.03732) instead of `alpha / r`.
        targets: names of modules, or ends of names behind a dot, such as "q_proj"; empty for all that adapters may change.
    """

    rank: int = 16
    alpha: float = 32.0
    rslora: bool = False
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"expected a rank of at least 1, found {self.rank}")
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"expected an alpha above 0, found {self.alpha:g}")

    @property
    def scale(self) -> float:
        """Factor of the product of A and B."""
        return adapter_scale(self.rank, self.alpha, self.rslora)


def adapter_scale(rank: int, alpha: float, rslora: bool) -> float:
    """Returns the factor of the product of A and B."""
    return alpha / (rank**0.5 if rslora else rank)


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

    def matrices(self, spec: ArraySpec) -> tuple[Any, Any]:
        """Returns all adapters' A `[I, R]` and B `[R, O]` of a matrix; zeros for adapters that do not change it."""
        inputs, outputs = spec.shape
        parts: list[tuple[Any, Any]] = []
        for adapter in self.adapters:
            pair = adapter.pairs.get(module_of(spec))
            if pair is None:
                parts.append((np.zeros((inputs, adapter.rank), np.float32), np.zeros((adapter.rank, outputs), np.float32)))
            else:
                parts.append((pair.a.T, pair.b[stored_outputs(spec)].T))
        a, b = zip(*parts, strict=True)
        return concatenated(a, 1), concatenated(b, 0)

    def check_fit(self, specs: Any) -> None:
        """Raises a `ValueError` if an adapter does not match the model with these declared parameters."""
        modules = changeable_modules(specs)
        for adapter in self.adapters:
            adapter.check_fit(modules)

    def apply(self, ops: Operations, specs: Any, params: Any, dtype: DTypeLike) -> Any:
        """Adds the adapters to a decoder's prepared parameters.

        Args:
            specs: the declaration of these parameters.
            dtype: of activations.

        Raises:
            ValueError: an adapter does not match the model.
        """
        self.check_fit(specs)

        def adapted(spec: Any, base: Any) -> Any:
            return self.field(ops, spec, base, dtype)

        layers = jax.tree.map(adapted, specs.layers, params.layers, is_leaf=lambda spec: isinstance(spec, Joined))
        return replace(params, layers=layers, adapters=jnp.asarray(self.columns))

    def merge(self, specs: Any, params: Any) -> Any:
        """Returns a decoder's unprepared parameters with the sum of the adapters in its matrices.

        Raises:
            ValueError: an adapter does not match the model.
        """
        self.check_fit(specs)

        def merged(spec: ArraySpec, w: Array) -> Array:
            return w + jnp.asarray(np.matmul(*self.matrices(spec)), w.dtype) if self.changed(spec) else w

        return replace(params, layers=jax.tree.map(merged, specs.layers, params.layers))

    def field(self, ops: Operations, spec: Any, base: Any, dtype: DTypeLike) -> Any:
        """Adds the adapters to one matrix of a layer, or to several that are `Joined`."""
        parts = spec.parts if isinstance(spec, Joined) else (spec,)
        if not any(map(self.changed, parts)):
            return base
        pairs = [self.matrices(part) if self.changed(part) else None for part in parts]
        a = concatenated([each[0] for each in pairs if each is not None], 1)

        def prepared(w: Any, name: str) -> Any:
            return ops.prepare_matrix(jnp.asarray(w, dtype), name, exact=True)

        b = tuple(
            None if each is None else prepared(each[1], f"lora_B of {part.name}")
            for part, each in zip(parts, pairs, strict=True)
        )
        return AdaptedMatrix(base, prepared(a, f"lora_A of {parts[0].name}"), b, tuple(part.shape[1] for part in parts))


def operations_for_adapters(ops: Operations, adapters: Adapters | None) -> Operations:
    """Returns operations that prepare weights so that adapters can be added."""
    return with_gates_apart(ops) if adapters is not None and adapters.change_gates else ops


def concatenated(arrays: Sequence[Any], axis: int) -> Any:
    """Concatenates arrays: those of the host on the host, since JAX would compile a program for each shape."""
    on_host = all(isinstance(each, np.ndarray) for each in arrays)
    return (np if on_host else jnp).concatenate(arrays, axis)


def stored_outputs(spec: ArraySpec) -> slice | np.ndarray:
    """Returns the outputs of a module's stored matrix that an array has, in the array's order."""
    if spec.pieces:
        return np.concatenate([np.arange(first, first + count) for first, count in spec.pieces])
    return slice(*spec.stored_bounds(((0, spec.shape[0]), (0, spec.shape[1])))[0])


def changeable_modules(specs: Any) -> dict[str, ArraySpec]:
    """Returns the declared matrices of a decoder's layers that adapters may change, by module, without routers and experts.

    Of a module that several arrays share, one of them stands for all.
    """
    return {module_of(spec): spec for layer in specs.layers for spec in spec_leaves(layer) if is_changeable(spec)}


def target_modules(specs: Any, targets: Sequence[str]) -> dict[str, ArraySpec]:
    """Returns the declared matrices of the modules that an adapter shall change.

    Args:
        specs: declaration of a decoder.
        targets: see `LoraSettings.targets`.

    Raises:
        ValueError: no module of a layer has one of the names, or only routers and experts, which adapters do not change.
    """
    modules = changeable_modules(specs)
    if not targets:
        return modules

    def ends(module: str, target: str) -> bool:
        return module == target or module.endswith(f".{target}")

    if unknown := [target for target in targets if not any(ends(module, target) for module in modules)]:
        known = ", ".join(sorted({module.rpartition(".")[2] for module in modules}))
        fixed = {module_of(spec) for layer in specs.layers for spec in spec_leaves(layer) if spec.kind in ("experts", "router")}
        reason = " (adapters do not change routers and experts)" if any(ends(m, t) for m in fixed for t in unknown) else ""
        raise ValueError(f"expected target modules among {known}, found {', '.join(unknown)}{reason}")
    return {module: spec for module, spec in modules.items() if any(ends(module, target) for target in targets)}


def is_changeable(spec: ArraySpec) -> bool:
    """True for a linear layer that every row passes; the small matrices that control a recurrent state are kept exact."""
    return spec.kind == "matrix" or "delta_heads" in spec.axes[1:]


def module_of(spec: ArraySpec) -> str:
    """Returns the name of the module to which a weight belongs."""
    return spec.name.removesuffix(".weight")
