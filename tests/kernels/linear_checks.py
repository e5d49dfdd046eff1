"""Checks of the CPU's linear kernels for every instruction set. `test_linear.py` draws shapes for these checks at random;
`test_instruction_sets.py` runs this file as a program for each instruction set, because a process keeps the one it began with.
"""

import hashlib
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels import block_checks, grouped_checks, paged_checks, quantised_checks, sparse_cases
from kernels.attention_checks import attend_in_rows, by_lengths
from tilewright.kernels import build, native
from tilewright.kernels.attention import cpu as attention
from tilewright.kernels.attention import reference as plain_attention
from tilewright.kernels.heads.xla import rotate_halves
from tilewright.kernels.linear import blocks, cpu
from tilewright.kernels.linear.blocks import BLOCK
from tilewright.kernels.operations import Norm
from tilewright.kernels.rms_norm import cpu as rms_norm
from tilewright.kernels.rms_norm import reference as plain_norm
from tilewright.kernels.sparse_attention import cpu as sparse_attention

FORMATS: tuple[cpu.Format, ...] = ("float32", "bfloat16", "q8_0")
COUNTS = range(1, 71)
"""Numbers of rows: every way of dividing them into tiles of 1, 2, 4, 8, 16 and 32 rows."""
SHAPES = [(70, 100), (128, 112)]
"""Inputs and outputs for those numbers of rows: with and without whole blocks of 32 inputs and panels of 16 outputs."""
ONE_BLOCK = (30, 100)
"""Inputs and outputs of products in blocks that are exact but for scaling."""
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
"""The largest relative error of rounding to a format."""


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(jnp.bfloat16).astype(np.float64)


def largest_of_blocks(x: np.ndarray) -> np.ndarray:
    """The largest number of each block of a row, in every place of the block."""
    parts = np.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK))).reshape(len(x), -1, BLOCK)
    return parts.max(axis=2).repeat(BLOCK, axis=1)[:, : x.shape[1]]


def operands(x: np.ndarray, w: np.ndarray, kind: cpu.Format) -> tuple[np.ndarray, np.ndarray]:
    """Both matrices as the format holds them, in float64."""
    if kind == "q8_0":
        return block_checks.rounded(x, kind), blocks.dequantise(blocks.quantise(w, kind))[: len(w)].astype(np.float64)
    return (rounded(x), rounded(w)) if kind == "bfloat16" else (x.astype(np.float64), w.astype(np.float64))


def product(x: np.ndarray, w: np.ndarray, kind: cpu.Format) -> tuple[np.ndarray, np.ndarray]:
    """Returns the float64 product of the rounded operands, and a bound on the float32 error.

    Each step of a chain of K float32 sums errs by a unit of what has been added up so far (Higham, Accuracy and Stability of
    Numerical Algorithms, section 3.1). For blocks see `block_checks.bounded`.
    """
    if kind == "q8_0":
        return block_checks.bounded(x, blocks.quantise(w, kind))
    a, b = operands(x, w, kind)
    expected = a @ b
    size = x.shape[1] * (np.abs(a) @ np.abs(b))
    exact = 2.0**-52 * size  # not quite: float64 has an error too, where the sum is zero for instance
    return expected, exact + (1 + 2 / x.shape[1]) * UNIT["float32"] * size


def format_error(x: np.ndarray, w: np.ndarray, kind: cpu.Format) -> np.ndarray:
    """A bound on how far the product of the operands that the format holds is from the product of the operands."""
    a = np.abs(x.astype(np.float64))
    b = np.abs(w.astype(np.float64))
    if kind == "float32":
        return np.zeros((len(x), w.shape[1]))
    if kind == "bfloat16":
        return (2 * UNIT[kind] + UNIT[kind] ** 2) * (a @ b)
    # Half a step of each block; scales of weights have half precision, which is coarser than that for the smallest.
    da = largest_of_blocks(a) / 254
    db = largest_of_blocks(b.T).T / 254 * (1 + 2.0**-10) + 127 * 2.0**-25
    return 1.0001 * (a @ db + da @ b + da @ db)


def within(actual: Any, expected: np.ndarray, bound: np.ndarray) -> None:
    excess = np.abs(np.asarray(actual, np.float64) - expected) - bound
    assert (excess <= 1e-37).all(), f"{excess.max()} beyond the bound at {np.unravel_index(excess.argmax(), excess.shape)}"


def check_product(seed: int, rows: int, sizes: tuple[int, int], kind: cpu.Format) -> None:
    rng = np.random.default_rng(seed)
    x = normal(rng, rows, sizes[0])
    w = normal(rng, *sizes)
    actual = jax.jit(cpu.linear)(jnp.asarray(x), cpu.pack(jnp.asarray(w), kind))
    expected, bound = product(x, w, kind)
    within(actual, expected, bound)
    within(actual, x.astype(np.float64) @ w.astype(np.float64), bound + format_error(x, w, kind))


def check_gated(seed: int, rows: int, sizes: tuple[int, int], kind: cpu.Format) -> None:
    rng = np.random.default_rng(seed)
    x = normal(rng, rows, sizes[0])
    gate = normal(rng, *sizes)
    up = normal(rng, *sizes)
    actual = jax.jit(cpu.linear)(jnp.asarray(x), cpu.pack_gated(jnp.asarray(gate), jnp.asarray(up), kind))
    (g, g_bound), (u, u_bound) = product(x, gate, kind), product(x, up, kind)
    silu = g / (1 + np.exp(-g))
    # The slope of silu is below 1.1; its exponential and four more operations err by a few units.
    bound = 1.1 * g_bound * (np.abs(u) + u_bound) + np.abs(silu) * u_bound + 16 * UNIT["float32"] * np.abs(silu * u)
    within(actual, silu * u, bound + 1e-30)


def check_largest(seed: int, rows: int, sizes: tuple[int, int], kind: cpu.Format, case: str) -> None:
    """The largest outputs and their indices are those of what `linear` writes, bit for bit; of equal ones the first first."""
    rng = np.random.default_rng(seed)
    x = normal(rng, rows, sizes[0])
    w = normal(rng, *sizes)
    if case == "ties":
        w = w[:, rng.integers(0, min(3, sizes[1]), sizes[1])]
    if case == "negative":  # what pads the last panel would come to zero, as may weights that 8 bits cannot hold
        x = np.abs(x)
        w = -np.abs(w) - np.float32(0.01)
    if case == "zeros":
        x[::2] = 0
    packed = cpu.pack(jnp.asarray(w), kind)
    top = min(16, sizes[1])

    @jax.jit
    def run(x: jax.Array, w: cpu.PackedMatrix) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        return cpu.linear(x, w), cpu.head_argmax(x, w), cpu.head_top_k(x, w, top)

    outputs, (found, largest), (places, values) = run(jnp.asarray(x), packed)
    np.testing.assert_array_equal(found, np.argmax(np.asarray(outputs), axis=1))
    np.testing.assert_array_equal(largest, np.max(np.asarray(outputs), axis=1))
    order = np.argsort(-np.asarray(outputs), axis=1, kind="stable")[:, :top]
    np.testing.assert_array_equal(places, order)
    np.testing.assert_array_equal(values, np.take_along_axis(np.asarray(outputs), order, axis=1))
    assert case != "negative" or (np.asarray(outputs) < 0).all()


def check_rows(seed: int, sizes: tuple[int, int], kind: cpu.Format) -> np.ndarray:
    """A row gets the same bits, and the same index, whatever the number of rows and wherever it stands; returns them all."""
    rng = np.random.default_rng(seed)
    x = normal(rng, max(COUNTS), sizes[0])
    w = cpu.pack(jnp.asarray(normal(rng, *sizes)), kind)
    gated = cpu.pack_gated(jnp.asarray(normal(rng, *sizes)), jnp.asarray(normal(rng, *sizes)), kind)

    @jax.jit  # the parts come as arguments: to compile seventy slices would take a hundred times as long
    def run(
        first: list[jax.Array], last: list[jax.Array], w: cpu.PackedMatrix, gated: cpu.PackedMatrix
    ) -> list[list[jax.Array]]:
        calls = (lambda x: cpu.linear(x, w), lambda x: cpu.linear(x, gated), lambda x: cpu.head_argmax(x, w)[0])
        return [[call(part) for part in parts] for call in calls for parts in (first, last)]

    found = run([x[:n] for n in COUNTS], [x[-n:] for n in COUNTS], w, gated)
    for first, last in zip(found[::2], found[1::2], strict=True):
        whole = np.asarray(first[-1])
        for n, head, tail in zip(COUNTS, first, last, strict=True):
            np.testing.assert_array_equal(head, whole[:n], err_msg=f"the first {n} rows")
            np.testing.assert_array_equal(tail, whole[-n:], err_msg=f"the last {n} rows")
    return np.asarray(found[0][-1])


def check_joined_calls(seed: int, rows: int, sizes: tuple[int, int], kind: cpu.Format, dtype: Any) -> None:
    """Checks that operations fused with a matmul give the bits of separate calls, in either dtype, without converts."""
    rng = np.random.default_rng(seed)
    x, norm = (jnp.asarray(normal(rng, *shape), dtype) for shape in ((rows, sizes[0]), (sizes[0],)))
    matrices = [jnp.asarray(normal(rng, sizes[0], outputs)) for outputs in (sizes[1], 16, 20)]
    add = jnp.asarray(normal(rng, rows, sum(m.shape[1] for m in matrices)), dtype)
    parts = [cpu.pack(m, kind) for m in matrices]
    whole = cpu.pack_joined(matrices, kind)
    gated = cpu.pack_gated(matrices[0], matrices[0] / 2, kind)

    @jax.jit
    def apart(x: jax.Array, parts: list[cpu.PackedMatrix], gated: cpu.PackedMatrix) -> list[jax.Array]:
        h = rms_norm.rms_norm(x, norm, 1e-5)
        sums = [cpu.linear(h, part, jnp.float32) for part in parts]
        joined = jnp.concatenate(sums, axis=1)
        index, value = cpu.head_argmax(h, parts[0])
        last = [jnp.concatenate(sums[1:], axis=1), cpu.linear(x, parts[1], jnp.float32)]
        return [
            joined,
            joined.astype(dtype),
            (joined + add.astype(jnp.float32)).astype(dtype),
            *last,
            cpu.linear(h, gated),
            index,
            value,
        ]

    @jax.jit
    def together(x: jax.Array, whole: cpu.PackedMatrix, first: cpu.PackedMatrix, gated: cpu.PackedMatrix) -> list[jax.Array]:
        call = partial(cpu.linear, x, norm=Norm(norm, 1e-5))
        sums = call(whole, jnp.float32), call(whole), call(whole, add=add), call(whole, jnp.float32, parts=(1, 3))
        one = cpu.linear(x, whole, jnp.float32, parts=(1, 2))
        return [*sums, one, call(gated), *cpu.head_argmax(x, first, norm=Norm(norm, 1e-5))]

    lowered = together.lower(x, whole, parts[0], gated)
    assert "stablehlo.convert" not in lowered.as_text()
    assert whole.parts == (sizes[1], 16, 20)
    for actual, expected in zip(lowered.compile()(x, whole, parts[0], gated), apart(x, parts, gated), strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def check_matmul(seed: int, rows: int, sizes: tuple[int, int], kind: cpu.Format) -> None:
    """Bit for bit the packed product (of few inputs: many are added up in stretches), however the operands lie."""
    rng = np.random.default_rng(seed)
    a = normal(rng, rows, sizes[0])
    b = normal(rng, *sizes)
    expected, bound = product(a, b, kind)
    multiply = partial(cpu.matmul, bfloat16=kind == "bfloat16")

    @jax.jit
    def run(a: list[jax.Array], b: list[jax.Array], w: cpu.PackedMatrix) -> list[jax.Array]:
        ways = [(left, right) for left in (0, 1) for right in (0, 1)]
        return [multiply(a[i], b[j], a_transposed=bool(i), b_transposed=bool(j)) for i, j in ways] + [cpu.linear(a[0], w)]

    *found, packed = run([a, a.T.copy()], [b, b.T.copy()], cpu.pack(jnp.asarray(b), kind))
    within(packed, expected, bound)
    for actual in found:
        np.testing.assert_array_equal(actual, packed)


def check_attention(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(normal(rng, *s), dtype) for s in ((2, 5, 4, 32), (2, 2, 40, 32), (2, 2, 40, 32)))
    lengths = jnp.asarray(rng.integers(0, 41, (2, 5)), jnp.int32)
    actual = jax.jit(by_lengths(attention.attend))(q, k, v, lengths)
    expected = jax.jit(by_lengths(plain_attention.attend))(q, k, v, lengths)
    np.testing.assert_allclose(
        actual.astype(jnp.float32), expected.astype(jnp.float32), atol=2 * UNIT[jnp.dtype(dtype).name] + 1e-5
    )


@dataclass(frozen=True)
class Appended:
    """A case of `attend_projected`: 2 key heads of 3 queries each, two thirds of a cache filled.

    Attributes:
        norms: whether queries and keys are normalised.
        counts: how many of the new entries each row keeps.
    """

    dtype: Any
    positions: int
    norms: bool
    counts: tuple[int, ...]
    head_dim: int = 48
    capacity: int = 60

    def draw(self, seed: int) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        b = len(self.counts)
        d = self.head_dim

        def draw(*shape: int) -> jax.Array:
            return jnp.asarray(normal(rng, *shape), self.dtype)

        angles = jnp.asarray(rng.uniform(0, 6, (b, self.positions, d // 2)), jnp.float32)
        drawn = {"qkv": draw(b, self.positions, 10 * d), "cos": jnp.cos(angles), "sin": jnp.sin(angles)}
        drawn |= {"q_norm": draw(d) if self.norms else None, "k_norm": draw(d) if self.norms else None}
        drawn |= {"k_cache": draw(b, 2, self.capacity, d), "v_cache": draw(b, 2, self.capacity, d)}
        start = rng.integers(0, self.capacity - self.positions + 1, b)
        return {**drawn, "start": jnp.asarray(start, jnp.int32), "count": jnp.asarray(self.counts, jnp.int32)}


def run_append(case: dict[str, Any], heads: int = 6) -> tuple[jax.Array, jax.Array, jax.Array]:
    return jax.jit(partial(attend_in_rows, heads=heads))(**case)


def plain_append(case: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs the plain operations one after the other; undefined values are NaN."""
    b, t, h = case["cos"].shape
    q, k, v = jnp.split(case["qkv"].reshape(b, t, 10, 2 * h), [6, 8], axis=2)
    if case["q_norm"] is not None:
        q, k = (plain_norm.rms_norm(x, case[name], 1e-5) for x, name in ((q, "q_norm"), (k, "k_norm")))
    q, k = (rotate_halves(x, case["cos"], case["sin"]) for x in (q, k))
    caches = [np.array(case[name].astype(jnp.float32)) for name in ("k_cache", "v_cache")]
    for row in range(b):
        first = int(case["start"][row])
        count = int(case["count"][row])
        for cache, new in zip(caches, (k, v), strict=True):
            cache[row, :, first : first + count] = np.asarray(new[row, :count].astype(jnp.float32)).transpose(1, 0, 2)
    lengths = case["start"][:, None] + 1 + jnp.arange(t)[None]
    keys, values = (jnp.asarray(cache, q.dtype) for cache in caches)
    out = by_lengths(plain_attention.attend)(q, keys, values, lengths)
    attended = np.array(out.astype(jnp.float32)).reshape(b, t, -1)
    attended[np.arange(t)[None] >= np.asarray(case["count"])[:, None]] = np.nan
    return attended, caches[0], caches[1]


def check_append(case: Appended, seed: int = 0) -> None:
    """Against the plain operations; and each query has the same bits alone, with only its own row beside it."""
    drawn = case.draw(seed)
    found = [np.asarray(x.astype(jnp.float32)) for x in run_append(drawn)]
    assert all(np.isfinite(x).all() for x in found)
    expected = plain_append(drawn)
    meant = ~np.isnan(expected[0])
    unit = UNIT[jnp.dtype(case.dtype).name]
    # Norm, rotation and each result are rounded; keys of norm sqrt(D) pass errors on to the weights.
    np.testing.assert_allclose(found[0][meant], expected[0][meant], atol=24 * unit + 1e-5)
    for cache, plain in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(cache, plain, atol=8 * unit, rtol=4 * unit)
    for row, count in enumerate(case.counts):
        part: dict[str, Any] = {n: x if n.endswith("norm") else x[row : row + 1] for n, x in drawn.items()}
        for at in range(count):  # one position after the other
            one = {name: x[:, at : at + 1] if name in ("qkv", "cos", "sin") else x for name, x in part.items()}
            one |= {"start": part["start"] + at, "count": jnp.ones(1, jnp.int32)}
            out, part["k_cache"], part["v_cache"] = run_append(one)
            np.testing.assert_array_equal(np.asarray(out.astype(jnp.float32))[0, 0], found[0][row, at])
        for name, whole in (("k_cache", found[1]), ("v_cache", found[2])):
            np.testing.assert_array_equal(np.asarray(part[name].astype(jnp.float32))[0], whole[row])


APPENDED = [
    Appended(jnp.float32, 5, True, (5, 0, 3)),
    Appended(jnp.bfloat16, 5, True, (5, 0, 3)),
    Appended(jnp.bfloat16, 17, False, (17, 9), head_dim=64),
    Appended(jnp.float32, 1, False, (1, 1), head_dim=16),
]


def main(isa: str, tiles: str = "") -> None:
    """Checks one instruction set. Prints a digest of products within one block of 8 bits, which is the same for each.

    Args:
        isa: what must have been chosen.
        tiles: a header that stands in for the tile unit (see `amx_tiles.h`); what uses tiles is built with it.
    """
    if tiles:
        flags = ("-O1" if flag == "-O3" else flag for flag in build.FLAGS)
        build.FLAGS = (*flags, f'-DTILEWRIGHT_AMX_TILES="{tiles}"')
        build.OPERATIONS = ["linear", "rms_norm", "attention"]
        native.TARGETS = {name: native.TARGETS[name] for name in build.OPERATIONS}
    found = native.kernels()
    assert found.isa == isa, found
    digest = hashlib.sha256(check_rows(0, ONE_BLOCK, "q8_0").tobytes())
    for kind in FORMATS:
        for seed, sizes in enumerate(SHAPES):
            check_rows(seed, sizes, kind)
        for rows, sizes in ((1, (33, 47)), (23, (70, 100)), (49, (130, 48))):
            check_product(rows, rows, sizes, kind)
            check_gated(rows, rows, sizes, kind)
        for rows, case in ((1, "ties"), (6, "negative"), (19, "ties"), (33, "zeros")):
            check_largest(rows, rows, (40, 77), kind, case)
        for dtype in (jnp.float32, jnp.bfloat16):
            check_joined_calls(0, 3, (96, 48), kind, dtype)
            check_joined_calls(1, 18, (70, 41), kind, dtype)
    block_checks.check_all()
    for kind in grouped_checks.FORMATS:
        grouped_checks.check_groups(0, [3, 0, 17, 1], (70, 41), kind, True, jnp.float32)
    for rows, sizes in ((3, (33, 47)), (35, (65, 70))):
        for kind in FORMATS[:2]:
            check_matmul(rows, rows, sizes, kind)
    for case in APPENDED:
        check_append(case)
        paged_checks.check_appended(replace(case, capacity=96).draw(0), 16)
        quantised_checks.check_cpu(replace(case, capacity=96).draw(0), 16)
    for dtype in (jnp.float32, jnp.bfloat16):
        check_attention(dtype)
        for extras in (0, 7):
            paged_checks.check_attention(dtype, 32, extras)
        for sizes in () if tiles else sparse_cases.SIZES:
            sparse_cases.check(jax.jit(sparse_attention.sparse_attention), sizes.draw(0, dtype))
    print(digest.hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:])
