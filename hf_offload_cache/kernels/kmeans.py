"""K-means over the rows of a batch: the twins, in plain torch, of the kernels in `kmeans_triton`.

Points are (R, n, D), of any floating-point type and any strides; labels are (R, n) int32. Sums are in float32 and in
the order of the points, so that equal points give equal results.
"""

from __future__ import annotations

import torch

from .on_a_device import with_kernel

_AT_ONCE = 1 << 24
"""Distances that `assign` computes at a time."""


@with_kernel()
def assign(points: torch.Tensor, centroids: torch.Tensor, closed: torch.Tensor | None = None) -> torch.Tensor:
    """The nearest of each row's `centroids` (R, C, D) float32 or float16, contiguous in the last two dimensions, for
    each point: labels. Of several, the first; 0 if a row has none. Centroids that are `closed` (R, C) bool are not
    assigned to. A distance that is not a number is never the smallest."""
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
        keys, values: (R, Hk, m, D) and (R, Hv, m, Dv), those of the next tokens. Of any strides, as `held`, but
            contiguous in the last dimension; all in the type of `out`.
        targets: (R, n) int64, contiguous, distinct: place `first` + i is row i of `out`; others are skipped. The first
            n tokens have one, n at most t + m.
    """
    count, width = held.shape[1], keys.shape[1] * keys.shape[3]
    row, token = ((targets >= first) & (targets < first + len(out))).nonzero(as_tuple=True)
    place, new = targets[row, token] - first, token >= count
    out[place[~new]] = held[row[~new], token[~new]]
    for part, columns in ((keys, slice(0, width)), (values, slice(width, None))):
        out[place[new], columns] = part[row[new], :, token[new] - count].flatten(1)
