"""Which of the records that a layer reads travel as replicas (LeoAM, section 4.4)."""

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

# What a fetcher needs of records' smaller replicas

class Replicas(Protocol):
    """Some records of a history once more, in fewer bytes and less exact."""

    store: Store
    record_bytes: int

    def locate(self, records: np.ndarray) -> np.ndarray:
        """The replica (int64 ids in `store`) of each record, -1: it has none."""

    @property
    def records(self) -> np.ndarray:
        """The records that have one, ascending."""

    def unpack(self, replicas: torch.Tensor, rows: np.ndarray, into: ByteRows, target: np.ndarray) -> None:
        """Payloads of replica `rows[i]` of `replicas` (n, record_bytes) uint8 into row `target[i]` of `into`, on the
        device of both."""

    def forget(self, records: np.ndarray) -> None:
        """These records have none any more."""


# What a link takes for records and for their replicas, measured once, and which share should travel as replicas

_RECORDS = 24
"""Read at a time where a link is measured, as far as there is room."""
_TIMES = 3


@dataclass(frozen=True)
class LinkRates:
    """Seconds. A link that is bound by requests takes as long for a replica as for a record."""

    latency: float
    """Of a read, beside what its records take: T0."""
    record: float
    """A record more: its bytes over B."""
    replica: float
    """A replica more: the record's by delta, as this link has it."""
    unpack: float
    """A replica unpacked: t of a record."""

    def share(self, records: int, hidden: float) -> float:
        """The theta (LeoAM, section 4.4) by which a read of so many `records` is there soonest, where the model
        computes for `hidden` seconds meanwhile (Tc).

        T0 + (D (1 - theta) + D theta delta) / B = Tc + t(D theta): what comes whole arrives as the last replica has
        been unpacked; T0 is that of two reads. Replicas come first; where these arrive after Tc, unpacking begins with
        them, and theta is where it lasts as long as the rest. All or nothing, where one read is there sooner than two.
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
        """How long after `hidden` seconds the last of `records` is there, where a `share` of them are replicas."""
        packed = share * records
        reads = (packed > 0) + (packed < records)
        rest = reads * self.latency + packed * self.replica + (records - packed) * self.record
        unpacked = max(hidden, self.latency + packed * self.replica) + packed * self.unpack
        return max(unpacked, rest if packed < records else 0.0) - hidden if packed else max(0.0, rest - hidden)


def measure(storage: Storage, history: Source, replicas: Replicas, area: Staging, seed: int) -> LinkRates | None:
    """Read records of `history` and replicas at random into `area`, which the caller has borrowed, and unpack some.

    None: not now. There are too few, or no room for more; some are not on the disk yet; or some cannot be read, and
    these replicas are forgotten. Raises `StalledError`, `BudgetError`.
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
            raise _NotNow  # the others came from the write queue
        area.upload(ids.size, record_bytes)

    def pick(some: int) -> np.ndarray:
        return np.sort(generator.choice(known, some, replace=False)).astype(np.int64)

    def whole(some: int) -> None:
        read(history.store, pick(some), form.record_bytes)

    def packed(some: int) -> None:
        records = pick(some)
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
        one, all_of_them = _seconds(history.device, lambda: whole(1)), _seconds(history.device, lambda: whole(count))
        record = max(0.0, all_of_them - one) / (count - 1)
        latency = max(0.0, one - record)
        replica = max(0.0, _seconds(history.device, lambda: packed(count)) - latency) / count
    except StalledError:
        raise
    except (OSError, _NotNow):
        return None
    unpack = _seconds(history.device, lambda: replicas.unpack(wire, rows, into, rows)) / count
    return LinkRates(latency, record, replica, unpack)


class _NotNow(Exception):
    """What is to be read is not on the disk yet."""


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """The median of a few times, after the first."""
    taken = []
    for _ in range(1 + _TIMES):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


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
