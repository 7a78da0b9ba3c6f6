"""4-bit replicas of a history's records, in a separate store: reads may use them instead of the records (LeoAM, section
4.4, dynamic KV compression)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ...errors import CorruptRecordError, StalledError, StoreError, not_whole
from ...fetch.areas import ByteRows
from ...fetch.storage import Storage
from ...history.base import frozen
from ...history.records import RecordFormat
from ...history.state import State, Table
from ...kernels.low_bit import LARGEST, ReplicaLayout, pack_replicas, unpack_replicas
from ...kernels.on_a_device import to_device
from ...memory.dry_run import DryRun
from ...stores.base import DEVICE_BLOCK, FreezableStore, Store, aligned_empty
from ...stores.layered import LayeredStore, parts_that_stay

# How a record's replica in 4 bits lies on the disk

_GROUPS = (64, 32)
"""Elements a quantisation group; the smaller group applies if it takes no more disk."""


@dataclass(frozen=True)
class ReplicaFormat:
    """One replica for each record of a `RecordFormat` (LeoAM, section 4.4: INT4, group-wise), padded to the device's
    block. A group has elements of one token, and either of its keys or of its values."""

    layout: ReplicaLayout
    record_bytes: int

    @classmethod
    def of(cls, form: RecordFormat) -> ReplicaFormat | None:
        """Format of the replicas of `form`; None: a replica would be no smaller than the record."""
        best: ReplicaFormat | None = None
        for group in _GROUPS:
            entry = ReplicaLayout.of(group, form.key_width, form.entry_width - form.key_width)
            if entry is not None:
                layout = ReplicaLayout(form.payload_width, entry.group)
                size = -(-layout.nbytes // DEVICE_BLOCK) * DEVICE_BLOCK
                if size <= (form.record_bytes - 1 if best is None else best.record_bytes):
                    best = cls(layout, size)
        return best


_NONE = -1


class Replicas:
    """The replica of each record, if it has one, and their store, which this owns. For the thread that runs the model.

    A replica belongs to a record, not to a row: rows that share records share replicas, whatever happens to the rows.
    If a replica cannot be read, the record is read instead.
    """

    STATE: ClassVar[State] = State(
        "replicas", of=Table("records", torch.int32, low=_NONE, below="replicas", at="_replica_of")
    )

    def __init__(self, storage: Storage, form: ReplicaFormat, name: str, store: Store | None = None) -> None:
        self.form, self.record_bytes = form, form.record_bytes
        self._storage, self._name = storage, f"{name}, replicas"
        self.store = storage.open_store(form.record_bytes, self._name) if store is None else store
        self._replica_of = np.full(64, _NONE, dtype=np.int32)

    def rehearse(self, run: DryRun, rows: int, groups: int, filled: int) -> None:
        """Take the size of `rows` rows of `groups` groups, in a dry run, with `filled` groups a row written at a
        time."""
        run.stores(self.store, rows * groups)
        self._replica_of = np.empty(max(64, rows * groups * 5 // 4), dtype=np.int32)
        working = self.form.layout.working_bytes
        at_once, a_group = (working + rows * count * self.record_bytes for count in (filled, 1))
        run.passes("packing", prefill=at_once, decode=a_group, together=True)
        run.passes("unpacking", decode=working)

    @property
    def tables_nbytes(self) -> int:
        return self._replica_of.nbytes + self.store.tables_bytes

    def locate(self, records: np.ndarray) -> np.ndarray:
        """The replica of each record, int64 ids in `store`; -1: none."""
        last = self._replica_of.size - 1  # always -1
        return self._replica_of[np.where((records < 0) | (records > last), last, records)].astype(np.int64)

    @property
    def records(self) -> np.ndarray:
        """The records with a replica, ascending."""
        return (self._replica_of >= 0).nonzero()[0]

    # --- reads and writes --------------------------------------------------------------------------------------

    def write(self, records: np.ndarray, payloads: torch.Tensor) -> None:
        """Quantise the payloads (n, payload width) in host memory of `records` (n), and hand the replicas to the
        writer.

        The records must have no replica yet. A record with an element beyond half precision gets none. Raises
        `StoreFullError`, or an earlier write's `StoreError`, with nothing changed.
        """
        layout = self.form.layout
        with self._storage.account.holding("packing", layout.working_bytes + records.size * self.record_bytes):
            fits = (payloads.amax(1) <= LARGEST) & (payloads.amin(1) >= -LARGEST)
            if not fits.all():
                records, payloads = records[fits.numpy()], payloads[fits]
                if not records.size:
                    return
            replicas = aligned_empty(records.size, self.record_bytes)
            pack_replicas(layout, payloads, replicas)
            ids = self.store.allocate(records.size)
            try:
                self._storage.prefetcher.write(self.store, ids, replicas)
            except BaseException:
                self.store.free(ids)
                raise
        if (last := int(records.max())) >= (size := self._replica_of.size) - 1:
            grown = np.full(max(last + 2, size * 5 // 4), _NONE, dtype=np.int32)
            grown[:size] = self._replica_of
            self._replica_of = grown
        self._replica_of[records] = ids

    def unpack(self, replicas: torch.Tensor, rows: np.ndarray, into: ByteRows, target: np.ndarray) -> None:
        """Dequantise row `rows[i]` of `replicas` (n, record_bytes) uint8 into row `target[i]` of `into`, on their
        device."""
        device = replicas.device
        indices, targets = (to_device(np.ascontiguousarray(part), device) for part in (rows, target))
        with self._storage.account.holding("unpacking", self.form.layout.working_bytes):
            unpack_replicas(self.form.layout, replicas, indices, into.tensor, targets)

    def forget(self, records: np.ndarray) -> None:
        """Drop the replicas of these records."""
        known = records[(records >= 0) & (records < self._replica_of.size)]
        replicas = self._replica_of[known]
        self._replica_of[known] = _NONE
        self.store.free(np.unique(replicas[replicas >= 0]).astype(np.int64))

    def close(self) -> None:
        self._storage.close_store(self.store)

    # --- contexts ----------------------------------------------------------------------------------------------

    def _named(self, count: int) -> np.ndarray:
        named = np.zeros(count, dtype=bool)
        named[self._replica_of[self._replica_of >= 0]] = True
        return named

    def _move(self, store: Store) -> None:
        self.store = store

    def freeze(self) -> Sequence[FreezableStore]:
        """As `History.freeze`. Drops replicas that were not written, and those of a part that cannot be merged."""
        try:
            self._storage.prefetcher.flush(self.store)
            self._storage.prefetcher.check_written(self.store, self.locate(self.records))
        except StalledError:
            raise
        except StoreError:
            self._forget_unwritten()
        try:
            return frozen(self._storage, self.store, self._name, self._named, self._move).parts
        except CorruptRecordError:
            store = self.store
            assert isinstance(store, LayeredStore)
            sizes = [part.capacity for part in store.parts]
            stays = sum(sizes[: parts_that_stay(sizes)])
            self.forget((self._replica_of >= stays).nonzero()[0])
            store.merge(self._named(store.capacity))
            return store.parts

    def _forget_unwritten(self) -> None:
        for record in self.records:
            try:
                self._storage.prefetcher.check_written(self.store, self.locate(record[None]))
            except StoreError:
                self.forget(record[None])

    def live(self, parts: Sequence[FreezableStore]) -> list[np.ndarray]:
        """As `History.live`."""
        edges = np.cumsum([part.capacity for part in parts])
        return np.split(self._named(self.store.capacity), edges[:-1])

    @classmethod
    def restore(
        cls, storage: Storage, tree: Any, form: RecordFormat, parts: Sequence[FreezableStore], name: str
    ) -> Replicas:
        """Make the captured replicas over the frozen stores `parts`, and own these. Raises `ContextError`."""
        replica = ReplicaFormat.of(form)
        count = sum(part.capacity for part in parts)
        if replica is None or any(part.record_bytes != replica.record_bytes for part in parts):
            sizes = [part.record_bytes for part in parts]
            raise not_whole(name, f"its replicas have {sizes} bytes, which do not fit records of {form}")
        records = cls.STATE.check(tree, name, replicas=count)["records"]
        if records < 64 or int(tree["of"][-1]) != _NONE:
            raise not_whole(name, f"its table of replicas has {records} records, not 64 or more with none for the last")
        store = storage.layer_store(parts, replica.record_bytes, f"{name}, replicas")
        replicas = cls(storage, replica, name, store)
        cls.STATE.restore(replicas, tree)
        return replicas
