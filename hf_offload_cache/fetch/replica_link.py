"""The split of a layer's reads into full records and smaller replicas (LeoAM, section 4.4).

A method makes the `Link` and stores the replicas. The split is part of a read (`reads.py`), which knows the absent
records, the area they go to, and the time that a prefetch had.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..errors import StalledError
from ..stores.base import Store
from .areas import ByteRows, Staging
from .choice import Source
from .storage import Storage

# The smaller replicas of records, as a fetcher uses them

class Replicas(Protocol):
    """Copies of some of a history's records, in fewer bytes and less exact."""

    store: Store
    record_bytes: int

    def locate(self, records: np.ndarray) -> np.ndarray:
        """The replica (int64 ids in `store`) of each record; -1: it has none."""

    @property
    def records(self) -> np.ndarray:
        """The records that have a replica, ascending."""

    def unpack(self, replicas: torch.Tensor, rows: np.ndarray, into: ByteRows, target: np.ndarray) -> None:
        """Write the payload of replica `rows[i]` of `replicas` (n, record_bytes) uint8 to row `target[i]` of `into`, on
        the device of both."""

    def forget(self, records: np.ndarray) -> None:
        """Drop these records' replicas."""


# A link's times for records and replicas, measured once, and the best share of replicas

_RECORDS = 24
"""Records read at a time when a link is measured, as far as there is room."""
_TIMES = 3


@dataclass(frozen=True)
class LinkRates:
    """Times in seconds. A link bound by its rate of requests takes as long for a replica as for a record."""

    latency: float
    """Time of a read besides that of its records: T0."""
    record: float
    """Time of one more record: its bytes over B."""
    replica: float
    """Time of one more replica: the record's times delta, as measured on this link."""
    unpack: float
    """Time to unpack one replica: t of a record."""

    def share(self, records: int, hidden: float) -> float:
        """The share theta of replicas (LeoAM, section 4.4) with which a read of `records` records ends soonest, while
        the model computes for `hidden` seconds (Tc).

        T0 + (D (1 - theta) + D theta delta) / B = Tc + t(D theta): the full records arrive when the last replica has
        been unpacked. T0 is that of two reads. Replicas are read first. If they arrive after Tc, unpacking begins then,
        and theta is the share with which it lasts as long as the remaining reads. The result is 0 or 1 if one read ends
        sooner than two.
        """
        saved = self.record - self.replica
        if saved <= 0 or not records:
            return 0.0
        both = 2 * self.latency + records * self.record
        balanced = (both - hidden) / (records * (saved + self.unpack))
        piped = (both - self.latency) / (records * (self.record + self.unpack))
        shares = 0.0, min(max(0.0, balanced), piped, 1.0), 1.0
        return min(shares, key=lambda share: self.late(records, hidden, share))

    def late(self, records: int, hidden: float, share: float) -> float:
        """Seconds after `hidden` at which the last of `records` arrives, if a `share` of them are replicas."""
        packed = share * records
        reads = (packed > 0) + (packed < records)
        read = reads * self.latency + packed * self.replica + (records - packed) * self.record
        unpacked = max(hidden, self.latency + packed * self.replica) + packed * self.unpack
        return max(unpacked, read if packed < records else 0.0) - hidden if packed else max(0.0, read - hidden)


def measure(storage: Storage, history: Source, replicas: Replicas, area: Staging, seed: int) -> LinkRates | None:
    """Time random reads of `history`'s records and of replicas into `area`, which the caller has borrowed, and unpack
    some.

    None if it cannot measure now: there are too few replicas, or no room for more; some are not on the disk yet; or
    some cannot be read, and these replicas are dropped. Raises `StalledError`, `BudgetError`.
    """
    form, known = history.form, replicas.records
    count = min(_RECORDS, known.size, area.nbytes // (form.record_bytes + replicas.record_bytes))
    if count < 2:
        return None
    generator = np.random.default_rng(seed)

    def read(store: Store, ids: np.ndarray, record_bytes: int) -> None:
        ticket = storage.prefetcher.read(store, ids, area.host_rows(ids.size, record_bytes), guess=True)
        ticket.wait()
        if ticket.records < ids.size:
            raise _NotNow  # the others were copied from the write queue
        area.upload(ids.size, record_bytes)

    def pick(number: int) -> np.ndarray:
        return np.sort(generator.choice(known, number, replace=False)).astype(np.int64)

    def whole(number: int) -> None:
        read(history.store, pick(number), form.record_bytes)

    def packed(number: int) -> None:
        records = pick(number)
        try:
            read(replicas.store, replicas.locate(records), replicas.record_bytes)
        except StalledError:
            raise
        except OSError:
            replicas.forget(records)
            raise

    behind = count * replicas.record_bytes
    into = ByteRows(form.payload(area.upload(count, form.record_bytes, behind)))
    rows = np.arange(count)
    wire = area.upload(count, replicas.record_bytes)
    try:
        single, many = _seconds(history.device, lambda: whole(1)), _seconds(history.device, lambda: whole(count))
        record = max(0.0, many - single) / (count - 1)
        latency = max(0.0, single - record)
        replica = max(0.0, _seconds(history.device, lambda: packed(count)) - latency) / count
    except StalledError:
        raise
    except (OSError, _NotNow):
        return None
    unpack = _seconds(history.device, lambda: replicas.unpack(wire, rows, into, rows)) / count
    return LinkRates(latency, record, replica, unpack)


class _NotNow(Exception):
    """Some records to read are not on the disk yet."""


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """The median time of some runs, after a first one that does not count."""
    taken = []
    for _ in range(1 + _TIMES):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


Rates = dict[Any, LinkRates]
"""Measured rates by record sizes and device, shared by a cache's layers."""


class Link:
    """One layer's split of its reads; for the thread that runs the model.

    Args:
        share: share of records that are read as replicas; None: solved for each read.
        rates: stores the measured rates.
    """

    _LATEST = 0.25
    """Weight of the latest time in the mean of hidden times."""

    def __init__(self, storage: Storage, replicas: Replicas, share: float | None, rates: Rates) -> None:
        self.replicas = replicas
        self._storage, self._share, self._rates = storage, share, rates
        self._hidden: float | None = None
        self._tried = 0
        self._owed = 0.0

    def split(
        self, history: Source, records: np.ndarray, importance: np.ndarray | None, area: Staging, ahead: bool
    ) -> np.ndarray | None:
        """Mask of the distinct `records` to read as replicas, (n,) bool: the least important ones; None: none.

        Measures in `area`, which the records will be read into and which is free until then. Raises as `measure` does.
        """
        if not records.size:
            return None
        counters = self._storage.counters
        counters.records_read += records.size
        wanted = self._owed + (self._share or 0.0) * records.size  # the next read makes up for rounding
        if self._share is None:
            rates = self._measured(history, area)
            hidden = (self._hidden or 0.0) if ahead else 0.0
            wanted = 0.0 if rates is None else rates.share(records.size, hidden) * records.size
        candidates = (self.replicas.locate(records) >= 0).nonzero()[0]
        count = max(0, min(candidates.size, round(wanted)))
        if self._share is not None:
            self._owed = max(-1.0, min(1.0, wanted - count))
        if self._storage.timeline.on:
            self._storage.timeline.count("compressed reads", share=count / records.size)
        if not count:
            return None
        counters.records_compressed += count
        if importance is not None:
            candidates = candidates[np.argsort(importance[candidates], kind="stable")]
        replicated = np.zeros(records.size, dtype=bool)
        replicated[candidates[:count]] = True
        return replicated

    def _measured(self, history: Source, area: Staging) -> LinkRates | None:
        """The rates of this link; None: not known yet."""
        sizes = history.form.record_bytes, self.replicas.record_bytes, history.device
        if sizes not in self._rates:
            self._tried += 1
            rates = measure(self._storage, history, self.replicas, area, self._tried)
            if rates is None:
                return None
            self._rates[sizes] = rates
        return self._rates[sizes]

    def hid(self, seconds: float) -> None:
        """Record the seconds between the start of a prefetch and its use."""
        before = seconds if self._hidden is None else self._hidden
        self._hidden = before + self._LATEST * (seconds - before)
