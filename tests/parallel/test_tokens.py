"""Token threading: the same bits, the threaded order in compiled programs, forwards and backwards, and no more collectives."""

import importlib.util
import re
import runpy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from tilewright.parallel import rings, tokens
from tilewright.parallel.mesh import make_mesh

SPEC = PartitionSpec()
OPCODES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
TAGGED = re.compile(rf" (?:{OPCODES})\(.*?frontend_attributes={{collective_type=\"(\w+)\",stream_id=\"(\d+)\"}}")


def ring_sum(x: Array) -> Array:
    return rings.all_reduce(x, "fsdp")


COLLECTIVES: dict[str, Callable[[Array], Array]] = {
    "gather": lambda x: jax.lax.all_gather(x, "fsdp", tiled=True),
    "sum": lambda x: jax.lax.psum(x, "tp"),
    "scatter": lambda x: jax.lax.psum_scatter(x, "fsdp", tiled=True),
    "exchange": lambda x: jax.lax.all_to_all(x, "fsdp", 0, 1, tiled=True),
    "permute": lambda x: jax.lax.ppermute(x, "fsdp", [(n, (n + 1) % 4) for n in range(4)]),
    "ring": ring_sum,
}


@pytest.fixture(scope="module", autouse=True)
def _optimised() -> Iterator[None]:
    """What is to survive the optimisers must meet them."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def untied(_: Any, collective: Callable[..., Any], *operands: Any, kind: str, stream: int = 0) -> tuple[Any, Array]:
    """The same collective with the same tags, and nothing that orders it."""
    with set_xla_metadata(collective_type=kind, stream_id=str(stream)):
        return collective(*operands), tokens.new_token()


def sequence(names: Sequence[str], thread: Callable[..., Any] = tokens.thread) -> Callable[..., Any]:
    """A program that runs collectives, each on an argument of its own."""

    def inside(*xs: Array) -> list[Array]:
        token = tokens.new_token()
        results = []
        for n, (name, x) in enumerate(zip(names, xs, strict=True)):
            result, token = thread(token, COLLECTIVES[name], x, kind=f"{name}_{n}", stream=n % 2)
            results.append(jnp.sin(result))
        return results

    return over_mesh(inside)


def over_mesh(inside: Callable[..., Any]) -> Callable[..., Any]:
    return jax.shard_map(inside, mesh=make_mesh({"fsdp": 4, "tp": 2}), in_specs=SPEC, out_specs=SPEC, check_vma=False)


def gradient(program: Callable[..., Any], count: int) -> Callable[..., Any]:
    return jax.grad(lambda *xs: sum(jnp.sum(y * y) for y in jax.tree.leaves(program(*xs))), tuple(range(count)))


def numbers(count: int) -> list[Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(8, 8 + n)).astype(np.float32)) for n in range(count)]


def compiled(program: Callable[..., Any], *args: Any) -> str:
    return jax.jit(program).lower(*args).compile().as_text() or ""


def order(hlo: str) -> list[str]:
    """Kinds of the collectives as they are scheduled; the hops of a ring count as one."""
    found = [kind for kind, _ in TAGGED.findall(hlo)]
    return [kind for kind, _ in groupby(found)]


def labels(names: Sequence[str]) -> list[str]:
    return [f"{name}_{n}" for n, name in enumerate(names)]


FORWARDS = tuple(COLLECTIVES)
OTHERWISE = ("ring", "exchange", "permute", "scatter", "gather", "sum")


def test_collectives_run_in_the_threaded_order_and_the_gradients_in_reverse():
    xs = numbers(len(OTHERWISE))
    expected = labels(OTHERWISE)
    assert order(compiled(sequence(OTHERWISE), *xs)) == expected
    # The last one runs forwards and then backwards.
    assert order(compiled(gradient(sequence(OTHERWISE), len(OTHERWISE)), *xs)) == expected + expected[-2::-1]


def test_without_a_token_the_compiler_chooses_another_order():
    xs = numbers(len(OTHERWISE))
    found = order(compiled(sequence(OTHERWISE, untied), *xs))
    assert sorted(found) == sorted(labels(OTHERWISE))
    assert found != labels(OTHERWISE)


def same_bits(ours: Any, plain: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@settings(max_examples=3)
@given(st.lists(st.sampled_from(FORWARDS), min_size=2, max_size=5))
def test_any_sequence_keeps_its_order_and_gives_the_same_bits(names: list[str]):
    xs = numbers(len(names))
    ours = jax.jit(lambda *xs: (sequence(names)(*xs), gradient(sequence(names), len(xs))(*xs)))
    plain = jax.jit(lambda *xs: (sequence(names, untied)(*xs), gradient(sequence(names, untied), len(xs))(*xs)))
    same_bits(ours(*xs), plain(*xs))
    assert order(compiled(sequence(names), *xs)) == labels(names)


def count(hlo: str) -> int:
    """Of the tagged ones; the transpose of `jax.shard_map` adds a sum of its own for arguments that all devices hold."""
    return len(TAGGED.findall(hlo))


def test_no_collective_is_added_and_none_merged():
    """Two sums of equal shapes would be merged into one."""
    names = ("sum", "gather", "sum", "scatter")
    xs = numbers(len(names))
    for program, expected in [(sequence(names), 4), (gradient(sequence(names), 4), 8)]:
        assert count(compiled(program, *xs)) == expected


def chain(thread: Callable[..., Any], x: Array) -> Array:
    token = tokens.new_token()
    for n in range(6):
        x, token = thread(token, COLLECTIVES["sum"], jnp.tanh(x), kind=f"sum_{n}")
    return x


def test_on_a_cpu_nothing_is_copied_but_a_result_stays_until_its_token_is_taken():
    """Six sums in a row: where they are threaded, one more of their buffers is held, and an entry is written where it is."""
    x = jnp.ones((64, 64))
    ours, plain = (jax.jit(over_mesh(partial(chain, thread))).lower(x).compile() for thread in (tokens.thread, untied))
    sizes = [program.memory_analysis().temp_size_in_bytes for program in (ours, plain)]  # pyright: ignore[reportOptionalMemberAccess]
    assert 0 <= sizes[0] - sizes[1] - x.nbytes < 64
    hlo = ours.as_text() or ""
    assert " copy(" not in hlo
    assert hlo.count(" dynamic-update-slice(") == 5  # there is nothing that the first one waits for


def looped(thread: Callable[..., Any], checkpoint: Callable[..., Any] | None = None, scan: bool = True) -> Callable[..., Any]:
    """Layers of which each gathers a weight and sums what it makes, in a loop whose carry holds the token."""

    def layer(token: Array, x: Array, weight: Array) -> Any:
        w, token = thread(token, COLLECTIVES["gather"], weight, kind="gather", stream=1)
        y, token = thread(token, COLLECTIVES["sum"], jnp.tanh(x @ w), kind="sum")
        z, token = thread(token, COLLECTIVES["permute"], weight, kind="permute")
        return x + y + z.sum(), token

    run = layer if checkpoint is None else checkpoint(layer)

    def inside(weights: Array, x: Array) -> Array:
        if scan:
            start = (x, tokens.new_token())
            return jax.lax.scan(lambda carry, weight: (run(carry[1], carry[0], weight), None), start, weights)[0][0]
        token = tokens.new_token()
        for weight in weights:
            x, token = run(token, x, weight)
        return x

    return over_mesh(inside)


FORWARD = ["gather", "sum", "permute"]
BACKWARD = ["permute", "sum", "gather"]
LAYERS = jnp.linspace(-1, 1, 3 * 2 * 8).reshape(3, 2, 8), jnp.ones((4, 8))


@pytest.mark.parametrize(
    ("checkpoint", "again", "scan"),
    [(None, [], True), (tokens.checkpoint, ["gather"], True), (tokens.checkpoint, ["gather"], False)],
)
def test_layers_keep_their_order_also_those_that_run_again(checkpoint: Any, again: list[str], scan: bool):
    """Of a layer that runs again, only what its gradient reads does, between the layer behind it and its own backward pass.

    Unrolled, nothing lies between the last layer's two passes, and the compiler takes the second's weights from the first. The
    bits are those of `jax.checkpoint`: JAX 0.12 fuses what runs again otherwise than what is kept.
    """
    ours = looped(tokens.thread, checkpoint, scan)
    plain = looped(untied, checkpoint and jax.checkpoint, scan)
    repeats = 1 if scan else 3
    assert order(compiled(ours, *LAYERS)) == FORWARD * repeats
    same_bits(jax.jit(gradient(ours, 2))(*LAYERS), jax.jit(gradient(plain, 2))(*LAYERS))
    back = again + BACKWARD if scan else BACKWARD + (again + BACKWARD) * 2
    expected = FORWARD * repeats + back
    assert order(compiled(gradient(ours, 2), *LAYERS)) == [kind for kind, _ in groupby(expected)]


def test_under_jax_checkpoint_what_runs_again_is_in_no_order():
    threaded = looped(tokens.thread, lambda layer: jax.checkpoint(layer), scan=False)
    found = order(compiled(gradient(threaded, 2), *LAYERS))
    assert found[9:] != (["gather", *BACKWARD] * 3)[1:]


def test_a_jax_that_cannot_be_told_what_is_unread_runs_more_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(partial_eval, "dce_rules")
    spec = importlib.util.spec_from_file_location("tokens_without_rules", str(tokens.__file__))
    assert spec is not None
    assert spec.loader is not None
    without = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without)
    monkeypatch.undo()
    with pytest.warns(UserWarning, match=r"has no dce_rules: recomputation includes collectives with unused results"):
        found = order(compiled(gradient(looped(without.thread, without.checkpoint), 2), *LAYERS))
    assert found == [kind for kind, _ in groupby(FORWARD + FORWARD + BACKWARD)]


@pytest.mark.parametrize("together", [lambda *several: several, tokens.joined])
def test_several_tokens_are_all_waited_for(together: Callable[..., Any]):
    def inside(a: Array, b: Array, c: Array) -> Any:
        x, first = tokens.thread(tokens.new_token(), COLLECTIVES["sum"], c, kind="c")
        y, second = tokens.thread(tokens.new_token(), COLLECTIVES["gather"], b, kind="b")
        return x, y, tokens.thread(together(first, second), COLLECTIVES["scatter"], a, kind="a")[0]

    assert order(compiled(over_mesh(inside), *numbers(3)))[-1] == "a"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.int32, jnp.bool_, jnp.complex64])
def test_all_bits_of_all_types_come_through(dtype: Any):
    """Negative zeros and what is no number too; what is empty or no array is handed through."""

    def inside(x: Array) -> Any:
        y, token = tokens.done({"x": x, "first": x[0, 0], "none": x[:0]})
        y, axis = tokens.wait(token, (y, "tp"))
        assert axis == "tp"
        return y

    values = [-0.0, np.nan, -np.inf, 1] if jnp.issubdtype(dtype, jnp.inexact) else [-1, 0, 1, 100]
    x = jnp.array([values]).astype(dtype)
    same_bits(jax.jit(inside)(x), {"x": x, "first": x[0, 0], "none": x[:0]})


def test_integers_beside_floats_have_no_cotangent():
    def inside(x: Array, n: Array) -> Array:
        (x, n), token = tokens.done((x, n))
        x, n = tokens.wait(token, (x, n))
        return (x * n.astype(jnp.float32)).sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(inside))(jnp.ones(3), jnp.arange(3)), [0, 1, 2])


@pytest.mark.parametrize(
    ("operands", "options", "expected"),
    [
        (("tp",), {"kind": "sum"}, "expected an array to tie a token to, found tp"),
        ((), {"kind": "sum"}, "expected an array to tie a token to, found nothing"),
        ((np.ones(2),), {"kind": ""}, "expected the kind of a collective and a stream from 0, found '' and 0"),
        ((np.ones(2),), {"kind": "sum", "stream": -1}, "found 'sum' and -1"),
    ],
)
def test_what_cannot_be_threaded_is_refused(operands: tuple[Any, ...], options: Any, expected: str):
    with pytest.raises(ValueError, match=re.escape(expected)):
        tokens.thread(tokens.new_token(), lambda *xs: xs, *operands, **options)


def test_the_example_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # which the example adds to, and which is put back
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "token_threading.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("loss ")
    # Forwards, each layer's weights are gathered before the layer before it ends.
    layers = ["fsdp_all_gather", "tp_all_gather"] * 3
    assert [line.split()[1] for line in lines[1:9]] == ["fsdp_all_gather", *layers, "tp_all_gather"]
    assert {line.split()[0] for line in lines[9:]} == {"reduce-scatter"}
