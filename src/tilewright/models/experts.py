"""Mixtures of experts: routing, and the MLP sublayer of a layer with experts.

Routing is dropless: every row reaches all of its experts, and no shape depends on the routing. Rows are sorted by expert, and a
grouped matmul multiplies them with one expert after another.

Legend: R rows, H hidden size, E experts, K of them chosen for a row.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.operations import Joined, Operations, RoutedProduct, RoutedWeights
from tilewright.models.params import ArraySpec, matrix


@dataclass(frozen=True)
class Mixture:
    """Sizes of a mixture of experts that replaces an MLP, or is added to one.

    Attributes:
        experts: E.
        chosen: K.
        size: the intermediate size of an expert.
        normalised: the weights of the chosen experts sum to 1.
        clamped: the gate is `ClampedGate`'s; None for `silu`.
        shared: the intermediate size of the shared expert, which every row uses; 0 if there is none.
        sigmoid: routing by sigmoids of the scores; None for their softmax.
        activation: activation of the gate, without `clamped`.
        beside_mlp: the layer also has an MLP (`MlpBeside`), and a norm of the router's own.
    """

    experts: int
    chosen: int
    size: int
    normalised: bool = True
    clamped: "ClampedGate | None" = None
    shared: int = 0
    sigmoid: "SigmoidRouting | None" = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    beside_mlp: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.experts:
            raise ValueError(f"expected from 1 to {self.experts} experts for each token, found {self.chosen}")
        if self.sigmoid is not None:
            self.sigmoid.check(self.experts, self.chosen)

    def expected_experts(self, rows: float) -> float:
        """Returns the expected number of experts that `rows` rows read under uniform routing.

        The number is E (1 - (1 - K / E) ** rows).
        """
        return self.experts * (1 - (1 - self.chosen / self.experts) ** rows)


@dataclass(frozen=True)
class ClampedGate:
    """gpt-oss' gate: `(up + 1) * gate * sigmoid(alpha * gate)`, with inputs clamped to a limit."""

    alpha: float
    limit: float

    def __call__(self, gate: Array, up: Array) -> Array:
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


@dataclass(frozen=True)
class SigmoidRouting:
    """Routing of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) and LLaDA2.

    An expert's affinity is the sigmoid of its score. Experts are chosen by affinity plus a stored correction, which does not
    change their weights. They belong to groups of equal size; a row chooses among the experts of its best groups, which are
    those with the largest sum of their best two.

    Attributes:
        groups: number of groups.
        chosen_groups: number of groups among whose experts a row chooses.
        scale: factor of the weights.
    """

    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0

    def check(self, experts: int, chosen: int) -> None:
        """Raises a `ValueError` if the groups do not fit the number of experts and of those that a row chooses."""
        each = experts // self.groups
        if experts % self.groups or (self.groups > 1 and each < 2):
            raise ValueError(f"expected groups that divide {experts} experts, with at least 2 each, found {self.groups}")
        if not 1 <= self.chosen_groups <= self.groups:
            raise ValueError(f"expected from 1 to {self.groups} groups for each token, found {self.chosen_groups}")
        if chosen > self.chosen_groups * each:
            raise ValueError(f"expected at most {self.chosen_groups * each} experts for each token, found {chosen}")

    def choose(
        self, chosen: int, normalised: bool, scores: Float[Array, "R E"], correction: Float[Array, " E"]
    ) -> tuple[Int[Array, "R K"], Float[Array, "R K"]]:
        """Selects experts and their weights; see `route`."""
        affinities = jax.nn.sigmoid(scores)
        ranked = affinities + correction.astype(jnp.float32)
        if self.groups > 1:
            by_group = ranked.reshape(len(ranked), self.groups, -1)
            best_two = jnp.sum(jax.lax.top_k(by_group, 2)[0], axis=-1)
            _, best = jax.lax.top_k(best_two, self.chosen_groups)
            is_best = jnp.any(best[:, :, None] == jnp.arange(self.groups), axis=1)
            ranked = jnp.where(is_best[:, :, None], by_group, -jnp.inf).reshape(ranked.shape)
        _, experts = jax.lax.top_k(ranked, chosen)
        weights = jnp.take_along_axis(affinities, experts, axis=1)
        if normalised:
            weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
        return experts, weights * self.scale


@dataclass(frozen=True)
class ExpertNames:
    """Names of a mixture's tensors in a family's checkpoints, after the name of the layer.

    Attributes:
        router: the layer whose outputs are the router scores.
        gate_up: gate and up. The same name twice is a tensor with gates before ups; a single name is a tensor whose outputs
            alternate between gate and up.
        biased: all of them have biases, and experts' matrices are stored `[experts, in, out]`.
        shared: the shared expert.
        shared_gated: `<shared>_gate` weights the shared expert; otherwise its weight is 1.
        correction: the correction of the experts' affinities; empty without `SigmoidRouting`.
        scale: factors of the experts' weights; empty if there are none.
    """

    router: str
    gate_up: tuple[str, ...]
    down: str
    biased: bool = False
    shared: str = ""
    shared_gated: bool = True
    correction: str = ""
    scale: str = ""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SharedExpert:
    """Expert that every row uses, and the matrix `[H, 1]` whose sigmoid is its weight; None for the weight 1."""

    gate_up: Any
    down: Any
    weight: Any


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "bias", "expert_bias", "shared", "correction", "scale"],
    meta_fields=["mixture"],
)
@dataclass(frozen=True)
class Router:
    """Router and biases of a layer with experts.

    Attributes:
        weight, bias: of the router, `[H, E]` and `[E]`.
        expert_bias: of the experts' two matmuls, `[E, O]`; None, as is `bias`, if the family has no biases.
        mixture: static settings, the same in a declaration and in its parameters.
        shared: `SharedExpert`; None if there is none.
        correction: addend `[E]` of the affinities in the choice of experts; None without `SigmoidRouting`.
        scale: factor `[E]` of the weights of chosen experts; None for 1.
    """

    weight: Any
    bias: Any
    expert_bias: Any
    mixture: Mixture
    shared: Any = None
    correction: Any = None
    scale: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MlpBeside:
    """MLP of a layer that adds its experts to it (Gemma 4). All weights but the matrices are `[H]`.

    Attributes:
        norm: norm before the MLP; the experts have the layer's.
        gate_up, down: matrices of the MLP, whose gate is that of the experts.
        out_norm, experts_norm: norms of the MLP's and of the experts' output.
        router_norm: norm before the router, whose weights count as divided by the square root of H.
    """

    norm: Any
    gate_up: Any
    down: Any
    out_norm: Any
    experts_norm: Any
    router_norm: Any


def declare_mixture(
    mixture: Mixture, names: ExpertNames, prefix: str, hidden: int, out_scale: float
) -> tuple[Router, Any, Any]:
    """Declares the arrays of a mixture: router, gate and up, and down."""
    e = mixture.experts
    i = mixture.size

    def experts(name: str, d_in: int, d_out: int, axes: tuple[str, str], scale: float = 0.02) -> ArraySpec:
        all_axes = ("experts", *axes)
        return ArraySpec(f"{prefix}.{name}", (e, d_in, d_out), all_axes, "experts", scale=scale, transposed=not names.biased)

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
    joined = gate_up[0] if len(gate_up) == 1 else gate_up if mixture.activation != "silu" else Joined(gate_up, gated=True)
    shared = None
    if mixture.shared:
        shared = declare_shared(mixture.shared, f"{prefix}.{names.shared}", hidden, out_scale, names.shared_gated)
    correction = None if mixture.sigmoid is None else ArraySpec(f"{prefix}.{names.correction}", (e,), ("router",))
    scale = ArraySpec(f"{prefix}.{names.scale}", (e,), ("router",), init="ones") if names.scale else None
    return Router(weight, bias, expert_bias, mixture, shared, correction, scale), joined, down


def declare_shared(size: int, name: str, hidden: int, out_scale: float, gated: bool) -> SharedExpert:
    """Declares the arrays of a shared expert; see `ExpertNames.shared_gated`."""
    parts = (matrix(f"{name}.{part}_proj.weight", hidden, size, ("hidden", "shared_expert")) for part in ("gate", "up"))
    down = matrix(f"{name}.down_proj.weight", size, hidden, ("shared_expert", "hidden"), out_scale)
    weight = ArraySpec(f"{name}_gate.weight", (hidden, 1), ("hidden", "single"), "router", transposed=True) if gated else None
    return SharedExpert(Joined(tuple(parts), gated=True), down, weight)


def route(
    mixture: Mixture, scores: Float[Array, "R E"], correction: Float[Array, " E"] | None = None
) -> tuple[Int[Array, "R K"], Float[Array, "R K"]]:
    """Selects the experts of each row, by descending score (the first among equals), and their weights in float32.

    The weights are the softmax of the chosen scores, or of all scores if they are not normalised; see also `SigmoidRouting`.

    Args:
        correction: see `Router`.
    """
    if mixture.sigmoid is not None:
        assert correction is not None, "expected the correction of the experts' affinities"
        return mixture.sigmoid.choose(mixture.chosen, mixture.normalised, scores.astype(jnp.float32), correction)
    best, experts = jax.lax.top_k(scores.astype(jnp.float32), mixture.chosen)
    if mixture.normalised:
        return experts, jax.nn.softmax(best, axis=-1)
    return experts, jnp.exp(best - jax.nn.logsumexp(scores.astype(jnp.float32), axis=-1, keepdims=True))


class ExpertRows(NamedTuple):
    """Rows sorted by expert: R * K entries, one for each row and chosen expert.

    Attributes:
        rows: the row of each entry.
        places: the entries of each row, `[R, K]`.
        experts: the expert of each entry, by its number on this device.
        sizes: number of entries of each of this device's experts. Entries of other experts follow behind.
    """

    rows: Int[Array, " RK"]
    places: Int[Array, "R K"]
    experts: Int[Array, " RK"]
    sizes: Int[Array, " num_local"]


def grouped(
    experts: Int[Array, "R K"], num_local: int, first: Array | int = 0, count: Int[Array, ""] | None = None
) -> ExpertRows:
    """Sorts rows by their experts.

    Args:
        num_local: number of experts on this device.
        first: the number of this device's first expert.
        count: only the first `count` rows are routed.
    """
    r, k = experts.shape
    is_local = (experts >= first) & (experts < first + num_local)
    if count is not None:
        is_local &= jnp.arange(r)[:, None] < count
    local = jnp.where(is_local, experts - first, num_local).reshape(-1)
    order = jnp.argsort(local, stable=True)
    places = jnp.zeros(r * k, jnp.int32).at[order].set(jnp.arange(r * k, dtype=jnp.int32), unique_indices=True)
    sizes = jnp.sum(local[:, None] == jnp.arange(num_local), axis=0, dtype=jnp.int32)
    return ExpertRows(order // k, places.reshape(r, k), jnp.minimum(local[order], num_local - 1), sizes)


def routed_product(mixture: Mixture) -> RoutedProduct:
    """Returns the functions that compute a mixture: scores, routing, and the weighted sum."""

    def choose(scores: Array, w: RoutedWeights) -> tuple[Array, Array]:
        experts, weights = route(mixture, scores, w.replicated.correction)
        scale = w.replicated.scale
        return experts, weights if scale is None else weights * scale.astype(jnp.float32)[experts]

    return RoutedProduct(router_scores, choose, sum_of_chosen, mixture.experts, mixture.chosen, mixture.shared > 0)


def routed_weights(router: Router, gate_up: Any, down: Any) -> RoutedWeights:
    """Returns the arrays of `routed_product`."""
    common = replace(router, expert_bias=None)
    shared = router.shared
    products = None
    if shared is not None:
        common = replace(common, shared=replace(shared, gate_up=None, down=None))
        products = (shared.gate_up, shared.down)
    return RoutedWeights(common, (gate_up, down, router.expert_bias), products)


def router_scores(ops: Operations, h: Float[Array, "R H"], w: RoutedWeights) -> Float[Array, "R E"]:
    """Computes each row's router scores, float32."""
    scores = ops.linear(h, w.replicated.weight, jnp.float32)
    return scores if w.replicated.bias is None else scores + w.replicated.bias.astype(jnp.float32)


def sum_of_chosen(
    ops: Operations,
    h: Float[Array, "R H"],
    w: RoutedWeights,
    experts: Int[Array, "R K"],
    weights: Float[Array, "R K"],
    count: Int[Array, ""] | None = None,
) -> Float[Array, "R H"]:
    """Returns the weighted sum of each row's experts, in float32.

    If experts are sharded, the sum is over this device's experts.
    """
    router, (gate_up, down, expert_bias), shared = w
    mixture = router.mixture
    num_local = down.shape[0]
    groups = grouped(experts, num_local, ops.first_expert(num_local), count)
    x = ops.gather_rows(h, groups.rows)
    if expert_bias is None:
        if mixture.activation == "silu":
            inner = ops.grouped_gated(x, gate_up, groups.sizes)
        else:
            inner = gelu_product(*(ops.grouped_linear(x, part, groups.sizes) for part in gate_up))
        y = ops.grouped_linear(inner, down, groups.sizes, jnp.float32)
    else:
        gate_bias, down_bias = (bias.astype(jnp.float32)[groups.experts] for bias in expert_bias)
        both = ops.grouped_linear(x, gate_up, groups.sizes, jnp.float32) + gate_bias
        assert mixture.clamped is not None, "expected the gate of gpt-oss for experts with biases"
        inner = mixture.clamped(both[:, ::2], both[:, 1::2]).astype(h.dtype)
        is_routed = jnp.arange(len(x))[:, None] < jnp.sum(groups.sizes)
        y = ops.grouped_linear(inner, down, groups.sizes, jnp.float32) + jnp.where(is_routed, down_bias, 0)
    parts = ops.gather_rows(y, groups.places)
    total = weights[:, 0, None] * parts[:, 0]  # in a fixed order: a row's sum does not depend on the number of rows
    for n in range(1, mixture.chosen):
        total += weights[:, n, None] * parts[:, n]
    if shared is not None:
        y = ops.linear(ops.gated_linear(h, shared[0]), shared[1], jnp.float32)
        if router.shared.weight is None:
            total += y
        else:
            total += jax.nn.sigmoid(ops.linear(h, router.shared.weight, jnp.float32)) * y
    return total


def gelu_product(gate: Float[Array, "*rows I"], up: Float[Array, "*rows I"]) -> Float[Array, "*rows I"]:
    """Computes `gelu(gate) * up` with the tanh approximation (Hendrycks and Gimpel, arXiv 1606.08415, section 2)."""
    return (jax.nn.gelu(gate.astype(jnp.float32), approximate=True) * up.astype(jnp.float32)).astype(gate.dtype)


class RouterLoad(NamedTuple):
    """Sums over rows for the balancing loss. Sums of several layers or devices can be added.

    Attributes:
        chosen: number of rows that went to each expert.
        shares: sum of the softmax of the rows' router scores.
    """

    chosen: Float[Array, " E"]
    shares: Float[Array, " E"]


def router_load(mixture: Mixture, scores: Float[Array, "R E"]) -> RouterLoad:
    """Computes the load of rows from their router scores."""
    experts, _ = route(mixture, scores)
    chosen = jnp.sum(jax.nn.one_hot(experts, mixture.experts, dtype=jnp.float32), axis=(0, 1))
    return RouterLoad(chosen, jnp.sum(jax.nn.softmax(scores.astype(jnp.float32), axis=-1), axis=0))


def balancing_loss(mixture: Mixture, load: RouterLoad) -> Float[Array, ""]:
    """Returns E times the sum over experts of the fraction of rows and the mean router probability.

    The loss is K if rows are spread evenly, and only the probabilities have a gradient. Rows of all layers count as one batch,
    as in transformers' `load_balancing_loss_func`; after Fedus et al., "Switch Transformers" (arXiv 2101.03961), section 2.2.
    """
    rows = jnp.maximum(jnp.sum(load.chosen) / mixture.chosen, 1.0)
    return mixture.experts * jnp.sum(load.chosen / rows * (load.shares / rows))
