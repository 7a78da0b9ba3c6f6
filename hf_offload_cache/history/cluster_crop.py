"""What a crop has to read of clusters."""

from __future__ import annotations

import numpy as np
import torch

from .cluster_bytes import settling
from .clustered_entries import ClusteredEntries
from .moments import Moments, counted
from .packing import places_within
from .settling import Settling


def read_for_crop(
    own: ClusteredEntries, keep: int, length: int
) -> tuple[torch.Tensor, list[tuple[Settling, Moments]]]:
    """Of the tokens of each row the entries (rows, length - keep, width) of those from `keep` to `length`; and of the
    clusters that would lose some, were there only the first `keep`, and have some before `length`, what the others have
    in common. Reads what of these clusters comes before `length`, some pages at a time. Changes nothing; raises
    `StoreError`."""
    partition, group, labels = own.partition, own.form.group_size, own.labels
    taken = own.buffer.entries.new_empty(partition.rows, length - keep, own.form.entry_width)
    stay, wanted = (counted(labels[:, :stop], partition.clusters) for stop in (keep, length))
    rows, clusters = ((partition.counts > stay) & (wanted > 0)).nonzero()
    there, left = np.minimum(own.stored, wanted), list[tuple[Settling, Moments]]()
    whole = np.ones(len(rows), dtype=bool)
    for some in Settling.in_pieces(rows, clusters, whole, there, wanted - there, group, own.most_settled):
        with own.holding(settling(own.form, some.written_pages(group))):
            waiting = own.buffer.at(*some.waits_at(own.buffer, labels[:, :length], partition.clusters))
            entries = some.entries(own.read, waiting, group)
            owner = np.repeat(np.arange(len(some.counts)), some.counts)
            stays = places_within(some.counts) < stay[some.rows, some.clusters][owner]
            row, place = some.members(labels[:, keep:length], partition.clusters)
            taken[torch.from_numpy(row), torch.from_numpy(place)] = entries[torch.from_numpy(~stays)]
            common = Moments.of(own.points(entries[torch.from_numpy(stays)]), owner[stays], len(some.counts))
            left.append((some, common))
    return taken, left
