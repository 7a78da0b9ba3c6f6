"""The best configuration that a budget allows, found before anything is allocated.

    geometry = Geometry.of(model)
    memory = parse_memory("1/13", geometry.full_kv_bytes(32768, 1))
    config = fit_config(geometry, memory, max_context=32768, max_batch=1, fields={})
    plan_memory(geometry, config, 32768, 1).peak_bytes <= memory
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ..caches.disk_swap_config import DiskSwapConfig
from ..config import OffloadConfig, parse_memory
from ..errors import BudgetError
from ..history.record_format import RecordFormat
from ..model.geometry import Geometry, KeptLayer, LayerShape
from ..report.text import size_text
from .plan import MemoryPlan, adapter_rank, area_bytes, default_rank, plan_memory

__all__ = [
    "Geometry",
    "KeptLayer",
    "LayerShape",
    "MemoryPlan",
    "fit_config",
    "fit_stream",
    "parse_memory",
    "plan_memory",
]

MAX_COMPRESSION = 32
"""Sigma's limit: bytes of a token's keys over bytes of its compact key (KVSwap, appendix A)."""

_SELECTED, _LEAST_SELECTED = 400, 64
_LEAST_QUEUE = 2**16
_LARGEST_QUEUE = 4 * 2**20
_STREAM_SHARES = (10, 20, 40)
"""The write queue, and the two buffers of a stream, take one part in so many of the budget each."""
_SHORT_TAIL, _LEAST_RECENT = 16, 4

Config = TypeVar("Config", bound=OffloadConfig)
Swap = TypeVar("Swap", bound=DiskSwapConfig)


def fit_config(
    geometry: Geometry, memory: int, max_context: int, max_batch: int, fields: dict[str, Any],
    config_class: type[Swap] = DiskSwapConfig,  # type: ignore[assignment]  # the default of a type variable
) -> Swap:  # fmt: skip
    """The best `DiskSwapConfig` that holds at most `memory` bytes for `max_batch` sequences of `max_context` tokens.

    `fields` are the user's and stay as they are. Of the others, without a measured profile (that is what tuning is
    for), this is best, in this order:

    1. `num_selected` 400, and a `rank` of five sixths of the default, a quarter of the joined key width: with less,
       facts are lost that the full cache finds, where fewer slots only cost time. For that, these give way, one after
       another: the staging areas of a look-ahead (`look_ahead=False`, unless they take less than a tenth), the write
       queue and the two buffers that stream a history (from a tenth of the budget each, at most 4 MiB and 1024 tokens,
       to a fortieth), layer budgets (uniform ones need smaller areas), the queue and the blocks to what they need.
    2. What is left goes to reuse slots up to `num_selected`, to the default rank, to slots up to twice `num_selected`,
       to a rank of up to half of the key width, and to slots until all is held.
    3. Where that rank does not fit, the highest that does, with slots for what is left; down to where compact keys are
       a 32nd of the keys' bytes. Below that `num_recent` (16) and `num_selected` (down to 64) give way.

    `group_size` and sinks are never changed.

    Raises `BudgetError` with the least memory that would do, `ConfigError` for a field that is wrong.
    """
    config_class.load(None, fields)  # wrong fields are told before budgets are
    if fields.get("exact"):
        return fit_stream(config_class, geometry, memory, max_context, max_batch, fields)
    given = {name: value for name, value in fields.items() if name != "rank" or value is not None}
    search = _Search(config_class, geometry, memory, max_context, max_batch, given)
    least_rank, most_rank = _ranks(search.forms, fields)
    default = max((default_rank(form) for form in search.forms), default=1)
    wanted = min(most_rank, max(least_rank, -(-default * 5 // 6)))
    for rank in (wanted, least_rank):
        for level in _levels(search) if rank == wanted else reversed(list(_levels(search))):
            chosen = {**level, "rank": rank, "reuse_capacity": 0}
            if search.fits(chosen):
                return search.config(_filled(search, chosen, default, most_rank))
    for level in _frugal(search):
        chosen = {**level, "rank": least_rank, "reuse_capacity": 0}
        if search.fits(chosen):
            return search.config(_filled(search, chosen, default, most_rank))
    raise search.refusal({**_least(search), "rank": least_rank, "reuse_capacity": 0})


def _filled(search: _Search[Any], chosen: dict[str, Any], default: int, most_rank: int) -> dict[str, Any]:
    """`chosen`, which fits, with what is left of the budget spent on rank and slots."""
    selected = chosen["num_selected"]
    chosen = search.most(chosen, "rank", min(-(-default * 5 // 6), most_rank))
    chosen = search.most(chosen, "reuse_capacity", selected)
    chosen = search.most(chosen, "rank", min(default, most_rank))
    chosen = search.most(chosen, "reuse_capacity", 2 * selected)
    chosen = search.most(chosen, "rank", most_rank)
    return search.most(chosen, "reuse_capacity", search.max_context)


def _levels(search: _Search[Any]) -> Iterator[dict[str, Any]]:
    """What is tried with all that is to be selected, best first."""
    streams = [search.streams(share) for share in _STREAM_SHARES]
    full = {"num_selected": search.fields.get("num_selected", _SELECTED), "look_ahead": False}
    area = max((search.area({**streams[0], **full}, form) for form in search.forms), default=0)
    if 2 * area <= search.memory // 10:
        yield {**streams[0], **full, "look_ahead": None}
    for some in streams:
        yield {**some, **full}
    full["layer_budgets"] = "uniform"
    yield {**streams[-1], **full}
    yield {**search.least_streams(), **full}


def _frugal(search: _Search[Any]) -> Iterator[dict[str, Any]]:
    """What is tried where that does not fit at any rank: a shorter tail, then fewer groups."""
    full = {"num_selected": search.fields.get("num_selected", _SELECTED), "look_ahead": False}
    uniform = {**search.least_streams(_SHORT_TAIL), **full, "layer_budgets": "uniform"}
    yield uniform
    group = max((form.group_size for form in search.forms), default=1)
    for selected in range(_SELECTED - group, _LEAST_SELECTED, -group):
        yield {**uniform, "num_selected": selected}
    yield {**uniform, "num_selected": _LEAST_SELECTED}


def _least(search: _Search[Any]) -> dict[str, Any]:
    """The fields of the least memory."""
    chosen = {"num_selected": _LEAST_SELECTED, "layer_budgets": "uniform", "look_ahead": False}
    return {**search.least_streams(_SHORT_TAIL), **chosen}


def _ranks(forms: list[RecordFormat], fields: dict[str, Any]) -> tuple[int, int]:
    """The least and the greatest rank to try: sigma's limit, and half of the key width or what the adapter has."""
    if fields.get("rank") is not None:
        return fields["rank"], fields["rank"]
    item = getattr(torch, fields.get("summary_dtype", "int8")).itemsize
    least = max((-(-form.key_width * form.dtype.itemsize // (MAX_COMPRESSION * item)) for form in forms), default=1)
    most = max((max(1, form.key_width // 2, default_rank(form)) for form in forms), default=1)
    if fields.get("adapter") is not None:
        most = min(most, adapter_rank(fields["adapter"]))
    return min(least, most), most


def fit_stream(
    config_class: type[Config], geometry: Geometry, memory: int, max_context: int, max_batch: int,
    fields: dict[str, Any],
) -> Config:  # fmt: skip
    """The best configuration of a cache that streams all it holds: as `fit_config`, for what it can adapt.

    The largest `block_tokens` up to 1024 and the largest `write_queue` up to 4 MiB that take a tenth of the budget
    each, at most; else a twentieth, a fortieth, or what they need; then fewer `num_recent`, 32 down to 4, for the
    rolling tail. Raises `BudgetError`.
    """
    config_class.load(None, fields)
    search = _Search(config_class, geometry, memory, max_context, max_batch, dict(fields))
    for chosen in (*(search.streams(share) for share in _STREAM_SHARES), search.least_streams()):
        if search.fits(chosen):
            return search.config(chosen)
    recent = config_class().num_recent
    while recent > _LEAST_RECENT:
        recent //= 2
        chosen = search.least_streams(recent)
        if search.fits(chosen):
            return search.config(chosen)
    raise search.refusal(chosen)


@dataclass
class _Search(Generic[Config]):
    """Configurations of one class under the user's fields, and whether they fit."""

    config_class: type[Config]
    geometry: Geometry
    memory: int
    max_context: int
    max_batch: int
    fields: dict[str, Any]

    @property
    def forms(self) -> list[RecordFormat]:
        """Those that differ."""
        return list(dict.fromkeys(self.geometry.forms(self.fields.get("group_size"))))

    def config(self, chosen: dict[str, Any]) -> Config:
        limits = {"memory": self.memory, "max_context": self.max_context, "max_batch": self.max_batch}
        return self.config_class.load(None, {**chosen, **self.fields, **limits})

    def peak(self, chosen: dict[str, Any]) -> int:
        return plan_memory(self.geometry, self.config(chosen), self.max_context, self.max_batch).peak_bytes

    def fits(self, chosen: dict[str, Any]) -> bool:
        return self.peak(chosen) <= self.memory

    def most(self, chosen: dict[str, Any], name: str, most: int) -> dict[str, Any]:
        """`chosen`, which fits, with its number `name` as large as fits, up to `most`."""
        least = chosen[name]
        while least < most:
            middle = (least + most + 1) // 2
            if self.fits({**chosen, name: middle}):
                least = middle
            else:
                most = middle - 1
        return {**chosen, name: least}

    def area(self, chosen: dict[str, Any], form: RecordFormat) -> int:
        """Bytes of a staging area."""
        config = self.config(chosen)
        assert isinstance(config, DiskSwapConfig)
        return area_bytes(form, config, self.max_context, self.max_batch)

    def streams(self, share: int) -> dict[str, Any]:
        """A write queue and blocks that take one part in `share` of the budget each, but what they need."""
        block, least = 1024, self.least_block()
        record = max((form.record_bytes / form.group_size for form in self.forms), default=1)
        while block > least and 2 * self.max_batch * block * record > self.memory // share:
            block //= 2
        queue = min(_LARGEST_QUEUE, self.memory // share)
        return {"block_tokens": max(block, least), "write_queue": max(queue, self.least_queue())}

    def least_streams(self, num_recent: int | None = None) -> dict[str, Any]:
        """The smallest queue and blocks; with `num_recent` latest tokens where that is given."""
        recent = {} if num_recent is None else {"num_recent": num_recent}
        return {"block_tokens": self.least_block(num_recent), "write_queue": self.least_queue(), **recent}

    def least_queue(self) -> int:
        """Room for two groups of every row, so that one is written while another is packed."""
        return max((_LEAST_QUEUE, *(2 * self.max_batch * form.record_bytes for form in self.forms)))

    def least_block(self, num_recent: int | None = None) -> int:
        """No less than a rolling tail is filled from when a context is cut."""
        recent = self.fields.get("num_recent", num_recent or self.config_class().num_recent)
        group = max((form.group_size for form in self.forms), default=1)
        return max(16, -(-recent // group) * group + 2 * group)

    def refusal(self, least: dict[str, Any]) -> BudgetError:
        """The error for a budget that not even `least` keeps to."""
        needed = self.peak(least)
        given = ", ".join(f"{name}={value!r}" for name, value in self.fields.items())
        advice = "give as much, or lower max_context or max_batch"
        if given:
            given, advice = f" with {given}", f"{advice}, or leave fields to the planner"
        return BudgetError(
            f"memory is {self.memory:,} bytes ({size_text(self.memory)}); "
            f"{self.max_batch} x {self.max_context:,} tokens need at least {needed:,} ({size_text(needed)})"
            f"{given}: {advice}"
        )
