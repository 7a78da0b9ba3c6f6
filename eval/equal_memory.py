"""The same memory for every method: registered caches as they plan it themselves; for the baselines, how wide compact
keys may be when all else that they hold is taken off."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from hf_offload_cache.model import Geometry
from hf_offload_cache.registry import class_named
from hf_offload_cache.stores import DEVICE_BLOCK

from .synthetic import Shape

NUM_SELECTED, NUM_RECENT, NUM_SINKS = 400, 32, 4
"""The paper's MG (section 4.3), and the defaults of the rolling buffer and of the sinks."""
_GROWTH = 33 / 32
"""What compact keys take more, once they have grown while decoding."""
_LEAST_REUSE = 64
_BOOKS = 40
"""Bytes of tables a record."""


@dataclass(frozen=True)
class Layout:
    """What a method keeps and reads. Widths are of one token and layer, in elements."""

    group_size: int
    entry: int
    """Elements of one token in one record."""
    rows: int = 1
    """Rows of records a sequence: the key heads, where each has records of its own."""
    key_tail: int = 0
    """Elements of one recent token that are kept beside its record's."""
    projections: int = 1
    """Compact keys a token; each `rank` wide, made by a matrix of `width` times `rank`."""
    width: int = 0

    @property
    def record_bytes(self) -> int:
        payload = 2 * self.group_size * self.entry
        return -(-payload // DEVICE_BLOCK) * DEVICE_BLOCK


BITS_8 = 1
"""Bytes of one element of a compact key, whatever the method."""

OWN = "DiskSwapCache"
BASELINES = ("InfiniGen", "InfiniGen*", "InfiniGen*+ru", "Loki", "ShadowKV")


def layout(method: str, shape: Shape, group_size: int | None = None) -> Layout:
    """How `method` of `BASELINES` keeps keys and values of `shape` in 16 bits."""
    heads, dim = shape.kv_heads, shape.head_dim
    keys = heads * dim
    if method in ("InfiniGen", "Loki"):
        return Layout(1, 2 * dim, rows=heads, projections=heads, width=dim)
    if method == "ShadowKV":
        return Layout(group_size or 8, keys, key_tail=keys, width=keys)
    return Layout(group_size or 1, 2 * keys, projections=heads, width=dim)


def fixed_bytes(layout: Layout, tokens: int, reuse: int, depth: int) -> int:
    """Bytes a sequence and layer of all but compact keys: tail, slots, tables of records, and a share of what `depth`
    layers have in common (three staging areas and the gathered view). Where each head has records of its own, the
    tables are left out: their size is this library's, and the methods need none."""
    group = layout.group_size
    tail = 2 * (NUM_RECENT + group) * (layout.entry * layout.rows + layout.key_tail)
    slots = 0 if not reuse else 2 * (-(-reuse // group) + -(-NUM_SINKS // group)) * group * layout.entry
    selected = layout.rows * (-(-NUM_SELECTED // group) + -(-NUM_SINKS // group))
    common = selected * (3 * layout.record_bytes + 2 * group * layout.entry)
    books = _BOOKS * tokens // group if layout.rows == 1 else 0
    return tail + slots + books + common // depth


def bytes_held(
    method: str, shape: Shape, tokens: int, batch: int, fields: dict[str, Any], depth: int | None = None,
    element_bytes: int = BITS_8,
) -> int:  # fmt: skip
    """Bytes a sequence that `method` holds with `fields`, all layers of `shape`, of a model of `depth` layers."""
    if (cls := class_named(method)) is not None:
        deep = depth or shape.layers
        whole = cls.plan(_geometry(shape, deep), cls.config_class(**fields), tokens, batch).peak_bytes
        return whole * shape.layers // deep // batch
    form = layout(method, shape, fields.get("group_size"))
    compact = form.projections * fields["rank"] * (tokens * _GROWTH * element_bytes + 4 * form.width / batch)
    fixed = fixed_bytes(form, tokens, fields.get("reuse_capacity", 0), depth or shape.layers)
    return shape.layers * int(fixed + compact)


def fields_for(
    method: str,
    shape: Shape,
    tokens: int,
    batch: int,
    memory: Fraction,
    *,
    depth: int | None = None,
    reuse: int | None = None,
    group_size: int | None = None,
    room: int = 1024,
) -> dict[str, Any]:
    """Fields of a cache that keep `method` within `memory` of the full KV, layer by layer.

    Compact keys are in 8 bits, whatever the method. A baseline's get what is left; its `reuse` tokens (`NUM_SELECTED`
    for InfiniGen*+ru, none for the others) are halved while no rank of 8 would fit. A registered cache is what its
    `fit` makes of the memory, with `NUM_SELECTED` selected, for `room` more tokens. `depth`: layers of the model that
    `shape` stands for. Raises `ValueError` with the bytes when nothing fits.
    """
    if (cls := class_named(method)) is not None:
        return _own_fields(cls, shape, tokens, batch, memory, depth or shape.layers, reuse, group_size, room)
    form = layout(method, shape, group_size)
    share = int(memory * tokens * shape.token_bytes / shape.layers)
    if reuse is None:
        reuse = NUM_SELECTED if method == "InfiniGen*+ru" else 0
    depth = depth or shape.layers
    a_rank = form.projections * (tokens * _GROWTH * BITS_8 + 4 * form.width / batch)
    while True:
        left = share - fixed_bytes(form, tokens, reuse, depth)
        rank = min(int(left / a_rank), form.width)
        if rank * form.projections >= 8:
            break
        if reuse < 2 * _LEAST_REUSE:
            raise ValueError(
                f"memory must leave {method} some compact keys: {memory} of {tokens} tokens are {share:,} bytes a "
                f"layer, of which {fixed_bytes(form, tokens, reuse, depth):,} are taken; use more, or a longer context"
            )
        reuse //= 2
    return {
        "rank": rank,
        "reuse_capacity": reuse,
        "group_size": form.group_size,
        "num_selected": NUM_SELECTED,
        "num_recent": NUM_RECENT,
        "num_sinks": NUM_SINKS,
    }


def _geometry(shape: Shape, depth: int) -> Geometry:
    return Geometry.uniform(depth, shape.heads, shape.kv_heads, shape.head_dim)


def _own_fields(
    cls: type[Any], shape: Shape, tokens: int, batch: int, memory: Fraction, depth: int, reuse: int | None,
    group_size: int | None, room: int,
) -> dict[str, Any]:  # fmt: skip
    """What `cls.fit` chooses for the model of `depth` layers; its limit is left out, since a replay has a part of the
    layers."""
    given = {"num_selected": NUM_SELECTED, "reuse_capacity": reuse, "group_size": group_size}
    given = {name: value for name, value in given.items() if value is not None}
    geometry = _geometry(shape, depth)
    budget = int(memory * geometry.full_kv_bytes(tokens, batch))
    config = cls.fit(geometry, budget, tokens + room, batch, given)
    fields = {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    default = cls.config_class()
    return {
        name: value
        for name, value in fields.items()
        if name not in ("memory", "max_batch") and (value != getattr(default, name) or name in given)
    }
