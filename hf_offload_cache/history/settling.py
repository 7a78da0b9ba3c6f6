"""What waits for clusters, on its way to the ends of their pages, or to their parts' (DynaKV, sections 4.2, 5.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from .append_buffer import AppendBuffer
from .cluster_pages import pieces
from .packing import places_within

PagesOf = Callable[[np.ndarray, np.ndarray, np.ndarray], torch.Tensor]
"""Of rows, clusters and numbers of their pages, (n,) each, what lies there: (n, group_size, width), even if others
were changed since."""


def fullest(waiting: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows (n,) and numbers (n,) of the fullest clusters of each row, of which so much waits (rows, clusters), without
    which no more than `most` does."""
    order = np.argsort(-waiting, 1, kind="stable")
    falling = np.take_along_axis(waiting, order, 1)
    over = falling.sum(1, keepdims=True) - most
    rows, places = ((np.cumsum(falling, 1) - falling < over) & (falling > 0)).nonzero()
    return rows, order[rows, places]


@dataclass(frozen=True)
class Settling:
    """Some clusters of which something is written anew: the page that is not full, or, of those that are to be split,
    all of them. Of each, (n,)."""

    rows: np.ndarray
    clusters: np.ndarray
    wide: np.ndarray
    """It is to be split."""
    kept: np.ndarray
    """Its pages that stay as they are: those that are full, none of what is to be split."""
    read: np.ndarray
    """How many entries are in the pages behind these, which are read and written anew."""
    waiting: np.ndarray
    """Entries that wait."""

    @classmethod
    def in_pieces(
        cls, rows: np.ndarray, clusters: np.ndarray, wide: np.ndarray, stored: np.ndarray, waiting: np.ndarray,
        group: int, most: int,
    ) -> Iterator[Settling]:  # fmt: skip
        """These clusters of these rows, of which some are `wide`, as many at a time as write `most` pages; of all there
        are so many entries `stored` and `waiting`, (rows, clusters)."""
        kept = np.where(wide, 0, stored[rows, clusters] // group)
        read = stored[rows, clusters] - kept * group
        waits = waiting[rows, clusters]
        for some in pieces(read + waits, most, group):
            yield cls(rows[some], clusters[some], wide[some], kept[some], read[some], waits[some])

    @property
    def counts(self) -> np.ndarray:
        """Entries that are written of each."""
        return self.read + self.waiting

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each its row, its number, and which page is written first."""
        return self.rows, self.clusters, self.kept

    def written_pages(self, group: int) -> int:
        """How many are written, but for those that parts do not fill."""
        return int((-(-self.counts // group)).sum())

    def pages(self, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, clusters and numbers of the pages that are read."""
        each = -(-self.read // group)
        number = np.repeat(self.kept, each) + places_within(each)
        return np.repeat(self.rows, each), np.repeat(self.clusters, each), number

    def waits_at(self, buffer: AppendBuffer, labels: np.ndarray, clusters: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows and columns of the buffer where these wait, (w,) each: one cluster's after the other's, in the order
        of the sequence. `labels`: of all tokens, or the first ones, (rows, tokens), numbers below `clusters`."""
        rows, columns = ((buffer.places >= 0) & (buffer.places < labels.shape[1])).nonzero()
        return self._sorted(rows, columns, labels, buffer.places[rows, columns], clusters)

    def members(self, labels: np.ndarray, clusters: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows and tokens (n,) of those tokens whose `labels` (rows, tokens), numbers below `clusters`, name these:
        one cluster's after the other's, in the order of the sequence."""
        rows, tokens = np.indices(labels.shape).reshape(2, -1)
        return self._sorted(rows, tokens, labels, tokens, clusters)

    def _sorted(
        self, rows: np.ndarray, columns: np.ndarray, labels: np.ndarray, tokens: np.ndarray, clusters: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of rows and columns (n,), at which there are these tokens, those that are members, as they have it."""
        number = np.full((len(labels), clusters), -1)
        number[self.rows, self.clusters] = np.arange(len(self.rows))
        whose = number[rows, labels[rows, tokens]]
        order = np.lexsort((tokens, whose))[(whose < 0).sum() :]
        return rows[order], columns[order]

    def entries(self, pages: PagesOf, waiting: torch.Tensor, group: int) -> torch.Tensor:
        """What is written of one cluster after the other, each in the order of the sequence, (sum of counts, width),
        new; `waiting`: what waits, (w, width), as `waits_at` has it."""
        out, counts = waiting.new_empty(int(self.counts.sum()), waiting.shape[1]), self.counts
        there = places_within(counts) < np.repeat(self.read, counts)
        if there.any():
            each = -(-self.read // group)
            held = places_within(each)[:, None] * group + np.arange(group) < np.repeat(self.read, each)[:, None]
            out[torch.from_numpy(there)] = pages(*self.pages(group))[torch.from_numpy(held)]
        out[torch.from_numpy(~there)] = waiting
        return out
