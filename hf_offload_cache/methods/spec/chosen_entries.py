"""The entries that each key head of a row wants, as they were stored, beside a copy of all (SpeCache, section 3.3)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ...errors import BudgetError
from ...fetch.areas import Areas
from ...fetch.choice import Choice, Source
from ...fetch.fetcher import Fetcher
from ...fetch.storage import Storage
from ...history.records import places_within
from ...history.state import Array, State
from ...kernels.on_a_device import has_kernels
from ...memory.account import MemoryAccount, lasting_empty


@dataclass(frozen=True)
class Entries:
    """Keys (rows, heads, m, Dk) and values (rows, heads, m, Dv) of `tokens` (rows, heads, m) int64, -1: none, which are
    undefined there and finite. All on one device."""

    tokens: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def records_of(tokens: np.ndarray, group_size: int, most: int) -> list[Choice]:
    """The units of `group_size` tokens in the order of the sequence that hold `tokens` (rows, heads, m), -1: none: of
    each row the first `most`, then more."""
    wanted = np.zeros((len(tokens), int(tokens.max(initial=-1)) // group_size + 2), dtype=bool)
    wanted[np.arange(len(tokens))[:, None], (tokens // group_size).reshape(len(tokens), -1)] = True  # -1: the last one
    rows, columns = wanted[:, :-1].nonzero()
    counts = np.bincount(rows, minlength=len(wanted))
    units = np.full((len(wanted), int(counts.max(initial=0))), -1, dtype=np.int64)
    units[rows, places_within(counts)] = columns
    choices = []
    for start in range(0, units.shape[1], most):
        choices.append(Choice(units[:, start : start + most]))
    return choices


def picked(form: Any, records: torch.Tensor, choice: Choice, tokens: np.ndarray) -> Entries:
    """The entries of those of `tokens` (rows, heads, m) that lie in `records` (rows, M, entries a record, entry width)
    of `choice`, as `records_of` named them: a copy."""
    units, own = choice.units, tokens // form.group_size
    at, there = np.zeros_like(tokens), np.zeros(tokens.shape, dtype=bool)
    for row, held in enumerate(units):
        held = held[held >= 0]
        if held.size:
            at[row] = np.minimum(np.searchsorted(held, own[row]), held.size - 1)
            there[row] = held[at[row]] == own[row]
    place = torch.from_numpy(at * form.group_size + tokens % form.group_size).to(records.device)
    keys, values = form.split(records.flatten(1, 2))
    of_row, of_head = (torch.arange(count, device=records.device) for count in tokens.shape[:2])
    where = of_row[:, None, None], of_head[:, None], place
    return Entries(torch.from_numpy(np.where(there, tokens, -1)).to(records.device), keys[where], values[where])


class ChosenEntries:
    """Room for `count` entries a row and key head, in the account as "chosen entries", on the history's device. What is
    wanted again stays where it lies. For the thread that runs the model, which on a GPU waits for nothing of it."""

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
        """Which token of its row each is, (rows, heads, count), -1: none; in no order."""
        self.wanted: torch.Tensor | None = None
        """The tokens (rows, heads, m) that are to be held, -1: none; None: those that are."""
        self.absent: torch.Tensor | None = None
        """Those of them that are not here, (rows, heads, m), -1 behind them; None as well."""
        self.empty = True
        """It holds nothing."""
        self.keys = lasting_empty(*shape, form.key_dim, dtype=form.dtype, device=device).zero_()
        self.values = lasting_empty(*shape, form.value_dim, dtype=form.dtype, device=device).zero_()
        self._under_way: torch.cuda.Event | None = None

    @staticmethod
    def nbytes_of(form: Any, rows: int, count: int) -> int:
        """Bytes of so many entries a row and head; which they are, which are wanted, and which of these are absent."""
        return rows * count * (form.entry_bytes + 3 * 8 * form.num_key_heads)

    @property
    def nbytes(self) -> int:
        return self.STATE.nbytes(self)

    @property
    def entries(self) -> Entries:
        """All of them: views, valid until the next change."""
        if self._under_way is not None:
            self._wait()
        return Entries(self.tokens, self.keys, self.values)

    def absent_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Those of `tokens` (rows, heads, m), -1: none, that are not here, (rows, heads, m), -1 behind them."""
        if self._under_way is not None:
            self._wait()
        return tokens.masked_fill(_among(tokens, self.tokens), -1).sort(2, descending=True).values

    def want(self, tokens: torch.Tensor) -> torch.Tensor:
        """From the next `take` on these are held, (rows, heads, `count` at most), -1: none, and no others. Returns what
        is `absent`."""
        self.wanted, self.absent = tokens, self.absent_of(tokens)
        return self.absent

    def take(self, new: Sequence[Entries]) -> None:
        """Hold what is wanted; what is absent is in `new`, each where it is among `absent`."""
        if self._under_way is not None:
            self._wait()
        if self.wanted is None:
            return
        self.tokens.masked_fill_(~_among(self.tokens, self.wanted), -1)
        free = (self.tokens >= 0).byte().argsort(dim=2, stable=True)
        for some in new:
            slot, there = free[:, :, : some.tokens.shape[2]], some.tokens >= 0
            self.tokens.scatter_(2, slot, torch.where(there, some.tokens, self.tokens.gather(2, slot)))
            for held, came in ((self.keys, some.keys), (self.values, some.values)):
                place = slot[..., None].expand(came.shape)
                held.scatter_(2, place, torch.where(there[..., None], came, held.gather(2, place)))
        self.empty = self.empty and not self.wanted.shape[2]
        self.wanted = self.absent = None

    def exchange(
        self,
        wanted: torch.Tensor,
        exchanged: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        gather: Callable[[torch.Tensor, tuple[torch.Tensor, torch.Tensor]], None],
        stream: torch.cuda.Stream,
    ) -> torch.Tensor:
        """As `want` and `take`: by `exchanged(tokens, wanted)`, which says who comes and how many, and by `gather` of
        those into keys and values, on `stream`. Does not block; what the current stream is given later finds it done.
        Returns how many are wanted, and came: (2,) int64."""
        self._wait()
        self.wanted = self.absent = None
        came, counts = exchanged(self.tokens, wanted)
        for used in (came, self.keys, self.values):
            used.record_stream(stream)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            gather(came, (self.keys, self.values))
            self._under_way = stream.record_event()
        self.empty = self.empty and not wanted.shape[2]
        return counts

    def _wait(self) -> None:
        """What the current stream is given from now on finds what was exchanged."""
        if self._under_way is not None:
            torch.cuda.current_stream(self._device).wait_event(self._under_way)
            self._under_way = None

    def settle(self) -> None:
        """Block until nothing is read out of host memory any more."""
        if self._under_way is not None:
            self._under_way.synchronize()
            self._under_way = None

    def truncate(self, tokens: int) -> None:
        """Only those of the first `tokens` tokens stay, and are wanted."""
        self.settle()
        self.tokens.masked_fill_(self.tokens >= tokens, -1)
        if self.wanted is not None and self.absent is not None:  # of inference mode, perhaps: not to be changed
            self.wanted = self.wanted.masked_fill(self.wanted >= tokens, -1)
            absent = self.absent.masked_fill(self.absent >= tokens, -1)
            self.absent = absent.sort(2, descending=True).values
        self.empty = not bool((self.tokens >= 0).any())

    def grow(self, count: int) -> None:
        """Make room for this larger number of entries. Raises `BudgetError` with nothing changed."""
        self.settle()
        self.STATE.remake(self, count=count)
        for grown, nothing in ((self.tokens, -1), (self.keys, 0), (self.values, 0)):
            grown[:, :, self.count :] = nothing
        self.count = count

    def select_rows(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` is now."""
        self.settle()
        self.STATE.select_rows(self, rows)
        if self.wanted is not None and self.absent is not None:
            own = rows.to(self._device)
            self.wanted, self.absent = self.wanted[own], self.absent[own]

    def close(self) -> None:
        self.settle()
        self.STATE.close(self)


def _among(these: torch.Tensor, those: torch.Tensor) -> torch.Tensor:
    """Which of `these` tokens (rows, heads, m) are among `those` (rows, heads, n) of the same row and head; not -1."""
    if not those.shape[2]:
        return torch.zeros_like(these, dtype=torch.bool)
    ascending = those.sort(2).values
    at = torch.searchsorted(ascending, these.contiguous()).clamp_(max=those.shape[2] - 1)
    return (ascending.gather(2, at) == these) & (these >= 0)


# Single entries out of pinned host memory, which a GPU reads by itself

class PinnedEntries:
    """Of one layer, whose records may lie in pinned memory. For the thread that runs the model, which waits for no
    read; but, when there are new records, until they are written and the device knows where they lie."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._addresses: torch.Tensor | None = None
        """Where each record begins, (rows, units) int64, on the device."""
        self._elsewhere = False
        """Not in pinned memory, some of them."""
        self._stream: torch.cuda.Stream | None = None
        self._gathered: torch.cuda.Event | None = None
        """Behind the last `gather`."""

    @property
    def nbytes(self) -> int:
        return 0 if self._addresses is None else self._addresses.nbytes

    def forget(self) -> None:
        """Records will lie elsewhere, or be those of other rows. Blocks until `gather` has read what it was asked for.
        """
        if self._gathered is not None:
            self._gathered.synchronize()
        self._addresses = self._gathered = None
        self._elsewhere = False

    def exchange(self, history: Source, chosen: ChosenEntries, wanted: torch.Tensor) -> torch.Tensor | None:
        """Let `chosen` hold what is `wanted`, what is read behind the back of the current stream; how many are
        wanted, and how many of these came: (2,) int64. None: no device reads there, or they are too many."""
        if history.device.type != "cuda" or (addresses := self._where(history)) is None:
            return None
        from ...kernels import host_entries_triton as kernel

        if max(chosen.count, wanted.shape[2]) > kernel.MOST_EXCHANGED:
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(history.device)

        def gather(tokens: torch.Tensor, into: tuple[torch.Tensor, torch.Tensor]) -> None:
            addresses.record_stream(torch.cuda.current_stream(history.device))
            kernel.gather_into(addresses, tokens, history.form, into, keeps=True)

        counts = chosen.exchange(wanted, kernel.exchange, gather, self._stream)
        self._count(history, counts[1])
        return counts

    def gather(self, history: Source, tokens: torch.Tensor) -> Entries | None:
        """The entries of tokens (rows, heads, m), -1: none, on the current stream. None: no device reads there."""
        if (addresses := self._where(history)) is None:
            return None
        from ...kernels import host_entries_triton as kernel

        found = Entries(tokens, *kernel.gather(addresses, tokens, history.form))
        self._gathered = torch.cuda.current_stream(history.device).record_event()
        self._count(history, (tokens >= 0).sum())
        return found

    def _count(self, history: Source, entries: torch.Tensor) -> None:
        """So many entries of a head were read, () int64."""
        form, store = history.form, history.store
        entry = (form.key_dim + form.value_dim) * form.dtype.itemsize
        self._storage.counters.tell_later(lambda read: store.count_read(read, read * entry), entries)

    def _where(self, history: Source) -> torch.Tensor | None:
        """`_addresses` of all units, written ones. None: some lie in memory that is not pinned."""
        if self._elsewhere or not has_kernels(history.device):
            return None
        known = self._addresses
        first = known.shape[1] if known is not None and len(known) == history.rows else 0
        if known is None or first != history.records:
            first = 0 if first > history.records else first
            units = np.broadcast_to(np.arange(first, history.records), (history.rows, history.records - first))
            records = history.extents(units).records
            self._storage.prefetcher.flush(history.store)  # what was written behind is there
            if (found := history.store.addresses(records.reshape(-1))) is None:
                self._elsewhere, self._addresses = True, None
                return None
            new = torch.from_numpy(found.reshape(records.shape)).to(history.device)
            self._addresses = known = new if known is None or not first else torch.cat([known, new], 1)
        return known


# Single entries of each key head: out of records that are read, or as parts of records that lie in host memory

class EntryReads:
    """Of one layer. Tokens are (rows, heads, m), -1: none. For the thread that runs the model."""

    def __init__(self, storage: Storage, areas: Areas) -> None:
        self._storage, self.areas = storage, areas
        self.pinned = PinnedEntries(storage)

    @staticmethod
    def area_bytes(form: Any, tokens: int) -> int:
        """What entries of so many tokens of every head take on their way out of host memory."""
        return tokens * form.entry_bytes

    def ahead(self, fetcher: Fetcher, history: Source, tokens: torch.Tensor) -> None:
        """Begin to read what `bring` will be asked for, as far as there is room. A read that fails is made anew."""
        if history.store.in_memory:
            return
        if choices := records_of(tokens.cpu().numpy(), history.form.group_size, fetcher.most_records):
            with self._storage.account.not_sparing(), contextlib.suppress(OSError, BudgetError):
                fetcher.ahead(history, choices[0])

    def bring(self, fetcher: Fetcher, history: Source, tokens: torch.Tensor) -> list[Entries]:
        """The entries of these tokens, none of which stands behind a -1: copies, in parts, and no more columns than
        there are tokens. Raises as `Fetcher.gather`."""
        in_memory = history.store.in_memory
        if in_memory and (pinned := self.pinned.gather(history, tokens)) is not None:
            return [pinned]
        there = tokens.cpu().numpy()
        there = there[:, :, : int((there >= 0).sum(2).max(initial=0))]
        if in_memory:
            return [self._parts(history, there)] if there.size else []
        found = list[Entries]()
        for choice in records_of(there, history.form.group_size, fetcher.most_records):
            found.append(picked(history.form, fetcher.bring(history, choice), choice, there))
        return found

    def _parts(self, history: Source, tokens: np.ndarray) -> Entries:
        """No more of a record than is wanted of it."""
        form, store, there = history.form, history.store, np.maximum(tokens, 0)
        (rows, heads, count), item = tokens.shape, form.dtype.itemsize
        records = history.extents((there // form.group_size).reshape(rows, -1)).records.reshape(-1)
        head, entry = np.arange(heads)[:, None], there % form.group_size * form.entry_width
        parts, first = [], 0
        keys, values = entry + head * form.key_dim, entry + form.key_width + head * form.value_dim
        area = self.areas.borrow(self.area_bytes(form, rows * count), history.device)
        try:
            self._storage.prefetcher.flush(store)  # what was written behind is there
            for dim, at in ((form.key_dim, keys), (form.value_dim, values)):
                store.read_parts(records, at.reshape(-1) * item, area.host_rows(tokens.size, dim * item, first))
                own = area.upload(tokens.size, dim * item, first).view(form.dtype)
                parts.append(own.view(rows, heads, count, dim).clone())
                first += tokens.size * dim * item
        finally:
            self.areas.give_back(area)
        return Entries(torch.from_numpy(tokens).to(history.device), *parts)
