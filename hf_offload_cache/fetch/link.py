"""Which of the records that a layer reads travel as replicas (LeoAM, section 4.4)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .fetched import Source
from .link_rates import LinkRates, measure
from .replicas import Replicas
from .staging import Staging
from .storage import Storage

Rates = dict[Any, LinkRates]
"""By the sizes of what is read, and the device it goes to; of one cache, whose layers share them."""


class Link:
    """Of one layer; for the thread that runs the model.

    Args:
        share: of what is read, the part that travels as replicas; None: solved for each read.
        rates: where what is measured goes.
    """

    _LATEST = 0.25
    """How much the latest time counts in the mean of what was hidden."""

    def __init__(self, storage: Storage, replicas: Replicas, share: float | None, rates: Rates) -> None:
        self.replicas = replicas
        self._storage, self._share, self._rates = storage, share, rates
        self._hidden: float | None = None
        self._tried = 0
        self._owed = 0.0

    def split(
        self, history: Source, records: np.ndarray, importance: np.ndarray | None, area: Staging, ahead: bool
    ) -> np.ndarray | None:
        """Which of distinct `records` come as replicas, (n,) bool: those that matter least; None: none do. `area`, into
        which they will be read, is free for measuring meanwhile. Raises what that raises."""
        if not records.size:
            return None
        counters = self._storage.counters
        counters.records_read += records.size
        wanted = self._owed + (self._share or 0.0) * records.size  # what is rounded is made up for by the next read
        if self._share is None:
            rates = self._measured(history, area)
            hidden = (self._hidden or 0.0) if ahead else 0.0
            wanted = 0.0 if rates is None else rates.share(records.size, hidden) * records.size
        there = (self.replicas.locate(records) >= 0).nonzero()[0]
        count = max(0, min(there.size, round(wanted)))
        if self._share is not None:
            self._owed = max(-1.0, min(1.0, wanted - count))
        if self._storage.timeline.on:
            self._storage.timeline.count("compressed reads", share=count / records.size)
        if not count:
            return None
        counters.records_compressed += count
        if importance is not None:
            there = there[np.argsort(importance[there], kind="stable")]
        come = np.zeros(records.size, dtype=bool)
        come[there[:count]] = True
        return come

    def _measured(self, history: Source, area: Staging) -> LinkRates | None:
        """None: it is not known yet."""
        sizes = history.form.record_bytes, self.replicas.record_bytes, history.device
        if sizes not in self._rates:
            self._tried += 1
            found = measure(self._storage, history, self.replicas, area, self._tried)
            if found is None:
                return None
            self._rates[sizes] = found
        return self._rates[sizes]

    def hid(self, seconds: float) -> None:
        """So long after a read ahead was begun it was asked for."""
        before = seconds if self._hidden is None else self._hidden
        self._hidden = before + self._LATEST * (seconds - before)
