"""The layers of `AbstractTreeCache`: their tiers, replica links and early reads (LeoAM, sections 4.3 and 4.4)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...core import device_step
from ...core.plan import LayerKind
from ...core.selective_layer import SelectiveLayer
from ...core.shared import Shared
from ...errors import BudgetError
from ...fetch.choice import Choice, Fetched, kept_entries
from ...fetch.policy import MostUsed, Policy
from ...fetch.replica_link import Link, Rates
from ...history.base import History
from ...history.records import RecordFormat
from ...memory.dry_run import DryRun
from ...stores.base import FreezableStore
from .config import AbstractTreeConfig
from .history import ChunkHistory
from .predictor import AbstractTreePredictor, DevicePredictor, StoredAbstractsPredictor

_FEW = 16
"""Chunks a row that a resident layer reads at a time, after its first complete read."""


class AbstractTreeLayer(SelectiveLayer):
    """A layer that selects chunks by their abstracts, and tokens within them; each KV head has its own chunks."""

    by_use = True

    config: AbstractTreeConfig

    def __init__(self, shared: Shared, layer_idx: int, place: int | None = None, **kwargs: Any) -> None:
        super().__init__(shared, layer_idx, place, **kwargs)
        self.rates: Rates = {}
        """Times of the disk as `compress="auto"` measured them; owned and set by the cache."""
        self.following: AbstractTreeLayer | None = None
        """The next layer, whose abstracts are read during this layer's attention; set by the cache."""
        self._all_kept = 0
        """Units when the tiers were last made to hold all of them."""

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
        made = AbstractTreePredictor if config.keeps_replicas else DevicePredictor  # a device reads no replicas
        return made(history.form, history.rows, config, account)

    def rehearse(self, run: DryRun, kind: LayerKind, context: int) -> None:
        super().rehearse(run, kind, context)
        over_host = run.device_type == "cuda" and not run.alone and not kind.over_host
        perhaps = over_host and self.config.engine in ("auto", "memory")  # for fewer tokens slots may hold a choice
        if perhaps and isinstance(self.predictor, DevicePredictor) and self.selecting is not None:
            wanted = self.selecting.units(self.config, kind.form.group_size, context)
            device_step.rehearse_beside(self, run, kind, wanted * (1 + self.widens(context)))
        pages = self.history.pages if isinstance(self.history, ChunkHistory) else None
        if pages is not None:  # which are read one layer early
            area = self.history.rows * pages.table.num_groups * kind.form.record_bytes
            run.stages("staging", decode=area, together=True)

    # --- tiers -------------------------------------------------------------------------------------------------

    @property
    def near_slots(self) -> int:
        near, history = super().near_slots, self.history
        return min(near, history.rows * _room_for_all(history.units)) if self.config.keeps_all else near

    @property
    def policy(self) -> Callable[[int], Policy]:
        """Frequently used records stay in host memory, and in slots (LeoAM, section 4.3)."""
        return MostUsed

    def keep_all(self) -> None:
        """Read all stored chunks of a resident layer into its slots, before its step selects some. If this fails, the
        step reads the chunks that it selects. On a device that reads records by itself they stay when a step has read
        them."""
        history = self.history if self.config.keeps_all and not self.on_device and self._sparse() else None
        if history is None or not self.can_choose() or history.units <= self.budget:
            return
        with self.shared.storage.account.not_sparing(), contextlib.suppress(OSError, BudgetError):
            fetcher = self.fetcher
            if self._has_all():
                return
            every = np.broadcast_to(np.arange(history.units), (history.rows, history.units))
            absent = fetcher.not_held(history.extents(every).records.reshape(-1))
            indices, valid = kept_entries(absent.reshape(every.shape))
            units = indices if valid is None else np.where(valid, indices, -1)
            for start in range(0, units.shape[1], self.budget):
                fetcher.bring(history, Choice(units[:, start : start + self.budget]))
            if not self._all_kept:
                assert self.selecting is not None
                self.selecting.areas.free_memory()  # other layers, and later reads of this one, need smaller ones
            self._all_kept = history.units
            fetcher.read_at_once = self.read_at_once(fetcher.most_records)

    def prefetch_again(self) -> None:
        if not self._has_all():
            super().prefetch_again()

    def _has_all(self) -> bool:
        """True if all units are in slots, so that there is nothing to prefetch."""
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
        automatic = isinstance(share, str)
        return Link(self.shared.storage, replicas, None if automatic else float(share), self.rates)

    # --- abstracts on the disk ---------------------------------------------------------------------------------

    # They are read one layer early (LeoAM, section 4.4).

    def begin_look(self) -> None:
        """Start to read the abstracts for this layer's next query. If this fails, the query reads them."""
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
        complete = config.tokens_fetched(context) <= config.attended(context)
        return 0 if complete else config.attended(context) + config.num_sinks


def _room_for_all(units: int) -> int:
    """Slots a row for all of `units` units, with up to an eighth more. So most slots are in use, and they are
    reallocated and read again only a few times while the units double."""
    step = max(16, 1 << max(0, units.bit_length() - 4))
    return -(-units // step) * step
