"""Which ids of a layered store lie in which of its stores."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from .freezable import FreezableStore


class IdLayout:
    """Which store has which ids; never changed.

    Attributes:
        stores: the parts, and the own store where there is one.
        firsts: the first id of each of them (int64).
        base: the first id behind the parts.
        second: the first id that is not the first store's; 2**64 where that has all.
    """

    def __init__(self, parts: tuple[FreezableStore, ...], own: FreezableStore | None) -> None:
        self.parts, self.own = parts, own
        self.stores = parts if own is None else (*parts, own)
        ends = np.cumsum([part.capacity for part in parts], dtype=np.int64)
        self.base = int(ends[-1]) if len(ends) else 0
        self.firsts = np.concatenate([np.zeros(1, dtype=np.int64), ends])[: len(self.stores)]
        self.second = int(self.firsts[1]) if len(self.firsts) > 1 else 2**64

    def pieces(self, ids: np.ndarray) -> list[tuple[FreezableStore, np.ndarray, tuple[int, int]]]:
        """Stretches of `ids` that lie in one store: the store, its own ids for them, and the positions in `ids`.

        Ids that do not exist, also those below 0, are the last store's to refuse.
        """
        count = len(ids)
        if count == 0:
            return []
        if np.maximum.reduce(ids.view(np.uint64)) < self.second:  # as a rule; a negative one is above all others
            return [(self.stores[0], ids, (0, count))]
        index = np.searchsorted(self.firsts, ids, side="right") - 1
        cuts = np.flatnonzero(index[1:] != index[:-1]) + 1
        pieces = []
        for first, stop in pairwise([0, *cuts.tolist(), count]):
            at = int(index[first])
            pieces.append((self.stores[at], ids[first:stop] - self.firsts[at], (first, stop)))
        return pieces
