"""Which slots a tier gives up for what comes in: replacement policies."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Policy(Protocol):
    """The order in which a tier's slots are filled anew. Made with the number of slots; used by one thread."""

    def evict(self, count: int, in_use: np.ndarray) -> np.ndarray:
        """At most `count` distinct slots to fill now, none of those `in_use` (int32); they count as filled."""

    def used(self, slots: np.ndarray) -> None:
        """What lies in these slots was wanted again."""

    def emptied(self, slots: np.ndarray) -> None:
        """Nothing valid lies in these slots any more: they are the next to be filled."""

    @property
    def nbytes(self) -> int:
        """Bytes of the policy's own books, the same all its life."""


class FirstIn:
    """First in, first out (KVSwap, section 3.4.3): the slot that was filled longest ago goes first."""

    def __init__(self, capacity: int) -> None:
        self._order = np.arange(capacity, dtype=np.int32)

    @property
    def nbytes(self) -> int:
        return self._order.nbytes

    def evict(self, count: int, in_use: np.ndarray) -> np.ndarray:
        order = self._order
        used = np.zeros(order.size, dtype=bool)
        used[in_use] = True
        slots = order[~used[order]][:count]
        if slots.size:
            self._behind(slots)
        return slots

    def used(self, slots: np.ndarray) -> None:
        """Changes nothing: what counts is when a slot was filled."""

    def emptied(self, slots: np.ndarray) -> None:
        chosen = np.zeros(len(self._order), dtype=bool)
        chosen[slots] = True
        self._order = np.concatenate([slots, self._order[~chosen[self._order]]])

    def _behind(self, slots: np.ndarray) -> None:
        chosen = np.zeros(self._order.size, dtype=bool)
        chosen[slots] = True
        self._order = np.concatenate([self._order[~chosen[self._order]], slots])


class LeastRecent(FirstIn):
    """Least recently used: a slot that was wanted again counts as filled anew."""

    def used(self, slots: np.ndarray) -> None:
        self._behind(slots)
