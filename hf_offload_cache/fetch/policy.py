"""Which slots a tier gives up for what comes in: replacement policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np


class Policy(Protocol):
    """Which of a tier's slots are filled anew, and with what. Made with the number of slots; used by one thread."""

    def place(
        self, records: np.ndarray, in_use: np.ndarray, *, wanted: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Where records (int64 ids), distinct and in no slot, lie from now on: the positions in `records` of those
        that get a slot, and distinct slots (int32) for them, none of those `in_use`. They are `wanted` by a step, which
        takes from the slots in use, or were written anew after it."""

    def used(self, slots: np.ndarray) -> None:
        """What lies in these slots was wanted again; several times in a step where several rows want it."""

    def renewed(self, slots: np.ndarray) -> None:
        """What lies in these slots was written anew, here and in the store."""

    def emptied(self, slots: np.ndarray) -> None:
        """Nothing valid lies in these slots any more: they are the next to be filled."""

    @property
    def nbytes(self) -> int:
        """Bytes of the policy's own books."""

    def rehearse(self, records: int) -> None:
        """Make the books as large as a store of `records` may make them: a quarter beyond what there is."""


class FirstIn:
    """First in, first out (KVSwap, section 3.4.3): the slot that was filled longest ago goes first. Of more records
    than slots the last ones get one."""

    def __init__(self, capacity: int) -> None:
        self._order = np.arange(capacity, dtype=np.int32)

    @property
    def nbytes(self) -> int:
        return self._order.nbytes

    def rehearse(self, records: int) -> None:
        """Changes nothing: the books are by slot."""

    def place(
        self, records: np.ndarray, in_use: np.ndarray, *, wanted: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        order = self._order
        used = np.zeros(order.size, dtype=bool)
        used[in_use] = True
        slots = order[~used[order]][: records.size]
        if slots.size:
            self.put_last(slots)
        return np.arange(records.size - slots.size, records.size), slots

    def used(self, slots: np.ndarray) -> None:
        """Changes nothing: what counts is when a slot was filled."""

    def renewed(self, slots: np.ndarray) -> None:
        """Changes nothing."""

    def emptied(self, slots: np.ndarray) -> None:
        chosen = np.zeros(len(self._order), dtype=bool)
        chosen[slots] = True
        self._order = np.concatenate([slots, self._order[~chosen[self._order]]])

    def put_last(self, slots: np.ndarray) -> None:
        """Let these slots be the last to be filled anew."""
        chosen = np.zeros(self._order.size, dtype=bool)
        chosen[slots] = True
        self._order = np.concatenate([self._order[~chosen[self._order]], slots])


class MostUsed:
    """The access-frequency table (LeoAM, section 4.3): what was wanted most often lately stays.

    Each record's uses are counted, in a slot or not; with each step that brings something older ones count less. What
    comes takes the place of what was wanted less often, or else finds none: a thing that is wanted once does not push
    out what is wanted in every other step. What a nearer tier has and gives is not counted by a farther one that has it
    too: that one need not keep it. (With those counted, two tiers hit as often: at 8K tokens of text .594 instead
    of .593, with slots for a third and two thirds of a selection; .929 of .926, for a third and four thirds.)
    """

    _KEEPS = 0.8
    """What a use counts after a step. At 8K tokens of text, with slots for an eighth to one selection, .8 and .9 hit a
    fifth to a quarter more often than first in, first out, .97 as often up to half a selection and less beyond."""

    def __init__(self, capacity: int) -> None:
        self._record_in = np.full(capacity, -1, dtype=np.int64)
        self._uses = np.zeros(64, dtype=np.float32)
        self._one = 1.0  # what a use counts now: later ones count more, which is the same as that older ones count less

    @property
    def nbytes(self) -> int:
        return self._record_in.nbytes + self._uses.nbytes

    def rehearse(self, records: int) -> None:
        if self._record_in.size:
            self._uses = np.empty(max(64, records * 5 // 4), dtype=np.float32)

    def place(
        self, records: np.ndarray, in_use: np.ndarray, *, wanted: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        none = np.empty(0, dtype=np.int32)
        if not self._record_in.size or not records.size:
            return none, none
        last = int(np.maximum.reduce(records))
        if last >= self._uses.size:
            self._grow(last)
        self._uses[records] += self._one
        if wanted:
            self._one /= self._KEEPS
            if self._one > 1e20:
                self._uses /= self._one
                self._one = 1.0
        worth, size = self._worth(np.concatenate([self._record_in, records])), self._record_in.size
        lie, come = np.where(self._record_in < 0, -1, worth[:size]), worth[size:]
        lie[in_use] = np.inf
        if self._reserved is not None:
            lie[self._reserved()] = np.inf
        count = min(records.size, lie.size)
        best = np.argsort(-come, kind="stable")[:count]
        least = np.argsort(lie, kind="stable")[:count]
        better = come[best] > lie[least]  # the first ones, since one falls and the other rises
        taken, slots = best[better], least[better].astype(np.int32)
        self._record_in[slots] = records[taken]
        return taken, slots

    def _worth(self, records: np.ndarray) -> np.ndarray:
        """What decides which of records stay; -1: anything."""
        return self._uses[records]

    _reserved: Callable[[], np.ndarray] | None = None
    """Gives the slots that are not given up in this step; None: there are none."""

    def renewed(self, slots: np.ndarray) -> None:
        """Changes nothing."""

    def used(self, slots: np.ndarray) -> None:
        """Without steps that bring something nothing gets older: no count goes beyond what being wanted for ever gives.
        """
        records, most = self._record_in[slots], self._one / (1 - self._KEEPS)
        self._uses[records] = np.minimum(self._uses[records] + self._one, most)

    def emptied(self, slots: np.ndarray) -> None:
        self._uses[self._record_in[slots]] = 0
        self._record_in[slots] = -1

    def _grow(self, record: int) -> None:
        size = self._uses.size
        grown = np.zeros(max(record + 1, size * 5 // 4), dtype=np.float32)
        grown[:size] = self._uses
        self._uses = grown


class ClusterAligned(MostUsed):
    """Aligned with clusters (DynaKV, section 6.2): small ones first, and what was lately written anew stays.

    A page stays by how often it was wanted lately, and less, the more pages its cluster has: those of a large one come
    in one read. Pages written anew in the latest steps, for their cluster was joined or split, are not given up, as far
    as they take an eighth of the slots.

    Args:
        sizes: pages of the cluster that each of records (n,) int64 belongs to, (n,).
    """

    _BY_SIZE = 0.25
    """Over 500 steps after 2K tokens of text, slots for a half of a selection: of the pages that were wanted .406 were
    there with the least recently used going first, .457 by uses alone, .456, .448 and .432 with this at a quarter, a
    half and 1; of the clusters that were wanted as a whole .423, .448, .467, .478, .491. With slots for one selection
    .780, .788, .784, .780, .765 and .767, .771, .778, .783, .785."""
    _LATELY, _SHARE = 16, 8

    def __init__(self, capacity: int, sizes: Callable[[np.ndarray], np.ndarray]) -> None:
        super().__init__(capacity)
        self._sizes, self._steps = sizes, 0
        self._renewed = np.full(capacity, -self._LATELY, dtype=np.int32)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._renewed.nbytes

    def place(
        self, records: np.ndarray, in_use: np.ndarray, *, wanted: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        self._steps += wanted
        taken, slots = super().place(records, in_use, wanted=wanted)
        self._renewed[slots] = -self._LATELY
        return taken, slots

    def emptied(self, slots: np.ndarray) -> None:
        super().emptied(slots)
        self._renewed[slots] = -self._LATELY

    def _worth(self, records: np.ndarray) -> np.ndarray:
        return self._uses[records] / self._sizes(records) ** self._BY_SIZE

    def _reserved(self) -> np.ndarray:
        lately = (self._renewed > self._steps - self._LATELY).nonzero()[0]
        most = self._renewed.size // self._SHARE
        return lately if lately.size <= most else lately[np.argsort(-self._renewed[lately], kind="stable")[:most]]

    def renewed(self, slots: np.ndarray) -> None:
        self._renewed[slots] = self._steps
