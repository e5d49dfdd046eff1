"""Makes the HLO texts of this folder with the real TPU compiler: `pip install 'tilewright[tpu]'`, then run this file.

Every program is small to read and large to run, so that its bytes can be worked out by hand. What a text has of this file's own
lines and paths is left out.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from tilewright.compiled.aot import compile_for

HERE = Path(__file__).parent
CHIP = "v5e:2x2"


def abstract(*shape: int, dtype: DTypeLike = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def save(name: str, fn: Callable[..., Any], *args: Any, donate: int | tuple[int, ...] = ()) -> None:
    text = compile_for(CHIP, fn, *args, donate=donate).hlo
    text = re.sub(r"\nFileNames\n.*?\n\n\n", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r" stack_frame_id=\d+", "", text)
    text = re.sub(r'"body":"[^"]*"', '"body":""', text)
    (HERE / f"{name}.txt").write_text(text.rstrip() + "\n", encoding="utf-8")
    print(f"{name}: {len(text)} bytes")


def layers(x: Array, weights: Array) -> Array:
    def layer(h: Array, w: Array) -> tuple[Array, None]:
        return jnp.tanh(h @ w), None

    return jax.lax.scan(layer, x, weights)[0]


def update(cache: Array, rows: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(cache, rows, start, axis=0)


def repeat(x: Array, count: Array) -> Array:
    return jax.lax.fori_loop(0, count, lambda _, h: jnp.sin(h), x)


def either(x: Array, which: Array) -> Array:
    return jax.lax.cond(which > 0, lambda x: jnp.flip(x, 1) @ x, lambda x: x * 2, x)


def mlps(x: Array, *layers: tuple[Array, Array, Array]) -> Array:
    for gate, up, down in layers:
        x = (jax.nn.relu(x @ gate) * (x @ up)) @ down
    return x


def double(x_ref, out_ref) -> None:
    out_ref[...] = x_ref[...] * 2


def kernel(x: Array) -> Array:
    return pl.pallas_call(double, out_shape=abstract(256, 512))(x) + 1


def main() -> None:
    bf16 = jnp.bfloat16
    i32 = jnp.int32
    save("elementwise", lambda x, y: jnp.tanh(x) * y, abstract(1024, 1024), abstract(1024, 1024))
    save("matmul", lambda x, w: x @ w, abstract(256, 512, dtype=bf16), abstract(512, 1024, dtype=bf16))
    save("reduce", lambda x: jnp.sum(jnp.exp(x), -1), abstract(1024, 4096))
    save("scan", layers, abstract(128, 4096, dtype=bf16), abstract(8, 4096, 4096, dtype=bf16))
    save("update_donated", update, abstract(8192, 1024), abstract(16, 1024), abstract(dtype=i32), donate=0)
    save("update_kept", update, abstract(8192, 1024), abstract(16, 1024), abstract(dtype=i32))
    save("gather", lambda table, ids: table[ids], abstract(100_000, 512), abstract(64, dtype=i32))
    save("while", repeat, abstract(4096, 16384), abstract(dtype=i32))
    save("conditional", either, abstract(512, 512), abstract(dtype=i32))
    save("pallas", kernel, abstract(256, 512))
    sizes = (2560, 9728), (2560, 9728), (9728, 2560)
    weights = tuple(abstract(*size, dtype=bf16) for size in sizes)
    save("mlp", mlps, abstract(16, 2560, dtype=bf16), weights, weights)


if __name__ == "__main__":
    main()
