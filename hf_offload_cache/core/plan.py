"""A cache's planned memory, summed over its owners, before anything is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..config import OffloadConfig, parse_size
from ..fetch.areas import PLACE_BYTES
from ..fetch.write_queue import WriteQueue
from ..history.records import RecordFormat, block_groups, latest_tokens, longest_block
from ..memory.account import LATENTS, RECORDS, host_side
from ..memory.fit import Search
from ..memory.plan import LayerPlan, MemoryPlan, Planned
from ..model.geometry import Geometry, LayerShape
from ..report.trace import Trace
from ..stores.base import DEVICE_BLOCK
from ..stores.engines import planned_ring
from ..stores.uring.ring import IO_RING
from .step import MOST_CANDIDATES
from .token_log import TokenLog


@dataclass(frozen=True)
class LayerKind:
    """The properties of a layer that its memory depends on, for a batch."""

    form: RecordFormat
    num_heads: int
    """Query heads, H."""
    rows: int
    """Rows of the history: sequences, or sequences times key heads."""
    batch: int
    device: str
    """Type of the device that attention runs on."""
    layers: int = 1
    """Number of offloaded layers, of this kind and others."""
    over_host: bool = False
    """Steps that could run on a device alone go over the host."""
    indexer_bytes: int = 0
    """As of `LayerShape`; and `most_chosen`, and `topk`."""
    most_chosen: int = 0
    topk: int = 0
    has_history: bool = True
    """As of `LayerShape`; if not, `form` is that of an indexer's keys."""

    @classmethod
    def of(cls, shape: LayerShape, geometry: Geometry, config: OffloadConfig, batch: int) -> LayerKind:
        """`config`: the layer's."""
        if shape.most_chosen:
            sizes = shape.num_key_heads, shape.key_dim, shape.num_value_heads, shape.value_dim
            own = geometry.device, len(geometry.layers), False, shape.indexer_bytes, shape.most_chosen, shape.topk
            if not shape.has_history:
                form = indexer_form(shape.indexer_bytes // geometry.dtype.itemsize, geometry.dtype, config)
                return cls(form, 0, batch, batch, *own, has_history=False)
            return cls(indexed_form(sizes, geometry.dtype, config), shape.num_heads, batch, batch, *own)
        heads = shape.num_key_heads if config.heads_apart else 1
        sizes = (shape.num_key_heads // heads, shape.key_dim, shape.num_value_heads // heads, shape.value_dim)
        form = RecordFormat.of_sizes(sizes, geometry.dtype, config.group_size, config.stored_bits)
        return cls(form, shape.num_heads, batch * heads, batch, geometry.device, len(geometry.layers))


_MOST_TOGETHER = 16
"""Most tokens that a record of an indexed layer has, unless `group_size` is given."""


def indexed_form(sizes: tuple[int, int, int, int], dtype: torch.dtype, config: OffloadConfig) -> RecordFormat:
    """The format of a layer whose model chooses by an indexer, for `sizes` (Hk, Dk, Hv, Dv). An indexer chooses single
    tokens, so a record has as many as fit the smallest read. They are stored in their own type: such layers are exact.
    """
    form = RecordFormat.of_sizes(sizes, dtype, 1)
    return replace(form, group_size=config.group_size or min(_MOST_TOGETHER, max(1, DEVICE_BLOCK // form.entry_bytes)))


def indexer_form(dim: int, dtype: torch.dtype, config: OffloadConfig) -> RecordFormat:
    """The format of the store of an indexer's keys (B, T, dim): as many tokens as fit the smallest read, unless
    `group_size` is given."""
    form = RecordFormat.of_sizes((1, dim, 1, 0), dtype, 1)
    return replace(form, group_size=config.group_size or max(1, DEVICE_BLOCK // form.entry_bytes))


def layer_kinds(geometry: Geometry, config: OffloadConfig, batch: int) -> list[tuple[LayerKind, OffloadConfig]]:
    """Each offloaded layer's kind and its part of `config`, in order; equal pairs are the same object."""
    config = config.for_layers(len(geometry.layers))
    known: dict[int, list[tuple[LayerKind, OffloadConfig]]] = {}
    kinds: list[tuple[LayerKind, OffloadConfig]] = []
    for place, shape in enumerate(geometry.shapes):
        layer_config = config.of_layer(place)
        same = known.setdefault(id(shape), [])
        pair = next((pair for pair in same if pair[1] is layer_config or pair[1] == layer_config), None)
        if pair is None:
            pair = LayerKind.of(shape, geometry, layer_config, batch), layer_config
            same.append(pair)
        kinds.append(pair)
    return kinds


def slots_of_choice(geometry: Geometry, config: OffloadConfig) -> int:
    """Tokens a layer of slots that hold all records of what a model's indexers choose, one for each token; 0: the model
    does not choose by itself."""
    kinds = [kind for kind, _ in layer_kinds(geometry, config, 1) if kind.topk and kind.has_history]
    return max((kind.most_chosen * kind.form.group_size for kind in kinds), default=0)


def streamed(kind: LayerKind, config: OffloadConfig, records: int) -> int:
    """Maximum records a row that are streamed at a time, in blocks or for a crop, of at most so many `records` a
    row."""
    block = block_groups(kind.form, config, kind.device, kind.rows, records)
    return max(block, -(-latest_tokens(kind.form, config) // kind.form.group_size) + 1)


def stream_bytes(kind: LayerKind, config: OffloadConfig, records: int) -> int:
    """Bytes of the two buffers that a history of at most so many `records` a row is streamed through, without their
    copy in host memory: see `staged`."""
    return 2 * kind.rows * streamed(kind, config, records) * kind.form.record_bytes


def place_bytes(kind: LayerKind, config: OffloadConfig, records: int) -> int:
    """Bytes besides, on a device whose kernel reads scattered records: where these are."""
    on_device = torch.device(kind.device).type == "cuda"
    return PLACE_BYTES * kind.rows * streamed(kind, config, records) if on_device else 0


def decoding_queue(write_queue: int, units: Iterable[int]) -> int:
    """Maximum bytes of waiting writes while steps select, which leaves memory for slots.

    `units`: each layer's bytes in one write. In steps of one token all layers write together, and then not again for as
    many steps as a unit has tokens. A verification that writes more waits for room."""
    each = list(units)
    return min(write_queue, max(sum(each), 2 * max(each, default=0)))


def plan_cache(
    geometry: Geometry,
    config: OffloadConfig,
    context: int,
    batch: int,
    layer_plan: Callable[[LayerKind, OffloadConfig, int], LayerPlan],
    outside_layers: Planned,
    selects: bool = False,
) -> MemoryPlan:
    """Maximum memory of a cache for `batch` sequences of up to `context` tokens: each layer's plan, and
    `outside_layers`. `selects`: its steps select.

    `engine="auto"` counts as a file on disk that is read past the page cache.
    """
    layers = layer_kinds(geometry, config, batch)
    distinct = {id(pair): pair for pair in layers}  # a search for a budget makes many plans, and hashing takes time
    counts = Counter(map(id, layers))
    unit_of = {known: kind.rows * kind.form.record_bytes for known, (kind, _) in distinct.items()}
    units = [unit_of[id(pair)] for pair in layers]
    queue = parse_size(config.write_queue)
    narrow = decoding_queue(queue, units) if selects else queue
    largest = max(units, default=0)
    ids = TokenLog.planned(context, batch)
    added = MOST_CANDIDATES if config.candidates else 2  # a token, and what a guess or a stopped `generate` takes back
    held = Planned.always(
        {
            "token ids": ids,
            "timeline": 0 if config.trace is None else Trace.HELD_BYTES,
            "layers not offloaded": geometry.kept_bytes(context, batch, added=added),
            IO_RING: planned_ring(config.engine),
        }
    )
    held += Planned(*({"write queue": WriteQueue.planned(most, largest)} for most in (queue, narrow)))
    moving = Planned.always({"moving rows": ids} if batch > 1 else {})
    plans = [(layer_plan(*distinct[known], context), count) for known, count in counts.items()]
    host = host_side(geometry.device, config.records_apart)
    planned, store_bytes = LayerPlan.of_layers(plans, moving)
    if any(plan.over_host for plan, _ in plans):
        others = [(plan.over_host or plan, count) for plan, count in plans]
        planned = planned.or_else(LayerPlan.of_layers(others, moving)[0], host)
    held = Planned.sum_of([(held, 1), (planned, 1), (outside_layers, 1)])
    if config.engine == "mapped":  # pages that were requested and not yet released
        read = [each.get("stream buffers", 0) + each.get("staging", 0) for each in (held.prefill, held.decode)]
        held = held + Planned(*({RECORDS: nbytes} for nbytes in read))
    if config.memory is not None and held.prefill.get(LATENTS):
        besides = sum(nbytes for owner, nbytes in held.prefill.items() if owner != LATENTS and owner not in host)
        room = max(0, parse_size(config.memory) - besides)
        held = Planned({**held.prefill, LATENTS: min(room, held.prefill[LATENTS])}, held.decode)
    on_disk = 0 if config.engine == "memory" else store_bytes
    sizes = on_disk, geometry.full_kv_bytes(context, batch), geometry.weight_bytes
    return MemoryPlan.of(held, *sizes, host, geometry.device)


def search(
    config_class: type[OffloadConfig],
    plan: Callable[[Geometry, Any, int, int], MemoryPlan],
    geometry: Geometry,
    limits: tuple[int, int, int],
    fields: dict[str, Any],
    of_goal: Mapping[str, Any],
    alone: bool = False,
) -> Search:
    """The search for fields within a budget (see `Search`); `plan`: the cache class's; `limits`: memory, context and
    batch; `alone`: the search's."""
    settings = config_class.load(None, {**of_goal, **fields})  # reports wrong fields before budgets
    forms = {kind.form for kind, _ in layer_kinds(geometry, settings, 1) if kind.has_history}
    records = [(form.record_bytes, form.group_size) for form in forms]
    full = geometry.full_kv_bytes(*limits[1:])

    def plan_of(config: OffloadConfig) -> MemoryPlan:
        return plan(geometry, config, *limits[1:])

    longest = None
    if geometry.device != "cpu":
        kinds = [kind for kind, _ in layer_kinds(geometry, settings, limits[2])]
        longest = min((longest_block(kind.form, kind.rows) for kind in kinds if kind.has_history), default=None)
    host_memory = None if settings.host_memory is None else parse_size(settings.host_memory)
    sides = geometry.device, host_memory, longest
    on_device = geometry.device == "cuda" and settings.engine == "memory"
    own, chosen = {**of_goal, **fields}, slots_of_choice(geometry, settings) if on_device else 0
    chosen = min(chosen, limits[1])
    return Search(config_class, plan_of, records, *limits, own, full, frozenset(fields), *sides, alone, chosen)
