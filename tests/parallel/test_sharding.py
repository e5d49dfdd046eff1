"""Shardings derived from declarations: the default rules on every model, any rules on any array, and what does not fit."""

from math import prod
from typing import Any, cast

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from tilewright.models import decoder, dflash, eagle3
from tilewright.models.params import ArraySpec, matrix, spec_leaves
from tilewright.parallel.mesh import make_mesh
from tilewright.parallel.sharding import (
    FULLY_SHARDED_TENSOR_PARALLEL,
    GROUPED,
    GROUPED_AXES,
    TENSOR_PARALLEL,
    IfDivides,
    Rules,
    grouped_mesh,
    partition,
    shardings,
)

SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 6,
}
MODELS = {
    "decoder": decoder.declare(decoder.DecoderConfig(family="qwen3", num_layers=2, **SIZES)),
    "dflash": dflash.declare(
        dflash.DFlashConfig(**SIZES, num_layers=1, block_size=4, mask_token_id=1, target_layer_ids=(0, 1), num_target_layers=2)
    ),
    "eagle3": eagle3.declare(
        eagle3.Eagle3Config(**SIZES, draft_vocab_size=12, target_hidden_size=8, target_layer_ids=(0, 1, 1), own_embedding=True)
    ),
}


def specs_by_name(model: str, axes: dict[str, int | None], rules: Rules) -> dict[str, PartitionSpec]:
    """How each tensor is divided, under the end of its name."""
    placed = jax.tree.leaves(shardings(MODELS[model], make_mesh(axes), rules))
    names = [spec.name.removesuffix(".weight").removeprefix("model.layers.0.") for spec in spec_leaves(MODELS[model])]
    return dict(zip(names, (sharding.spec for sharding in placed), strict=True))


def test_tensor_parallel_rules():
    """Heads, MLP and vocabulary are divided as in Megatron-LM: each matrix once, each pair of matrices along the same dim."""
    found = specs_by_name("decoder", {"tp": 2}, TENSOR_PARALLEL)
    columns = PartitionSpec(None, "tp")
    rows = PartitionSpec("tp")
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "lm_head"):
        assert found[name] == columns, name
    for name in ("self_attn.o_proj", "mlp.down_proj", "model.embed_tokens"):
        assert found[name] == rows, name
    for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "model.norm"):
        assert found[name] == PartitionSpec(), name


def test_fewer_key_value_heads_than_devices():
    """Eight heads in two groups over four devices: two devices to a group, and to its key/value head."""
    queries, keys, values, out = (f"self_attn.{name}_proj" for name in "qkvo")
    with pytest.raises(
        ValueError, match=r"layers\.0\.self_attn\.k_proj\.weight: .*'kv_heads' .* over tp=4, found 2 units of 6"
    ):
        specs_by_name("decoder", {"tp": 4}, TENSOR_PARALLEL)
    mesh = grouped_mesh(make_mesh({"tp": 4}), "tp", heads=8, kv_heads=2, vocabulary=24)
    assert mesh.shape == {"kv": 2, "group": 2}
    placed = jax.tree.leaves(shardings(MODELS["decoder"], mesh, GROUPED))
    names = [spec.name.removesuffix(".weight").removeprefix("model.layers.0.") for spec in spec_leaves(MODELS["decoder"])]
    found = dict(zip(names, placed, strict=True))
    assert (found[queries].spec, found[out].spec) == (PartitionSpec(None, GROUPED_AXES), PartitionSpec(GROUPED_AXES))
    assert found[keys].spec == found[values].spec == PartitionSpec(None, "kv")
    for name, size, per in ((queries, 48, 12), (keys, 12, 6)):
        parts = found[name].devices_indices_map((8, size))
        starts = [parts[device][1].indices(size)[0] // 6 for device in jax.devices()[:4]]
        assert starts == ([0, 2, 4, 6] if per == 12 else [0, 0, 1, 1]), "each device has the head that its queries read"


def test_a_grouped_mesh_keeps_the_other_axes_and_the_order_of_devices():
    whole = make_mesh({"fsdp": 2, "tp": 4})
    assert grouped_mesh(whole, "tp", heads=8, kv_heads=8).shape == {"fsdp": 2, "kv": 4, "group": 1}
    cut = grouped_mesh(whole, "tp", heads=8, kv_heads=1)
    assert (cut.shape, list(cut.devices.flat)) == ({"fsdp": 2, "kv": 1, "group": 4}, list(whole.devices.flat))


@pytest.mark.parametrize(
    ("devices", "sizes", "message"),
    [
        (8, {"heads": 12, "kv_heads": 4}, r"divide 12 heads, and that divide 4 key/value .*: 1, 2, 4, 12; found 8$"),
        (6, {"heads": 12, "kv_heads": 4}, r"are a multiple of them: 1, 2, 4, 12; found 6$"),
        (8, {"heads": 8, "kv_heads": 8, "vocabulary": 50}, r"divide 8 heads, 50 vocabulary, .*: 1, 2; found 8$"),
    ],
)
def test_devices_that_do_not_fit_a_model(devices: int, sizes: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        grouped_mesh(make_mesh({"tp": devices}), "tp", **sizes)
    with pytest.raises(ValueError, match=r"expected a mesh with the axis 'tp', found nodes"):
        grouped_mesh(make_mesh({"nodes": devices}), "tp", **sizes)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("axes", "rules"),
    [
        ({"fsdp": 4, "tp": 1}, FULLY_SHARDED_TENSOR_PARALLEL),
        ({"fsdp": 4, "tp": 2}, FULLY_SHARDED_TENSOR_PARALLEL),
        ({"fsdp": 1, "tp": 4}, FULLY_SHARDED_TENSOR_PARALLEL),
    ],
)
def test_fully_sharded_leaves_little_whole(model: str, axes: dict[str, int | None], rules: Rules):
    """A device holds its share of every array, but the norms of single heads, which are whole."""
    mesh = make_mesh(axes)
    for spec, placed in zip(spec_leaves(MODELS[model]), jax.tree.leaves(shardings(MODELS[model], mesh, rules)), strict=True):
        over = {"hidden": "fsdp", "heads": "tp", "vocab": "tp", "mlp": "tp"} | (
            {"kv_heads": "tp"} if axes.get("tp") == 2 else {}
        )
        used = {over[axis] for axis in spec.axes if axis in over} & set(axes)
        assert prod(placed.shard_shape(spec.shape)) * prod(mesh.shape[axis] for axis in used) == prod(spec.shape), spec.name
        assert used or spec.axes == ("head",), spec.name


AXES = st.dictionaries(st.sampled_from("abc"), st.integers(1, 4), min_size=1).filter(lambda axes: prod(axes.values()) <= 8)
DIMS = st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=3)
NAMES = st.one_of(st.sampled_from("abc"), st.lists(st.sampled_from("abc"), max_size=3, unique=True).map(tuple))
RULES = st.fixed_dictionaries(dict.fromkeys("xyz", st.one_of(st.none(), NAMES)))


def pieces(axis: str, units: int, rules: Rules, sizes: dict[str, int]) -> tuple[list[str], bool]:
    """Mesh axes over which a dim is cut, and whether that can be done; told anew, by counting."""
    rule = rules[axis]
    given = rule.axes if isinstance(rule, IfDivides) else rule
    names = [] if given is None else list(given)  # the names are single letters
    if any(name not in sizes for name in names):
        return names, False
    fits = len({len(part) for part in np.array_split(np.arange(units), prod(sizes[name] for name in names))}) == 1
    return ([], True) if isinstance(rule, IfDivides) and not fits else (names, fits)


@settings(max_examples=100)
@given(AXES, DIMS, RULES, st.sets(st.sampled_from("xyz")))
def test_any_rules_on_any_array(sizes: dict[str, int], dims: list[tuple[str, int, int]], strict: Any, loose: set[str]):
    """Either an error, where no even division follows the rules, or shards that cover the array evenly and part no unit."""
    rules = {axis: IfDivides(rule) if axis in loose and rule is not None else rule for axis, rule in strict.items()}
    mesh = make_mesh(dict(sizes))
    spec = ArraySpec("w", tuple(n * unit for _, n, unit in dims), tuple(d[0] for d in dims), units=tuple(d[2] for d in dims))
    cut = [pieces(axis, n, rules, sizes) for axis, n, _ in dims]
    used = [name for names, _ in cut for name in names]
    if not all(fits for _, fits in cut) or len(set(used)) < len(used):
        with pytest.raises(ValueError, match=r"^w: expected "):
            partition(spec, mesh.shape, rules)
        return
    placed = cast(NamedSharding, shardings(spec, mesh, rules))
    times = np.zeros(spec.shape, int)
    for index in placed.devices_indices_map(spec.shape).values():
        times[index] += 1
        shape = times[index].shape
        assert shape == placed.shard_shape(spec.shape)
        for n, (part, size, unit) in enumerate(zip(index, spec.shape, spec.units, strict=True)):
            assert shape[n] * prod(sizes[name] for name in cut[n][0]) == size
            assert part.indices(size)[0] % unit == shape[n] % unit == 0
    assert set(times.flat) == {mesh.size // prod(sizes[name] for name in used)}


MESH = make_mesh({"fsdp": 2, "tp": 3})


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"hidden": None}, r"w: expected a rule for each logical axis, found none for 'mlp', only hidden$"),
        ({"hidden": "tp", "mlp": None}, r"w: expected the dim 'hidden' to divide evenly over tp=3, found 4 units of 1$"),
        ({"hidden": None, "mlp": ("fsdp", "tp")}, r"'mlp' to divide evenly over fsdp=2 × tp=3, found 3 units of 4$"),
        ({"hidden": "fsdp", "mlp": "dp"}, r"w: expected axes of the mesh \(fsdp, tp\), found dp in the rule for 'mlp'$"),
        ({"hidden": "", "mlp": None}, r"w: expected axes of the mesh \(fsdp, tp\), found  in the rule for 'hidden'$"),
        (
            {"hidden": "fsdp", "mlp": ("tp", "fsdp")},
            r"'mlp' to divide evenly over tp=3 × fsdp=2, found 3 units of 4$",
        ),
    ],
)
def test_rules_that_do_not_fit(rules: Rules, message: str):
    with pytest.raises(ValueError, match=message):
        shardings(matrix("w", 4, 12, ("hidden", "mlp"), units=(1, 4)), MESH, rules)


@pytest.mark.parametrize("rules", [{"hidden": "fsdp", "mlp": ("tp", "fsdp")}, {"hidden": "fsdp", "mlp": IfDivides("fsdp")}])
def test_a_mesh_axis_divides_one_dim(rules: Rules):
    with pytest.raises(ValueError, match=r"^w: expected fsdp to divide one dim at most, found 'hidden' over fsdp"):
        partition(matrix("w", 4, 12, ("hidden", "mlp")), MESH.shape, rules)


def test_a_square_matrix_of_one_axis():
    with pytest.raises(ValueError, match=r"found 'hidden' over fsdp, 'hidden' over fsdp$"):
        partition(ArraySpec("w", (4, 4), ("hidden", "hidden")), MESH.shape, {"hidden": "fsdp"})
