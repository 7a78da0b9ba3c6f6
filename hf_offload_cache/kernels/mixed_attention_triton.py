"""Split-K attention with log-sum-exp merge over a low-bit copy, some entries of which are replaced by stored ones;
optionally returns each token's share (SpeCache, section 3.3)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .low_bit import SIDES
from .low_bit_triton import _half, wide

_GROUPS = 4
"""Groups of the copy's tokens per program of scores."""
_ADDED = 64
"""Tokens of the copy whose values a program adds at a time."""
_ENTRIES = 32
"""Stored entries at a time."""
_TOKENS = 1024
"""Tokens per program of shares."""
_PROGRAMS = 1056
"""Enough to keep a device busy: with fewer rows and heads, the copy is split."""
MOST_QUERIES = 64
"""Upper bound per key head."""


@triton.jit(do_not_specialize=["groups"])
def _score(  # type: ignore[no-untyped-def]
    queries, keys, hidden, scores, scaling, count, groups, key_stride, KEY: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, ROW: tl.constexpr, KEY_WIDE: tl.constexpr, QUERIES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    head, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS
    asked, token, key = tl.arange(0, QUERIES), tl.arange(0, GROUP), tl.arange(0, KEY_WIDE)
    there, within, tokens = asked < count, key < KEY, groups * GROUP
    query = tl.load(
        queries + (head * count + asked)[:, None] * KEY + key[None, :], mask=there[:, None] & within[None, :], other=0.0
    ).to(tl.float16)
    for group in range(first, min(first + GROUPS, groups)):
        rows = keys + head * key_stride + (group * KEY + key) * ROW
        codes = tl.load(rows[:, None] + (token * BITS // 8)[None, :], mask=within[:, None], other=0).to(tl.int16)
        codes = (codes >> (token * BITS % 8).to(tl.int16)[None, :]) & ((1 << BITS) - 1)
        scale, zero = _half(rows + GROUP * BITS // 8, within), _half(rows + GROUP * BITS // 8 + 2, within)
        entries = codes.to(tl.float16) * scale.to(tl.float16)[:, None] + zero.to(tl.float16)[:, None]
        own = tl.dot(query, entries) * scaling
        at = group * GROUP + token
        seen = tl.load(hidden + head * (tokens + 1) + at) == 0
        own = tl.where(seen[None, :], own, float("-inf"))
        tl.store(scores + (head * count + asked)[:, None] * tokens + at[None, :], own, mask=there[:, None])


@triton.jit(do_not_specialize=["tokens", "per_part", "parts"])
def _add_values(  # type: ignore[no-untyped-def]
    scores, values, hidden, output, best, total, count, tokens, per_part, parts, value_stride, value_part,
    VALUE: tl.constexpr, BITS: tl.constexpr, CHANNELS: tl.constexpr, ROW: tl.constexpr, WIDE: tl.constexpr,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    head, part, group = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    asked, channel = tl.arange(0, QUERIES), tl.arange(0, WIDE)
    there, within = asked < count, channel < CHANNELS
    most = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    shares = tl.zeros((QUERIES,), dtype=tl.float32)
    found = tl.zeros((QUERIES, WIDE), dtype=tl.float32)
    for first in range(part * per_part, min((part + 1) * per_part, tokens), TOKENS):
        at = first + tl.arange(0, TOKENS)
        inside = at < tokens
        seen = inside & (tl.load(hidden + head * (tokens + 1) + at, mask=inside, other=1) == 0)
        own = tl.load(
            scores + (head * count + asked)[:, None] * tokens + at[None, :], mask=there[:, None] & seen[None, :],
            other=float("-inf"),
        )  # fmt: skip
        above = tl.maximum(most, tl.max(own, 1))
        safe = tl.where(above == float("-inf"), 0.0, above)
        share, before = tl.exp(own - safe[:, None]), tl.exp(most - safe)
        rows = values + head * value_stride + group * value_part + at * ROW
        codes = tl.load(
            rows[:, None] + (channel * BITS // 8)[None, :], mask=inside[:, None] & within[None, :], other=0
        ).to(tl.int16)
        codes = (codes >> (channel * BITS % 8).to(tl.int16)[None, :]) & ((1 << BITS) - 1)
        scale, zero = _half(rows + CHANNELS * BITS // 8, inside), _half(rows + CHANNELS * BITS // 8 + 2, inside)
        entries = codes.to(tl.float16) * scale.to(tl.float16)[:, None] + zero.to(tl.float16)[:, None]
        found = found * before[:, None] + tl.dot(share.to(tl.float16), entries)
        shares = shares * before + tl.sum(share, 1)
        most = above
    to = (head * parts + part) * count + asked
    of_all = asked < tl.where(group == 0, count, 0)
    tl.store(best + to, most, mask=of_all)
    tl.store(total + to, shares, mask=of_all)
    value = group * CHANNELS + channel
    into = output + to[:, None] * VALUE + value[None, :]
    tl.store(into, found, mask=there[:, None] & (within & (value < VALUE))[None, :])


@triton.jit(do_not_specialize=["entries", "after", "width", "parts", "part"])
def _over_stored(  # type: ignore[no-untyped-def]
    queries, keys, values, tokens, seen, scores, output, best, total, scaling, count, entries, after, width, heads,
    parts, part, key_row, key_head, key_entry, value_row, value_head, value_entry, KEY: tl.constexpr,
    VALUE: tl.constexpr, KEY_WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, QUERIES: tl.constexpr, ENTRIES: tl.constexpr,
    EACH: tl.constexpr, LATEST: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    row, own_head = head // heads, head % heads
    asked, key, value = tl.arange(0, QUERIES), tl.arange(0, KEY_WIDE), tl.arange(0, VALUE_WIDE)
    there = asked < count
    query = tl.load(
        queries + (head * count + asked)[:, None] * KEY + key[None, :], mask=there[:, None] & (key < KEY)[None, :],
        other=0.0,
    ).to(tl.float32)  # fmt: skip
    most = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    shares = tl.zeros((QUERIES,), dtype=tl.float32)
    found = tl.zeros((QUERIES, VALUE_WIDE), dtype=tl.float32)
    for first in range(0, entries, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        held = entry < entries
        if LATEST:
            last = entries + after - EACH + asked % EACH
            visible = held[None, :] & (entry[None, :] <= last[:, None])
            if MASKED:
                visible = visible & (tl.load(seen + row * entries + entry, mask=held, other=0) != 0)[None, :]
        else:
            token = tl.load(tokens + head * entries + entry, mask=held, other=-1)
            visible = (token >= 0)[None, :] & (asked >= 0)[:, None]
        own_keys = tl.load(
            keys + row * key_row + own_head * key_head + entry[None, :] * key_entry + key[:, None],
            mask=held[None, :] & (key < KEY)[:, None], other=0.0,
        ).to(tl.float32)  # fmt: skip
        own = tl.dot(query, own_keys, input_precision=PRECISION) * scaling
        own = tl.where(visible, own, float("-inf"))
        if not LATEST:
            tl.store(
                scores + (head * count + asked)[:, None] * width + token[None, :], own,
                mask=there[:, None] & (token >= 0)[None, :],
            )  # fmt: skip
        above = tl.maximum(most, tl.max(own, 1))
        safe = tl.where(above == float("-inf"), 0.0, above)
        share = tl.exp(own - safe[:, None])
        before = tl.exp(most - safe)
        own_values = tl.load(
            values + row * value_row + own_head * value_head + entry[:, None] * value_entry + value[None, :],
            mask=held[:, None] & (value < VALUE)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        found = found * before[:, None] + tl.dot(share, own_values, input_precision=PRECISION)
        shares = shares * before + tl.sum(share, 1)
        most = above
    to = (head * parts + part) * count + asked
    tl.store(best + to, most, mask=there)
    tl.store(total + to, shares, mask=there)
    tl.store(output + to[:, None] * VALUE + value[None, :], found, mask=there[:, None] & (value < VALUE)[None, :])


@triton.jit(do_not_specialize=["parts"])
def _merge(  # type: ignore[no-untyped-def]
    parted, best, total, output, base, count, heads, parts, EACH: tl.constexpr, VALUE: tl.constexpr,
    VALUE_WIDE: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    asked, value = tl.arange(0, QUERIES), tl.arange(0, VALUE_WIDE)
    there = asked < count
    most = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    shares = tl.zeros((QUERIES,), dtype=tl.float32)
    found = tl.zeros((QUERIES, VALUE_WIDE), dtype=tl.float32)
    for part in range(parts):
        at = (head * parts + part) * count + asked
        own = tl.load(best + at, mask=there, other=float("-inf"))
        above = tl.maximum(most, own)
        safe = tl.where(above == float("-inf"), 0.0, above)
        before, now = tl.exp(most - safe), tl.exp(own - safe)
        shares = shares * before + tl.load(total + at, mask=there, other=0.0) * now
        more = tl.load(
            parted + at[:, None] * VALUE + value[None, :], mask=there[:, None] & (value < VALUE)[None, :], other=0.0
        )
        found = found * before[:, None] + more * now[:, None]
        most = above
    none = shares == 0
    shares = tl.where(none, 1.0, shares)
    tl.store(base + head * count + asked, tl.where(none, 0.0, most) + tl.log(shares), mask=there)
    # (B, q, H, D): a query of a head of this key head
    to = (head // heads * EACH + asked % EACH) * (heads * (count // EACH)) + head % heads * (count // EACH)
    to += asked // EACH
    found = found / shares[:, None]
    tl.store(output + to[:, None] * VALUE + value[None, :], found, mask=there[:, None] & (value < VALUE)[None, :])


@triton.jit(do_not_specialize=["tokens", "first", "stride"])
def _share(  # type: ignore[no-untyped-def]
    scores, base, output, count, tokens, first, stride, EACH: tl.constexpr, QUERIES: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    head, asked = tl.program_id(0).to(tl.int64), first + tl.program_id(2)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    total = tl.zeros((TOKENS,), dtype=tl.float32)
    for query in range(asked, count, EACH):
        own = tl.load(scores + (head * count + query) * tokens + token, mask=token < tokens, other=float("-inf"))
        total += tl.exp(own - tl.load(base + head * count + query))
    tl.store(output + tl.program_id(2) * stride + head * tokens + token, total, mask=token < tokens)


class Parts:
    """One attention in parts: of queries (rows, heads, n, Dk), `each` of every query head of a key head, over a copy of
    `tokens` tokens and stored entries. On a CUDA device and its current stream; under `TRITON_INTERPRET=1` on a CPU,
    for tests. Scores are float32.

    Args:
        hidden: (rows, heads, tokens + 1) uint8: tokens whose copy is not attended to are not 0.
        sources: number of calls of `stored` and `latest`.
    """

    def __init__(
        self, queries: torch.Tensor, scaling: float, each: int, value_dim: int, hidden: torch.Tensor, sources: int,
        group: int,
    ) -> None:  # fmt: skip
        rows, heads, count, _ = queries.shape
        self._queries, self._scaling, self._each, self._value = queries, scaling, each, value_dim
        self._hidden, self._tokens, self._groups = hidden, hidden.shape[2] - 1, (hidden.shape[2] - 1) // group
        blocks = triton.cdiv(self._tokens, _ADDED)
        self._per_part = max(1, triton.cdiv(blocks, max(1, min(blocks, _PROGRAMS // (rows * heads))))) * _ADDED
        self._of_copy = triton.cdiv(self._tokens, self._per_part)
        self._parts, self._next = self._of_copy + sources, self._of_copy
        options: dict[str, Any] = {"dtype": torch.float32, "device": queries.device}
        self._scores = torch.empty(rows, heads, count, self._tokens, **options)
        self._best, self._total = torch.empty(2, rows, heads, self._parts, count, **options)
        self._parted = torch.empty(rows, heads, self._parts, count, value_dim, **options)
        self._wide = wide(count)

    def copy(self, keys: torch.Tensor, values: torch.Tensor, bits: int) -> None:
        """Add the copy's keys and values in `LowBitForm.layout`; before any other part."""
        (rows, heads, count, key), group = self._queries.shape, (keys.shape[4] - SIDES) * 8 // bits
        if not self._of_copy:
            return
        grid: Any = (rows * heads, triton.cdiv(self._groups, _GROUPS))
        _score[grid](
            self._queries, keys, self._hidden, self._scores, self._scaling, count, self._groups, keys.stride(1), key,
            bits, group, keys.shape[4], wide(key), self._wide, _GROUPS,
        )  # fmt: skip
        channels = (values.shape[4] - SIDES) * 8 // bits
        grid = (rows * heads, self._of_copy, values.shape[2])
        _add_values[grid](
            self._scores, values, self._hidden, self._parted, self._best, self._total, count, self._tokens,
            self._per_part, self._parts, values.stride(1), values.stride(2), self._value, bits, channels,
            values.shape[4], wide(channels), self._wide, _ADDED,
        )  # fmt: skip

    def stored(self, keys: torch.Tensor, values: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add keys (rows, heads, m, Dk) and values of these tokens (rows, heads, m) of the copy, -1: none."""
        self._stored(keys, values, tokens.contiguous(), None, 0)

    def latest(self, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor | None, after: int = 0) -> None:
        """Add the entries after the copy's tokens, `after` of which come later, each query up to its own; `seen`:
        (rows, m) uint8, or all."""
        self._stored(keys, values, None, seen, after)

    def _stored(
        self, keys: torch.Tensor, values: torch.Tensor, tokens: torch.Tensor | None, seen: torch.Tensor | None,
        after: int,
    ) -> None:  # fmt: skip
        (rows, heads, count, key), entries = self._queries.shape, keys.shape[2]
        keys, values = (part if part.stride(3) == 1 else part.contiguous() for part in (keys, values))
        _over_stored[(rows * heads,)](
            self._queries, keys, values, self._hidden if tokens is None else tokens,
            self._hidden if seen is None else seen, self._scores, self._parted, self._best, self._total,
            self._scaling, count, entries, after, self._tokens, heads, self._parts, self._next, *keys.stride()[:3],
            *values.stride()[:3], key, self._value, wide(key), wide(self._value), self._wide, _ENTRIES, self._each,
            tokens is None, seen is not None, "ieee" if keys.dtype == torch.float32 else "tf32",
        )  # fmt: skip
        self._next += 1

    def merged(self) -> torch.Tensor:
        """Attention over all parts: (rows, each, query heads, Dv) float32."""
        rows, heads, count, _ = self._queries.shape
        assert self._next == self._parts
        options: dict[str, Any] = {"dtype": torch.float32, "device": self._queries.device}
        output = torch.empty(rows, self._each, heads * count // self._each, self._value, **options)
        self._base = torch.empty(rows, heads, count, **options)
        _merge[(rows * heads,)](
            self._parted, self._best, self._total, output, self._base, count, heads, self._parts, self._each,
            self._value, wide(self._value), self._wide,
        )  # fmt: skip
        return output

    def shares(self, first: int, number: int) -> torch.Tensor:
        """After `merged`: each copied token's share in queries [first, first + number) of each head, summed over the
        heads of a key head: (number, rows, heads, tokens) float32."""
        rows, heads, count, _ = self._queries.shape
        options: dict[str, Any] = {"dtype": torch.float32, "device": self._queries.device}
        output = torch.empty(number, rows, heads, self._tokens, **options)
        if output.numel():
            grid: Any = (rows * heads, triton.cdiv(self._tokens, _TOKENS), number)
            _share[grid](
                self._scores, self._base, output, count, self._tokens, first, output.stride(0), self._each, self._wide,
                _TOKENS,
            )  # fmt: skip
        return output
