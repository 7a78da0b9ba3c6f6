"""The best fields of `DiskSwapCache` that a budget allows, without a measured profile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..history.record_format import RecordFormat
from ..memory.fit import LEAST_SELECTED
from ..memory.search import SHORT_TAIL, STREAM_SHARES, Search
from ..predictors.coding import default_summary_bytes
from ..predictors.low_rank_keys import default_rank
from .adapter import adapter_rank
from .disk_swap_config import DiskSwapConfig
from .summary_bytes import QUEUE_HALVED, sizes_to_try, worth

_LAST_TAIL = 8
"""`num_recent` where not even `SHORT_TAIL` leaves room."""

MAX_COMPRESSION = 32
"""Sigma's limit: bytes of a token's keys over bytes of its compact key (KVSwap, appendix A)."""


def fit_disk_swap(search: Search[DiskSwapConfig], forms: list[RecordFormat], area_bytes: int) -> DiskSwapConfig:
    """The best configuration that fits. What is best, in this order:

    1. `num_selected` 400, and compact keys that find facts: coded in an eighth of a byte an element, or, where the
       fields ask for truncated ones, a `rank` of five sixths of the default: with less, facts are lost that the full
       cache finds, where fewer slots only cost time. For that, these give way, one after another: the staging areas of
       a look-ahead (`look_ahead=False`, unless they take less than a tenth), the write queue and the two buffers that
       stream a history (from a tenth of the budget each, at most 4 MiB and 1024 tokens, to a fortieth), layer budgets
       (uniform ones need smaller areas), the queue and the blocks to what they need.
    2. What is left goes to bytes of codes and to slots as they are worth (`summary_bytes.worth`); of truncated keys to
       reuse slots up to `num_selected`, to the default rank, to slots up to twice `num_selected`, to a rank of up to
       half of the key width, and to slots until all is held. What a prefill has room for, which holds no slots, goes to
       blocks of up to 2048 tokens and a third of the context.
    3. Where that does not fit, the most of the compact keys that does, with slots for what is left; down to where they
       are a 32nd of the keys' bytes. Below that `num_recent` (16), `num_selected` (down to 64) and then `num_recent`
       (8) give way. Where not even that leaves room to find out how keys are coded (a short context of a small model),
       keys are truncated.

    `group_size` and sinks are never changed.

    Args:
        forms: how records lie, of each kind of layer.
        area_bytes: of one staging area.

    Raises `BudgetError` with the least memory that would do, `ConfigError` for a field that is wrong.
    """
    for name in ("rank", "summary_bytes"):
        if search.fields.get(name, 0) is None:
            del search.fields[name]
    look_ahead = 2 * area_bytes <= search.memory // 10
    kinds: list[_Coded | _Truncated] = [_Truncated(search, forms)]
    if search.config({}).summaries == "coded":
        kinds.insert(0, _Coded(search, forms))
        if search.fields.get("summary_dtype") == "coded" or "summary_bytes" in search.fields:
            kinds.pop()
    for keys in kinds:
        for amount in (keys.wanted, keys.least):
            levels = list(_levels(search, look_ahead))
            for level in levels if amount == keys.wanted else reversed(levels):
                chosen = {**level, **keys.of(amount), "reuse_capacity": 0}
                if search.fits(chosen):
                    return search.config(search.wider_blocks(keys.filled(chosen)))
        for level in _frugal(search, forms):
            chosen = {**level, **keys.of(keys.least), "reuse_capacity": 0}
            if search.fits(chosen):
                return search.config(search.wider_blocks(keys.filled(chosen)))
    levels = [*_levels(search, look_ahead), *_frugal(search, forms)]
    least = [{**level, **keys.of(keys.least), "reuse_capacity": 0} for keys in kinds for level in levels]
    return search.config(search.first_fit(least))


class _Truncated:
    """How a rank is chosen, and what is left is spent."""

    def of(self, amount: int) -> dict[str, Any]:
        """The fields that say so."""
        return {"rank": amount}

    def __init__(self, search: Search[DiskSwapConfig], forms: list[RecordFormat]) -> None:
        self._search = search
        self.least, self.most = _ranks(forms, search)
        self._default = max((default_rank(form.key_width) for form in forms), default=1)
        self.wanted = min(self.most, max(self.least, -(-self._default * 5 // 6)))

    def filled(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """`chosen`, which fits, with what is left of the budget spent on rank and slots."""
        search, selected, default = self._search, chosen["num_selected"], self._default
        chosen = search.most(chosen, "rank", min(-(-default * 5 // 6), self.most))
        chosen = search.most(chosen, "reuse_capacity", selected)
        chosen = search.most(chosen, "rank", min(default, self.most))
        chosen = search.most(chosen, "reuse_capacity", 2 * selected)
        chosen = search.most(chosen, "rank", self.most)
        return search.most(chosen, "reuse_capacity", search.max_context)


class _Coded:
    """How bytes of codes are chosen, and what is left is spent."""

    def of(self, amount: int) -> dict[str, Any]:
        """The fields that say so."""
        return {"summary_bytes": amount}

    def __init__(self, search: Search[DiskSwapConfig], forms: list[RecordFormat]) -> None:
        self._search = search
        self._width = max((form.key_width for form in forms), default=1)
        given = search.fields.get("summary_bytes")
        self._amounts = sizes_to_try(self._width) if given is None else [given]
        self.least = self._amounts[0]
        self.wanted = default_summary_bytes(self._width) if given is None else given

    def filled(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """`chosen`, which fits, with what is left of the budget spent on codes and slots, as they are worth."""
        search, best = self._search, None
        queues = {queue for queue in map(_queue_of, map(search.streams, STREAM_SHARES)) if queue < _queue_of(chosen)}
        for halved, queue in enumerate([_queue_of(chosen), *sorted(queues, reverse=True)]):
            for amount in self._amounts:
                tried = {**chosen, "write_queue": queue, "summary_bytes": amount}
                if search.fits(tried):
                    tried = search.most(tried, "reuse_capacity", search.max_context)
                    value = worth(amount, self._width, tried["reuse_capacity"], tried["num_selected"])
                    value -= halved * QUEUE_HALVED
                    if best is None or value >= best[0]:
                        best = value, tried
        return chosen if best is None else best[1]


def _queue_of(chosen: dict[str, Any]) -> int:
    queue: int = chosen["write_queue"]
    return queue


def _selected(search: Search[DiskSwapConfig]) -> int:
    return search.fields.get("num_selected", DiskSwapConfig.num_selected)


def _levels(search: Search[DiskSwapConfig], look_ahead: bool) -> Iterator[dict[str, Any]]:
    """What is tried with all that is to be selected, best first."""
    streams = [search.streams(share) for share in STREAM_SHARES]
    full: dict[str, Any] = {"num_selected": _selected(search), "look_ahead": False}
    if look_ahead:
        yield {**streams[0], **full, "look_ahead": None}
    for some in streams:
        yield {**some, **full}
    full["layer_budgets"] = "uniform"
    yield {**streams[-1], **full}
    yield {**search.least_streams(), **full}


def _frugal(search: Search[DiskSwapConfig], forms: list[RecordFormat]) -> Iterator[dict[str, Any]]:
    """What is tried where that does not fit at any rank: a shorter tail, fewer groups, then a still shorter tail."""
    group = max((form.group_size for form in forms), default=1)
    for recent in (SHORT_TAIL, _LAST_TAIL):
        full = {"num_selected": _selected(search), "look_ahead": False}
        uniform = {**search.least_streams(recent), **full, "layer_budgets": "uniform"}
        yield uniform
        for selected in range(full["num_selected"] - group, LEAST_SELECTED, -group):
            yield {**uniform, "num_selected": selected}
        yield {**uniform, "num_selected": LEAST_SELECTED}


def _ranks(forms: list[RecordFormat], search: Search[DiskSwapConfig]) -> tuple[int, int]:
    """The least and the greatest rank to try: sigma's limit, and half of the key width or what the adapter has."""
    fields = search.fields
    if fields.get("rank") is not None:
        return fields["rank"], fields["rank"]
    item = _item_bytes(search.config({}).summaries)
    least = max((-(-form.key_width * form.dtype.itemsize // (MAX_COMPRESSION * item)) for form in forms), default=1)
    most = max((max(1, form.key_width // 2, default_rank(form.key_width)) for form in forms), default=1)
    if fields.get("adapter") is not None:
        most = min(most, adapter_rank(fields["adapter"]))
    return min(least, most), most


def _item_bytes(summaries: str) -> int:
    """Bytes of a component of truncated keys, where those are wanted, or may be all that fits."""
    return 1 if summaries == "coded" else getattr(torch, summaries).itemsize
