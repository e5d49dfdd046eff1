"""Mixtures of experts: routing, and the MLP half of a layer that has one.

Every row goes to its experts, however many rows choose the same (dropless), and shapes do not depend on what is chosen: rows
are put in the order of their experts, and a grouped product takes them one expert after another.

Legend: R rows, H hidden size, E experts, K of them chosen for a row.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.operations import Joined, Operations, RoutedProduct, RoutedWeights
from tilewright.models.params import ArraySpec, matrix


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts in the place of an MLP.

    Attributes:
        experts: E.
        chosen: K.
        size: what an expert has in the place of an MLP's intermediate size.
        normalised: the weights of the chosen ones add up to one.
        clamped: the gate is `ClampedGate`'s; None for `silu`.
        shared: the intermediate size of an expert that every row goes to besides; 0 where there is none.
    """

    experts: int
    chosen: int
    size: int
    normalised: bool = True
    clamped: "ClampedGate | None" = None
    shared: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.experts:
            raise ValueError(f"expected from 1 to {self.experts} experts for each token, found {self.chosen}")

    def read(self, rows: float) -> float:
        """The experts that so many rows are expected to read, if each chooses evenly: E (1 - (1 - K / E) ** rows)."""
        return self.experts * (1 - (1 - self.chosen / self.experts) ** rows)


@dataclass(frozen=True)
class ClampedGate:
    """gpt-oss' gate: `(up + 1) * gate * sigmoid(alpha * gate)`, of numbers up to a limit."""

    alpha: float
    limit: float

    def __call__(self, gate: Array, up: Array) -> Array:
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


@dataclass(frozen=True)
class ExpertNames:
    """Names of a mixture's tensors in a family's checkpoints, behind those of the layer.

    Attributes:
        router: the layer whose outputs are the experts' scores.
        gate_up: gate and up, which may be one tensor that has gates before ups; or a tensor that has an output of each in turn.
        biased: all of them have biases, and experts' matrices are stored `[experts, in, out]`.
        shared: the expert that every row goes to; its share is what `<shared>_gate` says.
    """

    router: str
    gate_up: tuple[str, ...]
    down: str
    biased: bool = False
    shared: str = ""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SharedExpert:
    """An expert that every row goes to, and the matrix `[H, 1]` whose sigmoid is its weight."""

    gate_up: Any
    down: Any
    weight: Any


@partial(jax.tree_util.register_dataclass, data_fields=["weight", "bias", "expert_bias", "shared"], meta_fields=["mixture"])
@dataclass(frozen=True)
class Router:
    """Scores, and biases, of a layer with experts.

    Attributes:
        weight, bias: of the experts' scores, `[H, E]` and `[E]`.
        expert_bias: of the experts' two products, `[E, O]`; None, as `bias`, where the family has none.
        mixture: no array, but the same in a declaration and in what is made of it.
        shared: `SharedExpert`; None where there is none.
    """

    weight: Any
    bias: Any
    expert_bias: Any
    mixture: Mixture
    shared: Any = None


def declare_mixture(
    mixture: Mixture, names: ExpertNames, prefix: str, hidden: int, out_scale: float
) -> tuple[Router, Any, Any]:
    """The arrays of a mixture: its router, and what stands in the place of an MLP's gate and up, and down."""
    e = mixture.experts
    i = mixture.size

    def experts(name: str, d_in: int, d_out: int, axes: tuple[str, str], scale: float = 0.02) -> ArraySpec:
        axes_of = ("experts", *axes)
        return ArraySpec(f"{prefix}.{name}", (e, d_in, d_out), axes_of, "experts", scale=scale, transposed=not names.biased)

    width = i if len(names.gate_up) == 2 else 2 * i
    gate_up = tuple(experts(name, hidden, width, ("hidden", "gate_up")) for name in names.gate_up)
    down = experts(names.down, i, hidden, ("expert", "hidden"), out_scale)
    router = f"{prefix}.{names.router}"
    bias = None
    expert_bias = None
    if names.biased:
        bias = ArraySpec(f"{router}.bias", (e,), ("router",))
        sizes = ((names.gate_up[0], 2 * i, "gate_up"), (names.down, hidden, "hidden"))
        expert_bias = tuple(ArraySpec(f"{prefix}.{name}_bias", (e, size), ("experts", axis)) for name, size, axis in sizes)
    weight = ArraySpec(f"{router}.weight", (hidden, e), ("hidden", "router"), "router", transposed=True)
    if len(set(names.gate_up)) < len(gate_up):
        gate_up = tuple(replace(part, rows=(n * i, 2 * i)) for n, part in enumerate(gate_up))
    joined = Joined(gate_up, gated=True) if len(gate_up) == 2 else gate_up[0]
    shared = declare_shared(mixture.shared, f"{prefix}.{names.shared}", hidden, out_scale) if mixture.shared else None
    return Router(weight, bias, expert_bias, mixture, shared), joined, down


def declare_shared(size: int, name: str, hidden: int, out_scale: float) -> SharedExpert:
    """The arrays of an expert that every row goes to."""
    parts = (matrix(f"{name}.{part}_proj.weight", hidden, size, ("hidden", "shared_expert")) for part in ("gate", "up"))
    down = matrix(f"{name}.down_proj.weight", size, hidden, ("shared_expert", "hidden"), out_scale)
    weight = ArraySpec(f"{name}_gate.weight", (hidden, 1), ("hidden", "single"), "router", transposed=True)
    return SharedExpert(Joined(tuple(parts), gated=True), down, weight)


def route(mixture: Mixture, scores: Float[Array, "R E"]) -> tuple[Int[Array, "R K"], Float[Array, "R K"]]:
    """Experts of each row, those with the largest scores first (of equals the first), and their weights, in float32.

    The weights are the softmax of the chosen scores, or of all where they are not normalised.
    """
    best, experts = jax.lax.top_k(scores.astype(jnp.float32), mixture.chosen)
    if mixture.normalised:
        return experts, jax.nn.softmax(best, axis=-1)
    return experts, jnp.exp(best - jax.nn.logsumexp(scores.astype(jnp.float32), axis=-1, keepdims=True))


class ExpertRows(NamedTuple):
    """Rows in the order of their experts: R * K of them, a row as often as it has experts.

    Attributes:
        rows: which row each of them is.
        places: where each row's are, `[R, K]`.
        experts: the expert of each of them.
        sizes: how many each of this device's experts has. Those of other experts follow behind them.
    """

    rows: Int[Array, " RK"]
    places: Int[Array, "R K"]
    experts: Int[Array, " RK"]
    sizes: Int[Array, " held"]


def grouped(experts: Int[Array, "R K"], held: int, first: Array | int = 0, count: Int[Array, ""] | None = None) -> ExpertRows:
    """Puts rows in the order of their experts.

    Args:
        held: how many experts this device has.
        first: the number of the first of them.
        count: only so many rows go to experts, from the first.
    """
    r, k = experts.shape
    here = (experts >= first) & (experts < first + held)
    if count is not None:
        here &= jnp.arange(r)[:, None] < count
    own = jnp.where(here, experts - first, held).reshape(-1)
    order = jnp.argsort(own, stable=True)
    places = jnp.zeros(r * k, jnp.int32).at[order].set(jnp.arange(r * k, dtype=jnp.int32), unique_indices=True)
    sizes = jnp.sum(own[:, None] == jnp.arange(held), axis=0, dtype=jnp.int32)
    return ExpertRows(order // k, places.reshape(r, k), jnp.minimum(own[order], held - 1), sizes)


def routed_product(mixture: Mixture) -> RoutedProduct:
    """The product of rows with a mixture's experts."""
    steps = router_scores, partial(route, mixture), sum_of_chosen
    return RoutedProduct(*steps, mixture.experts, mixture.chosen, mixture.shared > 0)


def routed_weights(router: Router, gate_up: Any, down: Any) -> RoutedWeights:
    """The arrays of `routed_product`."""
    common = replace(router, expert_bias=None)
    shared = router.shared
    products = None
    if shared is not None:
        common = replace(common, shared=replace(shared, gate_up=None, down=None))
        products = (shared.gate_up, shared.down)
    return RoutedWeights(common, (gate_up, down, router.expert_bias), products)


def router_scores(ops: Operations, h: Float[Array, "R H"], w: RoutedWeights) -> Float[Array, "R E"]:
    """The experts' scores for each row, float32."""
    scores = ops.linear(h, w.whole.weight, jnp.float32)
    return scores if w.whole.bias is None else scores + w.whole.bias.astype(jnp.float32)


def sum_of_chosen(
    ops: Operations,
    h: Float[Array, "R H"],
    w: RoutedWeights,
    experts: Int[Array, "R K"],
    weights: Float[Array, "R K"],
    count: Int[Array, ""] | None = None,
) -> Float[Array, "R H"]:
    """The sum of each row's experts by their weights, in float32; of this device's experts alone where there are more."""
    router, (gate_up, down, expert_bias), shared = w
    mixture = router.mixture
    held = down.shape[0]
    groups = grouped(experts, held, ops.first_expert(held), count)
    x = ops.gather_rows(h, groups.rows)
    if expert_bias is None:
        inner = ops.grouped_gated(x, gate_up, groups.sizes)
        y = ops.grouped_linear(inner, down, groups.sizes, jnp.float32)
    else:
        of_gate, of_down = (bias.astype(jnp.float32)[groups.experts] for bias in expert_bias)
        both = ops.grouped_linear(x, gate_up, groups.sizes, jnp.float32) + of_gate
        assert mixture.clamped is not None, "experts with biases have gpt-oss' gate"
        inner = mixture.clamped(both[:, ::2], both[:, 1::2]).astype(h.dtype)
        there = jnp.arange(len(x))[:, None] < jnp.sum(groups.sizes)
        y = ops.grouped_linear(inner, down, groups.sizes, jnp.float32) + jnp.where(there, of_down, 0)
    parts = ops.gather_rows(y, groups.places)
    total = weights[:, 0, None] * parts[:, 0]  # one after another: a row's sum is the same however many rows there are
    for n in range(1, mixture.chosen):
        total += weights[:, n, None] * parts[:, n]
    if shared is not None:
        y = ops.linear(ops.gated_linear(h, shared[0]), shared[1], jnp.float32)
        total += jax.nn.sigmoid(ops.linear(h, router.shared.weight, jnp.float32)) * y
    return total


class RouterLoad(NamedTuple):
    """Sums over rows, of which the balancing loss is made; those of several layers, or devices, add up.

    Attributes:
        chosen: how many rows went to each expert.
        shares: of the softmax of their scores.
    """

    chosen: Float[Array, " E"]
    shares: Float[Array, " E"]


def router_load(mixture: Mixture, scores: Float[Array, "R E"]) -> RouterLoad:
    """The load that rows with these scores make."""
    experts, _ = route(mixture, scores)
    chosen = jnp.sum(jax.nn.one_hot(experts, mixture.experts, dtype=jnp.float32), axis=(0, 1))
    return RouterLoad(chosen, jnp.sum(jax.nn.softmax(scores.astype(jnp.float32), axis=-1), axis=0))


def balancing_loss(mixture: Mixture, load: RouterLoad) -> Float[Array, ""]:
    """E times the sum over experts of the part of all rows that went there and the mean share of its score.

    It is K where rows are spread evenly, and has a gradient by the shares alone. All layers' rows count as one batch, as in
    transformers' `load_balancing_loss_func`; after Fedus et al., "Switch Transformers" (arXiv 2101.03961), section 2.2.
    """
    rows = jnp.maximum(jnp.sum(load.chosen) / mixture.chosen, 1.0)
    return mixture.experts * jnp.sum(load.chosen / rows * (load.shares / rows))
