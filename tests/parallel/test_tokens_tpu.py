"""What the TPU compiler makes of token threading: schedules that follow the thread, tags, and nothing more to run.

Skipped without the compiler. v5e's all-gathers are asynchronous, v6e's are not.
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from parallel.test_tokens import untied
from tilewright.compiled.aot import Compiled, compile_for, tpu_topology
from tilewright.compiled.hlo import FREE, read_module
from tilewright.hardware.tpu import chip_of
from tilewright.parallel import rings, tokens
from tilewright.parallel.mesh import make_mesh
from tilewright.perfmodel.schedule import COPY, read_schedule

pytestmark = pytest.mark.tpu

WHOLE = PartitionSpec()
ROWS = PartitionSpec("fsdp")
HIDDEN = 2048
INNER = 8192
LAYERS = 4
TOKENS = 2048
UP = PartitionSpec("fsdp", "tp")
DOWN = PartitionSpec(("tp", "fsdp"))


class UnderWay(NamedTuple):
    """A collective in a schedule: its tags, when it begins and ends, and the products whose results it has beside it."""

    kind: str
    stream: int
    start: int
    end: int
    beside: tuple[str, ...]


def compiled(chip: str, inside: Callable[..., Any], shapes: Any, specs: Any, out: Any) -> Compiled:
    mesh = make_mesh({"fsdp": 4, "tp": 2}, tpu_topology(chip).devices)
    args = jax.tree.map(
        lambda spec, shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)), specs, shapes
    )
    return compile_for(chip, jax.shard_map(inside, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False), *args)


def schedule(program: Compiled) -> list[UnderWay]:
    """The collectives in the order in which they begin."""
    graph = read_schedule(program.hlo, chip_of(program.chip))
    ops = {op.name: op for computation in read_module(program.hlo).computations.values() for op in computation.ops}
    ends = {node.start: at for at, node in enumerate(graph.nodes) if node.start is not None}
    found = []
    for start, node in enumerate(graph.nodes):
        if node.transfer is None or node.transfer.kind == COPY:
            continue
        end = ends.get(start, start)
        # Of an asynchronous collective, the end has the tags.
        tags = re.search(r'collective_type="(\w+)",stream_id="(\d+)"', ops[graph.nodes[end].name].attributes)
        kind, stream = tags.groups() if tags else ("untagged", -1)  # as where two were merged
        beside = [each.op_name for each in graph.nodes[start + 1 : end] if each.cycles and "dot_general" in each.op_name]
        found.append(UnderWay(kind, int(stream), start, end, tuple(beside)))
    return found


COLLECTIVES: dict[str, Callable[[Array], Array]] = {
    "weights": lambda x: jax.lax.all_gather(x, "fsdp", tiled=True),
    "gradients": lambda x: jax.lax.psum_scatter(x, "fsdp", tiled=True),
    "activations": lambda x: jax.lax.psum(x, "tp"),
}
NAMES = ["gradients_0", "weights_0", "activations_0", "weights_1", "gradients_1", "activations_1", "weights_2"]


@cache
def independent(chip: str, threaded: bool) -> Compiled:
    """Collectives, each on an argument of its own, and a product of each."""

    def inside(*xs: Array) -> list[Array]:
        token = tokens.new_token()
        results = []
        for name, x in zip(NAMES, xs, strict=True):
            collective = COLLECTIVES[name.split("_")[0]]
            stream = int(not name.startswith("activations"))
            result, token = (tokens.thread if threaded else untied)(token, collective, x, kind=name, stream=stream)
            results.append(result @ result.T)
        return results

    count = len(NAMES)
    return compiled(chip, inside, ((512, 512),) * count, (WHOLE,) * count, [WHOLE] * count)


@pytest.mark.parametrize("chip", ["v5e:4x2", "v6e:4x2"])
def test_the_schedule_follows_the_thread(chip: str):
    found = schedule(independent(chip, threaded=True))
    assert [each.kind for each in found] == NAMES
    assert [each.stream for each in found] == [int(not name.startswith("activations")) for name in NAMES]
    assert all(before.end < after.start for before, after in pairwise(found))


@pytest.mark.parametrize("chip", ["v5e:4x2", "v6e:4x2"])
def test_without_a_token_the_compiler_chooses_another_order(chip: str):
    assert [each.kind for each in schedule(independent(chip, threaded=False))] != NAMES


@pytest.mark.parametrize("chip", ["v5e:4x2", "v6e:4x2"])
def test_a_token_leaves_nothing_to_run(chip: str):
    """As many products and collectives, as many cycles to a thousandth, and no array more in memory."""
    ours = independent(chip, threaded=True)
    plain = independent(chip, threaded=False)
    assert not re.search(r" opt-barrier\(", ours.hlo)
    assert abs(ours.cycles - plain.cycles) < plain.cycles / 1000
    assert ours.temp_bytes <= plain.temp_bytes
    counts = [
        Counter(op.opcode for op in read_module(program.hlo).entry.ops if op.opcode not in FREE) for program in (ours, plain)
    ]
    assert counts[0]["all-reduce"] == 2
    assert counts[0]["copy"] <= counts[1]["copy"]


@cache
def prefetching(threaded: bool) -> Compiled:
    """Layers of two products, whose weights are gathered a layer ahead: the first under the first product, and so on."""
    thread = tokens.thread if threaded else untied

    def mark(x: Array, token: Array) -> tuple[Array, Array]:
        return tokens.done(x, token) if threaded else (x, token)

    def inside(x: Array, layers: list[list[Array]]) -> Array:
        token = tokens.new_token()
        held = {}

        def fetch(n: int, half: int, token: Array) -> Array:
            if n < LAYERS:
                kind = f"weights_{n}_{half}"
                collective = COLLECTIVES["weights"]
                held[n, half], token = thread(token, collective, layers[n][half], kind=kind, stream=1)
            return token

        for half in range(2):
            token = fetch(0, half, token)
        for n in range(LAYERS):
            with jax.named_scope(f"layer_{n}"):
                x, token = mark(x, token)
                token = fetch(n + 1, 0, token)
                y, token = mark(jax.nn.silu(x @ held[n, 0]), token)
                token = fetch(n + 1, 1, token)
                y, token = thread(token, COLLECTIVES["activations"], y @ held[n, 1], kind=f"activations_{n}")
                x = x + y
        return x

    shapes = ((4 * TOKENS, HIDDEN), [[(HIDDEN, INNER), (INNER, HIDDEN)]] * LAYERS)
    return compiled("v5e:4x2", inside, shapes, (ROWS, [[UP, DOWN]] * LAYERS), ROWS)


def hidden(program: Compiled) -> list[bool]:
    """For each layer's weights but the first, whether the previous layer's compute, and no other's, is in their window."""
    windows = {each.kind: each.beside for each in schedule(program)}
    return [
        bool(windows[f"weights_{n}_{half}"]) and all(f"layer_{n - 1}/" in name for name in windows[f"weights_{n}_{half}"])
        for n in range(1, LAYERS)
        for half in range(2)
    ]


def test_weights_are_gathered_under_the_layer_before():
    assert all(hidden(prefetching(threaded=True)))


def test_without_a_token_weights_come_at_another_time():
    assert not all(hidden(prefetching(threaded=False)))


GATHERS: dict[str, Callable[[Array], Array]] = {
    "whole": lambda x: jax.lax.all_gather(x, "fsdp", tiled=True),
    "ring": lambda x: rings.all_gather(x, "fsdp"),
}
FORWARD = ["weights", "activations", "more"]
BACKWARD = ["more", "activations", "weights"]
DEPTH = 3


def looped(chip: str, gather: str, threaded: bool, remat: bool) -> Compiled:
    """The gradient of a loop over layers that gather two weights, of which only the first is read at once."""
    thread = tokens.thread if threaded else untied

    def layer(token: Array, x: Array, shards: list[Array]) -> tuple[Array, Array]:
        w, token = thread(token, GATHERS[gather], shards[0], kind="weights", stream=1)
        y, token = thread(token, COLLECTIVES["activations"], jax.nn.silu(x @ w), kind="activations")
        v, token = thread(token, GATHERS[gather], shards[1], kind="more", stream=1)
        return x + y @ v, token

    run = tokens.checkpoint(layer) if threaded and remat else jax.checkpoint(layer) if remat else layer

    def loss(shards: list[Array], x: Array) -> Array:
        y, _ = jax.lax.scan(lambda carry, each: (run(carry[1], carry[0], each), None), (x, tokens.new_token()), shards)[0]
        return (y.astype(jnp.float32) ** 2).sum()

    stacked = PartitionSpec(None, "fsdp")
    shapes = ([(DEPTH, 1024, 1024)] * 2, (4096, 1024))
    specs = ([stacked] * 2, ROWS)
    return compiled(chip, jax.grad(loss), shapes, specs, specs[0])


def passes(remat: bool) -> list[str]:
    """The order of a loop that keeps the thread."""
    return [kind for kind, _ in groupby(FORWARD * DEPTH + ([*FORWARD, *BACKWARD] if remat else BACKWARD) * DEPTH)]


@pytest.mark.parametrize(
    ("chip", "remat", "gather"),
    [
        ("v5e:4x2", False, "whole"),
        ("v5e:4x2", True, "whole"),
        ("v5e:4x2", True, "ring"),
        ("v6e:4x2", True, "whole"),
        ("v6e:4x2", False, "ring"),
    ],
)
def test_gradients_of_loops_follow_the_thread_backwards(chip: str, remat: bool, gather: str):
    """Whole gathers and rings of permutes, and layers that run again."""
    found = schedule(looped(chip, gather, True, remat))
    assert [kind for kind, _ in groupby(each.kind for each in found)] == passes(remat)
    assert {(each.kind, each.stream) for each in found} == {("weights", 1), ("activations", 0), ("more", 1)}


@pytest.mark.parametrize("chip", ["v5e:4x2", "v6e:4x2"])
def test_gradients_of_loops_without_a_token_have_another_order(chip: str):
    found = schedule(looped(chip, "whole", False, True))
    assert [kind for kind, _ in groupby(each.kind for each in found)] != passes(True)
