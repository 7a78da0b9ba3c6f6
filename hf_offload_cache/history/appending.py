"""What waits for clusters that are at hand, on its way to the ends of their pages (DynaKV, section 5.3)."""

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
class Appending:
    """Some clusters that are not to be split; of each, (n,)."""

    rows: np.ndarray
    clusters: np.ndarray
    kept: np.ndarray
    """Its pages that are full, and stay as they are."""
    partly: np.ndarray
    """How many entries are in the page behind these, which is written anew."""
    waiting: np.ndarray
    """Entries that wait."""

    @classmethod
    def in_pieces(
        cls, rows: np.ndarray, clusters: np.ndarray, stored: np.ndarray, waiting: np.ndarray, group: int, most: int
    ) -> Iterator[Appending]:
        """These clusters of these rows, as many at a time as write `most` pages; of all there are so many entries
        `stored` and `waiting`, (rows, clusters)."""
        kept, partly = np.divmod(stored[rows, clusters], group)
        waits = waiting[rows, clusters]
        for some in pieces(partly + waits, most, group):
            yield cls(rows[some], clusters[some], kept[some], partly[some], waits[some])

    @property
    def counts(self) -> np.ndarray:
        """Entries that are written of each."""
        return self.partly + self.waiting

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each its row, its number, and which page is written first."""
        return self.rows, self.clusters, self.kept

    def waits_at(self, buffer: AppendBuffer, labels: np.ndarray, clusters: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows and columns of the buffer where these wait, (w,) each: one cluster's after the other's, in the order
        of the sequence. `labels`: of all tokens (rows, tokens), numbers below `clusters`."""
        number = np.full((len(labels), clusters), -1)
        number[self.rows, self.clusters] = np.arange(len(self.rows))
        rows, columns = (buffer.places >= 0).nonzero()
        tokens = buffer.places[rows, columns]
        whose = number[rows, labels[rows, tokens]]
        order = np.lexsort((tokens, whose))[(whose < 0).sum() :]
        return rows[order], columns[order]

    def entries(self, pages: PagesOf, waiting: torch.Tensor) -> torch.Tensor:
        """What is written of one cluster after the other, (sum of counts, width), new; `waiting`: what waits, (w,
        width), as `waits_at` has it. Asks for the pages that are partly full."""
        out, counts = waiting.new_empty(int(self.counts.sum()), waiting.shape[1]), self.counts
        there = places_within(counts) < np.repeat(self.partly, counts)
        if there.any():
            some = self.partly > 0
            read = pages(*(one[some] for one in self.ends))
            held = np.arange(read.shape[1]) < self.partly[some][:, None]
            out[torch.from_numpy(there)] = read[torch.from_numpy(held)]
        out[torch.from_numpy(~there)] = waiting
        return out
