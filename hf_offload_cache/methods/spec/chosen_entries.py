"""Each key head's top-k entries in full precision, C_K of SpeCache (section 3.3), and the reads that fetch them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ...errors import BudgetError
from ...fetch.areas import Areas
from ...fetch.choice import Choice, Source
from ...fetch.device_slots import Addresses
from ...fetch.fetcher import Fetcher
from ...fetch.storage import Storage
from ...history.records import places_within
from ...history.state import Array, State
from ...kernels.mixed_attention import MOST_EXCHANGED, bring, exchange
from ...kernels.on_a_device import has_step
from ...memory.account import MemoryAccount, lasting_empty


@dataclass(frozen=True)
class Entries:
    """Keys (rows, heads, m, Dk) and values (rows, heads, m, Dv) of `tokens` (rows, heads, m) int64, on one device. A
    token of -1 is an empty place, whose key and value are undefined but finite."""

    tokens: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    count: int | None = None
    """Tokens of each head, if none of these places is empty; None: unknown to the host."""


def records_of(tokens: np.ndarray, group_size: int, most: int) -> list[Choice]:
    """Units of `group_size` tokens that contain `tokens` (rows, heads, m), -1: none. They are in sequence order, split
    into choices of at most `most` units a row."""
    wanted = np.zeros((len(tokens), int(tokens.max(initial=-1)) // group_size + 2), dtype=bool)
    wanted[np.arange(len(tokens))[:, None], (tokens // group_size).reshape(len(tokens), -1)] = True  # -1: last column
    rows, columns = wanted[:, :-1].nonzero()
    counts = np.bincount(rows, minlength=len(wanted))
    units = np.full((len(wanted), int(counts.max(initial=0))), -1, dtype=np.int64)
    units[rows, places_within(counts)] = columns
    choices = []
    for start in range(0, units.shape[1], most):
        choices.append(Choice(units[:, start : start + most]))
    return choices


def picked(form: Any, records: torch.Tensor, choice: Choice, tokens: np.ndarray) -> Entries:
    """Copy the entries of `tokens` (rows, heads, m) from `records` (rows, M, entries a record, entry width).

    `choice` is the one of `records_of` that was read. A token in none of its records becomes -1.
    """
    units, wanted = choice.units, tokens // form.group_size
    at, hits = np.zeros_like(tokens), np.zeros(tokens.shape, dtype=bool)
    for row, chosen in enumerate(units):
        chosen = chosen[chosen >= 0]
        if chosen.size:
            at[row] = np.minimum(np.searchsorted(chosen, wanted[row]), chosen.size - 1)
            hits[row] = chosen[at[row]] == wanted[row]
    place = torch.from_numpy(at * form.group_size + tokens % form.group_size).to(records.device)
    keys, values = form.split(records.flatten(1, 2))
    of_row, of_head = (torch.arange(count, device=records.device) for count in tokens.shape[:2])
    where = of_row[:, None, None], of_head[:, None], place
    return Entries(torch.from_numpy(np.where(hits, tokens, -1)).to(records.device), keys[where], values[where])


class ChosenEntries:
    """The resident top-k: room for `count` entries a row and key head, on the history's device.

    Entries that are selected again keep their places. The account books it as "chosen entries". For the thread that
    runs the model; on a GPU, `exchange` does not block it.
    """

    STATE: ClassVar[State] = State(
        "chosen entries",
        "chosen entries",
        tokens=Array("rows heads count", torch.int64, low=-1, booked=3),  # with those wanted and those absent
        keys=Array("rows heads count key_dim"),
        values=Array("rows heads count value_dim"),
    )

    def __init__(self, form: Any, rows: int, count: int, device: torch.device, account: MemoryAccount) -> None:
        self.form, self.count, self._device, self._account = form, count, device, account
        account.hold("chosen entries", self.nbytes_of(form, rows, count))
        shape = rows, form.num_key_heads, count
        self.tokens = lasting_empty(*shape, dtype=torch.int64, device=device).fill_(-1)
        """Token of each entry, (rows, heads, count) int64, -1: an empty place; in no order."""
        self.wanted: torch.Tensor | None = None
        """Tokens (rows, heads, m) to hold after the next `take`, -1: none. None: the resident ones."""
        self.absent: torch.Tensor | None = None
        """The wanted tokens that are not resident, (rows, heads, m), padded with -1. None if `wanted` is."""
        self.empty = True
        """True if no entry is resident."""
        self.keys = lasting_empty(*shape, form.key_dim, dtype=form.dtype, device=device).zero_()
        self.values = lasting_empty(*shape, form.value_dim, dtype=form.dtype, device=device).zero_()
        self._resident: int | None = None  # tokens of each head, if the host knows it
        self._under_way: torch.cuda.Event | None = None

    @staticmethod
    def nbytes_of(form: Any, rows: int, count: int) -> int:
        """Bytes for `count` entries a row and head, with their tokens, the wanted and the absent ones."""
        return rows * count * (form.entry_bytes + 3 * 8 * form.num_key_heads)

    @property
    def nbytes(self) -> int:
        return self.STATE.nbytes(self)

    @property
    def entries(self) -> Entries:
        """All resident entries: views, valid until the next change."""
        if self._under_way is not None:
            self.join()
        return Entries(self.tokens, self.keys, self.values, self._resident)

    def absent_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """The `tokens` (rows, heads, m), -1: none, that are not resident, padded with -1 to the same shape."""
        if self._under_way is not None:
            self.join()
        return tokens.masked_fill(_among(tokens, self.tokens), -1).sort(2, descending=True).values

    def want(self, tokens: torch.Tensor) -> torch.Tensor:
        """Set `tokens` (rows, heads, at most `count`), -1: none, to be the resident ones after the next `take`. Returns
        `absent`."""
        self.wanted, self.absent = tokens, self.absent_of(tokens)
        return self.absent

    def take(self, new: Sequence[Entries]) -> None:
        """Make the wanted tokens resident and evict all others. `new` has the absent entries, at their places in
        `absent`."""
        if self._under_way is not None:
            self.join()
        if self.wanted is None:
            return
        self.tokens.masked_fill_(~_among(self.tokens, self.wanted), -1)
        free = (self.tokens >= 0).byte().argsort(dim=2, stable=True)
        for entries in new:
            slot, valid = free[:, :, : entries.tokens.shape[2]], entries.tokens >= 0
            self.tokens.scatter_(2, slot, torch.where(valid, entries.tokens, self.tokens.gather(2, slot)))
            for resident, fetched in ((self.keys, entries.keys), (self.values, entries.values)):
                place = slot[..., None].expand(fetched.shape)
                resident.scatter_(2, place, torch.where(valid[..., None], fetched, resident.gather(2, place)))
        self.empty = self.empty and not self.wanted.shape[2]
        self.wanted = self.absent = self._resident = None

    def exchange(
        self, wanted: torch.Tensor, addresses: torch.Tensor, stream: torch.cuda.Stream, *, complete: bool = False
    ) -> torch.Tensor:
        """`want` and `take` in one, on the GPU. Does not block; later work of the current stream sees the result.

        Args:
            wanted: (rows, heads, at most `count`) of integers, -1: none; `complete`: there are none of these.
            addresses: of each unit's record in pinned host memory, (rows, units) int64: see `kernels.mixed_attention`.
            stream: reads those entries.

        Returns the numbers of fetched entries: (rows, heads) int64.
        """
        self.join()
        self.wanted = self.absent = self._resident = None
        try:
            fetched, counts = exchange(self.tokens, wanted)
            for used in (fetched, self.keys, self.values, addresses):
                used.record_stream(stream)
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                bring(addresses, fetched, self.form, self.keys, self.values)
                self._under_way = stream.record_event()
        except BaseException:  # tokens may name entries that were not read
            self.tokens.fill_(-1)
            self.empty = True
            raise
        self.empty = self.empty and not wanted.shape[2]
        self._resident = wanted.shape[2] if complete else None
        return counts

    def join(self) -> None:
        """Let the current stream's later work see the exchanged entries."""
        if self._under_way is not None:
            torch.cuda.current_stream(self._device).wait_event(self._under_way)
            self._under_way = None

    def abandon(self) -> None:
        """Forget a read that was captured, after the capture failed."""
        self._under_way = None

    def settle(self) -> None:
        """Block until no read of host memory is in flight."""
        if self._under_way is not None:
            self._under_way.synchronize()
            self._under_way = None

    def truncate(self, tokens: int) -> None:
        """Keep, and want, only entries of the first `tokens` tokens."""
        self.settle()
        self.tokens.masked_fill_(self.tokens >= tokens, -1)
        if self.wanted is not None and self.absent is not None:  # perhaps inference tensors: not to be changed
            self.wanted = self.wanted.masked_fill(self.wanted >= tokens, -1)
            absent = self.absent.masked_fill(self.absent >= tokens, -1)
            self.absent = absent.sort(2, descending=True).values
        self.empty, self._resident = not bool((self.tokens >= 0).any()), None

    def grow(self, count: int) -> None:
        """Make room for `count` entries, more than before. Raises `BudgetError` and changes nothing then."""
        self.settle()
        self.STATE.remake(self, count=count)
        for grown, empty in ((self.tokens, -1), (self.keys, 0), (self.values, 0)):
            grown[:, :, self.count :] = empty
        self.count = count

    def select_rows(self, rows: torch.Tensor) -> None:
        """Replace row i by row `rows[i]`."""
        self.settle()
        self.STATE.select_rows(self, rows)
        if self.wanted is not None and self.absent is not None:
            index = rows.to(self._device)
            self.wanted, self.absent = self.wanted[index], self.absent[index]

    def close(self) -> None:
        self.settle()
        self.STATE.close(self)


def _among(these: torch.Tensor, those: torch.Tensor) -> torch.Tensor:
    """Mask (rows, heads, m) of the tokens `these` that are also in `those` (rows, heads, n) of the same row and head.
    False for -1."""
    if not those.shape[2]:
        return torch.zeros_like(these, dtype=torch.bool)
    ascending = those.sort(2).values
    at = torch.searchsorted(ascending, these.contiguous()).clamp_(max=those.shape[2] - 1)
    return (ascending.gather(2, at) == these) & (these >= 0)


# Single entries from pinned host memory, which a GPU kernel reads

class PinnedEntries:
    """One layer's entries, if its records are in pinned host memory. For the thread that runs the model.

    It never waits for a read.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage, self._addresses = storage, Addresses(storage)
        self._gathered: torch.cuda.Event | None = None
        """Recorded after the last `gather`."""

    @property
    def nbytes(self) -> int:
        return self._addresses.nbytes

    @property
    def readable(self) -> bool:
        """Whether the device could read all records, as far as was tried."""
        return not self._addresses.elsewhere

    def forget(self) -> None:
        """Drop the addresses, because records move or rows change. Blocks until the last `gather` has finished."""
        if self._gathered is not None:
            self._gathered.synchronize()
        self._gathered = None
        self._addresses.forget()

    def exchange(
        self, history: Source, chosen: ChosenEntries, wanted: torch.Tensor, *, complete: bool = False
    ) -> torch.Tensor | None:
        """Make the `wanted` tokens (rows, heads, m) resident in `chosen`, by reads on a separate stream: Pre-fetch of
        SpeCache's algorithm 3. `complete`: none of them is -1.

        Returns the numbers of fetched entries, (rows, heads) int64. None if the device cannot read the records, or if
        there are too many entries for the kernel.
        """
        if history.device.type != "cuda" or max(chosen.count, wanted.shape[2]) > MOST_EXCHANGED:
            return None
        if (addresses := self._where(history)) is None:
            return None
        stream = self._storage.reading_stream(history.device)
        return chosen.exchange(wanted, addresses, stream, complete=complete)

    def gather(self, history: Source, tokens: torch.Tensor) -> Entries | None:
        """Entries of tokens (rows, heads, m), -1: none, on the current stream. None if the device cannot read there."""
        if (addresses := self._where(history)) is None:
            return None
        form, tokens = history.form, tokens.contiguous()
        options = {"dtype": form.dtype, "device": tokens.device}
        keys, values = (torch.zeros(*tokens.shape, dim, **options) for dim in (form.key_dim, form.value_dim))
        bring(addresses, tokens, form, keys, values)
        self._gathered = torch.cuda.current_stream(history.device).record_event()
        counters = self._storage.counters
        counters.tell_later(lambda read: self.count(history, read), (tokens >= 0).sum())
        return Entries(tokens, keys, values)

    @staticmethod
    def count(history: Source, read: int) -> None:
        """Count `read` entries of single heads."""
        entry = (history.form.key_dim + history.form.value_dim) * history.form.dtype.itemsize
        history.store.count_read(read, read * entry)

    def _where(self, history: Source) -> torch.Tensor | None:
        """Addresses of all units. None if some are in memory that is not pinned."""
        return self._addresses.of(history) if has_step(history.device) else None

    def latest(self, history: Source) -> torch.Tensor | None:
        """The addresses, (rows, units or more) int64, if `exchange` finds them as they are and does nothing on the
        host; else None."""
        known = self._addresses.known
        return known if known is not None and self._addresses.is_latest(known, history) else None


# Single entries of each key head, from complete records that are read or from parts of records in host memory

class EntryReads:
    """Reads of one layer's entries. Tokens are (rows, heads, m), -1: none. For the thread that runs the model."""

    def __init__(self, storage: Storage, areas: Areas) -> None:
        self._storage, self.areas = storage, areas
        self.pinned = PinnedEntries(storage)

    @staticmethod
    def area_bytes(form: Any, tokens: int) -> int:
        """Bytes that entries of `tokens` tokens of every head need on their way from host memory."""
        return tokens * form.entry_bytes

    def ahead(self, fetcher: Fetcher, history: Source, tokens: torch.Tensor) -> None:
        """Prefetch the records that `bring` will need, as far as there is room: Pre-fetch of SpeCache's algorithm 3. A
        read that fails is repeated by `bring`."""
        if history.store.in_memory:
            return
        if choices := records_of(tokens.cpu().numpy(), history.form.group_size, fetcher.most_records):
            with self._storage.account.not_sparing(), contextlib.suppress(OSError, BudgetError):
                fetcher.ahead(history, choices[0])

    def bring(self, fetcher: Fetcher, history: Source, tokens: torch.Tensor) -> list[Entries]:
        """Entries of `tokens`, whose -1 are last: copies, in several parts, with at most as many columns as one head
        has tokens. Raises as `Fetcher.gather`."""
        in_memory = history.store.in_memory
        if in_memory and (pinned := self.pinned.gather(history, tokens)) is not None:
            return [pinned]
        absent = tokens.cpu().numpy()
        absent = absent[:, :, : int((absent >= 0).sum(2).max(initial=0))]
        if in_memory:
            return [self._parts(history, absent)] if absent.size else []
        entries = list[Entries]()
        for choice in records_of(absent, history.form.group_size, fetcher.most_records):
            entries.append(picked(history.form, fetcher.bring(history, choice), choice, absent))
        return entries

    def _parts(self, history: Source, tokens: np.ndarray) -> Entries:
        """Entries of `tokens`, copied from host memory without the rest of their records."""
        form, store, valid = history.form, history.store, np.maximum(tokens, 0)
        (rows, heads, count), item = tokens.shape, form.dtype.itemsize
        records = history.extents((valid // form.group_size).reshape(rows, -1)).records.reshape(-1)
        head, entry = np.arange(heads)[:, None], valid % form.group_size * form.entry_width
        parts, first = [], 0
        keys, values = entry + head * form.key_dim, entry + form.key_width + head * form.value_dim
        area = self.areas.borrow(self.area_bytes(form, rows * count), history.device)
        try:
            self._storage.prefetcher.flush(store)  # finishes the writes behind
            for dim, at in ((form.key_dim, keys), (form.value_dim, values)):
                store.read_parts(records, at.reshape(-1) * item, area.host_rows(tokens.size, dim * item, first))
                uploaded = area.upload(tokens.size, dim * item, first).view(form.dtype)
                parts.append(uploaded.view(rows, heads, count, dim).clone())
                first += tokens.size * dim * item
        finally:
            self.areas.give_back(area)
        keys, values = parts
        return Entries(torch.from_numpy(tokens).to(history.device), keys, values)
