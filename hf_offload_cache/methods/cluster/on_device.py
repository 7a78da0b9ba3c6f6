"""What a CUDA device knows of a layer's clusters, so that steps choose among them without the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from ...core.captured import CapturedLayer
from ...kernels import clusters as kernels
from ...kernels.clusters import MOST_CLUSTERS
from ...kernels.on_a_device import Arriving, fill, to_device
from ...memory.account import MemoryAccount, beside, lasting_empty
from ...memory.dry_run import DryRun
from .arrivals import Arrivals
from .entries import ClusteredEntries, Settling, fullest

_OWNER, _SENT = "centroids", beside("stream buffers")
MOST_JOINING = 128
"""Most keys of a row that join clusters on a device, where each is compared with each."""


class DeviceClusters:
    """Copies of a layer's centroids and counts on its device. The account books them as "centroids".

    They are renewed when clusters have changed, which waits for nothing. They have room for more clusters, whose tables
    are zeros. Keys that `join` change them at once, before the host knows which clusters they have joined. For the
    thread that runs the model.
    """

    def __init__(self, clustered: ClusteredEntries, num_sinks: int, account: MemoryAccount) -> None:
        self._clustered, self._num_sinks, self._account = clustered, num_sinks, account
        self._number = -1  # of the change that is known
        self._centroids: torch.Tensor | None = None
        self._tables: torch.Tensor | None = None
        self._sent: list[tuple[Settling, Arriving]] = []  # keys of clusters that may be split
        self._sent_bytes = self._late_bytes = 0  # booked: of these keys, and of other copies for `late` changes

    @staticmethod
    def rehearse(run: DryRun, rows: int, clusters: int, largest: int, dim: int) -> None:
        """Take the memory for at most `clusters` clusters a row of `largest` pages, in a dry run; that of the slots'
        tables, too."""
        room = _room(clusters)
        run.keeps(_OWNER, rows * room * (2 * dim + 4 * 3))
        run.keeps("tables", (8 + 4 + 4) * rows * _room(clusters * largest))

    @property
    def latest(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Centroids (rows, clusters, D) float16 and tables (3, rows, clusters) int32, which work of the current stream
        may read: see `kernels.clusters.score`. Valid until clusters change. Raises `BudgetError`; they are renewed
        when they are needed again then."""
        if not self.is_latest or self._tables is None:
            self._renew()
        centroids, tables = self.memory
        count = self._clustered.partition.clusters
        return centroids[:, :count], tables[:, :, :count]

    @property
    def is_latest(self) -> bool:
        """Whether `latest` renews nothing."""
        return self._number == self._clustered.changes.number and self._centroids is not None

    @property
    def memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As `latest`, with the room for further clusters, after a call of that: valid while the tensors stay."""
        assert self._centroids is not None and self._tables is not None
        return self._centroids, self._tables

    @staticmethod
    def joining_bytes(rows: int, keys: int, dim: int) -> int:
        """Upper bound on the bytes that `join` uses for so many keys a row."""
        return rows * keys * (2 * keys + 6 * 4 * dim + 64)

    def join(self, coming: Arrivals) -> bool:
        """Algorithm 1 on the device: assign the next tokens of all rows to their nearest clusters, and buffer them. The
        clusters of the host follow in `ClusteredEntries.catch_up`. Nothing waits.

        False, with nothing changed: the copies are not those of the latest clusters, some row has no open cluster, more
        than `MOST_JOINING` tokens come, or the host has no memory for their keys. Raises `BudgetError`, with nothing
        changed."""
        clustered, partition = self._clustered, self._clustered.partition
        are_open = ((partition.counts > 0) & ~partition.closed).any(1).all()
        nbytes = _joining_on_host(clustered, coming.count)
        fits = coming.count <= MOST_JOINING and self._account.has_room(nbytes, _SENT)
        if not self.is_latest or not fits or not are_open:
            return False
        keys = coming.points_of(np.arange(coming.rows), 0, coming.count)
        arriving, first = Arriving(self._joined(keys), keys), clustered.buffer_all(coming)
        self._book_late(nbytes)

        def caught_up() -> None:
            try:
                labels, of_host = arriving.wait()
                clustered.joined(of_host.float().numpy(), labels.numpy().astype(np.int64), first)
            finally:
                self._book_late(-nbytes)

        clustered.late.append(caught_up)
        return True

    def _joined(self, keys: torch.Tensor) -> torch.Tensor:
        """Nearest open clusters, (rows, n) int32, new, of keys (rows, n, D). UpdateStats: their counts and centroids
        change as `Partition.join` will change those on the host."""
        centroids, tables, partition, count = self._centroids, self._tables, self._clustered.partition, keys.shape[1]
        assert centroids is not None and tables is not None
        with self._account.holding("packing", self.joining_bytes(len(keys), count, keys.shape[2])):
            closed, means = tables[0, :, : partition.clusters] == 0, centroids[:, : partition.clusters]
            if partition.closed.any():
                closed |= to_device(np.ascontiguousarray(partition.closed), keys.device)
            at = kernels.assign(keys, means, closed).long()
            # a key without a distance that is a number gets the row's first open cluster, as on the host
            at = torch.where(closed.gather(1, at), closed.byte().argmin(1, keepdim=True), at)
            of_label = (at[:, :, None] == at[:, None]).byte().argmax(2)  # the first key with the same label
            sums, counts = kernels.means(keys, of_label.int(), keys.new_zeros(keys.shape, dtype=torch.float32))
            channels = of_label[..., None].expand(keys.shape)
            joined, before = counts.gather(1, of_label), tables[0].gather(1, at)
            own = means.gather(1, at[..., None].expand(keys.shape)).float()
            own += (sums.gather(1, channels) - own) * (joined / (before + joined))[..., None]
            largest = torch.finfo(torch.float16).max
            means.scatter_(1, at[..., None].expand(keys.shape), own.clamp_(-largest, largest).half())
            tables[0].scatter_(1, at, before + joined)
        return at.int()

    def _renew(self) -> None:
        clustered, partition = self._clustered, self._clustered.partition
        device, centroids = clustered.buffer.entries.device, partition.centroids
        (rows, count, dim), before, changed = centroids.shape, self._centroids, clustered.changes.since(self._number)
        if before is None or len(before) != rows or before.shape[1] < count:
            self._free()
            self._centroids = self._empty(rows, _room(count), dim, dtype=torch.float16, device=device).zero_()
            changed = None
        known = self._centroids
        assert known is not None
        room = known.shape[1]
        if self._tables is None:
            self._tables = self._empty(3, rows, room, dtype=torch.int32, device=device)
        if changed is None:
            known[:, :count] = to_device(np.ascontiguousarray(centroids), device)
        else:
            row, cluster = to_device(np.stack(changed).astype(np.int64), device)
            known[row, cluster] = to_device(centroids[changed], device)
        sinks = np.zeros((rows, count), dtype=np.int32)
        np.add.at(sinks, (np.arange(rows)[:, None], clustered.labels[:, : self._num_sinks]), 1)
        tables = np.zeros((3, rows, room), dtype=np.int32)
        tables[:, :, :count] = partition.counts, clustered.stored, sinks
        self._tables.copy_(to_device(tables, device))
        self._number = clustered.changes.number

    # --- settling ----------------------------------------------------------------------------------------------

    def settle(self, kept: torch.Tensor | None) -> None:
        """Algorithm 1 after attention: settle the clusters with buffered entries of which a step has kept some, and,
        over the buffer budget, the fullest others. `ClusteredEntries.catch_up` does so when the numbers have arrived.

        `kept` (rows, clusters) int32 are the entries that the step has kept, on the device; None: of all clusters. Keys
        of clusters that may be split are copied to the host now, if it knows these clusters. Raises `StoreError` or
        `BudgetError`, with nothing changed. Until then the account has the copies."""
        clustered, joined = self._clustered, bool(self._clustered.late)
        if not joined:  # otherwise it is not known which clusters these are
            self._send_keys(*(clustered.partition.to_split & (clustered.waiting > 0)).nonzero())
        if kept is not None:
            self._book_late(kept.nbytes)
        clustered.late.append(partial(self._settle, None if kept is None else Arriving(kept), joined))

    def _settle(self, kept: Arriving | None, joined: bool) -> None:
        """As `settle` says. `joined`: tokens have joined in the same step, so that the host waits for keys now, once
        for all."""
        clustered, waiting = self._clustered, self._clustered.waiting
        retrieved = waiting > 0
        if kept is not None:
            (entries,) = kept.wait()
            retrieved &= entries.numpy() > 0
            self._book_late(-entries.nbytes)
        others = fullest(np.where(retrieved, 0, waiting), clustered.buffer.most)
        rows, clusters = map(np.concatenate, zip(retrieved.nonzero(), others, strict=True))
        try:
            if joined:
                wide = clustered.partition.to_split[rows, clusters]
                self._send_keys(rows[wide], clusters[wide])
            known = {
                place: keys for piece, sent in reversed(self._sent)  # after the last one, all have arrived
                for place, keys in piece.keys(sent.wait()[0].float().numpy())
            }  # fmt: skip
            clustered.settle(clustered.read, rows, clusters, known=known)
        finally:
            self._drop_sent()

    def _send_keys(self, rows: np.ndarray, clusters: np.ndarray) -> None:
        """Begin to copy the keys of clusters (n,) of rows (n,) to the host, unless it has no memory for them."""
        clustered, form = self._clustered, self._clustered.form
        count = int(clustered.partition.counts[rows, clusters].sum())
        nbytes = count * form.key_width * form.dtype.itemsize
        if self._account.has_room(nbytes, _SENT):
            for piece, entries in clustered.assembled(rows, clusters):
                self._sent.append((piece, Arriving(entries[:, : form.key_width])))
            self._account.hold(_SENT, nbytes)
            self._sent_bytes = nbytes

    def _drop_sent(self) -> None:
        self._account.release(_SENT, self._sent_bytes)
        self._sent, self._sent_bytes = [], 0

    def _book_late(self, nbytes: int) -> None:
        """Book so many bytes more for the host's copies, or less, if they are negative."""
        nbytes = max(nbytes, -self._late_bytes)  # `close` has booked them as freed
        self._account.hold(_SENT, nbytes)
        self._late_bytes += nbytes

    @staticmethod
    def most_sent(clustered: ClusteredEntries) -> int:
        """Upper bound on the bytes that `join` and `settle` copy to the host: the keys that join, the numbers of
        entries that a step has kept, and the keys of clusters that may be split."""
        form, buffer, partition = clustered.form, clustered.buffer, clustered.partition
        waiting = partition.rows * (buffer.most + buffer.joining)  # each in another full cluster
        split = waiting * (partition.capacity + 1) * form.key_width * form.dtype.itemsize
        joining = _joining_on_host(clustered, min(buffer.joining, MOST_JOINING))
        return split + joining + 4 * clustered.stored.size

    def _empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._account.empty(_OWNER, *shape, dtype=dtype, device=device)

    def close(self) -> None:
        """Free the memory; it is taken again when it is needed."""
        self._free()
        self._drop_sent()
        self._book_late(-self._late_bytes)

    def _free(self) -> None:
        for one in (self._centroids, self._tables):
            if one is not None:
                self._account.free(_OWNER, one)
        self._centroids, self._tables, self._number = None, None, -1


def _room(count: int) -> int:
    """Room that is made for so many."""
    return count + max(64, count // 8)


def _joining_on_host(clustered: ClusteredEntries, tokens: int) -> int:
    """Bytes of the host's copies of so many tokens' keys and labels."""
    form = clustered.form
    return clustered.partition.rows * tokens * (form.key_width * form.dtype.itemsize + 4)


class CapturedClusterLayer(CapturedLayer):
    """A `ClusterLayer` in a captured step. Steps that change clusters, and those after them, run the model."""

    _seen: torch.Tensor | None = None  # which entries of the buffer and the tail count
    _seen_at = -1  # as of this change of clusters

    def why_not(self) -> str | None:
        layer = self.layer
        if not layer.on_device or not layer.is_filled:
            return super().why_not()
        history, predictor = layer.history, layer.predictor
        if layer.settles(1):
            return "the step settles clusters"
        if history.clustered.late or not predictor.on_device.is_latest:
            return "clusters have changed"
        if (why := super().why_not()) is not None:
            return why
        config, group = layer.config, history.form.group_size
        if layer.device_slots.count < layer.most_records(config, group, layer.budget):
            return "slots do not hold the most pages of a choice"
        return None if predictor.room <= MOST_CLUSTERS else "the context is too long for a kernel"

    @property
    def latest_room(self) -> int:
        return super().latest_room + int(self.layer.history.clustered.buffer.places.shape[1])

    def latest(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """As `CapturedLayer.latest`: the buffered entries, and then the tail's. A copy."""
        history = self.layer.history
        buffered = history.clustered.buffer.entries
        entries = torch.cat([buffered, history.tail.memory], 1)
        return entries, self._mask(), self.sizes.recent + buffered.shape[1]

    def parts(self) -> list[Any]:
        return [*super().parts(), self.latest_room, self.layer.history.clustered.buffer.entries]

    @property
    def own_bytes(self) -> int:
        return int(self.layer.history.rows * self.latest_room)  # of `_mask`

    def free(self) -> None:
        self._seen, self._seen_at = None, -1

    def join(self) -> None:
        """Tell the device which buffered entries there are."""
        clustered = self.layer.history.clustered
        if self._seen_at != clustered.changes.number:
            seen = np.ones((self.layer.history.rows, self.latest_room), dtype=bool)
            seen[:, : clustered.buffer.places.shape[1]] = clustered.buffer.places >= 0
            fill(self._mask(), seen)
            self._seen_at = clustered.changes.number

    def _mask(self) -> torch.Tensor:
        """(rows, `latest_room`) bool, on the device."""
        shape = self.layer.history.rows, self.latest_room
        if self._seen is None or self._seen.shape != shape:
            device = self.layer.history.device
            self._seen, self._seen_at = lasting_empty(*shape, dtype=torch.bool, device=device), -1
        return self._seen
