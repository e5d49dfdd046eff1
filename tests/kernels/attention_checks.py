"""Helpers for attention tests: implementations called by lengths, and cases of `attend_projected` for the CPU kernels."""

from collections.abc import Callable
from typing import Any

from tilewright.kernels.attention import cpu
from tilewright.kernels.linear.cpu import Joint
from tilewright.kernels.masks import AttentionMask, causal_from
from tilewright.kernels.operations import Heads, KeyValueRows, Norm, PagedCache

EPS = 1e-5


def mask_of(lengths: Any, block_kv: Any) -> AttentionMask:
    """Mask of queries that see the first `lengths` entries of a cache, and all of their block keys."""
    return AttentionMask(lengths, None if block_kv is None else "full")


def by_lengths(attend: Callable[..., Any]) -> Callable[..., Any]:
    """`run(q, k, v, lengths, block_kv=None)`: an implementation over a cache in rows."""

    def run(q: Any, k: Any, v: Any, lengths: Any, block_kv: Any = None, **options: Any) -> Any:
        return attend(q, KeyValueRows(k, v), mask_of(lengths, block_kv), block_kv, **options)

    return run


def over_pages(attend: Callable[..., Any]) -> Callable[..., Any]:
    """`run(q, pool, table, lengths, block_kv=None)`: an implementation over pages."""

    def run(q: Any, pool: Any, table: Any, lengths: Any, block_kv: Any = None, **options: Any) -> Any:
        return attend(q, PagedCache(pool, table), mask_of(lengths, block_kv), block_kv, **options)

    return run


def heads_of(case: dict[str, Any]) -> Heads:
    """Heads of a case; see `linear_checks.Appended`."""
    q_norm, k_norm = (None if case[name] is None else Norm(case[name], EPS) for name in ("q_norm", "k_norm"))
    return Heads(case["cos"].shape[2] * 2, q_norm, k_norm, (case["cos"], case["sin"]))


def attend_in_rows(heads: int = 6, **case: Any) -> tuple[Any, Any, Any]:
    """The CPU kernel for a case over a cache in rows: returns the output, keys and values."""
    cache = KeyValueRows(case["k_cache"], case["v_cache"])
    out, after = attend_projected(case, cache, heads)
    return out, after.k, after.v


def attend_in_pages(pool: Any, table: Any, **case: Any) -> tuple[Any, Any]:
    """The CPU kernel for a case over pages: returns the output and the pool."""
    out, after = attend_projected(case, PagedCache(pool, table))
    return out, after.pool


def attend_projected(case: dict[str, Any], cache: Any, heads: int = 6) -> tuple[Any, Any]:
    spec = heads_of(case)
    parts = (heads * spec.head_dim, 2 * spec.head_dim, 2 * spec.head_dim)
    projection = Joint(case["qkv"], parts if heads else parts[1:])
    return cpu.attend_projected(None, projection, spec, cache, causal_from(case["start"], case["count"]))
