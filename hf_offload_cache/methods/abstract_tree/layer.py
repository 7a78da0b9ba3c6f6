"""The layers of `AbstractTreeCache`: tiers, links and looks of their own (LeoAM, sections 4.3 to 4.5)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ...core.plan import LayerKind
from ...core.selecting import most_slots
from ...core.selective_layer import SelectiveLayer
from ...core.shared import Shared
from ...errors import BudgetError
from ...fetch.areas import Staging
from ...fetch.choice import Choice, Fetched, kept_entries
from ...fetch.policy import MostUsed
from ...fetch.replica_link import Link, Rates
from ...fetch.tier import SlotTier, Tier
from ...history.base import History
from ...history.records import RecordFormat
from ...memory.dry_run import DryRun
from ...stores.base import FreezableStore
from .config import AbstractTreeConfig
from .history import ChunkHistory
from .predictor import AbstractTreePredictor, StoredAbstractsPredictor

_FEW = 16
"""Chunks a row that a resident layer reads at a time, once it has all but the latest."""


class AbstractTreeLayer(SelectiveLayer):
    """A layer whose chunks are fetched by their abstracts, and whose tokens are chosen within them; each key head has
    chunks of its own."""

    heads_apart: ClassVar[bool] = True
    config: AbstractTreeConfig

    def __init__(self, shared: Shared, layer_idx: int, place: int | None = None, **kwargs: Any) -> None:
        super().__init__(shared, layer_idx, place, **kwargs)
        self.num_layers = 1
        """How many layers are offloaded; set by the cache."""
        self.rates: Rates = {}
        """What the disk takes, as `compress="auto"` has measured it; the cache's, set by it."""
        self.following: AbstractTreeLayer | None = None
        """The layer whose abstracts are read from the disk while this one attends; set by the cache."""
        self._all_kept = 0
        """Units that tiers were made to hold all of."""

    @property
    def num_stores(self) -> int:  # type: ignore[override]
        return 2 if self.config.keeps_replicas else 1

    def make_history(self, form: RecordFormat, rows: int, device: torch.device) -> History:
        return ChunkHistory(self.shared.storage, form, rows, device, self.config, self.name)

    def restore_history(self, tree: dict[str, Any], parts: Sequence[FreezableStore], device: torch.device) -> History:
        return ChunkHistory.restore(self.shared.storage, tree, parts, device, self.config, self.name)

    @property
    def replica_bytes(self) -> int:
        replicas = self.history.replicas if isinstance(self.history, ChunkHistory) else None
        return 0 if replicas is None else replicas.store.disk_bytes

    def make_predictor(self) -> AbstractTreePredictor:
        config, history, account = self.config, self.history, self.shared.storage.account
        if isinstance(history, ChunkHistory) and history.pages is not None:
            return StoredAbstractsPredictor(history.form, history.rows, config, account, history.pages)
        return AbstractTreePredictor(history.form, history.rows, config, account)

    def rehearse(self, run: DryRun, kind: LayerKind, context: int) -> None:
        self.num_layers = kind.layers
        super().rehearse(run, kind, context)
        pages = self.history.pages if isinstance(self.history, ChunkHistory) else None
        if pages is not None and not self.config.exact:  # which are looked at a layer early
            area = self.history.rows * pages.table.num_groups * kind.form.record_bytes
            run.passes("staging", decode=area * Staging.sides(kind.device), together=True)

    # --- tiers -------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        near, history = self._near_slots, self.history
        return near + _host_slots(history.form, self.config, self.num_layers, history.rows, history.units, near)

    @property
    def _near_slots(self) -> int:
        """On the device."""
        near, history = super().slots, self.history
        return min(near, history.rows * _room_for_all(history.units)) if self.config.keeps_all else near

    def make_tiers(self, capacity: int) -> Sequence[Tier]:
        """Slots on the device and in host memory, which are one on a CPU. What is used often stays in host memory, and
        on a CPU (LeoAM, section 4.3)."""
        form, device, account = self.history.form, self.history.device, self.shared.storage.account
        near = capacity if device.type == "cpu" else self._near_slots
        tiers: list[Tier] = [SlotTier(near, form.payload_width, form.dtype, device, account, policy=MostUsed)]
        if near < capacity:
            host, far = torch.device("cpu"), (capacity - near, form.payload_width, form.dtype)
            try:
                tiers.append(SlotTier(*far, host, account, "host slots", MostUsed))
            except BaseException:
                tiers[0].close()
                raise
        return tiers

    def keep_all(self) -> None:
        """Let the slots of a resident layer have all that is held, before its step wants a part of it. Where that
        fails the step brings what it wants."""
        history = self.history if self.config.keeps_all and self._sparse() else None
        if history is None or not self.can_choose() or history.units <= self.budget:
            return
        with self.shared.storage.account.not_sparing(), contextlib.suppress(OSError, BudgetError):
            fetcher = self.fetcher
            if self._has_all():
                return
            every = np.broadcast_to(np.arange(history.units), (history.rows, history.units))
            absent = fetcher.not_held(history.extents(every).records.reshape(-1))
            places, there = kept_entries(absent.reshape(every.shape))
            units = places if there is None else np.where(there, places, -1)
            for start in range(0, units.shape[1], self.budget):
                fetcher.bring(history, Choice(units[:, start : start + self.budget]))
            if not self._all_kept:
                assert self.selecting is not None
                self.selecting.areas.free_memory()  # the other layers, and what comes to this one, need smaller ones
            self._all_kept = history.units
            fetcher.read_at_once = self.read_at_once(fetcher.most_records)

    def prefetch_again(self) -> None:
        if not self._has_all():
            super().prefetch_again()

    def _has_all(self) -> bool:
        """There is nothing to read ahead."""
        return self.is_filled and 0 < self._all_kept == self.history.units

    def read_at_once(self, most: int) -> int:
        return min(most, _FEW) if self._all_kept else most

    def drop_fetcher(self) -> None:
        super().drop_fetcher()
        self._all_kept = 0

    # --- the link ----------------------------------------------------------------------------------------------

    def make_link(self) -> Link | None:
        replicas = self.history.replicas if isinstance(self.history, ChunkHistory) else None
        share = self.config.compress
        if replicas is None or share is None:
            return None
        solved = isinstance(share, str)
        return Link(self.shared.storage, replicas, None if solved else float(share), self.rates)

    # --- abstracts on the disk ---------------------------------------------------------------------------------

    # They are read a layer early (LeoAM, section 4.4).

    def begin_look(self) -> None:
        """Start to read the abstracts that this layer's next query will be held against. Where that fails, the query
        reads them."""
        history = self.history if self._sparse() else None
        pages = history.pages if isinstance(history, ChunkHistory) else None
        if history is not None and pages is not None and self.can_choose() and history.units > self.budget:
            with self.shared.storage.account.not_sparing(), contextlib.suppress(OSError, BudgetError):
                self.fetcher.begin_look(history, pages.extents())

    def fetched(self, choice: Choice, fetched: Fetched) -> None:
        if self.following is not None:
            self.following.begin_look()

    def prefetch_for(self, states: torch.Tensor, visible: torch.Tensor | None) -> None:
        if not self._has_all():
            super().prefetch_for(states, visible)

    def most_kept(self, context: int) -> int:
        config = self.config
        whole = config.brought(context) <= config.attended(context)
        return 0 if whole else config.attended(context) + config.num_sinks


def _host_slots(
    form: RecordFormat, config: AbstractTreeConfig, layers: int, rows: int, units: int, near: int
) -> int:
    """Slots in host memory beside `near` ones, of one of `layers` layers: no copies of what those can hold."""
    most = rows * most_slots(config, form.group_size, units)
    held = config.host_bytes_of(layers) // (form.payload_width * form.dtype.itemsize)
    return max(0, min(held, most - near))


def _room_for_all(units: int) -> int:
    """Slots a row for all of `units` units: an eighth more at most, so that what is held is what is used, and that they
    are made anew, and read, a few times while as many come again."""
    step = max(16, 1 << max(0, units.bit_length() - 4))
    return -(-units // step) * step
