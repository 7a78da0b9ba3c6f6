"""What a configuration will hold, by owner and in the account's words, before anything is allocated."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..caches.disk_swap_config import DiskSwapConfig
from ..config import OffloadConfig, parse_size
from ..errors import AdapterError
from ..history.position_history import packing_bytes, piece_groups
from ..history.record_format import RecordFormat
from ..model.geometry import Geometry
from ..predictors.directions import fitting_bytes
from ..predictors.layer_budgets import LATEST_QUERIES, MOST
from ..report.trace import Trace
from ..stores.encryption import Encryption
from ..stores.engines import planned_ring
from ..stores.file import LARGEST_STEP_BYTES, SMALLEST_STEP_RECORDS
from ..stores.guard import Checksums
from ..stores.memory import CHUNK_BYTES
from ..stores.uring.ring import IO_RING

_TABLE_ITEM = 4
"""Bytes of a record's number in a table."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by owner, in the words of the account, at the worst moment of a prefill and of decoding.

    A prefill is one over a history, as a conversation's next turn is: what decoding made is still there.
    """

    prefill: dict[str, int]
    decode: dict[str, int]
    disk_bytes: int
    """What the store needs; it takes up to an eighth as much again, at most 64 MiB a layer, while the disk has room."""
    full_kv_bytes: int
    weight_bytes: int

    @property
    def prefill_bytes(self) -> int:
        return sum(self.prefill.values())

    @property
    def decode_bytes(self) -> int:
        return sum(self.decode.values())

    @property
    def peak_bytes(self) -> int:
        return max(self.prefill_bytes, self.decode_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values."""
        totals = {name: getattr(self, name) for name in ("prefill_bytes", "decode_bytes", "peak_bytes")}
        return {**asdict(self), **totals}


def plan_memory(geometry: Geometry, config: OffloadConfig, max_context: int, max_batch: int) -> MemoryPlan:
    """The most that a cache of `config` holds for `max_batch` sequences of up to `max_context` tokens each.

    `config` decides the cache: an `OffloadConfig` or an `exact` one streams everything, a `DiskSwapConfig` selects.
    `engine="auto"` counts as "direct". Raises `AdapterError` for an adapter file that cannot be read.
    """
    forms = Counter(geometry.forms(config.group_size))
    always = _held_always(geometry, forms, config, max_context, max_batch)
    streams = {"stream buffers": max((stream_bytes(form, config, max_batch) for form in forms), default=0)}
    streams["stream buffers"] *= _sides(geometry)
    prefill, decode = Counter(always), Counter(always)
    queue = parse_size(config.write_queue)
    for form in forms:
        for rows, groups in ((prefill, piece_groups(form, max_batch, queue)), (decode, 1)):
            packing = packing_bytes(form, max_batch, config.num_recent, groups)
            if rows is prefill:  # attention of several queries needs the tail as it was before them
                packing += max_batch * (config.num_recent + form.group_size) * form.entry_bytes
            rows["packing"] = max(rows["packing"], packing)
    if isinstance(config, DiskSwapConfig) and not config.exact:
        selecting = _selecting(geometry, forms, config, max_context, max_batch)
        moving = max(always["moving rows"], selecting.pop("moving rows", 0))
        for rows in (prefill, decode):
            rows["moving rows"] = moving
        kept = {owner: held for owner, held in selecting.items() if owner not in ("selection", "staging", "scores")}
        prefill.update({**kept, **streams})
        fitting = max((fitting_bytes(form.key_width, max_batch) for form in forms), default=0)
        prefill["fitting"] = max(0, fitting - prefill["packing"])  # records are packed before, not meanwhile
        if config.layer_budgets == "measured" and config.selection == "default":
            prefill["tables"] += _latest_queries(geometry, config, max_batch)
        decode.update(selecting)
    else:
        prefill.update(streams)
        decode.update(streams)
    if config.engine == "mapped":  # pages that were asked for and not let go of yet
        for rows in (prefill, decode):
            rows["records in memory"] += (rows["stream buffers"] + rows["staging"]) // _sides(geometry)
    disk = sum(count * max_batch * _groups(form, config, max_context) * form.record_bytes
               for form, count in forms.items())  # fmt: skip
    return MemoryPlan(
        prefill={owner: held for owner, held in prefill.items() if held},
        decode={owner: held for owner, held in decode.items() if held},
        disk_bytes=0 if config.engine == "memory" else disk,
        full_kv_bytes=geometry.full_kv_bytes(max_context, max_batch),
        weight_bytes=geometry.weight_bytes,
    )


def stream_bytes(form: RecordFormat, config: OffloadConfig, batch: int) -> int:
    """Bytes of the two buffers that a streamed history goes through, on one side."""
    units = max(config.block_tokens // form.group_size, -(-config.num_recent // form.group_size) + 2)  # `truncate`'s
    return 2 * batch * units * form.record_bytes


def area_bytes(form: RecordFormat, config: DiskSwapConfig, max_context: int, batch: int) -> int:
    """Bytes of one staging area on one side: a record for each group that a step of one layer can select."""
    return batch * most_selected(form, config, max_context) * form.record_bytes


def most_selected(form: RecordFormat, config: DiskSwapConfig, max_context: int) -> int:
    """M: the most groups a row that a step of one layer selects, sinks of a padded row included."""
    group = form.group_size
    selected = -(-config.num_selected // group)
    if isinstance(config.layer_budgets, tuple):
        selected = -(-max(config.layer_budgets) // group)
    elif config.layer_budgets == "measured" and config.selection == "default":
        selected *= MOST
    sinks = -(-(config.num_sinks + group - 1) // group) if config.num_sinks else 0
    return min(selected + sinks, _groups(form, config, max_context) * 9 // 8 + 8)


def default_rank(form: RecordFormat) -> int:
    """The width of a compact key when none is given: a quarter of the joined key width, from 16 to 160."""
    return min(form.key_width, max(16, min(160, form.key_width // 4)))


def adapter_rank(path: str | Path) -> int:
    """The least number of columns of a calibrated adapter's layers. Raises `AdapterError`."""
    try:
        with safe_open(path, "pt") as file:
            return min(file.get_slice(name).get_shape()[1] for name in file.keys())  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, IndexError) as error:
        raise AdapterError(f"adapter {str(path)!r} cannot be read ({error}): make it with calibrate()") from error


def _held_always(
    geometry: Geometry, forms: Counter[RecordFormat], config: OffloadConfig, context: int, batch: int
) -> Counter[str]:
    """What every cache holds, whatever it is doing."""
    rows: Counter[str] = Counter()
    queue = parse_size(config.write_queue)
    rows["token ids"] = batch * context * 8
    rows[IO_RING] = planned_ring(config.engine)
    rows["timeline"] = 0 if config.trace is None else Trace.HELD_BYTES
    if batch > 1:  # another number of rows: old ids, or a layer's tail, stay until the new ones are made
        tails = (batch * (config.num_recent + form.group_size) * form.entry_bytes for form in forms)
        rows["moving rows"] = max((rows["token ids"], *tails))
    rows["layers not offloaded"] = geometry.kept_bytes(context, batch)
    rows["rolling tail"] = _tails(forms, config, batch)
    rows["write queue"] = max((queue, *(batch * form.record_bytes for form in forms)))
    for form, count in forms.items():
        groups = _groups(form, config, context)
        ids = batch * (groups * 5 // 4 + 16)  # rows grow by a quarter
        owned = batch * (2 * groups + 1) if batch > 1 else groups  # beams leave records behind, until as many again
        rows["tables"] += count * (ids + owned) * _TABLE_ITEM
        rows["tables"] += count * _capacity(form, batch * groups) * _record_books(config)
        if config.engine == "memory":
            chunk = max(1, CHUNK_BYTES // form.record_bytes)
            rows["records in memory"] += count * -(-batch * groups // chunk) * chunk * form.record_bytes
    return rows


def _capacity(form: RecordFormat, records: int) -> int:
    """The records that a file has which holds `records`: it grows by up to an eighth."""
    return records + max(SMALLEST_STEP_RECORDS, min(records // 8, LARGEST_STEP_BYTES // form.record_bytes))


def _record_books(config: OffloadConfig) -> int:
    """Bytes that a store keeps on each of its records: its tag, whether it is taken, whether it was advised."""
    return (Checksums if config.encryption_key is None else Encryption).tag_bytes + 1 + (config.engine == "mapped")


def _selecting(
    geometry: Geometry, forms: Counter[RecordFormat], config: DiskSwapConfig, context: int, batch: int
) -> dict[str, int]:
    """What choosing groups takes: summary, slots, areas to read into, one view for attention."""
    rows: Counter[str] = Counter()
    item = getattr(torch, config.summary_dtype).itemsize
    given = config.rank or (None if config.adapter is None else adapter_rank(config.adapter))
    areas = 1 if config.look_ahead is False else 3
    heads = max((shape.num_heads for shape in geometry.layers), default=0)
    for form, count in forms.items():
        group, payload = form.group_size, form.payload_width * form.dtype.itemsize
        groups = _groups(form, config, context)
        rank = min(form.key_width, given or default_rank(form))
        rows["compact keys"] += count * batch * context * rank * item
        kept = 4 if item == 4 else 2  # a projection of keys and one of queries
        rows["adapters"] += count * 2 * form.key_width * rank * kept
        if batch > 1:  # another number of rows: a layer's old keys stay until the new ones are made
            rows["moving rows"] = max(rows["moving rows"], batch * context * rank * item)
        slots = batch * _slots(form, config, groups)
        rows["reuse slots"] += count * slots * payload
        # which record lies in which slot: by record, a quarter beyond what there is, and by slot, twice
        by_record = max(64, batch * groups * 5 // 4) if slots else 64
        rows["tables"] += count * (by_record + 2 * slots) * _TABLE_ITEM
        selected = most_selected(form, config, context)
        tail_units = -(-(config.num_recent + group) // group)
        rows["selection"] = max(rows["selection"], batch * (selected + tail_units) * payload)
        staging = areas * area_bytes(form, config, context, batch) * _sides(geometry)
        rows["staging"] = max(rows["staging"], staging)
        rows["scores"] = max(rows["scores"], heads * (context + -(-context // group)) * 4)
    return dict(rows)


def _slots(form: RecordFormat, config: DiskSwapConfig, groups: int) -> int:
    """Reuse slots a row and layer, a mean over the layers: budgets of their own are rounded up layer by layer."""
    reuse, group = config.reuse_capacity, form.group_size
    if not reuse:
        return 0
    slots = -(-reuse // group)
    if isinstance(config.layer_budgets, tuple):
        shares = [-(-round(tokens / config.num_selected * reuse) // group) for tokens in config.layer_budgets]
        slots = -(-sum(shares) // len(shares))
    elif config.layer_budgets == "measured" and config.selection == "default":
        slots = -(-(-(-config.num_selected // group) * reuse) // config.num_selected) + 1
    exist = 1 << max(groups - 1, 0).bit_length()
    return min(slots + -(-config.num_sinks // group), exist)


def _latest_queries(geometry: Geometry, config: DiskSwapConfig, batch: int) -> int:
    """Bytes of the prompt's latest queries, which layer budgets are measured with at the first step after it."""
    heads = sum(shape.num_heads * shape.key_dim for shape in geometry.layers)
    return batch * LATEST_QUERIES * heads * geometry.dtype.itemsize


def _tails(forms: Counter[RecordFormat], config: OffloadConfig, batch: int) -> int:
    """Bytes of the rolling tails of all layers."""
    return sum(
        count * batch * (config.num_recent + form.group_size) * form.entry_bytes for form, count in forms.items()
    )


def _groups(form: RecordFormat, config: OffloadConfig, context: int) -> int:
    """Groups a row that are sealed when `context` tokens are held."""
    return max(0, context - config.num_recent) // form.group_size


def _sides(geometry: Geometry) -> int:
    """How many times what is read is held: in host memory, and on CUDA in the device's too."""
    return 2 if geometry.device == "cuda" else 1
