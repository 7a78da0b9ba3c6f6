"""Clusters of keys: which ones a step attends to, with an estimate of the others, and k-means over the rows of a batch,
without the host.

It is what `ClusterPredictor` computes on a processor, in single precision (DynaKV, section 4.1).

Shapes: B sequences, H query heads, D channels of a key; R rows, the key heads of all sequences, of h query heads each;
C clusters a row, each in at most L pages of G entries. Page p of cluster c is unit c L + p. Points of a k-means are
(R, n, D), of any floating-point type and any strides; labels are (R, n) int32. Its sums are in float32 and in the order
of the points, so that equal points give equal results.

A step that is captured as a CUDA graph has room for more clusters and latest keys than there are: see `ranking`. The
tables of clusters that do not exist are zeros, as those of empty ones.
"""

from __future__ import annotations

import torch

from .on_a_device import with_kernel
from .ranking import BLOCK, HIDDEN, PROGRAMS

MOST_CLUSTERS = 1 << 14
"""Most clusters of a row; for more, a program of `choose` would not have the registers."""
_AT_ONCE = 1 << 24
"""Distances that `assign` computes at a time."""


def centroids_bytes(rows: int, heads: int, clusters: int, dim: int, value_dim: int, near: int, listed: int) -> int:
    """Upper bound on the device memory of a step's choice among `clusters` and of an estimate, for `heads` query heads
    a row, `near` keys with exact scores, and lists of `listed` entries in pages a row."""
    together, parts = max(16, 1 << (heads - 1).bit_length()), max(1, PROGRAMS // rows)
    sums = parts * together * ((1 << (dim - 1).bit_length()) + 2)
    scores = heads * (clusters + 2 * ((clusters + near) // BLOCK + 2) + value_dim + 1)
    return 4 * rows * (sums + scores + 3 * clusters + 2) + 5 * rows * listed


@with_kernel()
def score(
    states: torch.Tensor, centroids: torch.Tensor, tables: torch.Tensor, recent: torch.Tensor, scaling: float,
    count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Scores of centroids, and what the softmax over all keys needs, as if each were its cluster's centroid; the latest
    keys have their own scores.

    Args:
        states: (B, H, D), of any type; contiguous in the last dimension.
        centroids: (R, C, D) float16, contiguous in the last two dimensions.
        tables: (3, R, C) int32, contiguous in the last dimension: each cluster's number of keys, of keys in its pages,
            and of the row's first tokens.
        recent: (R, t, D), the latest keys, contiguous in the last dimension.
        scaling: factor of all scores.
        count: () int64, on the device: number of the first `recent` keys that exist; None: all. There may be anything
            in the others.

    Returns `scores` (R, h, C) float32, `HIDDEN` for what is no number; and of each `BLOCK` clusters, and then of each
    `BLOCK` latest keys, their largest score `tops` (R, h, n) float32, the logarithm of the cluster's number of keys
    included, `HIDDEN` if there is none, and `sums`, of the same shape, of exp(score - top). All are new.
    """
    rows, clusters = centroids.shape[:2]
    asked = states.float().reshape(rows, -1, states.shape[2])
    scores, near = (
        ((asked @ keys.float().transpose(1, 2)) * scaling).nan_to_num_(HIDDEN, torch.inf, -torch.inf)
        for keys in (centroids, recent)
    )  # fmt: skip
    if count is not None:
        near.masked_fill_(torch.arange(recent.shape[1], device=recent.device) >= count, HIDDEN)
    counted = (scores + tables[0].float().log()[:, None]).clamp_(min=HIDDEN)
    parts = [torch.nn.functional.pad(part, (0, -part.shape[2] % BLOCK), value=HIDDEN) for part in (counted, near)]
    padded = torch.cat(parts, 2).unflatten(2, (-1, BLOCK))
    tops = padded.amax(3)
    weights = (padded - tops[..., None]).exp_().masked_fill_(padded <= HIDDEN, 0)
    return scores, tops, weights.sum(3)


@with_kernel()
def choose(
    scores: torch.Tensor, tops: torch.Tensor, sums: torch.Tensor, tables: torch.Tensor, wanted: int, most: int,
    listed: int, largest: int, group: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The clusters with the largest shares of attention, in the order of these, until there are the wanted entries, or
    no room for another one. The last cluster gives its latest entries. A row's first tokens are chosen from any
    cluster. Of equal clusters the first come first.

    Args:
        scores, tops, sums, tables: of `score`.
        wanted: entries a row, those included that are among the first tokens, or in no page.
        most: pages that the chosen clusters have together, those of the first tokens included.
        listed: pages a row that are returned: as many as are chosen, or more.
        largest, group: L and G.

    Returns `units` (R, listed) int32, the pages with chosen entries, ascending, behind them -1; `keep` (R, listed, G)
    bool, these entries; `kept` (R, C) int32, the number of each cluster's; `shares` (R, C) float32, the share of
    attention that each key of a cluster gets, summed over the row's query heads, 0 if none is in a page; and `left` (2,
    R) float32, the sum of this over entries in pages that are not chosen, and over those whose clusters have chosen
    ones. All are new.
    """
    members, stored, sinks = tables
    top = tops.amax(2, keepdim=True)
    total = (sums * (tops - top).exp()).sum(2, keepdim=True)
    of_heads = (scores - (top + total.log())).exp_().nan_to_num_(0).masked_fill_(scores <= HIDDEN, 0)
    shares = of_heads.sum(1).masked_fill_(stored == 0, 0)
    first = (sinks > 0) & (stored > 0)
    pages = (stored + group - 1) // group
    wants = (wanted - (members - stored).sum(1) - sinks.sum(1)).clamp_(min=0)[:, None]
    room = most - (pages * first).sum(1)[:, None]
    order = shares.masked_fill(stored == 0, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    counts, others = stored.gather(1, order), (pages * ~first).gather(1, order)
    before = counts.cumsum(1) - counts
    chosen = (before < wants) & (others.cumsum(1) <= room)
    cut = torch.zeros_like(before).scatter_(1, order, torch.where(chosen, torch.minimum(counts, wants - before), 0))
    entry = torch.arange(largest * group, device=stored.device)
    last = stored[..., None]
    keep = (entry >= last - cut[..., None]) | ((entry < sinks[..., None]) & first[..., None])
    keep = (keep & (entry < last)).view(len(stored), -1, group)
    there = keep.any(2)
    units = (~there).byte().sort(dim=1, stable=True).indices[:, :listed]
    units = torch.nn.functional.pad(units, (0, listed - units.shape[1]))
    held = torch.arange(listed, device=stored.device) < there.sum(1, keepdim=True)
    keep_of = keep.gather(1, units[..., None].expand(-1, -1, group)) & held[..., None]
    kept = keep.view(*stored.shape, -1).sum(2, dtype=torch.int32)
    mass = shares * (stored - kept)
    left = torch.stack([mass.sum(1), (mass * (kept > 0)).sum(1)])
    return torch.where(held, units, -1).int(), keep_of, kept, shares, left


@with_kernel()
def rest(
    scores: torch.Tensor, centroids: torch.Tensor, tables: torch.Tensor, kept: torch.Tensor, maps: torch.Tensor,
    scale: torch.Tensor, log_ratio: torch.Tensor, batch: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What attention to the clusters of which no entry is chosen would add, estimated: for each query head its mean
    value, and the logarithm of its weight.

    Args:
        scores, centroids, tables: of `score`.
        kept: of `choose`.
        maps: (R, D + 1, 1, Dv) int8, from a key and a constant to a value, times `scale` (R, D + 1) float32.
        log_ratio: (R, h) float32, added to the logarithms.
        batch: B.

    Returns `value` (B, H, Dv) float32 and `weight` (B, H) float32, -inf if there is no such cluster. Both are new.
    """
    (rows, heads, _), dim, stored = scores.shape, centroids.shape[2], tables[1]
    mass = (scores + stored.float().log()[:, None]).masked_fill(((kept > 0) | (stored == 0))[:, None], -torch.inf)
    logarithm = mass.logsumexp(2)
    weights = (mass - logarithm.clamp(min=HIDDEN)[..., None]).exp_()
    mean = weights @ centroids.float()
    wide = maps[:, :, 0].float() * scale[..., None]
    value = mean @ wide[:, :dim] + wide[:, dim:]
    return value.view(batch, rows // batch * heads, -1), (logarithm + log_ratio).view(batch, -1)


# K-means

@with_kernel()
def assign(points: torch.Tensor, centroids: torch.Tensor, closed: torch.Tensor | None = None) -> torch.Tensor:
    """The nearest of each row's `centroids` (R, C, D) float32 or float16, contiguous in the last two dimensions, for
    each point: labels. The first of equally near ones is taken; the label is 0 if a row has none. No point is assigned
    to centroids that are `closed` (R, C) bool. A distance that is not a number is never the smallest."""
    centroids = centroids.float()
    norms = (centroids * centroids).sum(2).div_(2)
    if closed is not None:
        norms = norms.masked_fill(closed, float("inf"))
    across = centroids.transpose(1, 2)
    parts = points.split(max(1, _AT_ONCE // max(1, len(points) * centroids.shape[1])), 1)
    labels = [(norms[:, None] - part.float() @ across).nan_to_num(float("inf")).argmin(2) for part in parts]
    return torch.cat(labels, 1).int()


@with_kernel(3)
def means(points: torch.Tensor, labels: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of the points of each label, (R, C, D) float32, and their number, (R, C) int32. A label without points has
    its mean `before` (R, C, D) float32."""
    (rows, clusters, dim), each = before.shape, labels.long()
    each = (each + torch.arange(rows, device=labels.device)[:, None] * clusters).flatten()
    sums = points.new_zeros(rows * clusters, dim, dtype=torch.float32)
    sums.index_add_(0, each, points.float().reshape(-1, dim))
    counts = torch.bincount(each, minlength=rows * clusters)[:, None]
    found = torch.where(counts > 0, sums / counts.clamp(min=1), before.flatten(0, 1))
    return found.view(before.shape), counts.view(rows, clusters).int()


@with_kernel()
def apart(points: torch.Tensor, labels: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Squared distance of each point to the centroid of its label, of `centroids` (R, C, D) float32: (R, n)
    float32."""
    own = centroids.gather(1, labels.long()[..., None].expand(*labels.shape, centroids.shape[2]))
    return (points.float() - own).square_().sum(2)


@with_kernel(4)
def parted(labels: torch.Tensor, clusters: int, capacity: int) -> torch.Tensor:
    """Labels without gaps, and none with more than `capacity` points, from labels below `clusters`.

    A label with more is split into as few equal parts as that takes, in the order of its points. Parts are numbered
    from 0 on, in the order of the labels; labels without points have none."""
    (rows, count), each = labels.shape, labels.long()
    counts = torch.zeros(rows, clusters, dtype=torch.int64, device=labels.device)
    counts.scatter_add_(1, each, torch.ones_like(each))
    parts = (counts + capacity - 1).div(capacity, rounding_mode="floor")
    order = each.argsort(dim=1, stable=True)
    sorted_labels = each.gather(1, order)
    first, before = counts.cumsum(1) - counts, parts.cumsum(1) - parts
    rank = torch.arange(count, device=labels.device) - first.gather(1, sorted_labels)
    part = (rank * parts.gather(1, sorted_labels)).div(counts.gather(1, sorted_labels), rounding_mode="floor")
    return torch.empty_like(each).scatter_(1, order, before.gather(1, sorted_labels) + part).int()


@with_kernel(3)
def placed(labels: torch.Tensor, pages: torch.Tensor, group_size: int) -> torch.Tensor:
    """The place of each point among pages of `group_size` entries: (R, n) int64. A label's points fill its pages in
    their order.

    `pages` (2, R, C) int32: the first page of each label below C that has points, and the step, 1 or -1, to its next
    ones."""
    (_, rows, clusters), each = pages.shape, labels.long()
    counts = torch.zeros(rows, clusters, dtype=torch.int64, device=labels.device)
    counts.scatter_add_(1, each, torch.ones_like(each))
    order = each.argsort(dim=1, stable=True)
    sorted_labels = each.gather(1, order)
    first = (counts.cumsum(1) - counts).gather(1, sorted_labels)
    rank = torch.arange(labels.shape[1], device=labels.device) - first
    begin, step = (own.gather(1, sorted_labels) for own in pages)
    page = begin + step * rank.div(group_size, rounding_mode="floor")
    return torch.empty_like(each).scatter_(1, order, page * group_size + rank % group_size)


@with_kernel()
def put(
    held: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, targets: torch.Tensor, first: int, out: torch.Tensor
) -> None:
    """Write tokens' entries, the keys of all heads and then the values, to places of `out` (N, width), contiguous.

    Args:
        held: (R, t, width), the first tokens' entries.
        keys, values: (R, Hk, m, D) and (R, Hv, m, Dv), those of the next tokens. Strides are free, as those of
            `held`, except in the last dimension, which is contiguous; all have the type of `out`.
        targets: (R, n) int64, contiguous, distinct: place `first` + i is row i of `out`; others are skipped. The first
            n tokens have one, n at most t + m.
    """
    count, width = held.shape[1], keys.shape[1] * keys.shape[3]
    row, token = ((targets >= first) & (targets < first + len(out))).nonzero(as_tuple=True)
    place, new = targets[row, token] - first, token >= count
    out[place[~new]] = held[row[~new], token[~new]]
    for part, columns in ((keys, slice(0, width)), (values, slice(width, None))):
        out[place[new], columns] = part[row[new], :, token[new] - count].flatten(1)
